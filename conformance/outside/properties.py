"""The properties of a function in a dialect: those of conformance, and masks as tensors, of each
form that it takes and of any layout in memory.

Each layout catches a bug that was shipped: a float32 mask read as bfloat16 (pytorch#191612), a mask
of one row or one head read as if it had them all. See conformance.outside.dialect for the forms.

Dimensions: B batch, H query heads, N queries, M keys.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention import Backend
from conformance.backend_under_test import Check, Subject
from conformance.cases import run
from conformance.errors import in_one_line
from conformance.outside.adapter import Adapter, dialect_of
from conformance.outside.dialect import Dialect
from conformance.properties import PROPERTIES, Property


def properties_of(backend: Backend) -> dict[str, Property]:
    """The properties to hold it to, by their usual names."""
    dialect = dialect_of(backend)
    if dialect is None:
        return PROPERTIES
    own = {"mask positions": mask_positions}
    if dialect.multiple > 1:
        own["ragged tails"] = whole_tiles
    return PROPERTIES | own


def whole_tiles(subject: Subject) -> Iterator[Check]:
    """It takes only lengths that are multiples of a tile."""
    subject.refusals.append(f"it takes lengths that are multiples of {subject.limits.multiple}")
    yield from ()


def mask_positions(subject: Subject) -> Iterator[Check]:
    """Which keys have weight, key by key, also under masks that are tensors."""
    yield from PROPERTIES["mask positions"](subject)
    yield from masks_as_tensors(subject)


def part_of_larger(mask: Tensor, heads: int) -> Tensor:
    """The beginning of a larger mask that hides nothing more."""
    *sizes, n, m = mask.shape
    shows = torch.ones if mask.dtype == torch.bool else torch.zeros
    larger = shows(*sizes, 2 * n, 2 * m, dtype=mask.dtype, device=mask.device)
    return larger[..., :n, :m].copy_(mask)


def of_one_row(mask: Tensor, heads: int) -> Tensor:
    """(B, 1, N, M), with a stride of 0, if all queries see the same keys."""
    row = mask[:, :, :1].clone().expand_as(mask)
    return row if torch.equal(row, mask) else mask


# changes of a mask (B, 1, N, M), given the number of heads
LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "a mask for every head": lambda mask, heads: mask.expand(-1, heads, -1, -1),
    "a mask written out": lambda mask, heads: mask.repeat(1, heads, 1, 1),
    "a part of a larger mask": part_of_larger,
    "a mask of one row": of_one_row,
}


def masks_as_tensors(subject: Subject) -> Iterator[Check]:
    """Masks that hide nothing, what comes later, and padding."""
    dialect, n = dialect_of(subject.backend), subject.length
    if dialect is None or not dialect.mask or dialect.mask_form == "block":
        return
    cases = (
        subject.case(batch=2, causal=False, window=(n, n)),
        subject.case(n // 2, n, batch=2),
        subject.case(batch=2, causal=False, key_lengths=True),
    )
    forms = [dialect.mask_form, *filter(None, dialect.more_mask_forms.split(","))]
    for case in cases:
        passes = subject.passes(case)
        if passes is None:
            continue
        inputs = subject.expected(case).inputs
        for form in forms:
            for what, change in LAYOUTS.items():
                backend = with_masks(subject.backend, replace(dialect, mask_form=form), change)
                try:
                    found = run(backend, *inputs, backward=passes == "both")
                except Exception as error:  # a user's function may raise anything
                    if form == dialect.mask_form:
                        raise
                    # it says so itself, which is no mistake
                    subject.refusals.append(f"{form} masks: {in_one_line(error)}")
                    break
                yield from subject.exactly(case, f"{what}, {form}", found)


def with_masks(
    backend: Backend, dialect: Dialect, change: Callable[[Tensor, int], Tensor]
) -> Backend:
    """The backend, given masks of the dialect's form that are changed before each call."""
    assert isinstance(backend.fn, Adapter)
    function, name = backend.fn.function, dialect.mask

    def call(*given: Any, **arguments: Any) -> Any:
        heads = given[int(dialect.module)].shape[1]  # q comes first, or after a module
        if arguments.get(name) is not None:
            arguments[name] = change(arguments[name], heads)
        elif name.isdigit() and given[int(name)] is not None:
            place = int(name)
            given = (*given[:place], change(given[place], heads), *given[place + 1 :])
        return function(*given, **arguments)

    return replace(backend, fn=Adapter(call, dialect))
