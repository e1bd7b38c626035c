"""Properties of memory: where inputs and gradients lie, what new memory holds, and how much of it a
call needs.

Dimensions: B batch, H heads, N queries, M keys.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from attention.interface import Refusal, statistics_dtype
from conformance.backend_under_test import Check, Subject
from conformance.cases import Case, call
from conformance.memory_growth import LINEAR, exponents
from conformance.properties.calls import deterministic_algorithms
from conformance.views import FAR, LAYOUTS, spread_out


def shared_keys(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """All sequences share one set of keys and values, whose stride along B is 0."""
    return [q, *(x[:1].expand_as(x) for x in (k, v))]


def strides(subject: Subject) -> Iterator[Check]:
    """Views of any layout give what contiguous tensors give, with NaN around them, and with
    offsets past 2^31.
    """
    tile = 32 if subject.device == "cpu" else 128
    case = subject.case(2 * tile + 1, batch=2)  # one key in a tile of its own
    if not subject.takes(case):
        return
    for layout, change in (LAYOUTS | FAR | {"shared keys": shared_keys}).items():
        # on a CPU a gradient of as_strided() would write to all the memory in between
        backward = layout not in FAR or subject.device != "cpu"
        try:
            views = [*change(*subject.expected(case).tensors)]
        except RuntimeError as error:  # PyTorch raises it if memory is too small
            subject.refusals.append(f"{layout}: {str(error).splitlines()[0]}")
            continue
        try:
            found = subject.run(case, views, backward=backward)
        except Refusal as error:
            subject.refusals.append(str(error))
            continue
        copies = [x.contiguous() for x in views]
        plain = subject.run(case, copies, backward=backward)
        yield from subject.same(case, layout, found, plain)
    if subject.takes(case, backward=True):
        yield from gradients_of_any_layout(subject, case)
    case = subject.case(batch=2, document_ids=True)
    if subject.takes(case):
        tensors, arguments, *_ = subject.expected(case).inputs
        ids = arguments["document_ids"]
        column = torch.stack((ids, ids.flip(1)), -1)[..., 0]
        outs = (
            {"out": subject.attend(*tensors, **arguments | {"document_ids": x})}
            for x in (column, ids)
        )
        yield from subject.same(case, "ids a column of a larger table", *outs)


def gradients_of_any_layout(subject: Subject, case: Case) -> Iterator[Check]:
    """Gradients of out and lse may be views too: that of out.sum() is a single expanded one."""
    tensors, arguments, d_out, d_lse = subject.expected(case).inputs
    d_out, d_lse = d_out.to(subject.dtype), d_lse.to(statistics_dtype(tensors[0]))
    views = {
        "d_out spread out": spread_out(d_out),
        "d_out expanded": [d_out[:1, :1, :1].expand_as(d_out)],
    }
    if subject.lse_gradient:
        views["d_lse transposed"] = [d_out, d_lse.mT.contiguous().mT]
        views["d_lse expanded"] = [d_out, d_lse[:1, :1, :1].expand_as(d_lse)]
    for layout, given in views.items():
        found = []
        for gradients in (given, [x.contiguous() for x in given]):
            output, leaves = call(subject.backend, tensors, arguments)
            outputs = [x for x in output[: len(given)] if x is not None]
            results = torch.autograd.grad(outputs, [*leaves.values()], gradients)
            found.append(dict(zip(leaves, results, strict=True)))
        yield from subject.same(case, layout, *found)


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
    for case in filter(subject.takes, cases):
        expected = subject.run(case)
        free_blocks_of_nan(subject.device)
        found = {"freed blocks of NaN": subject.run(case)}
        with deterministic_algorithms():
            found["memory filled with NaN"] = subject.run(case)
        for what, results in found.items():
            yield from subject.same(case, what, results, expected, bits=True)


measured_exponents = lru_cache(exponents)  # two properties share the measurement


def growth(subject: Subject, *figures: str) -> Iterator[Check]:
    lengths = (128, 256, 512) if subject.device == "cpu" else (2048, 4096, 8192)
    head_dim = 32 if 32 in subject.head_dims else subject.head_dims[0]
    if not subject.takes(subject.case(128, head_dim=head_dim), backward=True):
        return
    where = {"device": subject.device, "dtype": subject.dtype}
    found = measured_exponents(subject.given, lengths, **where, head_dim=head_dim)
    for name in figures:
        if name in found:
            what = f"exponent of N in the {name} bytes, N = {lengths[0]} to {lengths[-1]}"
            yield Check(what, found[name], LINEAR)


def saved_bytes(subject: Subject) -> Iterator[Check]:
    """The bytes saved for the backward pass grow like N, not like N x M."""
    yield from growth(subject, "saved")


def largest_tensor(subject: Subject) -> Iterator[Check]:
    """No intermediate tensor of either pass is N x M, and their peak grows like N."""
    yield from growth(subject, "largest", "peak")
