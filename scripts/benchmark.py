"""Measure peak memory and time of one attention call, forward and backward separately, over
backends, lengths, head dims and dtypes.

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
    features      what changes the scores: none, softcap, alibi, sinks (none)
    causal        false: no causal mask (true)
    dtype         auto, fp32, bf16, fp16 (auto)
    device        auto, cpu or cuda (auto)
    repeats       timed calls of each; fewer if one takes long (20)
    check         false: check no results first, and mark every row as unchecked (true)
    allow_broken  time backends whose results are wrong, and mark their rows (false)
    max_length    search the longest sequence instead of timing (false)
    memory_gib    max_length: with this much memory, as if the card were smaller (all)
    limit_s       max_length: no single trial longer than this (20)
    out           write the rows to this JSON file, and a picture of them beside it

Memory is the peak above what was allocated before the call. Time is the median; the file has the
20th and 80th percentile too. The backward pass is timed alone, over a graph that is kept. Backends
take turns, so that a drifting clock affects all alike. On a GPU events measure the device's time,
with an empty L2 cache; the host's is printed beside it. TFLOP/s count the scores that the mask
leaves, and five products in a backward pass for two in a forward pass. A backend with wrong results
is not timed; the check takes minutes on a GPU.
"""

import sys
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated

import torch
import torch._functorch.config

from attention import Backend, dtype_name
from scripts.arguments import Count, Device, Dtype, Json, command, default, parse_backend
from scripts.attention_call import (
    Call,
    Feature,
    Measurement,
    longest,
    memory_cap,
    take_turns,
    try_length,
)
from scripts.plots import draw
from scripts.tables import Row
from training.loop.device import pick_device, pick_dtype
from training.record.environment import measured_on
from training.record.files import write_json


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
    features: list[Feature] = default("none")
    causal: bool = True
    dtype: list[Dtype] = default("auto")
    device: Device = "auto"
    repeats: Count = 20
    check: bool = True
    allow_broken: bool = False
    max_length: bool = False
    memory_gib: list[Annotated[float, 1e-3]] | None = None
    limit_s: Annotated[float, 1e-3] = 20.0
    out: Json | None = None

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ValueError(f"groups={self.groups} does not divide heads={self.heads}")
        if self.window and not self.causal:
            raise ValueError("window= is of the most recent keys, so it is causal")
        if self.memory_gib and not self.max_length:
            raise ValueError("memory_gib= belongs to max_length=true; add it")
        if self.max_length and self.features != ["none"]:
            raise ValueError("features= are timed; leave max_length=true out")


# properties that a backend fails, by its name and dtype
Red = dict[tuple[str, torch.dtype], list[str]]


def wrong_results(backend: Backend, *, device: torch.device, dtype: torch.dtype) -> list[str]:
    """The properties that a backend fails in a quick check."""
    from conformance.properties import red_properties

    # on a GPU this compiles every kernel, which takes minutes
    what = f"the results of {backend.name} in {dtype_name(dtype)}"
    print(f"checking {what} first; check=false leaves that out", file=sys.stderr)
    return red_properties(backend, device=device, dtype=dtype)


def shape_of(options: Options, head_dim: int, length: int) -> Row:
    given = ("batch", "heads", "groups", "causal", "window", "documents")
    shape = {name: getattr(options, name) for name in given}
    shape = {name: value for name, value in shape.items() if value is not None}
    return {"seq_len": length, "head_dim": head_dim} | shape


@command
def main(options: Options) -> None:
    # a graph that is kept for timing must not donate its buffers
    torch._functorch.config.donated_buffer = False
    device = pick_device(options.device)
    dtypes = list(dict.fromkeys(pick_dtype(name, device) for name in options.dtype))
    backends = {text: parse_backend(text) for text in options.attention}
    lengths = options.seq_len[:1] if options.max_length else options.seq_len
    shapes = [shape_of(options, *sizes) for sizes in product(options.head_dim, lengths)]
    red = {
        (text, dtype): wrong_results(backend, device=device, dtype=dtype)
        for (text, backend), dtype in product(backends.items(), dtypes)
        if options.check and dtype in backend.dtypes
    }
    # the others are measured all the same
    wrong = {} if options.allow_broken else complaints(red)
    asked = list(product([text for text in backends if text not in wrong], options.features))
    rows: list[Row] = []
    for dtype, shape in product(dtypes, shapes if asked else []):
        begun = [begun_row(*names, dtype, shape, red) for names in asked]
        if options.max_length:
            for row in begun:
                rows += search(backends[row["attention"]], row, options, device, dtype)
        else:
            rows += measured(backends, begun, options, device, dtype)
        if options.out:
            data = {"environment": measured_on(device), "rows": rows}
            write_json(options.out, data)
            draw(data, options.out.with_suffix(".png"))
    if wrong:
        raise ValueError("; ".join(wrong.values()))
    if all("refused" in row for row in rows):
        raise ValueError(f"nothing was measured: {rows[0]['refused']}")


def complaints(red: Red) -> dict[str, str]:
    """Why a backend that fails these properties is not timed."""
    return {
        text: (
            f"{text} is wrong in {dtype_name(dtype)}, so its speed means nothing: red in "
            f"{', '.join(properties)}; see python -m scripts.verify attention={text}, or add "
            "allow_broken=true to time it and have its rows marked"
        )
        for (text, dtype), properties in red.items()
        if properties
    }


def begun_row(text: str, feature: str, dtype: torch.dtype, shape: Row, red: Red) -> Row:
    """What is asked for, and what the check found."""
    row = {"attention": text} | shape | {"dtype": dtype_name(dtype)}
    if feature != "none":
        row["feature"] = feature
    if not red:
        row["unchecked"] = True
    elif found := red.get((text, dtype)):
        row["broken"] = found
    return row


def measured(
    backends: dict[str, Backend],
    begun: list[Row],
    options: Options,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Row]:
    """The rows of one shape: with measurements, with how a backend ran out of memory, or with why
    it does not take the shape.
    """
    makes = [
        partial(Call, backends[row["attention"]], row, device=device, dtype=dtype) for row in begun
    ]
    found = take_turns([Measurement(make, repeats=options.repeats) for make in makes], device)
    rows = [row | each for row, each in zip(begun, found, strict=True)]
    print("\n".join(map(describe, rows)), flush=True)
    return rows


def search(
    backend: Backend,
    row: Row,
    options: Options,
    device: torch.device,
    dtype: torch.dtype,
) -> list[dict]:
    """The longest sequence that ran, one row for each memory size and pass."""
    first, rows = row["seq_len"], []
    for gib, train in product(options.memory_gib or [None], (False, True)):
        result = {key: value for key, value in row.items() if key != "seq_len"}
        result |= {"pass": "training" if train else "forward", "memory_gib": gib}

        def fits(length: int, train: bool = train) -> float | dict:
            shape = shape_of(options, row["head_dim"], length)
            return try_length(backend, shape, device=device, dtype=dtype, train=train)

        try:
            if train:
                shape = (1, row["heads"], 128, row["head_dim"])
                brief = torch.zeros(shape, device=device, dtype=dtype, requires_grad=True)
                backend.check_supported(brief, brief, brief, causal=row["causal"])
            with memory_cap(gib, device):
                result |= longest(fits, start=first, limit_s=options.limit_s)
        except ValueError as error:
            result["refused"] = str(error)
        print(describe_longest(result), flush=True)
        rows.append(result)
    return rows


def describe(row: Row) -> str:
    head = f"{row['attention']:<28} {row['dtype']:<8} N={row['seq_len']:<7} D={row['head_dim']:<4}"
    marks = [row["feature"]] if "feature" in row else []
    marks += [mark for mark in ("broken", "unchecked") if mark in row]
    parts = [" ".join([head, *marks])]
    if "oom" in row:
        parts.append(f"out of memory: {row['oom']['message'][:90]}")
    if "refused" in row:
        parts.append(f"refused: {row['refused']}")
    for name in ("forward", "backward"):
        if f"{name}_seconds" not in row:
            continue
        size, host = row.get(f"{name}_bytes"), row.get(f"{name}_host_seconds")
        memory = "" if size is None else f"{size / 2**20:,.1f} MiB"
        on_host = "" if host is None else f" (host {host * 1e3:.3f} ms)"
        parts.append(
            f"{name} {memory:>14} {row[f'{name}_seconds'] * 1e3:>9.3f} ms{on_host} "
            f"{row[f'{name}_tflops']:>6.3g} TFLOP/s"
        )
    return "   ".join(parts)


def describe_longest(row: Row) -> str:
    memory = "all memory" if row["memory_gib"] is None else f"{row['memory_gib']:g} GiB"
    head = (
        f"{row['attention']:<28} {row['dtype']:<8} D={row['head_dim']:<4} {memory:<10} "
        f"{row['pass']:<8}"
    )
    if "refused" in row:
        return f"{head} refused: {row['refused']}"
    sign = ">=" if row["limited_by"] == "time" else "  "
    end = f"{row['oom_seq_len']:,} ran out of memory" if row["oom_seq_len"] else "no limit met"
    return (
        f"{head} {sign} {row['max_seq_len']:>10,} tokens ({end}; the last took "
        f"{row['seconds']:.2f} s)"
    )


if __name__ == "__main__":
    main()
