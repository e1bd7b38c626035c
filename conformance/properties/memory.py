"""Properties of memory: where inputs and gradients lie, what new memory holds, and how much of it a
call needs.

Dimensions: B batch, H heads, N queries, M keys.
"""

from collections.abc import Iterator

import torch

from conformance.backend_under_test import Check, Subject
from conformance.cases import Case, call, distance
from conformance.memory_growth import LINEAR, exponents, lengths_on, shape_of
from conformance.properties.calls import deterministic_algorithms
from conformance.views import FAR, LAYOUTS, spread_out


def strides(subject: Subject) -> Iterator[Check]:
    """Views of any layout give what contiguous tensors give, with NaN around them, and with
    offsets past 2^31.
    """
    case = subject.case(batch=2)
    passes = subject.passes(case)
    if not passes:
        return
    expected, plain = subject.expected(case), subject.run(case)
    for layout, change in (LAYOUTS | FAR).items():
        # on a CPU a gradient of as_strided() would write to all the memory in between
        backward = passes == "both" and not (layout in FAR and subject.device == "cpu")
        try:
            views = change(expected.tensors)
        except RuntimeError as error:  # PyTorch raises it if memory is too small
            subject.refusals.append(f"{layout}: {str(error).splitlines()[0]}")
            continue
        if not subject.takes_views(views, expected.arguments, backward=backward):
            continue
        found = subject.run(case, views, backward=backward)
        yield from subject.unmoved(case, layout, found, plain)
    if passes == "both":
        yield from gradients_of_any_layout(subject, case)
    yield from ids_of_any_layout(subject)
    yield from shared_keys(subject)


def gradients_of_any_layout(subject: Subject, case: Case) -> Iterator[Check]:
    """Gradients of out and lse may be views too: that of out.sum() is a single expanded one."""
    expected = subject.expected(case)
    d_out, d_lse = expected.d_out.to(subject.dtype), expected.inputs[3]
    expanded = d_out[:1, :1, :1].expand_as(d_out)
    views = {"d_out spread out": [spread_out(d_out)], "d_out expanded": [expanded]}
    if subject.lse_gradient and d_lse is not None:
        d_lse = d_lse.to(torch.promote_types(subject.dtype, torch.float32))
        views["d_lse transposed"] = [d_out, d_lse.mT.contiguous().mT]
        views["d_lse expanded"] = [d_out, d_lse[:1, :1, :1].expand_as(d_lse)]
    for layout, given in views.items():
        found = []
        for gradient in (given, [x.contiguous() for x in given]):
            made = call(subject.backend, expected.tensors, expected.arguments)
            outputs = [x for x in made.output[: len(given)] if x is not None]
            gradients = torch.autograd.grad(outputs, list(made.leaves.values()), gradient)
            found.append({name: x.double() for name, x in zip(made.leaves, gradients, strict=True)})
        yield from subject.unmoved(case, layout, *found)


def ids_of_any_layout(subject: Subject) -> Iterator[Check]:
    """document_ids may be a column of a larger table."""
    case = subject.case(batch=2, document_ids=True)
    if subject.takes(case, backward=False):
        expected = subject.expected(case)
        ids = expected.arguments["document_ids"]
        column = torch.stack((ids, ids.flip(1)), -1)[..., 0]
        found, plain = (
            subject.attend(*expected.tensors, **expected.arguments | {"document_ids": x}).double()
            for x in (column, ids)
        )
        yield Check(f"out of {case}, ids a column", distance(found, plain), expected.budget("out"))


def shared_keys(subject: Subject) -> Iterator[Check]:
    """All sequences share one set of keys and values, whose stride along B is 0."""
    tile = 32 if subject.device == "cpu" else 128
    case = subject.case(2 * tile + 1, batch=2)  # one key in a tile of its own
    if subject.takes(case, backward=False):
        expected = subject.expected(case)
        q, *kv = expected.tensors
        k, v = (x[:1].expand_as(x) for x in kv)
        if not subject.takes_views([q, k, v], expected.arguments, backward=False):
            return
        shared, copied = (
            {"out": subject.attend(q, *each).double()} for each in ((k, v), (k.clone(), v.clone()))
        )
        yield from subject.unmoved(case, "shared keys", shared, copied)


def free_blocks_of_nan(device: str) -> None:
    """Leave NaN in the memory that the next calls will get from the allocator."""
    blocks = [torch.full((2**power,), torch.nan, device=device) for power in range(6, 20)]
    del blocks


def poisoned_memory(subject: Subject) -> Iterator[Check]:
    """New memory that holds NaN changes nothing: every output is written, and nothing is read
    before. Rows without keys, ragged tails and masks leave parts of a tile out.
    """
    n = subject.length
    cases = [
        subject.case(batch=2),
        subject.case(n, n // 2 - 2),
        subject.case(n // 2 - 2, n, num_heads=4, causal=False),
        subject.case(17, head_dim=subject.head_dims[-1] if subject.device == "cuda" else 16),
        subject.case(window=9),
        subject.case(document_ids=True),
    ]
    for case in cases:
        if not subject.passes(case):
            continue
        expected = subject.run(case)
        free_blocks_of_nan(subject.device)
        found = {"freed blocks of NaN": subject.run(case)}
        with deterministic_algorithms():
            found["memory filled with NaN"] = subject.run(case)
        for what, results in found.items():
            yield from subject.same_bits(case, what, results, expected)


def growth(subject: Subject, *figures: str) -> Iterator[Check]:
    shape, lengths = shape_of(subject.head_dims), lengths_on(subject.device)
    if not subject.takes(subject.case(128, **shape), backward=True):
        return
    if not subject.exponents:
        subject.exponents = exponents(
            subject.given, lengths, device=subject.device, dtype=subject.dtype, **shape
        )
    for name in figures:
        if name in subject.exponents:
            what = f"exponent of N in the {name} bytes, N = {lengths[0]} to {lengths[-1]}"
            yield Check(what, subject.exponents[name], LINEAR)


def saved_bytes(subject: Subject) -> Iterator[Check]:
    """The bytes saved for the backward pass grow like N, not like N x M."""
    yield from growth(subject, "saved")


def largest_tensor(subject: Subject) -> Iterator[Check]:
    """No intermediate tensor of either pass is N x M, and their peak grows like N."""
    yield from growth(subject, "largest", "peak")
