"""Random calls. A property tests one thing; a random call combines shapes, memory layouts, masks,
logits and dtypes in any way that the attention takes.

Each result is compared with the budget of its case, as in conformance.cases. The same seed gives
the same calls.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from attention.interface import Refusal
from conformance.backend_under_test import Check, Subject, expected_of, expected_of_function
from conformance.cases import Case
from conformance.errors import in_one_line
from conformance.views import LAYOUTS

# calls in a row of one kind on a GPU, because each new kind compiles kernels
CALLS_OF_A_KIND = 60
# the share of calls with a layout that is not contiguous, with logits that are not normal, with
# each feature, and with lengths that are multiples of 16
LAYOUT_SHARE, LOGITS_SHARE, FEATURE_SHARE, WHOLE_SHARE = 0.5, 0.4, 0.25, 0.25
LOGITS = ("large", "growing", "negative", "up", "down", "up and down", "ties")
CONTIGUOUS = "contiguous"


class Trial(NamedTuple):
    """One call and its outcome: a check for each tensor, or the reason why there is none."""

    case: Case
    layout: str
    checks: Sequence[Check] = ()
    refused: str = ""
    failures: Sequence[str] = ()  # a line each


def fuzz(subject: Subject, *, calls: int, seed: int) -> Iterator[Trial]:
    """Yield `calls` random calls. A wrong result or a failing call raises nothing."""
    drawn = random.Random(seed)
    kinds = left = 0
    for number in range(calls):
        kind = drawn
        if subject.device == "cuda":
            if left == 0:
                kinds, left = kinds + 1, CALLS_OF_A_KIND
            kind = random.Random(seed * 10**6 + kinds)
        case = draw_case(subject, drawn, kind, seed=seed * 10**6 + number + 1)
        layout = CONTIGUOUS
        if drawn.random() < LAYOUT_SHARE:
            q, k = (case.num_heads, case.num_queries), (case.num_kv_heads, case.num_keys)
            same = q == k and case.value_dim is None  # else one tensor cannot hold all three
            layout = drawn.choice([name for name in LAYOUTS if same or name != "packed"])
        trial = try_out(subject, case, layout)
        left = 0 if trial.refused else left - 1
        yield trial


def try_out(subject: Subject, case: Case, layout: str) -> Trial:
    subject.begin()
    try:
        if not subject.takes(case):
            raise Refusal(subject.refusals[0])
        expected = subject.expected(case)
        views = [x.detach().clone() for x in expected.tensors]
        if layout != CONTIGUOUS:
            views = [*LAYOUTS[layout](*views)]
        results = subject.run(case, views)
        if not all(map(torch.equal, views, expected.tensors)):
            raise ValueError("it changes its inputs")
    except Refusal as error:
        return Trial(case, layout, refused=str(error))
    except (Exception, SystemExit) as error:  # anybody's attention may raise anything
        return Trial(case, layout, failures=[f"{case}, {layout}: {in_one_line(error)}"])
    checks = [*expected.checks(case, results).values()]
    for cached in (expected_of, expected_of_function):
        cached.cache_clear()  # no case repeats, and hundreds would fill a GPU's memory
    wrong = [f"{check.excess}, {layout}" for check in checks if check.share > 1]
    return Trial(case, layout, checks, failures=wrong)


def draw_case(subject: Subject, drawn: random.Random, kind: random.Random, seed: int) -> Case:
    """A case with features that the attention has; it may still refuse their combination. `kind`
    draws what a kernel is compiled for, `drawn` everything else.
    """
    features = subject.backend.features

    def has(feature: str, share: float = FEATURE_SHARE) -> bool:
        return feature in features and kind.random() < share

    # on a GPU every head dim compiles another kernel
    common = (8, 16, 24, 40, 64) if subject.device == "cpu" else (64, 128)

    def length() -> int:
        whole, size = kind.random() < WHOLE_SHARE, drawn.randint(1, 2 * subject.length)
        # Triton compiles separate code for multiples of 16
        return size + -size % 16 if whole else size + (size % 16 == 0)

    num_queries = num_keys = length()
    if has("cross_length"):
        num_keys = length()
    num_kv_heads = kind.choice((1, 2, 3))  # Triton compiles separate code for a 1 too
    case = subject.case(
        num_queries,
        num_keys,
        batch=kind.choice((1, 2, 3)),
        num_heads=num_kv_heads * (kind.choice((2, 3, 4)) if has("gqa") else 1),
        num_kv_heads=num_kv_heads,
        head_dim=kind.choice(subject.head_dims_of(common)),
        value_dim=kind.choice(common) if has("value_dim") else None,
        causal=not has("non_causal", 0.4),
        inputs=drawn.choice(LOGITS) if drawn.random() < LOGITS_SHARE else "normal",
        seed=seed,
    )
    optional: dict[str, Any] = {}
    two_sided = "two_sided_window" in features
    if has("window") and (case.causal or two_sided):
        # few keys, or about as many as there are
        left = min(case.num_keys, int(2 ** drawn.uniform(0, 9)))
        right = 0 if case.causal else drawn.choice((-1, 0, drawn.randint(0, case.num_keys)))
        one_sided = case.causal and (not two_sided or kind.random() < 0.5)
        optional["window"] = left if one_sided else (drawn.choice((-1, left)), right)
    if has("softcap"):
        optional["softcap"] = 2.0 ** kind.randint(0, 6)
    if has("alibi_slopes"):
        optional["alibi_slopes"] = True
    if not optional.keys() & {"softcap", "alibi_slopes"} and has("score_mod"):
        optional["score_mod"] = True
    if case.num_queries == case.num_keys and has("document_ids"):
        optional["document_ids"] = True
    if "document_ids" not in optional and has("key_lengths"):
        optional["key_lengths"] = True
    if has("lse") or has("sinks"):
        optional["sinks"] = True
    return replace(case, optional=optional)


def summary(trials: Sequence[Trial]) -> str:
    """One line on many trials."""
    taken = [trial for trial in trials if not trial.refused]
    shares = [(check.share, check.case, trial.layout) for trial in taken for check in trial.checks]
    worst, case, layout = max(shares, default=(0.0, "none", CONTIGUOUS))
    return (
        f"{len(taken)} calls ({len(trials) - len(taken)} more refused), {len(shares)} checks, "
        f"{sum(len(trial.failures) for trial in taken)} failures; worst share of a budget "
        f"{worst:.2f}: {case}, {layout}"
    )
