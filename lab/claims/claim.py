"""What a claim is: who makes it, what decides, the function that measures it, the verdict computed
from its figures.

The five documents about flash attention that this project answers:

    chapter    a book chapter that builds tiled attention in PyTorch and breaks it on purpose
    notebook   a notebook from naive attention to a streaming softmax
    exercise   one programming exercise, attention of one head in NumPy, with hidden tests
    guide      a project guide: phases, benchmarks, pitfalls, interview questions
    deep dive  a derivation in NumPy: online softmax, memory, the way to CUDA, quick checks
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from string import Formatter
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "results"
DOCUMENTS = ("chapter", "notebook", "exercise", "guide", "deep dive")
Figures = dict[str, Any]

HOLDS = "holds"
FAILS = "does not hold"
NOT_TESTABLE = "not testable here"


def only_if(condition: str) -> str:
    return f"holds only if {condition}"


def verdict(holds: bool) -> str:
    return HOLDS if holds else FAILS


@dataclass(frozen=True)
class Claim:
    name: str
    documents: str  # who makes it, as in "chapter, guide"
    says: str  # the claim in our words
    criterion: str  # completes "holds if ..."
    measure: Callable[..., Figures]  # gives plain numbers, strings, lists and dicts of them
    verdict: Callable[[Figures], str]
    measured: str  # the figures in a sentence: a format string over them
    because: str = ""  # why, where the verdict needs it
    reads: str | None = (
        None  # a file of results/ that holds the figures, when a run or a GPU made them
    )
    also: str = ""  # another command of the project that shows it
    tiny: Figures | None = (
        None  # smaller arguments of `measure` with the same verdict, for the tests; None: it times
    )


CLAIMS: dict[str, Claim] = {}


def claim(
    documents: str, **words: Any
) -> Callable[[Callable[..., Figures]], Callable[..., Figures]]:
    """Put the measuring function below it into CLAIMS, under its name."""

    def add(measure: Callable[..., Figures]) -> Callable[..., Figures]:
        assert measure.__name__ not in CLAIMS and set(documents.split(", ")) <= set(DOCUMENTS), (
            measure.__name__
        )
        CLAIMS[measure.__name__] = Claim(measure.__name__, documents, measure=measure, **words)
        return measure

    return add


def spread(values: Iterable[float]) -> Figures:
    """n, smallest, median and largest: what one figure is when several seeds were tried."""
    values = sorted(values)
    return {"n": len(values), "min": values[0], "median": median(values), "max": values[-1]}


def growth(sizes: dict[int, float]) -> float:
    """The exponent of N between the shortest and the longest length."""
    shortest, longest = min(sizes), max(sizes)
    return math.log(sizes[longest] / sizes[shortest]) / math.log(longest / shortest)


class Shown:
    """A figure inside a sentence: {x:.2f} of a spread reads "median (min to max, n=5)", of a dict
    "key: value, ...".
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, key: Any) -> "Shown":
        # str.format turns [1024] into a number, JSON turns keys into strings
        return Shown(self.value[str(key)])

    def __format__(self, form: str) -> str:
        value = self.value
        if isinstance(value, str):
            return value
        if isinstance(value, dict) and value.keys() == {"n", "min", "median", "max"}:
            low, middle, high = (
                format(Shown(value[name]), form) for name in ("min", "median", "max")
            )
            return middle if low == high else f"{middle} ({low} to {high}, n={value['n']})"
        if isinstance(value, dict):
            return ", ".join(f"{key}: {Shown(item):{form}}" for key, item in value.items())
        if value == 0 and not form.endswith("%"):
            return "0"
        if form or isinstance(value, bool):
            return format(value, form)
        if isinstance(value, int) or abs(value) >= 1000:
            return f"{value:,.0f}"
        return f"{value:.1e}" if abs(value) < 0.01 else f"{value:.3g}"


def cells(template: str, figures: Figures) -> dict[str, str]:
    """What a template of one figure that is a dict, {name[figure]:.1f}, shows for each key."""
    ((_, field, form, _),) = Formatter().parse(template)
    shown = Formatter().get_field(
        field, (), {name: Shown(value) for name, value in figures.items()}
    )[0]
    return {key: format(shown[key], form) for key in shown.value}


def sentence(template: str, figures: Figures) -> str:
    return template.format_map({name: Shown(value) for name, value in figures.items()})


def recorded(name: str) -> Figures:
    """results/NAME.json. Raises FileNotFoundError where it has not been measured yet."""
    return json.loads((RESULTS / f"{name}.json").read_text())
