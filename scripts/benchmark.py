"""Measure the peak memory and the time of one attention call by length: forward, and forward and
backward together.

    python -m scripts.benchmark attention=naive,tiled,sdpa seq_len=256,512 out=benchmark.json
    python -m scripts.benchmark max_length=true memory_gib=8 out=longest.json

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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch._functorch.config
from pydantic import Field

from attention import Backend, dtype_name
from scripts.arguments import Count, Device, Dtype, Json, check_out, command, default, parse_backend
from scripts.attention_call import (
    Call,
    Measurement,
    attempt,
    longest,
    memory_cap,
    take_turns,
    trial,
)
from scripts.tables import Row
from training.loop.device import pick_device, pick_dtype
from training.record.environment import measured_on
from training.record.files import write_json
from training.record.memory import GIB
from training.record.palette import variant_colors

# what all calls of a command share
SHARED = ("head_dim", "dtype", "batch", "heads", "groups", "causal")
SHARED += ("window", "documents", "unchecked")
PANELS = {
    "bytes": (GIB, "peak GiB above q, k, v (cross: out of memory, as requested)"),
    "seconds": (1e-3, "milliseconds, median"),
}
DASHES = {"training": [1, 0], "forward": [5, 4]}


@dataclass
class Options:
    attention: list[str] = default("naive", "tiled", "sdpa")
    seq_len: list[Count] = default(256, 512, 1024, 2048)
    head_dim: Count = 64
    heads: Count = 16
    batch: Count = 1
    groups: Count = 1
    window: Count | None = None
    documents: Count | None = None
    causal: bool = True
    dtype: Dtype = "auto"
    device: Device = "auto"
    repeats: Count = 20
    check: bool = True
    max_length: bool = False
    memory_gib: Annotated[float, Field(ge=1e-3)] | None = None
    out: Json | None = None

    def __post_init__(self) -> None:
        if self.memory_gib and not self.max_length:
            raise ValueError("memory_gib= belongs to max_length=true; add it")
        if self.out:
            check_out(self.out.with_suffix(".png"), ".png")


Make = Callable[[Row], Call]  # the call of a shape


@command
def main(options: Options) -> None:
    # a graph that is kept for timing must not donate its buffers
    torch._functorch.config.donated_buffer = False
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    backends = {text: parse_backend(text) for text in options.attention}
    makes, complaints = {}, []
    for text, backend in backends.items():
        if options.check and (wrong := complaint(text, backend, device, dtype)):
            complaints.append(wrong)  # the others are measured all the same
        else:
            makes[text] = partial(Call, backend, device=device, dtype=dtype)
    lengths = options.seq_len[:1] if options.max_length else options.seq_len
    settings = vars(options) | {"unchecked": not options.check or None, "dtype": dtype_name(dtype)}
    shared = {name: settings[name] for name in SHARED if settings[name] is not None}
    rows = []
    for length in lengths if makes else []:
        shape = {"seq_len": length} | shared
        if options.max_length:
            for text, make in makes.items():
                rows += searched(text, make, shape, options.memory_gib, device)
        else:
            rows += measured(makes, shape, options.repeats, device)
        if options.out:
            data = {"environment": measured_on(device), "rows": rows}
            write_json(options.out, data)
            draw(data, options.out.with_suffix(".png"))
    if complaints:
        raise ValueError("; ".join(complaints))
    if all("refused" in row for row in rows):
        raise ValueError(f"nothing was measured: {rows[0]['refused']}")


def complaint(text: str, backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend is not timed: the properties that it fails in a quick check."""
    from conformance.properties import verify_backend

    if dtype not in backend.dtypes:
        return None
    # on a GPU this compiles every kernel, which takes minutes
    what = f"the results of {text} in {dtype_name(dtype)}"
    print(f"checking {what} first; check=false leaves that out", file=sys.stderr)
    cells = verify_backend(backend, device=device, dtype=dtype, quick=True, random_cases=4)
    red = [cell.property for cell in cells if cell.status == "red"]
    if not red:
        return None
    return (
        f"{text} is wrong in {dtype_name(dtype)}, so its speed means nothing: red in "
        f"{', '.join(red)}; see python -m scripts.verify attention={text}, or add check=false to "
        "time it all the same"
    )


def measured(makes: dict[str, Make], shape: Row, repeats: int, device: torch.device) -> list[Row]:
    """The rows of one shape: with measurements, with how a backend ran out of memory, or with why
    it does not take the shape.
    """
    calls = [Measurement(partial(make, shape), repeats=repeats) for make in makes.values()]
    found = take_turns(calls, device)
    rows = [{"attention": text} | shape | row for text, row in zip(makes, found, strict=True)]
    print("\n".join(map(describe, rows)), flush=True)
    return rows


def searched(
    text: str, make: Make, shape: Row, gib: float | None, device: torch.device
) -> list[Row]:
    """The longest sequence that ran in `gib` GiB of memory, a row for each pass."""
    rows, at_most = [], math.inf if gib is None else gib * GIB
    with memory_cap(gib, device):
        # not limited on a CPU: threads and libraries take memory of their own in their first call
        attempt(partial(trial, make, shape, True, shape["seq_len"]), device)
        for name in ("forward", "training"):
            row = {"attention": text} | shape | {"pass": name, "memory_gib": gib}
            start, run = row.pop("seq_len"), partial(trial, make, shape, name == "training")
            row |= longest(run, start=start, device=device, at_most=at_most)
            print(describe_longest(row), flush=True)
            rows.append(row)
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


def describe_longest(row: Row) -> str:
    memory = "all memory" if row["memory_gib"] is None else f"{row['memory_gib']:g} GiB"
    head = f"{beginning(row)} {memory:<10} {row['pass']:<8}"
    if "refused" in row:
        return f"{head} refused: {row['refused']}"
    sign = ">=" if row["limited_by"] == "time" else "  "
    end = f"{row['oom_seq_len']:,} ran out of memory" if row["oom_seq_len"] else "no limit met"
    return f"{head} {sign} {row['max_seq_len']:>10,} tokens ({end})"


def draw(data: Row, path: Path) -> None:
    """Draw `data`, the content of a benchmark's file, unless no call of it ran.

    Two panels, forward alone and both passes together: peak memory above the inputs and median
    time against the length. A cross marks where an attention ran out of memory, at the amount that
    it requested.
    """
    import altair as alt

    rows = [row for row in data["rows"] if "seq_len" in row and "refused" not in row]
    if all("oom" in row for row in rows):
        return
    colors = variant_colors({row["attention"]: row["attention"].partition(":")[0] for row in rows})
    lengths = sorted({row["seq_len"] for row in rows})
    x = alt.X("seq_len:Q", title="sequence length, tokens").scale(type="log", nice=False)
    color = alt.Color("attention:N", title=None).legend(labelLimit=400)
    color = color.scale(domain=[*colors], range=[*colors.values()])
    chart = alt.Chart(alt.Data(values=rows), width=420, height=320)
    chart = chart.encode(x.axis(values=lengths, format=",", labelAngle=-45), color)
    panels = []
    for column, (unit, title) in PANELS.items():
        y = alt.Y("y:Q", title=title).scale(type="log", nice=False)
        for name, dash in DASHES.items():
            # a logarithmic axis shows no zero
            curves = chart.transform_calculate(y=f"datum.{name}_{column} / {unit}")
            curves = curves.transform_filter("datum.y > 0")
            panels.append(curves.mark_line(point=True, strokeDash=dash).encode(y))
    ran_out = chart.transform_filter("datum.oom").encode(y="oom.asked_gib:Q")
    crosses = ran_out.mark_point(shape="cross", angle=45, size=120)
    picture = alt.layer(crosses, *panels[:2]) | alt.layer(*panels[2:])
    title = alt.Title(
        "one attention call; dashed: forward alone", subtitle=heading(rows[0], data["environment"])
    )
    picture.properties(title=title).save(path, scale_factor=1.5)


def heading(row: Row, environment: Row) -> list[str]:
    """What all rows share with this one, and the machine."""
    shared = [f"{key}={row[key]}" for key in SHARED if key in row]
    hardware, torch_version = environment["hardware"], environment["versions"]["torch"]
    machine = hardware.get("gpu") or f"{hardware['cpu']}, {hardware['torch_threads']} threads"
    commit = (environment["commit"] or "unknown")[:7]
    return [", ".join(shared), f"{machine}, torch {torch_version}, commit {commit}"]


if __name__ == "__main__":
    main()
