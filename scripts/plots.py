"""Draw the memory and the time of attention calls by length, for scripts.benchmark."""

from pathlib import Path
from typing import Any

from scripts.drawing import new_figure, save_figure
from scripts.tables import Row, grouped
from training.record.memory import GIB
from training.record.palette import variant_colors
from training.record.plot import plain_text

# what all calls of a command share, and what its curves may differ in
SHARED = ("batch", "heads", "groups", "causal", "window", "documents", "unchecked")
VARIED = ("head_dim", "dtype")
MARKERS = "osv^D<>P*X"
LINES = {"forward": "--", "training": "-"}  # the dashed line is the forward pass alone


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
