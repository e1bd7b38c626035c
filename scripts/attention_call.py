"""Measure the memory, the time and the longest sequence of one attention call, for
scripts.benchmark and lab.peers.

Dimensions: q, k, v (B, H, N, D).
"""

import ctypes
import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from attention import Backend, attention
from conformance.backend_under_test import standalone
from conformance.errors import in_one_line
from conformance.memory_growth import LiveTensors
from scripts.tables import Row
from scripts.traffic import pairs
from training.record.memory import (
    GIB,
    LINUX,
    cpu_memory_limit,
    describe_out_of_memory,
    is_out_of_memory,
    release_memory,
)
from training.record.speed import seconds_between, stamp

M_MMAP_THRESHOLD = -3  # of malloc.h
FLUSH_BYTES = 256 * 2**20  # several times the L2 cache of any GPU
SHORTEST_WAIT, LONGEST_WAIT = 0.5e-3, 16e-3  # seconds
CYCLES_PER_SECOND = 2.5e9  # of a fast GPU: on others the wait is longer than requested
ROUNDS = 4
PRODUCTS = {"forward": 2, "backward": 5}  # of matrices
# of the longest length: its relative precision, and the number that it is a multiple of
PRECISION, MULTIPLE = 0.12, 64
LONGEST_TRIAL = 20.0  # seconds
SECONDS = 3.0  # what the timed calls of one pass may take; 20 of a long call would take too long


def seconds(function: Callable[[], Any], *, repeats: int, device: torch.device) -> list[float]:
    """The times of `repeats` calls, on a GPU by its own clock.

    There each call starts with an empty L2 cache. The GPU first waits, for twice as long as the
    host took for a call. So the whole call is queued before it starts, and the time has no wait of
    a short kernel for the host. triton.testing.do_bench would count such waits. A call that
    synchronises with the GPU cannot be queued, so its time includes some of the host's.
    """
    if device.type == "cpu":
        return [timed_on_host(function) for _ in range(repeats)]
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    wait = min(max(2 * timed_on_host(function), SHORTEST_WAIT), LONGEST_WAIT)
    stretches = []
    for _ in range(repeats):
        flush.zero_()
        torch.cuda._sleep(int(wait * CYCLES_PER_SECOND))
        start = stamp(device)
        function()
        stretches.append((start, stamp(device)))
    return [seconds_between(*each) for each in stretches]


def timed_on_host(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class Call:
    """One attention call on random inputs.

    shape: batch, heads, seq_len, head_dim, causal; optionally groups (query heads per key/value
    head), window, softcap, and documents (tokens of each document packed into a sequence).
    """

    def __init__(self, backend: Backend, shape: Row, *, device: torch.device, dtype: torch.dtype):
        self.backend, self.device = standalone(backend), device
        batch, heads, length = shape["batch"], shape["heads"], shape["seq_len"]
        kv_heads = heads // shape.get("groups", 1)
        made = {"device": device, "dtype": dtype, "requires_grad": backend.backward}
        self.inputs = [
            torch.randn(batch, n, length, shape["head_dim"], **made)
            for n in (heads, kv_heads, kv_heads)
        ]
        names = ("causal", "window", "softcap")
        self.mask: Row = {name: shape[name] for name in names if shape.get(name) is not None}
        if shape.get("documents"):
            documents = torch.arange(length, device=device) // shape["documents"]
            self.mask["document_ids"] = documents.expand(batch, -1)
        self.flops = 4 * batch * heads * shape["head_dim"] * pairs(shape)  # of the forward pass
        self.trainable = backend.backward

    def forward(self) -> Tensor:
        return attention(*self.inputs, backend=self.backend, **self.mask).out

    def forward_only(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def backward(self, out: Tensor, d_out: Tensor, *, keep: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.inputs, d_out, retain_graph=keep)

    def run(self) -> None:
        """Run what a training step runs, or the forward pass where the inputs want no gradient."""
        if self.inputs[0].requires_grad:
            self.backward(self.forward(), torch.ones_like(self.inputs[0]))
        else:
            self.forward_only()

    def passes(self) -> dict[str, Callable[[], Any]]:
        """What can be timed many times: forward without gradients, and backward over a kept graph
        if the backend has one.
        """
        functions = {"forward": self.forward_only}
        if self.trainable:
            out, d_out = self.forward(), torch.randn_like(self.inputs[0])
            functions["backward"] = lambda: self.backward(out, d_out, keep=True)
        return functions


@contextmanager
def memory_probe(device: torch.device) -> Iterator[Callable[[], tuple[int, int]]]:
    """A function for inside the block: bytes of the tensors made there, now and at the peak."""
    if device.type == "cpu":
        with LiveTensors() as live:
            yield lambda: (live.bytes, live.peak)
        return
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield lambda: (
        torch.cuda.memory_allocated(device) - before,
        torch.cuda.max_memory_allocated(device) - before,
    )


def measure_memory(call: Call) -> dict[str, int]:
    """forward_bytes: the peak without gradients. saved_bytes: what the graph holds, including out.
    training_bytes: the peak of forward and backward together.
    """
    if call.device.type == "cpu" and call.backend.name == "flex":
        return {}  # one operator there, which no dispatch mode can look into
    with memory_probe(call.device) as look:
        call.forward_only()
        row = {"forward_bytes": look()[1]}
    if call.trainable:
        d_out = torch.ones_like(call.inputs[0])
        with memory_probe(call.device) as look:
            out = call.forward()
            row["saved_bytes"] = look()[0]
            call.backward(out, d_out)
            row["training_bytes"] = look()[1]
    return row


@dataclass(eq=False)
class Measurement:
    """Bytes and seconds of a call: forward without gradients, backward alone, and training, which
    is both together.

    make() makes the call again in each of ROUNDS turns, and nothing of it stays in memory between
    turns: other calls take theirs there.
    """

    make: Callable[[], Call]
    repeats: int  # timed calls in all turns together
    tolerant: bool = False  # whether take_turns() goes on after any error
    failure: Row | None = None  # see attempt()
    times: dict[str, list[float]] = field(default_factory=dict)

    def turn(self) -> None:
        """Run one turn's share of the timed calls; the first turn also measures the bytes."""
        call = self.make()
        if not self.times:
            gc.collect()  # free what other calls left
            # warm up: compile, and let libraries allocate their lasting workspaces
            call.run()
            self.bytes, self.flops = measure_memory(call), call.flops
        for name, function in call.passes().items():
            (once,) = seconds(function, repeats=1, device=call.device)
            share = min(math.ceil(self.repeats / ROUNDS), int(SECONDS / ROUNDS / max(once, 1e-6)))
            times = seconds(function, repeats=max(1, share), device=call.device)
            self.times.setdefault(name, []).extend(times)

    @property
    def row(self) -> Row:
        """The measured fields of a benchmark's row, after all turns."""
        row = dict(self.bytes)
        for name, times in self.times.items():
            # between the times: few of them have no 20th percentile outside
            p20, *_, p80 = quantiles(times, n=5, method="inclusive")
            row |= {
                f"{name}_seconds": median(times),
                f"{name}_p20": p20,
                f"{name}_p80": p80,
                f"{name}_repeats": len(times),
                f"{name}_tflops": PRODUCTS[name] / 2 * self.flops / median(times) / 1e12,
            }
        if "backward" in self.times:
            row["training_seconds"] = row["forward_seconds"] + row["backward_seconds"]
        return row


def take_turns(measurements: list[Measurement], device: torch.device) -> list[Row]:
    """The row of each measurement after all of its turns, or how it failed: see attempt()."""
    for each in ROUNDS * measurements:
        if each.failure is None:
            each.failure = attempt(each.turn, device, tolerant=each.tolerant)
    release_memory(device)
    return [each.failure or each.row for each in measurements]


def attempt(
    step: Callable[[], Row | None],
    device: torch.device,
    *,
    tolerant: bool = False,
    at_most: float = math.inf,
) -> Row | None:
    """What step() returns, or why it failed: `refused` (ValueError), `oom`, or with `tolerant` any
    other error as `failed`.

    at_most: bytes that it may take on a CPU, beside what the process has by then.
    """
    try:
        with cpu_memory_limit(at_most):
            return step()
    except ValueError as error:
        failure = {"refused": str(error)}
    except Exception as error:
        if is_out_of_memory(error):
            failure = {"oom": describe_out_of_memory(error)}
        elif tolerant:
            failure = {"failed": in_one_line(error)}
        else:
            raise
    release_memory(device)
    return failure


def trial(make: Callable[[Row], Call], shape: Row, train: bool, length: int) -> Row:
    """The seconds of one call of this length; the inputs of a training step want a gradient."""
    call = make(shape | {"seq_len": length})
    for x in call.inputs:
        x.requires_grad_(train)

    def run() -> None:
        call.run()
        if call.device.type == "cuda":
            torch.cuda.synchronize(call.device)

    took = timed_on_host(run)
    # the first call may have compiled: the second predicts what the next length will take
    return {"seconds": timed_on_host(run) if took > 1 else took}


def longest(
    trial: Callable[[int], Row], *, start: int, device: torch.device, at_most: float = math.inf
) -> Row:
    """Find the longest length that fits: double from `start`, then halve the gap until it is below
    PRECISION.

    trial(length) returns the `seconds` it took, or runs out of memory. If the next length would
    take longer than LONGEST_TRIAL, by quadratic growth, limited_by is "time", and the length is a
    lower bound.
    """
    length, best, failed = start, 0, None
    found: Row = {"limited_by": "memory", "oom": None}
    while length > best:
        outcome = attempt(partial(trial, length), device, at_most=at_most)
        found |= outcome
        if "refused" in outcome:
            return outcome
        if "oom" in outcome:
            failed = length
        else:
            best = length
        if failed is None and 4 * outcome["seconds"] > LONGEST_TRIAL:
            found["limited_by"] = "time"
            break
        if failed is not None and failed - best <= max(MULTIPLE, PRECISION * best):
            break
        length = 2 * best if failed is None else (best + failed) // 2 // MULTIPLE * MULTIPLE
    return found | {"max_seq_len": best, "oom_seq_len": failed}


@contextmanager
def memory_cap(gib: float | None, device: torch.device) -> Iterator[None]:
    """Limit this process to `gib` GiB of a GPU, as if the card were smaller. None allows all free
    memory. On a CPU attempt() limits each trial; this lets what one has freed not help the next.
    """
    release_memory(device)
    if device.type == "cpu":
        if LINUX:
            # else glibc would keep what is freed, and give it out again beside the limit
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    share = 1.0 if gib is None else gib * GIB / total
    if share > 1:
        raise ValueError(f"memory_gib={gib:g} is more than the {total / GIB:.1f} GiB of this GPU")
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
