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

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import torch._functorch.config

from attention import Backend, dtype_name
from scripts.arguments import Count, Device, Dtype, Json, command, default, parse_backend
from scripts.attention_call import Call, Measurement, longest, memory_cap, take_turns, trial
from scripts.drawing import new_figure, save_figure
from scripts.tables import Row, grouped
from training.loop.device import pick_device, pick_dtype
from training.record.environment import measured_on
from training.record.files import write_json
from training.record.memory import GIB
from training.record.palette import variant_colors
from training.record.plot import plain_text

# what all calls of a command share, and what its curves may differ in
SHARED = ("batch", "heads", "groups", "causal", "window", "documents", "unchecked")
VARIED = ("head_dim", "dtype")
MARKERS = "osv^D<>P*X"
LINES = {"forward": "--", "training": "-"}  # the dashed line is the forward pass alone


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
            for text, make in makes.items():
                rows += searched(text, make, shape, options.memory_gib or [None], device)
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
    from conformance.properties import verify_backend

    for dtype in dtypes:
        if dtype not in backend.dtypes:
            continue
        # on a GPU this compiles every kernel, which takes minutes
        what = f"the results of {text} in {dtype_name(dtype)}"
        print(f"checking {what} first; check=false leaves that out", file=sys.stderr)
        cells = verify_backend(backend, device=device, dtype=dtype, quick=True, random_cases=4)
        if red := [cell.property for cell in cells if cell.status == "red"]:
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


def searched(
    text: str, make: Make, shape: Row, sizes: list[float] | list[None], device: torch.device
) -> list[Row]:
    """The longest sequence that ran, a row for each memory size in GiB and pass."""
    rows = []
    for gib, train in product(sizes, (False, True)):
        row = {"attention": text} | shape
        start = row.pop("seq_len")
        row |= {"pass": "training" if train else "forward", "memory_gib": gib}
        with memory_cap(gib, device):
            row |= longest(partial(trial, make, shape, train), start=start, device=device)
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


@plain_text()
def draw(data: Row, path: Path) -> Path | None:
    """Draw `data`, the content of a benchmark's file. Returns None if no call of it ran.

    Two panels, forward alone and both passes together: peak memory above the inputs and median
    time against the length. A cross marks where an attention ran out of memory, at the amount that
    it requested.
    """
    rows = [row for row in data["rows"] if "seq_len" in row and "refused" not in row]
    if all("oom" in row for row in rows):
        return None
    figure, (memory, time) = new_figure(1, 2, size=(12, 5))
    for label, (style, own) in curves(rows).items():
        for name, line in LINES.items():
            plot(memory, own, f"{name}_bytes", GIB, linestyle=line, **style)
            plot(time, own, f"{name}_seconds", 1e-3, linestyle=line, **style)
        memory.plot([], [], label=label, **style)
        asked = [row | row["oom"] for row in own if "oom" in row]
        plot(memory, asked, "asked_gib", 1, linestyle="", **style | {"marker": "x"})
    lengths = sorted({row["seq_len"] for row in rows})
    length_axis(memory, lengths, "peak GiB above q, k, v (x: out of memory, as requested)")
    length_axis(time, lengths, "milliseconds, median")
    if card := data["environment"]["hardware"].get("gpu_memory_gib"):
        memory.axhline(card, color="black", linewidth=0.8, linestyle=":", label="this GPU")
    title = "one attention call, forward and backward; dashed: forward alone"
    figure.suptitle(f"{title}\n{heading(data, rows)}", fontsize=9)
    figure.legend(loc="outside right upper", fontsize=8)
    return save_figure(figure, path, dpi=110)


def curves(rows: list[Row]) -> dict[str, tuple[Row, list[Row]]]:
    """For each label a color and a marker, and its rows by length."""
    several = [key for key in VARIED if len({row[key] for row in rows}) > 1]
    by_label = grouped(
        rows, lambda row: " ".join([row["attention"], *(f"{key}={row[key]}" for key in several)])
    )
    names = {label: own[0]["attention"].partition(":")[0] for label, own in by_label.items()}
    found = {}
    for place, (label, color) in enumerate(variant_colors(names).items()):
        style = {"color": color, "marker": MARKERS[place % len(MARKERS)]}
        # the first is the widest, and so stays in sight where curves coincide
        style |= {"linewidth": max(3.0 - 0.4 * place, 0.8), "markersize": max(8 - place, 4)}
        found[label] = style, sorted(by_label[label], key=lambda row: row["seq_len"])
    return found


def plot(axes: Any, rows: list[Row], column: str, unit: float, **style: Any) -> None:
    points = [(row["seq_len"], row[column] / unit) for row in rows if row.get(column)]
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def length_axis(axes: Any, lengths: list[int], ylabel: str) -> None:
    from matplotlib.ticker import LogLocator

    axes.set(xscale="log", yscale="log", xlabel="sequence length, tokens", ylabel=ylabel)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45)
    axes.minorticks_off()
    # not only powers of ten, of which there may be none in sight
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(alpha=0.3)


def heading(data: Row, rows: list[Row]) -> str:
    """What all rows share, and the machine."""
    values = {key: {row[key] for row in rows if key in row} for key in (*SHARED, *VARIED)}
    shared = [f"{key}={found.pop()}" for key, found in values.items() if len(found) == 1]
    environment = data["environment"]
    hardware, torch_version = environment["hardware"], environment["versions"].get("torch")
    machine = hardware.get("gpu") or f"{hardware['cpu']}, {hardware['torch_threads']} threads"
    commit = (environment.get("commit") or "unknown")[:7]
    return f"{', '.join(shared)}\n{machine}, torch {torch_version}, commit {commit}"


if __name__ == "__main__":
    main()
