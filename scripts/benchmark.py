"""Measure the peak memory and the time of one attention call by length: forward, and forward and
backward together.

    python -m scripts.benchmark attention=naive,tiled,sdpa seq_len=256,512 out=benchmark.json
    python -m scripts.benchmark max_length=true memory_gib=8,24 out=longest.json

    attention     names, each with options as in tiled:block_q=512, or your own as
                  pkg.module:BACKEND (naive,tiled,sdpa)
    seq_len       lengths; with max_length=true, the first one is tried first (256,512,1024,2048)
    head_dim      (64)
    heads, batch  (16, 1)
    groups        query heads that share a key/value head (1)
    window        keys that a query sees, its own included
    documents     tokens of each document that sequences are packed from
    causal        false: no causal mask (true)
    dtype         auto, fp32, bf16, fp16 (auto)
    device        auto, cpu or cuda (auto)
    repeats       timed calls of each, in four turns; fewer if one takes long (20)
    check         false: check no results first, and mark every row as unchecked (true)
    max_length    search the longest sequence instead of timing (false)
    memory_gib    max_length: with this much memory, as if the card were smaller (all)
    out           write the rows to this JSON file, and a picture of them beside it

Memory is the peak above what was allocated before the call. Time is the median; the file has the
20th and 80th percentile too. The backward pass is timed alone, over a graph that is kept. Backends
take turns, so that a drifting clock affects all alike. A GPU's own clock measures its time, with an
empty L2 cache. TFLOP/s count the scores that the mask leaves, and five products in a backward pass
for two in a forward pass. A backend with wrong results is not timed; the check takes minutes on a
GPU. In the search no trial takes longer than 20 seconds.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated

import torch
import torch._functorch.config

from attention import Backend, dtype_name
from scripts.arguments import Count, Device, Dtype, Json, command, default, parse_backend
from scripts.attention_call import Call, Measurement, attempt, take_turns, timed_on_host
from scripts.plots import SHARED, draw
from scripts.tables import Row
from training.loop.device import pick_device, pick_dtype
from training.record.environment import measured_on
from training.record.files import write_json
from training.record.memory import GIB, cpu_memory_limit, release_memory

# of the longest length: its relative precision, and the number that it is a multiple of
PRECISION, MULTIPLE = 0.12, 64
LONGEST_TRIAL = 20.0  # seconds


@dataclass
class Options:
    attention: list[str] = default("naive", "tiled", "sdpa")
    seq_len: list[Count] = default(256, 512, 1024, 2048)
    head_dim: list[Count] = default(64)
    heads: Count = 16
    batch: Count = 1
    groups: Count = 1
    window: Count | None = None
    documents: Count | None = None
    causal: bool = True
    dtype: list[Dtype] = default("auto")
    device: Device = "auto"
    repeats: Count = 20
    check: bool = True
    max_length: bool = False
    memory_gib: list[Annotated[float, 1e-3]] | None = None
    out: Json | None = None

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ValueError(f"groups={self.groups} does not divide heads={self.heads}")
        if self.window and not self.causal:
            raise ValueError("window= is of the most recent keys, so it is causal")
        if self.memory_gib and not self.max_length:
            raise ValueError("memory_gib= belongs to max_length=true; add it")


Make = Callable[[Row], Call]  # the call of a shape


@command
def main(options: Options) -> None:
    # a graph that is kept for timing must not donate its buffers
    torch._functorch.config.donated_buffer = False
    device = pick_device(options.device)
    dtypes = list(dict.fromkeys(pick_dtype(name, device) for name in options.dtype))
    backends = {text: parse_backend(text) for text in options.attention}
    wrong = {}
    if options.check:
        wrong = {text: complaint(text, each, device, dtypes) for text, each in backends.items()}
    # the others are measured all the same
    right = {text: backend for text, backend in backends.items() if not wrong.get(text)}
    lengths = options.seq_len[:1] if options.max_length else options.seq_len
    settings = vars(options) | {"unchecked": not options.check or None}
    shared = {name: settings[name] for name in SHARED if settings[name] is not None}
    rows: list[Row] = []
    for dtype, head_dim, length in product(dtypes, options.head_dim, lengths if right else []):
        shape = {"seq_len": length, "head_dim": head_dim, "dtype": dtype_name(dtype)} | shared
        makes: dict[str, Make] = {
            text: partial(Call, backend, device=device, dtype=dtype)
            for text, backend in right.items()
        }
        if options.max_length:
            rows += search(makes, shape, options.memory_gib or [None], device)
        else:
            rows += measured(makes, shape, options.repeats, device)
        if options.out:
            data = {"environment": measured_on(device), "rows": rows}
            write_json(options.out, data)
            draw(data, options.out.with_suffix(".png"))
    if complaints := list(filter(None, wrong.values())):
        raise ValueError("; ".join(complaints))
    if all("refused" in row for row in rows):
        raise ValueError(f"nothing was measured: {rows[0]['refused']}")


def complaint(
    text: str, backend: Backend, device: torch.device, dtypes: list[torch.dtype]
) -> str | None:
    """Why a backend is not timed: the properties that it fails in a quick check."""
    from conformance.properties import red_properties

    for dtype in dtypes:
        if dtype not in backend.dtypes:
            continue
        # on a GPU this compiles every kernel, which takes minutes
        what = f"the results of {text} in {dtype_name(dtype)}"
        print(f"checking {what} first; check=false leaves that out", file=sys.stderr)
        if red := red_properties(backend, device=device, dtype=dtype):
            return (
                f"{text} is wrong in {dtype_name(dtype)}, so its speed means nothing: red in "
                f"{', '.join(red)}; see python -m scripts.verify attention={text}, or add "
                "check=false to time it all the same"
            )
    return None


def measured(makes: dict[str, Make], shape: Row, repeats: int, device: torch.device) -> list[Row]:
    """The rows of one shape: with measurements, with how a backend ran out of memory, or with why
    it does not take the shape.
    """
    calls = [Measurement(partial(make, shape), repeats=repeats) for make in makes.values()]
    found = take_turns(calls, device)
    rows = [{"attention": text} | shape | row for text, row in zip(makes, found, strict=True)]
    print("\n".join(map(describe, rows)), flush=True)
    return rows


def describe(row: Row) -> str:
    parts = [f"{beginning(row)} N={row['seq_len']:<7}"]
    if "oom" in row:
        parts.append(f"out of memory: {row['oom']['message'][:90]}")
    if "refused" in row:
        parts.append(f"refused: {row['refused']}")
    for name, peak in (("forward", "forward_bytes"), ("backward", "training_bytes")):
        if f"{name}_seconds" in row:
            memory = f"{row[peak] / 2**20:,.1f} MiB" if peak in row else ""
            parts.append(
                f"{name} {memory:>14} {row[f'{name}_seconds'] * 1e3:>9.3f} ms "
                f"{row[f'{name}_tflops']:>6.3g} TFLOP/s"
            )
    return "   ".join(parts)


def beginning(row: Row) -> str:
    mark = " unchecked" if "unchecked" in row else ""
    return f"{row['attention']:<28} {row['dtype']:<8} D={row['head_dim']:<4}{mark}"


# the longest sequence


def search(
    makes: dict[str, Make], shape: Row, sizes: list[float] | list[None], device: torch.device
) -> list[Row]:
    """The longest sequence that ran: a row for each attention, memory size in GiB and pass."""
    rows = []
    for (text, make), gib, train in product(makes.items(), sizes, (False, True)):
        row = {"attention": text} | shape
        start = row.pop("seq_len")
        row |= {"pass": "training" if train else "forward", "memory_gib": gib}
        with memory_cap(gib, device):
            row |= longest(partial(trial, make, shape, train), start=start, device=device)
        print(describe_longest(row), flush=True)
        rows.append(row)
    return rows


def trial(make: Make, shape: Row, train: bool, length: int) -> Row:
    """The seconds of one call of this length; the inputs of a training step want a gradient."""
    call = make(shape | {"seq_len": length})
    for x in call.inputs:
        x.requires_grad_(train)

    def run() -> None:
        call.run(train=train)
        if call.device.type == "cuda":
            torch.cuda.synchronize(call.device)

    took = timed_on_host(run)
    # the first call may have compiled: the second predicts what the next length will take
    return {"seconds": timed_on_host(run) if took > 1 else took}


def longest(trial: Callable[[int], Row], *, start: int, device: torch.device) -> Row:
    """Find the longest length that fits: double from `start`, then halve the gap until it is below
    PRECISION.

    trial(length) returns the `seconds` it took, or runs out of memory. If the next length would
    take longer than LONGEST_TRIAL, by quadratic growth, limited_by is "time", and the length is a
    lower bound.
    """
    length, best, failed = start, 0, None
    found: Row = {"limited_by": "memory", "oom": None}
    while length > best and length != failed:
        outcome = attempt(partial(trial, length), device) or {}
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
    """Limit this process to `gib` GiB of memory, as if the card were smaller. None allows all free
    memory.
    """
    release_memory(device)
    if device.type == "cpu":
        with cpu_memory_limit(math.inf if gib is None else gib * GIB):
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


def describe_longest(row: Row) -> str:
    memory = "all memory" if row["memory_gib"] is None else f"{row['memory_gib']:g} GiB"
    head = f"{beginning(row)} {memory:<10} {row['pass']:<8}"
    if "refused" in row:
        return f"{head} refused: {row['refused']}"
    sign = ">=" if row["limited_by"] == "time" else "  "
    end = f"{row['oom_seq_len']:,} ran out of memory" if row["oom_seq_len"] else "no limit met"
    return f"{head} {sign} {row['max_seq_len']:>10,} tokens ({end})"


if __name__ == "__main__":
    main()
