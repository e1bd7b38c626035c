"""Properties of calls beside one another: earlier calls, other rows, the same call again, another
stream, torch.compile.

Each of the first two catches a bug that was shipped: a cache key that leaves something out, a
maximum that rows share.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from conformance.backend_under_test import Check, Subject
from conformance.cases import Case, call, distance, run

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
            if is_right(subject, replace(other, batch=3)):
                yield from subject.exactly(other, f"after {case}", found)
            yield from subject.same_bits(case, f"after {other}", subject.run(case), first)
    dtype = torch.bfloat16 if subject.dtype == torch.float32 else torch.float32
    other = subject.in_dtype(dtype)
    if other.passes(case):
        other.run(case)
        yield from subject.same_bits(case, f"after {dtype}", subject.run(case), first)
    yield from same_memory(subject, case)
    if passes == "both":
        yield from gradient_in_another_layout(subject, case)
    yield from several_at_once(subject, case, backward=passes == "both")


def is_right(subject: Subject, case: Case) -> bool:
    """Whether all results of a case are within their budgets."""
    return all(check.share <= 1 for check in subject.exactly(case, "", subject.run(case)))


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
        yield from subject.same_bits(changed, "other numbers in its memory", found, expected)


def gradient_in_another_layout(subject: Subject, case: Case) -> Iterator[Check]:
    """The same d_out with the heads of a token adjacent in memory, as the layer after attention
    makes it; then the original d_out again.
    """
    tensors, arguments, d_out, d_lse = subject.expected(case).inputs
    expected = subject.run(case)
    for what, changed in (
        ("d_out with the heads inside", d_out.transpose(1, 2).contiguous().transpose(1, 2)),
        ("after such a d_out", d_out),
    ):
        found = run(subject.backend, tensors, arguments, changed, d_lse, backward=True)
        yield from subject.same_bits(case, what, found, expected)


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
        yield from subject.same_bits(each, "one of several at once", found, expected)
        moved = distance(made.output.out.detach().double(), out.double())
        yield Check(f"out of {each}, after the other calls", moved, 0.0)


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


def bitwise_repeat(subject: Subject) -> Iterator[Check]:
    """The same call gives the same bits again, where PyTorch must use deterministic kernels."""
    case = subject.case(batch=2, num_heads=4, num_kv_heads=4)
    if not subject.passes(case):
        return
    with deterministic_algorithms():
        first = subject.run(case)
        for _ in range(3 if subject.device == "cpu" else 50):
            for name, x in subject.run(case).items():
                yield Check(f"{name} of {case}", distance(x, first[name]), 0.0)


def compiled_equals_eager(subject: Subject) -> Iterator[Check]:
    """torch.compile changes nothing but the speed."""
    case = subject.case()
    passes = subject.passes(case)
    if not passes:
        return
    expected = subject.expected(case)
    # on a CPU only the graph is checked: code generation needs a compiler and takes time
    function = torch.compile(
        lambda q, k, v: subject.attend(q, k, v) * 1,
        backend="aot_eager" if subject.device == "cpu" else "inductor",
    )
    results = []
    # eager first: it creates the module of a backend that has one
    for attend in (subject.attend, function):
        tensors = [x.detach().requires_grad_(passes == "both") for x in expected.tensors]
        out = attend(*tensors)
        result = [out.detach()]
        if passes == "both":
            result += torch.autograd.grad(out, tensors, expected.d_out.to(out.dtype))
        results.append(result)
    torch.compiler.reset()
    for name, eager, compiled in zip(("out", "dq", "dk", "dv"), *results, strict=False):
        error = distance(compiled.double(), eager.double())
        yield Check(f"{name} of {case}", error, 2 * expected.budget(name))
