"""Measure the memory and time of one attention call, for scripts.benchmark.

Dimensions: q, k, v (B, H, N, D).
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from statistics import median, quantiles
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attention import Backend, attention
from conformance.backend_under_test import standalone
from conformance.errors import in_one_line
from conformance.memory_growth import LiveTensors
from model.layer_function import alibi_slopes
from scripts.tables import Row
from training.record.memory import (
    GIB,
    cpu_memory_limit,
    describe_out_of_memory,
    is_out_of_memory,
    release_memory,
)

FLUSH_BYTES = 256 * 2**20  # several times the L2 cache of any GPU
# seconds; a call that needs a longer wait synchronises with the GPU, or fills its queue
SHORTEST_WAIT, LONGEST_WAIT = 0.5e-3, 16e-3
CYCLES_PER_SECOND = 2.5e9  # of a fast GPU: on others the wait is longer than requested
ROUNDS = 4
# of the longest length: its relative precision, and the number that it is a multiple of
PRECISION, MULTIPLE = 0.12, 64
Feature = Literal["none", "softcap", "alibi", "sinks"]
SOFTCAP = 50.0  # as Gemma 2 has it


class Memory(NamedTuple):
    """Bytes since a probe began."""

    peak: int  # since the last look
    now: int
    reserved: int | None  # the peak of what PyTorch took from a GPU, with what it had before


@contextmanager
def memory_probe(device: torch.device) -> Iterator[Callable[[], Memory]]:
    """A function to call inside the block, which looks at the memory of its tensors."""
    if device.type == "cpu":
        with LiveTensors() as live:

            def look_at_cpu() -> Memory:
                found = Memory(live.peak, live.bytes, None)
                live.peak = live.bytes
                return found

            yield look_at_cpu
        return
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)

    def look() -> Memory:
        torch.cuda.synchronize(device)
        allocated = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return Memory(*(each - before for each in allocated), reserved)

    yield look


def seconds(
    function: Callable[[], Any], *, repeats: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """The times of `repeats` calls: on the device, and on the host until the call is queued. On a
    CPU they are the same.

    On a GPU each call starts with an empty L2 cache, and is queued completely before the GPU
    reaches it: a wait on the GPU comes first and grows until it is long enough. A call that
    synchronises with the GPU cannot be queued, so its device time includes some host time.
    """
    times, host = [], []
    if device.type == "cpu":
        for _ in range(repeats):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return times, times
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    wait, events = SHORTEST_WAIT, []
    while len(events) < repeats:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        torch.cuda._sleep(int(wait * CYCLES_PER_SECOND))
        start.record()
        called = time.perf_counter()
        function()
        took = time.perf_counter() - called
        # the GPU has started already: its waits for the host would count
        was_late = start.query()
        end.record()
        if was_late and wait < LONGEST_WAIT:
            wait *= 2
            continue
        events.append((start, end))
        host.append(took)
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1000 for start, end in events], host


def pairs(shape: Row) -> float:
    """The number of visible scores of one head. A causal mask leaves half of the square, as is
    customary; a window leaves fewer.
    """
    # length of what attends to itself
    length = min(shape.get("documents") or shape["seq_len"], shape["seq_len"])
    window = min(shape.get("window") or length, length)
    per_document = (window * length - window**2 / 2) if shape["causal"] else length**2
    return per_document * shape["seq_len"] / length


class Call:
    """One attention call on random inputs.

    shape: batch, heads, seq_len, head_dim, causal; optionally groups (query heads per key/value
    head), window, documents (tokens of each document packed into a sequence), and feature.
    """

    def __init__(self, backend: Backend, shape: Row, *, device: torch.device, dtype: torch.dtype):
        self.backend, self.device = standalone(backend), device
        batch, heads, length = shape["batch"], shape["heads"], shape["seq_len"]
        kv_heads = heads // shape.get("groups", 1)
        self.inputs = [
            torch.randn(batch, n, length, shape["head_dim"], device=device, dtype=dtype)
            for n in (heads, kv_heads, kv_heads)
        ]
        self.mask: Row = {"causal": shape["causal"]}
        if shape.get("window"):
            self.mask["window"] = shape["window"]
        if shape.get("documents"):
            documents = torch.arange(length, device=device) // shape["documents"]
            self.mask["document_ids"] = documents.expand(batch, -1)
        feature = shape.get("feature")
        if feature == "softcap":
            self.mask["softcap"] = SOFTCAP
        if feature == "alibi":
            self.mask["alibi_slopes"] = alibi_slopes(heads).to(device)
        self.sinks = {}
        if feature == "sinks":
            self.sinks["sinks"] = torch.randn(heads, device=device)
        self.flops = 4 * batch * heads * shape["head_dim"] * pairs(shape)  # of the forward pass
        # a short input: a long sequence may leave no room for a gradient that a backend without a
        # backward pass never needs
        brief = (x[:1, :, :128].detach().requires_grad_() for x in self.inputs)
        mask = {name: x[:1, :128] if name == "document_ids" else x for name, x in self.mask.items()}
        self.trainable = not backend.unsupported_reasons(*brief, **mask)
        if self.trainable:
            for x in self.leaves:
                x.requires_grad_()

    @property
    def leaves(self) -> list[Tensor]:
        """What the backward pass differentiates by."""
        return [*self.inputs, *self.sinks.values()]

    def forward(self) -> Tensor:
        return attention(*self.inputs, backend=self.backend, **self.mask, **self.sinks).out

    def forward_only(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def backward(self, out: Tensor, d_out: Tensor, *, keep: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, d_out, retain_graph=keep)

    def passes(self, d_out: Tensor | None) -> dict[str, Callable[[], Any]]:
        """What can be timed many times: forward without gradients, and backward over a kept graph
        if the backend has one.
        """
        functions: dict[str, Callable[[], Any]] = {"forward": self.forward_only}
        if self.trainable:
            out = self.forward()
            functions["backward"] = lambda: self.backward(out, d_out, keep=True)
        return functions


class Measurement:
    """Bytes and seconds of a call: forward without gradients, backward alone, and training, which
    is both together.

    make() makes the call again in each of ROUNDS turns, and nothing of it stays in memory between
    turns: other calls take theirs there. tolerant: whether take_turns() goes on after any error.
    """

    def __init__(
        self,
        make: Callable[[], Call],
        *,
        repeats: int,
        tolerant: bool = False,
    ):
        self.make, self.repeats, self.tolerant = make, repeats, tolerant
        self.turns = 0
        self.bytes: dict[str, int | None] = {}
        self.counts: dict[str, int] = {}  # timed calls in all turns
        self.times: dict[str, tuple[list[float], list[float]]] = {}  # the device's and the host's

    def turn(self) -> None:
        """Run one turn's share of the timed calls; the first turn also measures the bytes."""
        call = self.make()
        self.flops, self.on_gpu = call.flops, call.device.type == "cuda"
        d_out = torch.randn_like(call.inputs[0]) if call.trainable else None
        if self.turns == 0:
            gc.collect()  # free what other calls left
            # warm up: compile, and let libraries allocate their lasting workspaces
            if call.trainable:
                call.backward(call.forward(), d_out)
            call.forward_only()
            self.bytes = measure_memory(call, d_out)
        for name, function in call.passes(d_out).items():
            if self.turns == 0:
                once = seconds(function, repeats=1, device=call.device)[0][0]
                # long calls need no warm-up of the clocks, and 20 of them would take too long
                self.counts[name] = max(3, min(self.repeats, int(3 / max(once, 1e-6))))
                self.times[name] = [], []
            done = self.counts[name] * self.turns // ROUNDS
            due = self.counts[name] * (self.turns + 1) // ROUNDS
            if due > done:
                seconds(function, repeats=max(1, (due - done) // 4), device=call.device)
                timed = seconds(function, repeats=due - done, device=call.device)
                for all_times, times in zip(self.times[name], timed, strict=True):
                    all_times += times
        self.turns += 1

    @property
    def row(self) -> Row:
        """The measured fields of a benchmark's row, after all turns."""
        row: Row = dict(self.bytes)
        for name, (times, host) in self.times.items():
            # between the times: three of them have no 20th percentile outside
            p20, *_, p80 = quantiles(times, n=5, method="inclusive")
            row |= {
                f"{name}_seconds": median(times),
                f"{name}_p20": p20,
                f"{name}_p80": p80,
                f"{name}_repeats": len(times),
            }
            if self.on_gpu:
                row[f"{name}_host_seconds"] = median(host)
        row["forward_tflops"] = self.flops / row["forward_seconds"] / 1e12
        if "backward" in self.times:
            row["training_seconds"] = row["forward_seconds"] + row["backward_seconds"]
            # the backward pass has five products, the forward pass two
            row["backward_tflops"] = 2.5 * self.flops / row["backward_seconds"] / 1e12
        return row


def take_turns(measurements: Sequence[Measurement], device: torch.device) -> list[Row]:
    """The row of each measurement after all of its turns, or how it failed: see attempt()."""
    failed: dict[int, Row] = {}
    for _, (number, measurement) in product(range(ROUNDS), enumerate(measurements)):
        if number in failed:
            continue
        failure = attempt(measurement.turn, device, tolerant=measurement.tolerant)
        if failure:
            failed[number] = failure
    release_memory(device)
    return [failed.get(number) or each.row for number, each in enumerate(measurements)]


def attempt(
    step: Callable[[], Row | None], device: torch.device, *, tolerant: bool = False
) -> Row | None:
    """What step() returns, or why it failed: `refused` (ValueError), `oom`, or with `tolerant` any
    other error as `failed`.
    """
    try:
        with cpu_memory_limit():
            return step()
    except ValueError as error:
        failure = {"refused": str(error)}
    except Exception as error:
        if is_out_of_memory(error):
            failure = {"oom": describe_out_of_memory(error, device)}
        elif tolerant:
            failure = {"failed": in_one_line(error)}
        else:
            raise
    release_memory(device)
    return failure


def measure_memory(call: Call, d_out: Tensor | None) -> dict[str, int | None]:
    """forward: without gradients. saved: memory held by the graph, including out. backward: peak of
    the backward pass, including the saved memory.
    """
    if call.device.type == "cpu" and call.backend.name == "flex":
        return {}  # one operator there, which no dispatch mode can look into
    with memory_probe(call.device) as look:
        out = call.forward_only()
        forward = look()
    del out
    row = {"forward_bytes": forward.peak, "forward_reserved_bytes": forward.reserved}
    if not call.trainable:
        return row
    with memory_probe(call.device) as look:
        out = call.forward()
        forward = look()
        grads = call.backward(out, d_out)
        backward = look()
    del out, grads
    on_gpu = call.device.type == "cuda"
    return row | {
        "saved_bytes": forward.now,
        "backward_bytes": backward.peak,
        "backward_reserved_bytes": backward.reserved,
        "training_bytes": max(forward.peak, backward.peak),
        "training_reserved_bytes": max(forward.reserved, backward.reserved) if on_gpu else None,
    }


@contextmanager
def memory_cap(gib: float | None, device: torch.device) -> Iterator[None]:
    """Limit this process to `gib` GiB of memory, as if the card were smaller. None allows all free
    memory.
    """
    release_memory(device)
    if device.type == "cpu":
        with cpu_memory_limit(math.inf if gib is None else gib * GIB):
            yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if gib is not None and gib * GIB > total:
        raise ValueError(
            f"memory_gib={gib:g} is more than the {total / GIB:.1f} GiB of "
            f"{torch.cuda.get_device_name(device)}"
        )
    torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else gib * GIB / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def longest(fits: Callable[[int], float | dict], *, start: int, limit_s: float) -> Row:
    """Find the longest length that fits: double from `start`, then halve the gap until it is below
    PRECISION.

    fits(length) returns the seconds it took, or a description of the failure. A trial is skipped if
    it would take longer than limit_s, by the time of the last one and quadratic growth. Then
    limited_by is "time", and the length is a lower bound.
    """
    length, best, took = start, 0, 0.0
    failed, failure = 0, None  # the shortest length that failed, and its failure
    limited_by = "memory"
    while length not in (best, failed):
        if best and took * (length / best) ** 2 > limit_s:
            limited_by = "time"
            break
        outcome = fits(length)
        if isinstance(outcome, dict):
            failed, failure = length, outcome
        else:
            best, took = length, outcome
        if not failed:
            length *= 2
        elif failed - best <= max(MULTIPLE, PRECISION * best) or failed <= MULTIPLE:
            break
        else:
            length = max(MULTIPLE, (best + failed) // 2 // MULTIPLE * MULTIPLE)
    return {
        "max_seq_len": best,
        "limited_by": limited_by,
        "seconds": took,
        "oom": failure,
        "oom_seq_len": failed or None,
    }


def try_length(
    backend: Backend,
    shape: Row,
    *,
    device: torch.device,
    dtype: torch.dtype,
    train: bool,
) -> float | dict:
    """Seconds of one forward, or forward and backward; or its out-of-memory error."""

    def run(call: Call) -> float:
        start = time.perf_counter()
        if train:
            call.backward(call.forward(), torch.ones_like(call.inputs[0]))
        else:
            call.forward_only()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    try:
        call = Call(backend, shape, device=device, dtype=dtype)
        took = run(call)
        # the first call may have compiled: the second predicts what the next length will take
        return run(call) if took > 1 else took
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return describe_out_of_memory(error, device)
    finally:
        call = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
