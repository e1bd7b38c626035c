"""Draw the results of scripts.benchmark: memory against length, time and speed-up, the roofline,
and the longest sequences.

    python -m scripts.plots results/memory_h200.json out=outputs/plots baseline=naive

The arguments are files of scripts.benchmark, and

    out       a folder for the figures (the file's folder)
    baseline  the variant that speed-ups compare with (naive if it was measured, else the first)

FILE.json becomes FILE_memory.png, FILE_time.png and FILE_roofline.png, or FILE_longest.png for a
search of the longest sequence. It draws only measurements, except that a roofline's ceilings come
from a data sheet, as their labels say.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, wraps
from math import log, log10
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scripts.arguments import command, parse_backend
from scripts.cards import PEAK_BANDWIDTH
from scripts.drawing import new_figure, save_figure
from scripts.plan import call_traffic
from scripts.tables import Row, grouped
from scripts.traffic import Call
from training.record.files import check_writable
from training.record.memory import GIB
from training.record.palette import variant_colors
from training.record.speed import PEAK_FLOPS, data_sheet

MARKERS = "osv^D<>P*X"
LOOK = {
    "axes.grid": True,
    "grid.alpha": 0.3,
    "lines.markersize": 4,
    "legend.fontsize": 8,
    "axes.titlesize": 9,
    "figure.titlesize": 9,
    # a dollar sign in a name does not start a formula
    "text.parse_math": False,
}


@dataclass
class Options:
    paths: list[Path]
    out: Path | None = None
    baseline: str | None = None


class Variant(NamedTuple):
    """The rows of one curve: a backend with its options, and its dtype and shape if these vary."""

    label: str
    name: str  # of the backend
    rows: list[Row]  # by length
    style: Row  # a color and a marker

    def plot(self, axes: Any, points: Iterable[tuple[float, float]], **style: Any) -> None:
        """Plot one curve through the points in their order; nothing if there are none."""
        if points := sorted(points):
            axes.plot(*zip(*points, strict=True), **self.style | style)


def variants(rows: list[Row]) -> list[Variant]:
    words = {"dtype": ", {}", "head_dim": ", head_dim {}", "heads": ", heads {}"}
    several = [key for key in words if len({row[key] for row in rows}) > 1]

    def label_of(row: Row) -> str:
        label = row["attention"].replace(":backend=", " ").replace(":", " ")
        label += "".join(words[key].format(row[key]) for key in several)
        return f"{label} (wrong results)" if row.get("broken") else label

    by_label = grouped(rows, label_of)
    names = {label: own[0]["attention"].partition(":")[0] for label, own in by_label.items()}
    found: list[Variant] = []
    for label, color in variant_colors(names).items():
        place = [variant.name for variant in found].count(names[label])
        style = {"color": color, "marker": MARKERS[place % len(MARKERS)]}
        # rows of a search have no seq_len
        own = sorted(by_label[label], key=lambda row: row.get("seq_len", 0))
        found.append(Variant(label, names[label], own, style))
    return found


def done(row: Row) -> bool:
    return "oom" not in row and "refused" not in row


def measured_on(data: Row) -> str:
    environment = data["environment"]
    hardware, torch_version = environment["hardware"], environment["versions"].get("torch")
    cpu = f"{hardware.get('cpu')}, {hardware.get('torch_threads')} thread(s)"
    commit = (environment.get("commit") or "unknown")[:7]
    return f"{hardware.get('gpu') or cpu}, torch {torch_version}, commit {commit}"


def shape_words(rows: list[Row]) -> str:
    """What all rows share, such as: batch 1, 16 heads of 64, bfloat16, causal."""
    words = {"batch": "batch {}", "heads": "{} heads", "head_dim": "of {}", "dtype": "{}"}
    values = {key: {row[key] for row in rows} for key in words}
    parts = [form.format(*values[key]) for key, form in words.items() if len(values[key]) == 1]
    if len(values["heads"]) > 1:
        parts = [part.replace("of ", "heads of ") for part in parts]
    parts.append("causal" if rows[0]["causal"] else "no mask")
    return ", ".join(parts).replace(" heads, of", " heads of")


def short_length(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def length_axis(axes: Any, rows: list[Row], *, ylabel: str) -> None:
    lengths = sorted({row["seq_len"] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="sequence length", ylabel=ylabel)
    rotation = 45 if len(lengths) > 8 else 0
    axes.set_xticks(lengths, map(short_length, lengths), rotation=rotation)
    axes.minorticks_off()
    plain_ticks(axes.yaxis)


def plain_ticks(axis: Any) -> None:
    """Ticks 1, 2, 5, 10 ... on a logarithmic axis, at least two of them; only decades if there are
    many.
    """
    from matplotlib.ticker import LogLocator

    low, high = axis.get_view_interval()
    if high < 6.3 * low:
        middle = (low * high) ** 0.5
        low, high = middle / 2.51, middle * 2.51
        axis.axes.set(**{f"{axis.axis_name}lim": (low, high)})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter("")


def picture(draw: Callable[..., Any]) -> Callable[..., Path | None]:
    """Turn `draw(data)` into a function of data and path that draws in the style LOOK and saves the
    file. The function returns None if there is nothing to draw.
    """

    @wraps(draw)
    def drawn(data: Row, path: Path, **how: Any) -> Path | None:
        import matplotlib

        with matplotlib.rc_context(LOOK):
            figure = draw(data, **how)
            return save_figure(figure, path, dpi=110) if figure else None

    return drawn


def heading(data: Row, rows: list[Row], *, joint: str = "\n", words: str = "") -> str:
    return f"one attention call{words}: {shape_words(rows)}{joint}{measured_on(data)}"


def note(axes: Any, text: str, where: tuple[float, float], offset: tuple[int, int], **how) -> None:
    how = {"fontsize": 8} | how
    axes.annotate(text, where, textcoords="offset points", xytext=offset, **how)


def growth(points: list[tuple[int, float]]) -> str:
    """The growth between the last two points as a power, such as N^1 or N^2."""
    if len(points) < 2:
        return ""
    (n, a), (m, b) = points[-2:]
    return f": N^{log(b / a) / log(m / n):.2f}"


def striped(curves: list[dict[int, float]]) -> list[Any]:
    """A line style for each curve. Curves that coincide become stripes of one line, so that none
    hides another.
    """
    found = []
    for place, curve in enumerate(curves):
        same = [
            i
            for i, other in enumerate(curves)
            if (common := curve.keys() & other.keys())
            and all(abs(curve[n] / other[n] - 1) < 0.02 for n in common)
        ]
        turn = same.index(place) if curve else 0
        found.append((6 * turn, (6, 6 * (len(same) - 1))) if len(same) > 1 else "-")
    return found


@picture
def draw_memory(data: Row) -> Any:
    """Peak memory above the inputs against length, with the exponent of the last doubling. The
    curve is for both passes, the thin one for the forward pass alone.

    A square marks where a variant ran out of memory, at the amount that it requested.
    """
    rows = [row for row in data["rows"] if "seq_len" in row]
    rows = [row for row in rows if "oom" in row or row.get("forward_bytes")]
    if not any(map(done, rows)):
        return None
    figure, axes = new_figure(size=(10, 5.5))
    curves = variants(rows)
    for column, width in (("forward_bytes", 1.0), ("training_bytes", 2.2)):
        measured = [[row for row in each.rows if done(row) and row.get(column)] for each in curves]
        points = [{row["seq_len"]: row[column] / GIB for row in rows} for rows in measured]
        for variant, own, line in zip(curves, points, striped(points), strict=True):
            of_both = column == "training_bytes"
            label = variant.label + growth(sorted(own.items())) if of_both else None
            variant.plot(axes, own.items(), linestyle=line, linewidth=width, label=label)
    squares = [
        (variant, (row["seq_len"], row["oom"]["asked_gib"]))
        for variant in curves
        for row in variant.rows
        if row.get("oom", {}).get("asked_gib")
    ]
    for variant, where in squares:
        square = {"color": variant.style["color"], "markersize": 9, "markerfacecolor": "none"}
        axes.plot(*where, "s", **square)
        note(axes, f"asked for {where[1]:,.4g} GiB", where, (-8, 4), ha="right")
    if card := data["environment"]["hardware"].get("gpu_memory_gib"):
        axes.axhline(card, color="black", linewidth=0.8, linestyle="--")
        note(axes, f"this card: {card:g} GiB", (min(row["seq_len"] for row in rows), card), (0, 3))
    square = "; square: out of memory" if squares else ""
    length_axis(axes, rows, ylabel=f"peak GiB above q, k, v (thin: forward alone{square})")
    axes.set_title(heading(data, rows))
    figure.legend(loc="outside right upper")
    return figure


@picture
def draw_time(data: Row, *, baseline: str | None = None) -> Any:
    """Median time with its 20th to 80th percentile, and the speed-up over the baseline, for forward
    and backward separately.
    """
    rows = [row for row in data["rows"] if "forward_seconds" in row and done(row)]
    if not rows:
        return None
    curves = variants(rows)
    reference, lines = pick_baseline(curves, baseline), {"forward": "-"}
    if any("backward_seconds" in row for row in rows):
        lines["backward"] = ":"
    count = len(lines) + 1
    figure, (*times, speedup) = new_figure(1, count, size=(5.2 * count, 4.3))
    for axes, (column, line) in zip(times, lines.items(), strict=True):
        name = f"{column}_seconds"
        base = {row["seq_len"]: row[name] for row in reference.rows if name in row}
        for variant in curves:
            draw_percentiles(axes, variant, column)
            both = [row for row in variant.rows if name in row and row["seq_len"] in base]
            points = [(row["seq_len"], base[row["seq_len"]] / row[name]) for row in both]
            label = variant.label if line == "-" else None
            variant.plot(speedup, points, linestyle=line, label=label)
        length_axis(axes, rows, ylabel="milliseconds (median, 20th to 80th percentile)")
        axes.set_title(column)
    times[0].legend()
    dotted = " (dotted: backward)" if "backward" in lines else ""
    length_axis(speedup, reference.rows, ylabel=f"times as fast as {reference.label}{dotted}")
    speedup.set_title(f"beside {reference.label}")
    figure.suptitle(heading(data, rows, joint="; "))
    return figure


def draw_percentiles(axes: Any, variant: Variant, column: str) -> None:
    measured = [row for row in variant.rows if f"{column}_p20" in row]
    lengths = [row["seq_len"] for row in measured]
    middle, low, high = (
        [1e3 * row[f"{column}_{kind}"] for row in measured] for kind in ("seconds", "p20", "p80")
    )
    variant.plot(axes, zip(lengths, middle, strict=True), label=variant.label)
    axes.fill_between(lengths, low, high, color=variant.style["color"], alpha=0.2)


def pick_baseline(curves: list[Variant], baseline: str | None) -> Variant:
    """The baseline's curve. Raises ValueError if it was not measured."""
    wanted = baseline or "naive"
    for variant in curves:
        if wanted in (variant.label, variant.rows[0]["attention"], variant.name):
            return variant
    if baseline is None:
        return curves[0]
    labels = ", ".join(variant.label for variant in curves)
    raise ValueError(f"baseline={baseline} was not measured; measured are: {labels}")


def intensity(row: Row, device: str) -> float | None:
    """FLOPs per byte of device memory in the forward pass, by scripts.traffic; None for a backend
    that is not in its table.
    """
    try:
        backend = parse_backend(row["attention"])
    except ValueError:
        return None
    element = getattr(torch, row["dtype"]).itemsize
    sizes = {name: row[name] for name in ("batch", "heads", "seq_len", "head_dim", "causal")}
    return call_traffic(backend, device, Call(**sizes, element=element)).intensity


@picture
def draw_roofline(data: Row) -> Any:
    """Measured forward TFLOP/s against a variant's FLOPs per byte of memory access, under the data
    sheet's ceilings.

    A point above the slope is not faster than the memory: a cache served its repeated reads.
    """
    gpu = data["environment"]["hardware"].get("gpu") or ""
    rows = [row for row in data["rows"] if "forward_tflops" in row and done(row)]
    rows = [row | {"intensity": intensity(row, "cuda" if gpu else "cpu")} for row in rows]
    rows = [row for row in rows if row["intensity"]]
    if not rows:
        return None
    figure, axes = new_figure(size=(10, 5.5))
    noted: list[tuple[float, float]] = []
    for variant in variants(rows):
        points = [(row["intensity"], row["forward_tflops"]) for row in variant.rows]
        style = variant.style | {"linewidth": 0.7, "markersize": 5, "label": variant.label}
        axes.plot(*zip(*points, strict=True), **style)
        for end, offset in ((0, (7, -9)), (-1, (7, 0))):
            where = log10(points[end][0]), log10(points[end][1])
            # label only one length where points lie close together
            if all(abs(where[0] - x) > 0.2 or abs(where[1] - y) > 0.08 for x, y in noted):
                length = short_length(variant.rows[end]["seq_len"])
                note(axes, length, points[end], offset, fontsize=7)
                noted.append(where)
    flops, bandwidth = data_sheet(PEAK_FLOPS, gpu), data_sheet(PEAK_BANDWIDTH, gpu)
    if flops and bandwidth:
        draw_ceilings(axes, flops / 1e12, bandwidth / 1e12, [row["intensity"] for row in rows])
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOPs a byte asked of device memory (counted)",
        ylabel="TFLOP/s, forward (measured)",
    )
    longest = max(row["seq_len"] for row in rows)
    axes.set_title(heading(data, rows, words=f", to {longest:,} tokens"))
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    figure.legend(loc="outside right upper")
    return figure


def draw_ceilings(axes: Any, tflops: float, bandwidth: float, xs: list[float]) -> None:
    """The slope of the memory (TB/s) and the ceiling of the matrix units."""
    ridge = tflops / bandwidth
    left, right = min(xs) / 2, max(ridge, *xs) * 4
    style = {"color": "black", "linewidth": 1, "linestyle": "--", "label": "data sheet"}
    axes.plot([left, ridge, right], [left * bandwidth, tflops, tflops], **style)
    middle = (left * ridge) ** 0.5
    slope = f"data sheet: {bandwidth:g} TB/s"
    note(axes, slope, (middle, middle * bandwidth), (-8, 4), ha="right")
    note(axes, f"data sheet: {tflops:g} TFLOP/s (16 bits)", (right, tflops), (0, 8), ha="right")


@picture
def draw_longest(data: Row) -> Any:
    """The longest sequence against memory. An open marker means that the search hit its time limit,
    so more would fit.
    """
    hardware = data["environment"]["hardware"]
    everything = hardware.get("gpu_memory_gib") or hardware.get("memory_gib")
    rows = [row for row in data["rows"] if row.get("max_seq_len")]
    rows = [row | {"memory_gib": row["memory_gib"] or everything} for row in rows]
    if not rows:
        return None
    figure, panels = new_figure(1, 2, size=(10.4, 4.3))
    sizes = sorted({row["memory_gib"] for row in rows})
    titles = {"forward": "forward", "training": "forward and backward"}
    # what limited a search: the end of its label, and the face of its markers
    limits = {
        "memory": ("", {}),
        "time": (", at least (time limit)", {"markerfacecolor": "none"}),
    }
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for variant in variants(rows):
            own = [row for row in variant.rows if row["pass"] == name]
            points = {
                limit: [
                    (row["memory_gib"], row["max_seq_len"])
                    for row in own
                    if row["limited_by"] == limit
                ]
                for limit in limits
            }
            variant.plot(axes, sum(points.values(), []), marker=None, linewidth=0.8)
            for limit, (words, face) in limits.items():
                dots = {"linestyle": "none", "markersize": 6, "label": variant.label + words}
                variant.plot(axes, points[limit], **dots, **face)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="GiB the process may have",
            ylabel="longest sequence that ran",
            title=title,
        )
        axes.set_xticks(sizes, [f"{x:g}" for x in sizes])
        axes.minorticks_off()
        plain_ticks(axes.yaxis)
        axes.legend()
    figure.suptitle(heading(data, rows, joint="; "))
    return figure


def draw(file: Path, folder: Path, *, baseline: str | None = None) -> list[Path]:
    """Draw every figure that the file has measurements for. Raises ValueError if the file is not
    from scripts.benchmark.
    """
    try:
        data = json.loads(file.read_text())
        measured_on(data)
        data["rows"][0]["attention"]
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{file} is not a benchmark; make one with python -m scripts.benchmark out=FILE.json"
        ) from error
    draws = {
        "memory": draw_memory,
        "time": partial(draw_time, baseline=baseline),
        "roofline": draw_roofline,
        "longest": draw_longest,
    }
    paths = {folder / f"{file.stem}_{name}.png": draw for name, draw in draws.items()}
    check_writable(next(iter(paths)), ".png")
    return [path for path, draw in paths.items() if draw(data, path)]


@command
def main(options: Options) -> None:
    for file in options.paths:
        drawn = draw(file, options.out or file.parent, baseline=options.baseline)
        nothing = f"{file}: nothing was measured in it, nothing is drawn"
        print("\n".join(map(str, drawn)) or nothing)


if __name__ == "__main__":
    main()
