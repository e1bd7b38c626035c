"""The properties of attention, checked for any backend: ours, broken ones, and yours.

    for cell in verify_backend(get_backend("tiled")): print(cell.property, cell.status, cell.note)

A property is a function that yields checks. A check has an error and a budget, which is relative to
the error of naive attention (see conformance.cases). A backend is green if every check holds, red
if one fails, and n/a if it declares that it takes no such input. A backend that computes another
function (exact=False without a defect) is n/a in properties of softmax, and has
its own oracle in the others: see conformance.other_functions. A defect, or an exact
backend that needs much memory, lists in `breaks` the properties in which it is red.
"""

import builtins
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from attention import Backend
from attention.interface import Refusal
from conformance.backend_under_test import Check, Subject
from conformance.errors import in_one_line
from conformance.properties import calls, decoding, masks, memory, results, shapes

# PyTorch warns so about FlexAttention on every machine, and no user can change it
WARNINGS = (
    "return_lse is deprecated",
    r"flex_attention called without torch\.compile",
    "Dynamo detected a call to a `functools.lru_cache`",
)

Property = Callable[[Subject], Iterator[Check]]
PROPERTIES: dict[str, Property] = {
    "forward": results.forward,
    "gradients": results.gradients,
    "lse": results.log_sum_exp,
    "block sizes": results.block_sizes,
    "key permutation": results.key_permutation,
    "rows sum to one": results.rows_sum_to_one,
    "large logits": results.large_logits,
    "logits + 100": results.shifted_up,
    "logits - 120": results.shifted_down,
    "float32 statistics": results.float32_statistics,
    "ragged tails": shapes.ragged_tails,
    "every length": shapes.every_length,
    "first tile masked": shapes.first_tile_masked,
    "rows without a key": shapes.rows_without_a_key,
    "rows of one key": results.rows_of_one_key,
    "N != M": shapes.cross_length,
    "grouped heads": shapes.grouped_heads,
    "strides and views": memory.strides,
    "no leak (outputs)": masks.no_leak_forward,
    "no leak (gradients)": masks.no_leak_backward,
    "mask positions": masks.mask_positions,
    "optional arguments": masks.optional_arguments,
    "wider calls": masks.wider_calls,
    "call history": calls.call_history,
    "poisoned memory": memory.poisoned_memory,
    "row independence": calls.row_independence,
    "streams and graphs": calls.streams_and_graphs,
    "saved bytes": memory.saved_bytes,
    "largest tensor": memory.largest_tensor,
    "bitwise repeat": calls.bitwise_repeat,
    "compiled = eager": calls.compiled_equals_eager,
    "prefill = decode": decoding.prefill_equals_decode,
    "cache and pages": decoding.cache_and_pages,
}
# these take long and do not test whether a result is right
SLOW = {"saved bytes", "largest tensor", "bitwise repeat", "compiled = eager"}
# a function with exact=False need not have these. As to statistics, a rounding of scores is like
# one of q, which its oracle excuses
OF_SOFTMAX = {
    *("lse", "key permutation", "rows sum to one", "logits + 100", "logits - 120"),
    *("float32 statistics", "rows of one key"),
}


@dataclass(frozen=True)
class Cell:
    """The result of one backend in one property."""

    property: str
    status: str  # green, red or n/a
    note: str  # red: the worst check or the exception; n/a: the reason
    documented: bool  # whether `breaks` of the backend names the property
    checks: int = 0
    worst_share: float | None = None  # of the budget
    worst_multiple: float | None = None  # of naive attention's error
    raised: str = ""  # the exception, in one line

    @builtins.property  # the field above has its name
    def ok(self) -> bool:
        return self.status == "n/a" or (self.status == "red") == self.documented


def why_unusable(device: str) -> str:
    """The error that made the GPU unusable for this process, such as an illegal memory access;
    empty if there was none.
    """
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return ""


def examine(subject: Subject, name: str, property: Property | None = None) -> Cell:
    """The cell of a property, by default the one of that name in PROPERTIES. An exception from the
    backend makes it red, and the note tells it with its cause. Raises ValueError if the backend
    lists an unknown name in `breaks`.
    """
    if unknown := set(subject.backend.breaks) - PROPERTIES.keys():
        raise ValueError(
            f"attention={subject.backend.name} breaks {', '.join(sorted(unknown))}; properties: "
            f"{', '.join(PROPERTIES)}"
        )
    subject.begin()
    documented = name in subject.backend.breaks
    checks = []
    if lost := why_unusable(subject.device):
        note = f"not examined: an earlier property left the GPU unusable ({lost})"
        return Cell(name, "red", note, documented)
    if name in OF_SOFTMAX and not subject.backend.claims_softmax:
        note = "it does not claim to be softmax attention (exact=False)"
        return Cell(name, "n/a", note, documented)
    try:
        with warnings.catch_warnings():
            for message in WARNINGS:
                warnings.filterwarnings("ignore", message)
            for check in (property or PROPERTIES[name])(subject):
                checks.append(check)
        if subject.device == "cuda":  # a kernel's error belongs to the property that launched it
            torch.cuda.synchronize()
    except Refusal as error:  # a layout that unsupported_reasons() did not see
        subject.refusals.append(str(error))
    except (Exception, SystemExit) as error:  # a user's backend may raise anything
        raised = in_one_line(error)
        last = f" (the last call: {subject.tried[-1]})" if subject.tried else ""
        return Cell(name, "red", raised + last, documented, len(checks), raised=raised)
    finally:
        if subject.device == "cuda" and not why_unusable(subject.device):
            torch.cuda.empty_cache()  # dozens of GiB after views that are far apart
    if not checks:
        reasons = "; ".join(dict.fromkeys(subject.refusals)) or "it takes no such lengths"
        return Cell(name, "n/a", reasons, documented)
    worst = max(checks, key=lambda check: check.share)
    status, note = ("red", worst.excess) if worst.share > 1 else ("green", "")
    multiples = [check.multiple for check in checks if check.multiple is not None]
    return Cell(
        name,
        status,
        note,
        documented,
        len(checks),
        worst.share,
        max(multiples, default=None),
    )


def verify_backend(
    backend: Backend,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    quick: bool = False,
    random_cases: int = 20,
    seed: int = 0,
    properties: Iterable[str] | None = None,
) -> list[Cell]:
    """A cell for every property. quick leaves out memory, repeats and compilation."""
    subject = Subject(backend, str(torch.device(device).type), dtype, random_cases, seed)
    names = PROPERTIES if properties is None else properties
    return [examine(subject, name) for name in names if not (quick and name in SLOW)]
