"""What a suite could have caught: the properties of conformance/, limited to calls that the suite
can express, in its dtype.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from attention import AttentionOutput, Backend
from conformance.backend_under_test import Subject
from conformance.cases import Case
from conformance.properties import PROPERTIES
from lab.public_suites.suite import Suite

# what a case of the property adds to a suite. If two catch equally many, the first is proposed
ADDITIONS = {
    "key permutation": "keys in another order",
    "rows sum to one": "values of one",
    "large logits": "scores that grow along the keys or stand in the hundreds",
    "logits + 100": "scores 100 higher",
    "logits - 120": "scores 120 lower, or lower still",
    "ragged tails": "a length that no tile divides",
    "every length": "a ragged length, scores 100 higher in a head and 120 lower in another",
    "first tile masked": "rows that do not see their first tile",
    "rows without a key": "more queries than keys, causal",
    "N != M": "other numbers of queries than of keys",
    "grouped heads": "grouped heads",
    "no leak (outputs)": "later keys times -100, which earlier rows may not see",
    "no leak (gradients)": "gradients of later keys, which are 0",
    "mask positions": "equal scores with unit vectors as values, which show the weights",
    "optional arguments": "the optional arguments together",
    "wider calls": "the optional arguments on other shapes",
    "call history": "several calls before the first backward pass",
    "strides and views": "views of larger tensors",
    "poisoned memory": "NaN in the free memory before a call",
    "row independence": "a sequence beside others that are huge or NaN",
    "prefill = decode": "the last few queries alone, with all keys",
    "forward": "more shapes",
    "gradients": "more shapes, with gradients",
    "lse": "lse of more shapes",
}
RAISED = " is raised"
# these need a causal mask
OF_CAUSAL = {
    "no leak (outputs)",
    "no leak (gradients)",
    "rows without a key",
}


@dataclass
class Restricted(Subject):
    """A subject that takes only cases that a suite can express."""

    suite: Suite = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lse_gradient = self.suite.lse_gradient

    def case(
        self, num_queries: int | None = None, num_keys: int | None = None, **fields: Any
    ) -> Case:
        case = super().case(num_queries, num_keys, **fields)
        masks = self.suite.features & {"causal", "full"}
        return case if len(masks) == 2 else replace(case, causal=masks == {"causal"})

    def takes(self, case: Case, *, backward: bool) -> bool:
        if self.suite.expresses(case):
            return super().takes(case, backward=backward)
        self.refusals.append("the suite cannot express it")
        return False


def restricted(backend: Backend, suite: Suite) -> Restricted:
    """The backend, limited to the arguments, passes and results of the suite's calls."""
    inner = backend.fn

    def fn(*tensors: Any, **arguments: Any) -> AttentionOutput:
        out, lse = inner(*tensors, **arguments)[:2]
        return AttentionOutput(out, lse if suite.lse else None)

    features = suite.features & backend.features | {"non_causal"}
    if suite.lse:
        features |= {"lse"}
    passes = {"backward": "backward" in suite.features, "decode": None}
    shown = replace(backend, fn=fn, features=features, **passes)
    return Restricted(shown, "cpu", suite.dtype, random_cases=4, seed=0, suite=suite)


def additions(backend: Backend, suite: Suite) -> list[tuple[str, str]]:
    """The cases that the suite could express and that catch the attention, each with the property
    that it belongs to.
    """
    subject = restricted(backend, suite)
    found: dict[tuple[str, str], None] = {}
    for name in ADDITIONS:
        if name in OF_CAUSAL and "causal" not in suite.features:
            continue
        try:
            for check in PROPERTIES[name](subject):
                if check.share > 1:
                    found[name, check.case.partition(" of ")[2] or check.case] = None
        except Exception as error:  # a broken attention may raise anything
            found[name, f"{type(error).__name__}{RAISED}"] = None
    return list(found)


def smallest_cover(caught_by: Mapping[str, Iterable[tuple[str, str]]]) -> list[dict[str, Any]]:
    """Cases that together catch every mistake that any case catches. The greedy choice takes the
    case that catches most of the rest.
    """
    left = {name: set(cases) for name, cases in caught_by.items() if cases}
    names = list(ADDITIONS)

    def place(case: tuple[str, str]) -> tuple[bool, int, str]:
        # an attention that remembers an earlier call may raise in any property
        stray = case[1].endswith(RAISED) and case[0] != "call history"
        return stray, names.index(case[0]), case[1]

    order = sorted(set().union(*left.values()), key=place)
    cover = []
    while left:
        best = max(order, key=lambda case: sum(case in cases for cases in left.values()))
        catches = [name for name, cases in left.items() if best in cases]
        left = {name: cases for name, cases in left.items() if name not in catches}
        cover.append({"property": best[0], "case": best[1], "catches": catches})
    return cover
