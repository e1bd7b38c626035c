"""A claim: the documents that make it, a function that measures it, and the rule that turns its
figures into a verdict.
"""

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

DOCUMENTS = {
    "chapter": '"Flash Attention and tiled kernels", chapter 8 of the book *Under The Hood: Build '
    "Every Layer of a Large Language Model from Scratch*",
    "notebook": '"From Naïve Attention to FlashAttention (in Pure PyTorch)", a PyTorch notebook in '
    "the form of a blog post",
    "exercise": '"FlashAttention tiled forward", a coding exercise in NumPy with hidden tests',
    "guide": '"Project 2: Implement Flash Attention (Memory-Efficient Attention)", a project guide '
    "with phases, pitfalls and interview questions",
    "deep dive": '"Flash Attention Concept -- Deep Dive", a derivation in NumPy',
}
Figures = dict[str, Any]  # numbers, strings, and dicts of them: what JSON can hold

HOLDS = "holds"
FAILS = "does not hold"


@dataclass(frozen=True)
class Claim:
    """The docstring of `measure` has these paragraphs: the claim in our words; "Holds if" and the
    criterion; "Measured:" and a format string over the figures; and, optionally, the reason.
    """

    documents: str  # names of DOCUMENTS, as in "chapter, guide"
    holds: Callable[[Figures], bool]  # the criterion
    measure: Callable[..., Figures]
    # the condition that the claim needs, and whether the figures confirm it
    only_if: tuple[str, Callable[[Figures], bool]] | None = None
    table: str = ""  # the meaning of the keys, as in "tokens", if figures are dicts for a table
    reads: str = ""  # the file of results/ with the figures, if trainings or a GPU made them

    @property
    def name(self) -> str:
        return self.measure.__name__

    @property
    def says(self) -> str:
        return self.words[0]

    @property
    def words(self) -> list[str]:
        return [" ".join(each.split()) for each in self.measure.__doc__.split("\n\n")]

    @property
    def topic(self) -> str:
        """The first line of the docstring of the claim's module."""
        return sys.modules[self.measure.__module__].__doc__.splitlines()[0].rstrip(".")

    def verdict(self, figures: Figures) -> str:
        if self.holds(figures):
            return HOLDS
        if self.only_if is not None:
            condition, is_confirmed = self.only_if
            if is_confirmed(figures):
                return f"holds only if {condition}"
        return FAILS


CLAIMS: dict[str, Claim] = {}


def claim(
    documents: str, **words: Any
) -> Callable[[Callable[..., Figures]], Callable[..., Figures]]:
    """A decorator that adds a measuring function to CLAIMS, under its name."""

    def add(measure: Callable[..., Figures]) -> Callable[..., Figures]:
        CLAIMS[measure.__name__] = Claim(documents, measure=measure, **words)
        return measure

    return add


def distribution(values: Iterable[float]) -> Figures:
    """Number, smallest, median and largest of the values from several seeds or repeats."""
    values = sorted(values)
    return {"n": len(values), "min": values[0], "median": median(values), "max": values[-1]}


def growth(sizes: dict[int, float]) -> float:
    """The exponent with which sizes[n] grows from the smallest n to the largest."""
    smallest, largest = min(sizes), max(sizes)
    return math.log(sizes[largest] / sizes[smallest]) / math.log(largest / smallest)
