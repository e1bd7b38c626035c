"""Properties of isolated calls: earlier calls, the contents of memory and the values in other rows
do not change a result.

Each property catches a bug that was shipped: a cache key that leaves something out, an output that
is not written for rows without a key, a maximum that rows share, a kernel on another stream than
its inputs. The other properties are in conformance.properties.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from conformance.backend_under_test import Check, Subject
from conformance.cases import Case, call, distance, run
from conformance.views import HEADS_INSIDE

HUGE = 100.0  # factor by which the other rows are larger
DELAY = 50_000_000  # GPU cycles, a few hundredths of a second


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Inside, PyTorch also fills the tensors of torch.empty and similar functions: with NaN, or the
    largest integer.
    """
    before = torch.get_deterministic_debug_mode()
    # use_deterministic_algorithms() would also import the compiler, which takes seconds
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def differences(
    what: str, found: dict[str, Tensor], expected: dict[str, Tensor], subject: Subject, case: Case
) -> Iterator[Check]:
    """One check per tensor: bitwise on a CPU; within twice the budget on a GPU, where sums may run
    in any order. Elements that are NaN in `expected` are left to other properties.
    """
    for name, x in found.items():
        y = expected[name]
        budget = 0.0 if subject.device == "cpu" else 2 * subject.expected(case).budget(name)
        x, y = (torch.where(expected[name].isnan(), 0.0, each) for each in (x, y))
        yield Check(f"{name} of {case}, {what}", distance(x, y), budget)


def exactly(what: str, found: dict[str, Tensor], subject: Subject, case: Case) -> Iterator[Check]:
    """One check per tensor, against the exact results."""
    expected = subject.expected(case)
    for name, x in found.items():
        moved = distance(x, expected.reference[name])
        yield Check(f"{name} of {case}, {what}", moved, expected.budget(name))


def right(subject: Subject, case: Case) -> bool:
    """Whether all results of a case are within their budgets."""
    return all(check.share <= 1 for check in exactly("", subject.run(case), subject, case))


def call_history(subject: Subject) -> Iterator[Check]:
    """A call does not remember another one: of other shape, mask or dtype, with other numbers in
    the same memory, whose d_out lies otherwise in memory, or whose backward pass is still to come.
    """
    case = subject.case(batch=2)
    passes = subject.passes(case)
    if not passes:
        return
    first, half = subject.run(case), subject.rounded(subject.length // 2)
    between = [
        subject.case(batch=2, causal=False),
        subject.case(batch=2, window=9),
        subject.case(batch=2, document_ids=True),
        subject.case(half, subject.length),
        subject.case(half),
    ]
    for other in between:
        if subject.passes(other):
            found = subject.run(other)
            # batch=3 is of a kind that no earlier call had
            if right(subject, replace(other, batch=3)):
                yield from exactly(f"after {case}", found, subject, other)
            yield from differences(f"after {other}", subject.run(case), first, subject, case)
    dtype = torch.bfloat16 if subject.dtype == torch.float32 else torch.float32
    other = subject.in_dtype(dtype)
    if other.passes(case):
        other.run(case)
        yield from differences(f"after {dtype}", subject.run(case), first, subject, case)
    yield from same_memory(subject, case)
    if passes == "both":
        yield from gradient_in_another_layout(subject, case)
    yield from several_at_once(subject, case, backward=passes == "both")


def same_memory(subject: Subject, case: Case) -> Iterator[Check]:
    """q, k and v, or document_ids, have new values at the addresses of the previous call."""
    for changed in (case, replace(case, optional={"document_ids": True})):
        passes = subject.passes(changed)
        if not passes:
            continue
        tensors, arguments, d_out, d_lse = changed.make(subject.dtype, subject.device)
        others, *_ = replace(changed, seed=1).make(subject.dtype, subject.device)
        new_arguments = dict(arguments)
        if "document_ids" in arguments:
            others = tensors
            new_arguments["document_ids"] = arguments["document_ids"].flip(0, 1).contiguous()
        backward = passes == "both"
        expected = run(subject.backend, others, new_arguments, d_out, d_lse, backward=backward)
        tensors = [x.clone() for x in tensors]
        run(subject.backend, tensors, arguments, d_out, d_lse, backward=backward)
        for x, y in zip(tensors, others, strict=True):
            x.copy_(y)
        for name, x in new_arguments.items():
            if isinstance(x, Tensor):
                arguments[name].copy_(x)
        found = run(subject.backend, tensors, arguments, d_out, d_lse, backward=backward)
        yield from differences("other numbers in its memory", found, expected, subject, changed)


def gradient_in_another_layout(subject: Subject, case: Case) -> Iterator[Check]:
    """The same d_out with the heads of a token adjacent in memory, as the layer after attention
    makes it; then the original d_out again.
    """
    tensors, arguments, d_out, d_lse = subject.expected(case).inputs
    expected = subject.run(case)
    for what, changed in (
        (HEADS_INSIDE, d_out.transpose(1, 2).contiguous().transpose(1, 2)),
        ("after such a d_out", d_out),
    ):
        found = run(subject.backend, tensors, arguments, changed, d_lse, backward=True)
        yield from differences(what, found, expected, subject, case)


def several_at_once(subject: Subject, case: Case, *, backward: bool) -> Iterator[Check]:
    """All forward passes run first, as in a model of many layers; no output may change."""
    cases = [case, replace(case, seed=1), replace(case, seed=2, causal=False)]
    cases = [each for each in cases if subject.passes(each)]
    calls, kept = [], []
    for each in cases:
        tensors, arguments, *_ = subject.expected(each).inputs
        calls.append(call(subject.backend, tensors, arguments, backward=backward))
        kept.append(calls[-1].output.out.detach().clone())
    for each, made, out in zip(cases, calls, kept, strict=True):
        *_, d_out, d_lse = subject.expected(each).inputs
        found, expected = made.results(d_out, d_lse), subject.run(each)
        yield from differences("one of several at once", found, expected, subject, each)
        moved = distance(made.output.out.detach().double(), out.double())
        yield Check(f"out of {each}, after the other calls", moved, 0.0)


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
            yield from differences(what, results, expected, subject, case)


def row_independence(subject: Subject) -> Iterator[Check]:
    """A sequence alone gives what it gives in a batch, and a row what it gives beside others that
    are a hundred times as large, or NaN.
    """
    grouped = "gqa" in subject.backend.features
    case = subject.case(batch=3, num_heads=4, num_kv_heads=2 if grouped else 4)
    passes = subject.passes(case)
    if not passes:
        return
    groups, row, plain = 4 // case.num_kv_heads, case.num_queries // 2 + 3, subject.run(case)
    tensors, arguments, d_out, d_lse = subject.expected(case).inputs

    def compared(what: str, given: list[Tensor], part: tuple, *names: str) -> Iterator[Check]:
        own, before = (
            {name: x[part[: x.ndim]] for name, x in results.items() if name in names}
            for results in (subject.run(case, given), plain)
        )
        yield from subject.unmoved(case, what, own, before)

    alone = [x[1:2] for x in (*tensors, d_out, d_lse)]
    found = run(subject.backend, alone[:3], arguments, *alone[3:], backward=passes == "both")
    second = {name: x[1:2] for name, x in plain.items()}
    yield from subject.unmoved(case, "one sequence alone", found, second)

    for what, change in (("huge", HUGE), ("NaN", torch.nan)):
        others = [x * change for x in tensors]
        for x, mine, heads in zip(others, tensors, (groups, 1, 1), strict=True):
            x[1, :heads] = mine[1, :heads]
        own = (slice(1, 2), slice(groups))
        yield from compared(f"beside {what} heads", others, own, "out", "lse", "dq")
        own = (slice(1, 2), slice(1))
        yield from compared(f"beside {what} heads", others, own, "dk", "dv")
        q = tensors[0] * change
        q[1, 0, row] = tensors[0][1, 0, row]
        own = (slice(1, 2), slice(1), slice(row, row + 1))
        yield from compared(f"beside {what} rows", [q, *tensors[1:]], own, "out", "lse", "dq")


def streams_and_graphs(subject: Subject) -> Iterator[Check]:
    """On a GPU: a call waits for what its own stream has still to write, and a CUDA graph of it
    takes new inputs.
    """
    case = subject.case()
    if not subject.takes(case, backward=False):
        return
    if subject.device != "cuda":
        subject.refusals.append("streams and CUDA graphs are a GPU's")
        return
    tensors = subject.expected(case).tensors
    plain = {"out": subject.attend(*tensors).double()}
    late = [torch.zeros_like(x) for x in tensors]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY)
        for x, y in zip(late, tensors, strict=True):
            x.copy_(y)
        out = subject.attend(*late)
    stream.synchronize()
    yield from subject.unmoved(case, "on a stream of its own", {"out": out.double()}, plain)
    if not subject.backend.traceable:
        return  # a loop in Python reads its tiles from the GPU, which no graph can capture
    late = [torch.zeros_like(x) for x in tensors]
    with torch.cuda.stream(stream):
        subject.attend(*late)  # compiles and allocates before the capture
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = subject.attend(*late)
    for x, y in zip(late, tensors, strict=True):
        x.copy_(y)
    graph.replay()
    torch.cuda.synchronize()
    yield from subject.unmoved(case, "from a CUDA graph", {"out": out.double()}, plain)
