"""An edit of the gallery survives tidying: the names of locals, the layout and the place of a
function. Where it does not, one sentence says which edit and why.
"""

import ast
import re

import pytest

from tests.conformance.edits import EditError, Package, argument, drop, swap

MEANS = '''
"""Two means."""


def weight(position, decay=1, *, floor=0):
    return max(decay**position, floor)


class Mean:
    def of(self, values):
        # the newest value counts most
        total, sum_of_weights = 0, 0
        for i, value in enumerate(values):
            w = weight(i, 2, floor=1)
            total += w * value
            sum_of_weights += w
        return total / sum_of_weights
'''
VALUES = (3, 5, 8)  # whose weights are 1, 2 and 4
# an edit, and what the edited mean of VALUES is
EDITS = {
    "swap": (swap("Mean.of", "total / sum_of_weights", "total"), 45),
    "swap of statements": (swap("Mean.of", "total += w * _x", "total = w * _x"), 32 / 7),
    "own variable": (swap("Mean.of", "return _x / _", "ten_ = 10 * _x\nreturn ten_"), 450),
    "drop": (drop("Mean.of", "w * value"), 0),
    "argument by place": (argument("Mean.of", "weight", "decay", "2", "1"), 16 / 3),
    "argument by name": (argument("Mean.of", "weight", "floor", "_", "2"), 48 / 8),
    "any other arguments": (swap("weight", "max(_x, ...)", "10 * _x"), 45 / 7),
}
WEIGHT, _, MEAN = MEANS.partition("class Mean:")
TIDIED = {
    "untouched": {"means": MEANS},
    "renamed locals": {"means": re.sub(r"\b(total|sum_of_weights|w|i)\b", r"new_\1", MEANS)},
    "other layout and comments": {"means": ast.unparse(ast.parse(MEANS))},
    "a function moved": {"weights": WEIGHT, "means": "class Mean:" + MEAN},
}


def package(folder, **sources):
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    return Package(folder)


def mean_of_values(sources):
    names = {}
    for source in sources.values():
        exec(source, names)
    return names["Mean"]().of(VALUES)


@pytest.mark.parametrize("tidied", TIDIED)
def test_an_edit_survives_tidying(tmp_path, tidied):
    sources = TIDIED[tidied]
    tidy = package(tmp_path, **sources)
    means = {
        name: mean_of_values({**sources, **tidy.edited((edit,))})
        for name, (edit, _) in EDITS.items()
    }
    assert means == pytest.approx({name: mean for name, (_, mean) in EDITS.items()})


# by what the sentence must name
REFUSED = {
    "2 places": swap("Mean.of", "0", "1"),
    "0 places": swap("Mean.of", "total - _", "total"),
    "Mean.median is defined 0": drop("Mean.median", "total"),
    "weight is defined 2": swap("weight", "max(_x, ...)", "_x"),
    "average": swap("Mean.of", "_x / _", "_x / average"),
    "nothing": swap("Mean.of", "_x / _y", "_x / _y"),
}


@pytest.mark.parametrize("says", REFUSED)
def test_an_edit_that_no_longer_applies_is_one_sentence(tmp_path, says):
    edit, twice = REFUSED[says], package(tmp_path, means=MEANS, others=WEIGHT)
    with pytest.raises(EditError, match=says) as caught:
        twice.edited((edit,), "astray")
    message = str(caught.value)
    assert message.startswith("astray: ") and edit.place in message and "\n" not in message
    with_its_module = swap("others:weight", "max(_x, ...)", "_x")
    assert twice.edited((with_its_module,)).keys() == {"others"}
