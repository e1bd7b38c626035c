"""Properties of calls beside one another: earlier calls, other rows, the same call again, another
stream, torch.compile.

Each of the first two catches a bug that was shipped: a cache key that leaves something out, a
maximum that rows share.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from attention import AttentionOutput
from conformance.backend_under_test import Check, Subject
from conformance.cases import Call, Case, call, distance, run

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
    if not subject.takes(case):
        return
    first, half = subject.run(case), subject.rounded(subject.length // 2)
    between = [
        subject.case(batch=2, causal=False),
        subject.case(batch=2, window=9),
        subject.case(batch=2, document_ids=True),
        subject.case(half, subject.length),
        subject.case(half),
    ]
    for other in filter(subject.takes, between):
        found = subject.run(other)
        new = replace(other, batch=3)  # of a kind that no earlier call had
        if all(check.share <= 1 for check in subject.exactly(new, "", subject.run(new))):
            yield from subject.exactly(other, f"after {case}", found)
        yield from subject.same(case, f"after {other}", subject.run(case), first, bits=True)
    dtype = torch.bfloat16 if subject.dtype == torch.float32 else torch.float32
    other = subject.in_dtype(dtype)
    if other.takes(case):
        other.run(case)
        yield from subject.same(case, f"after {dtype}", subject.run(case), first, bits=True)
    yield from same_memory(subject, case)
    if subject.takes(case, backward=True):
        yield from gradient_in_another_layout(subject, case)
    yield from several_at_once(subject, case)


def same_memory(subject: Subject, case: Case) -> Iterator[Check]:
    """q, k, v and document_ids have new values at the addresses of the previous call."""
    for changed in filter(subject.takes, [case, replace(case, optional={"document_ids": True})]):
        tensors, arguments, d_out, d_lse = changed.make(subject.dtype, subject.device)
        others, new_arguments, *_ = replace(changed, seed=1).make(subject.dtype, subject.device)
        if "document_ids" in arguments:
            new_arguments["document_ids"] = arguments["document_ids"].flip(0, 1).contiguous()
        backward = subject.takes(changed, backward=True)
        attend = partial(run, subject.backend, d_out=d_out, d_lse=d_lse, backward=backward)
        expected = attend(others, new_arguments)
        attend(tensors, arguments)
        new = [*others, *new_arguments.values()]
        for x, y in zip([*tensors, *arguments.values()], new, strict=True):
            if isinstance(x, Tensor):
                x.copy_(y)
        found = attend(tensors, arguments)
        yield from subject.same(changed, "other numbers in its memory", found, expected, bits=True)


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
        found = run(subject.backend, tensors, arguments, changed, d_lse)
        yield from subject.same(case, what, found, expected, bits=True)


def several_at_once(subject: Subject, case: Case) -> Iterator[Check]:
    """All forward passes run first, as in a model of many layers; no output may change."""
    cases = [case, replace(case, seed=1), replace(case, seed=2, causal=False)]
    made = []
    for each in filter(subject.takes, cases):
        tensors, arguments, *gradients = subject.expected(each).inputs
        backward = subject.takes(each, backward=True)
        pending = call(subject.backend, tensors, arguments, backward=backward)
        made.append((each, pending, gradients, {"out": pending.output.out.detach().clone()}))
    for each, pending, gradients, early in made:
        found, alone = pending.results(*gradients), subject.run(each)
        yield from subject.same(each, "one of several at once", found, alone, bits=True)
        late = {"out": pending.output.out.detach()}
        yield from subject.same(each, "after the other calls", late, early, bits=True)


def row_independence(subject: Subject) -> Iterator[Check]:
    """A sequence alone gives what it gives in a batch, and a row what it gives beside others that
    are a hundred times as large, or NaN.
    """
    grouped = "gqa" in subject.backend.features
    case = subject.case(batch=3, num_heads=4, num_kv_heads=2 if grouped else 4)
    if not subject.takes(case):
        return
    plain, backward = subject.run(case), subject.takes(case, backward=True)
    tensors, arguments, *gradients = subject.expected(case).inputs

    q, k, v, *gradients = (x[1:2] for x in (*tensors, *gradients))
    alone = run(subject.backend, [q, k, v], arguments, *gradients, backward=backward)
    second = {name: x[1:2] for name, x in plain.items()}
    yield from subject.same(case, "one sequence alone", alone, second)

    # what stays as it is: of the second sequence the first key/value head and its query heads, or
    # one row of queries
    heads, kv_head = (1, slice(4 // case.num_kv_heads)), (1, slice(1))
    row = (1, 0, case.num_queries // 2 + 3)
    parts = {
        "heads": {"out": heads, "lse": heads, "dq": heads, "dk": kv_head, "dv": kv_head},
        "rows": {"out": row, "lse": row, "dq": row},
    }
    factors = {"huge": HUGE, "NaN": torch.nan}
    for what, (others, kept) in product(factors, parts.items()):
        changed = [x.clone() for x in tensors]
        for name, x, y in zip(("dq", "dk", "dv"), changed, tensors, strict=True):
            if name in kept:
                x *= factors[what]
                x[kept[name]] = y[kept[name]]
        found, same = (
            {name: x[kept[name]] for name, x in results.items() if name in kept}
            for results in (subject.run(case, changed), plain)
        )
        yield from subject.same(case, f"beside {what} {others}", found, same)


def streams_and_graphs(subject: Subject) -> Iterator[Check]:
    """On a GPU: a call waits for what its own stream has still to write, and a CUDA graph of it
    takes new inputs.
    """
    case = subject.case()
    if not subject.takes(case):
        return
    if subject.device != "cuda":
        subject.refusals.append("streams and CUDA graphs are a GPU's")
        return
    tensors = subject.expected(case).tensors
    plain = {"out": subject.attend(*tensors)}
    inputs = [torch.zeros_like(x) for x in tensors]

    def fill() -> None:
        for x, y in zip(inputs, tensors, strict=True):
            x.copy_(y)

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY)
        fill()
        out = subject.attend(*inputs)
    stream.synchronize()
    yield from subject.same(case, "on a stream of its own", {"out": out}, plain)
    if not subject.backend.traceable:
        return  # a loop in Python reads its tiles from the GPU, which no graph can capture
    for x in inputs:
        x.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # the call above has compiled and allocated on this stream
    with torch.cuda.graph(graph, stream=stream):
        out = subject.attend(*inputs)
    fill()
    graph.replay()
    torch.cuda.synchronize()
    yield from subject.same(case, "from a CUDA graph", {"out": out}, plain)


def bitwise_repeat(subject: Subject) -> Iterator[Check]:
    """The same call gives the same bits again, where PyTorch must use deterministic kernels."""
    case = subject.case(batch=2, num_heads=4, num_kv_heads=4)
    if not subject.takes(case):
        return
    with deterministic_algorithms():
        first = subject.run(case)
        for _ in range(3 if subject.device == "cpu" else 50):
            for name, x in subject.run(case).items():
                yield Check(f"{name} of {case}", distance(x, first[name]), 0.0)


def compiled_equals_eager(subject: Subject) -> Iterator[Check]:
    """torch.compile changes nothing but the speed."""
    case = subject.case()
    if not subject.takes(case):
        return
    expected, backward = subject.expected(case), subject.takes(case, backward=True)
    # on a CPU only the graph is checked: code generation needs a compiler and takes time
    compiled = torch.compile(
        lambda q, k, v: subject.attend(q, k, v) * 1,
        backend="aot_eager" if subject.device == "cpu" else "inductor",
    )

    def results(attend: Callable[..., Tensor]) -> dict[str, Tensor]:
        tensors = [x.detach().requires_grad_(backward) for x in expected.tensors]
        leaves: dict[str, Tensor] = dict(zip(("dq", "dk", "dv"), tensors, strict=True))
        return Call(AttentionOutput(attend(*tensors)), leaves).results(expected.d_out, None)

    # eager first: it creates the module of a backend that has one
    eager, found = results(subject.attend), results(compiled)
    torch.compiler.reset()
    yield from subject.same(case, "compiled", found, eager)
