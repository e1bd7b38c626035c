"""Do the properties catch mistakes? Every mistake of the gallery turns its properties red, and a
harmless edit turns none red.

    pytest tests/conformance/test_gallery.py -k loop --kill-matrix results/mutants.json

tries every property on every mutant of the tile loop, with --gpu on a GPU; so do -k states
and -k decoding, for their own files. -k kernels, for results/mutants_kernels.json, stops at the
first red property, because the kernels are interpreted on a CPU. Without the option, a mutant is
tried on the CPU with the properties that its line in the gallery names.
"""

from collections.abc import Iterable, Iterator

import pytest

from conformance.backend_under_test import Check, Subject
from conformance.properties import PROPERTIES, Property, examine
from tests.conformance.edits import EditError
from tests.conformance.gallery import ROOMS, gallery, mutants_of
from tests.conformance.kill_matrix import DEVICE, EVERYTHING, matrix_of, row
from tests.conformance.mutation import Mutant, package

ALL = [mutant for group in ROOMS for mutant in gallery(group)]
# tried on a harmless edit; on one of the loop, every property
FEW = {
    "states": ("forward", "gradients", "large logits"),
    "decoding": ("cache and pages",),
    "kernels": ("forward", "gradients"),
}
# tried before the others where the first red property ends it: least time for what they catch
FIRST = (
    *("cache and pages", "N != M", "mask positions", "optional arguments", "wider calls"),
    *("rows without a key", "strides and views", "logits - 120", "call history"),
)
# no mistake on a CPU turns it red
NEEDS_GPU = "streams and graphs"
# of an edit that was never tried, where a property would be red whatever it asks
NO_RESULT = ("NameError", "SyntaxError", "IndentationError", "CompilationError")


def until_red(property: Property) -> Property:
    """The property, stopped after its first red check."""

    def check(subject: Subject) -> Iterator[Check]:
        for each in property(subject):
            yield each
            if each.share > 1:
                return

    return check


def caught(
    mutant: Mutant, names: Iterable[str], *, first: bool = False, device: str = "cpu"
) -> list[str]:
    """The properties that are red; with first, only the first of them."""
    found = []
    with mutant.installed() as backend:
        subject = Subject(backend, device, mutant.dtype, random_cases=4, seed=0)
        for name in names:
            cell = examine(subject, name, until_red(PROPERTIES[name]))
            assert not any(error in cell.note for error in NO_RESULT), cell.note
            if cell.status == "red":
                found.append(name)
                if first:
                    break
    return found


def measured(mutant: Mutant, group: str) -> list[str]:
    """The mutant's row of the kill matrix."""
    if group != "kernels":
        return caught(mutant, EVERYTHING, device=DEVICE)
    names = dict.fromkeys((*FIRST, *EVERYTHING))
    return caught(mutant, names, first=mutant.survives is None, device=DEVICE)


def cases(*, harmless: bool):
    """Each mutant with its group, in `make test` the quick ones only."""
    return pytest.mark.parametrize(
        "group, mutant",
        [
            pytest.param(
                *(group, mutant),
                id=f"{group}-{mutant.name}",
                marks=[] if mutant.quick else pytest.mark.slow,
            )
            for group in ROOMS
            for mutant in gallery(group)
            if harmless == (mutant.survives is not None)
        ],
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, about NaN
@cases(harmless=False)
def test_a_mistake_is_caught(group, mutant, kill_record):
    if kill_record:
        found = measured(mutant, group)
        kill_record(row(mutant, found))
        assert found, mutant.says
    else:
        assert caught(mutant, mutant.red) == list(mutant.red), mutant.says


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@cases(harmless=True)
def test_no_mistake_is_caught(group, mutant, kill_record):
    """A property that is red here demands more than attention must do."""
    if kill_record:
        found = measured(mutant, group)
        kill_record(row(mutant, found))
    else:
        found = caught(mutant, FEW.get(group, EVERYTHING))
    assert not found, mutant.survives


@pytest.mark.parametrize("room", [room for rooms in ROOMS.values() for room in rooms])
def test_each_edit_applies(room):
    """To the product as it is today; and no two edits of a room make the same mutant."""
    errors, programs = [], {}
    for mutant in mutants_of(room):
        try:
            edited = package().edited(mutant.edits, mutant.name)
        except EditError as error:
            errors.append(str(error))
        else:
            programs.setdefault(frozenset(edited.items()), []).append(mutant.name)
    assert errors == []
    assert [names for names in programs.values() if len(names) > 1] == []


def test_quick_mutants_need_each_property_and_touch_each_section():
    """So that `make test` notices a property that no longer catches anything."""
    assert len({mutant.name for mutant in ALL}) == len(ALL)
    mistakes = [mutant for mutant in ALL if mutant.survives is None]
    quick = [mutant for mutant in mistakes if mutant.quick]
    assert {name for mutant in quick for name in mutant.red} == {*EVERYTHING} - {NEEDS_GPU}
    assert {mutant.section for mutant in quick} == {mutant.section for mutant in mistakes}
    assert any(mutant.quick for mutant in ALL if mutant.survives is not None)


@pytest.mark.parametrize("group", ROOMS)
def test_the_committed_matrix_is_of_these_mutants_and_properties(group, kill_record):
    if kill_record:
        pytest.skip("it is being written")
    data, mutants = matrix_of(group), gallery(group)
    survive = {mutant.name: mutant.survives is not None for mutant in mutants}
    assert {row["name"]: not row["killed_by"] for row in data["mutants"]} == survive
    assert data["properties"] == EVERYTHING
