"""Draw what scripts.benchmark measured: memory against length, time and speed-up, the roofline, and
the longest sequences.

    python -m scripts.plots results/memory_h200.json out=outputs/plots baseline=naive

The arguments are files of scripts.benchmark, and

    out       a folder for the figures (the file's own)
    baseline  the variant that speed-ups are against (naive where it was measured, else the first)

FILE.json becomes FILE_memory.png, FILE_time.png and FILE_roofline.png, or FILE_longest.png for a
search of the longest sequence. Only what was measured is drawn. The lines of a roofline are a data
sheet's, and say so.
"""

import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import log, log10
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scripts.arguments import command, parse_backend
from scripts.plan import call_traffic
from training.files import check_writable, write_file
from training.hardware import PEAK_BANDWIDTH, PEAK_FLOPS, data_sheet
from training.palette import variant_colors
from training.plot import plain_text

MARKERS = "osv^D<>P*X"
Row = dict[str, Any]


@dataclass
class Options:
    paths: list[Path]
    out: Path | None = None
    baseline: str | None = None


class Variant(NamedTuple):
    """Rows that are one curve: a backend with its options, and a dtype and shape where these
    vary.
    """

    label: str
    rows: list[Row]
    style: dict[str, Any]  # a color and a marker

    @property
    def color(self) -> str:
        return self.style["color"]

    @property
    def name(self) -> str:
        return name_of(self.rows[0])


def name_of(row: Row) -> str:
    return row["attention"].partition(":")[0]


def variants(rows: list[Row]) -> list[Variant]:
    several = [key for key in ("dtype", "head_dim", "heads") if len({row[key] for row in rows}) > 1]
    by_label: dict[str, list[Row]] = {}
    for row in rows:
        label = row["attention"].replace(":backend=", " ").replace(":", " ")
        for key in several:
            label += f", {row[key]}" if key == "dtype" else f", {key} {row[key]}"
        if row.get("broken"):
            label += " (wrong results)"
        by_label.setdefault(label, []).append(row)
    names = {label: name_of(own[0]) for label, own in by_label.items()}
    colors = variant_colors(names)
    found = []
    for place, (label, own) in enumerate(by_label.items()):
        marker = MARKERS[list(names.values())[:place].count(names[label]) % len(MARKERS)]
        found.append(Variant(label, own, {"color": colors[label], "marker": marker}))
    return found


def done(row: Row) -> bool:
    return "oom" not in row and "refused" not in row


def measured_on(data: dict[str, Any]) -> str:
    environment = data["environment"]
    hardware, torch_version = environment["hardware"], environment["versions"].get("torch")
    cpu = f"{hardware.get('cpu')}, {hardware.get('torch_threads')} thread(s)"
    commit = (environment.get("commit") or "unknown")[:7]
    return f"{hardware.get('gpu') or cpu}, torch {torch_version}, commit {commit}"


def shape_words(rows: list[Row]) -> str:
    """What all rows share: batch 1, 16 heads of 64, bfloat16, causal."""
    words = {"batch": "batch {}", "heads": "{} heads", "head_dim": "of {}", "dtype": "{}"}
    values = {key: {row[key] for row in rows} for key in words}
    parts = [form.format(*values[key]) for key, form in words.items() if len(values[key]) == 1]
    if len(values["heads"]) > 1:
        parts = [part.replace("of ", "heads of ") for part in parts]
    parts.append("causal" if rows[0]["causal"] else "no mask")
    return ", ".join(parts).replace(" heads, of", " heads of")


def short_length(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def length_axis(axes: Any, rows: list[Row]) -> None:
    lengths = sorted({row["seq_len"] for row in rows})
    axes.set(xscale="log", xlabel="sequence length")
    rotation = 45 if len(lengths) > 8 else 0
    axes.set_xticks(lengths, map(short_length, lengths), rotation=rotation)
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def plain_ticks(axis: Any) -> None:
    """1, 2, 5, 10 ... beside a logarithmic axis, and never fewer than two of them; decades alone
    where there are many.
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


def figure_of(columns: int, *, width: float = 5.2, height: float = 4.3) -> tuple[Any, Any]:
    from matplotlib import pyplot

    size = (width * columns, height)
    return pyplot.subplots(1, columns, figsize=size, layout="constrained", squeeze=False)


def save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_file(path, picture.getvalue())
    pyplot.close(figure)
    return path


def plot(axes: Any, points: Iterable[tuple[float, float]], variant: Variant, **style: Any) -> None:
    """One curve, in the order of its points; nothing where there are none."""
    if points := sorted(points):
        axes.plot(*zip(*points, strict=True), **{"markersize": 4} | variant.style | style)


def note(axes: Any, text: str, where: tuple[float, float], offset: tuple[int, int], **how) -> None:
    how = {"fontsize": 8} | how
    axes.annotate(text, where, textcoords="offset points", xytext=offset, **how)


def growth(points: list[tuple[int, float]]) -> str:
    """How the last two points grow: as N^1, or as N^2."""
    if len(points) < 2:
        return ""
    (n, a), (m, b) = points[-2:]
    return f": N^{log(b / a) / log(m / n):.2f}"


def striped(curves: list[dict[int, float]]) -> list[Any]:
    """A line style for each curve: curves that coincide become stripes of one line, so that none
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


def draw_memory(data: dict[str, Any], path: Path) -> Path | None:
    """Peak above the inputs against length, with the exponent of the last doubling of both passes
    together; thin the forward
    pass alone.

    A square stands where a variant ran out, at what it asked for.
    """
    rows = [row for row in data["rows"] if "seq_len" in row]
    rows = [row for row in rows if "oom" in row or row.get("forward_bytes")]
    if not any(map(done, rows)):
        return None
    figure, ((axes,),) = figure_of(1, width=10, height=5.5)
    ran_out = False
    curves = variants(rows)
    for column, width in (("forward_bytes", 1.0), ("training_bytes", 2.2)):
        points = [
            {
                row["seq_len"]: row[column] / 2**30
                for row in curve.rows
                if done(row) and row.get(column)
            }
            for curve in curves
        ]
        for variant, own, line in zip(curves, points, striped(points), strict=True):
            of_both = column == "training_bytes"
            label = variant.label + growth(sorted(own.items())) if of_both else None
            plot(axes, own.items(), variant, linestyle=line, linewidth=width, label=label)
    for variant in curves:
        for row in variant.rows:
            if "oom" in row and (gib := row["oom"].get("asked_gib")):
                ran_out = True
                where = (row["seq_len"], gib)
                axes.plot(*where, "s", markersize=9, markerfacecolor="none", color=variant.color)
                note(axes, f"asked for {gib:,.4g} GiB", where, (-8, 4), ha="right")
    card = data["environment"]["hardware"].get("gpu_memory_gib")
    if card:
        axes.axhline(card, color="black", linewidth=0.8, linestyle="--")
        note(axes, f"this card: {card:g} GiB", (min(row["seq_len"] for row in rows), card), (0, 3))
    square = "; square: out of memory" if ran_out else ""
    axes.set(yscale="log", ylabel=f"peak GiB above q, k, v (thin: forward alone{square})")
    axes.set_title(f"one attention call: {shape_words(rows)}\n{measured_on(data)}", fontsize=9)
    length_axis(axes, rows)
    plain_ticks(axes.yaxis)
    figure.legend(loc="outside right upper", fontsize=8)
    return save(figure, path)


def draw_time(data: dict[str, Any], path: Path, *, baseline: str | None = None) -> Path | None:
    """Median time with its 20th to 80th percentile, and how many times faster than the baseline,
    forward and backward apart.
    """
    rows = [row for row in data["rows"] if "forward_seconds" in row and done(row)]
    if not rows:
        return None
    curves = variants(rows)
    reference = pick_baseline(curves, baseline)
    columns = ["forward"]
    if any("backward_seconds" in row for row in rows):
        columns.append("backward")
    figure, ((*times, speedup),) = figure_of(len(columns) + 1)
    for axes, column in zip(times, columns, strict=True):
        for variant in curves:
            draw_percentiles(axes, variant, column)
        axes.set(yscale="log", ylabel="milliseconds (median, 20th to 80th percentile)")
        axes.set_title(column, fontsize=9)
        length_axis(axes, rows)
        plain_ticks(axes.yaxis)
    times[0].legend(fontsize=8)
    for column, line in zip(columns, ("-", ":"), strict=False):
        name = f"{column}_seconds"
        base = {row["seq_len"]: row[name] for row in reference.rows if name in row}
        for variant in curves:
            both = [row for row in variant.rows if name in row and row["seq_len"] in base]
            points = [(row["seq_len"], base[row["seq_len"]] / row[name]) for row in both]
            label = variant.label if line == "-" else None
            plot(speedup, points, variant, linestyle=line, label=label)
    dotted = f" (dotted: {columns[1]})" if len(columns) > 1 else ""
    speedup.set(yscale="log", ylabel=f"times as fast as {reference.label}{dotted}")
    speedup.set_title(f"beside {reference.label}", fontsize=9)
    length_axis(speedup, [row for row in reference.rows if "forward_seconds" in row])
    plain_ticks(speedup.yaxis)
    figure.suptitle(f"one attention call: {shape_words(rows)}; {measured_on(data)}", fontsize=9)
    return save(figure, path)


def draw_percentiles(axes: Any, variant: Variant, column: str) -> None:
    measured = [row for row in variant.rows if f"{column}_p20" in row]
    if measured := sorted(measured, key=lambda row: row["seq_len"]):
        lengths = [row["seq_len"] for row in measured]
        middle, low, high = (
            [1e3 * row[f"{column}_{kind}"] for row in measured]
            for kind in ("seconds", "p20", "p80")
        )
        axes.plot(lengths, middle, **{"markersize": 4, "label": variant.label} | variant.style)
        axes.fill_between(lengths, low, high, color=variant.color, alpha=0.2)


def pick_baseline(curves: list[Variant], baseline: str | None) -> Variant:
    """Raises ValueError for one that was not measured."""
    wanted = baseline or "naive"
    for variant in curves:
        if wanted in (variant.label, variant.rows[0]["attention"], variant.name):
            return variant
    if baseline is None:
        return curves[0]
    labels = ", ".join(variant.label for variant in curves)
    raise ValueError(f"baseline={baseline} was not measured; measured are: {labels}")


def intensity(row: Row, device: str) -> float | None:
    """FLOPs a byte of device memory, of the forward pass, by training.traffic; None for a backend
    that is not in the table.
    """
    try:
        backend = parse_backend(row["attention"])
    except ValueError:
        return None
    element = getattr(torch, row["dtype"]).itemsize
    sizes = (row["batch"], row["heads"], row["seq_len"], row["head_dim"], element)
    return call_traffic(backend, device, sizes, causal=row["causal"]).intensity


def draw_roofline(data: dict[str, Any], path: Path) -> Path | None:
    """Measured forward TFLOP/s over the FLOPs a byte that a variant's accesses come to, under the
    data sheet's ceilings.

    A point above the slope is not faster than the memory: its repeated reads were served by a
    cache.
    """
    gpu = data["environment"]["hardware"].get("gpu") or ""
    rows, xs = [], []
    for row in data["rows"]:
        x = intensity(row, "cuda" if gpu else "cpu") if "forward_tflops" in row else None
        if x and done(row):
            rows.append(row | {"intensity": x})
            xs.append(x)
    if not rows:
        return None
    figure, ((axes,),) = figure_of(1, width=10, height=5.5)
    noted: list[tuple[float, float]] = []
    for variant in variants(rows):
        own = sorted(variant.rows, key=lambda row: row["seq_len"])
        points = [(row["intensity"], row["forward_tflops"]) for row in own]
        style = variant.style | {"linewidth": 0.7, "markersize": 5, "label": variant.label}
        axes.plot(*zip(*points, strict=True), **style)
        for end in (0, -1):
            where = log10(points[end][0]), log10(points[end][1])
            # one length for points that lie close together
            if all(abs(where[0] - x) > 0.2 or abs(where[1] - y) > 0.08 for x, y in noted):
                offset = (7, -9) if end == 0 else (7, 0)
                note(axes, short_length(own[end]["seq_len"]), points[end], offset, fontsize=7)
                noted.append(where)
    flops, bandwidth = data_sheet(PEAK_FLOPS, gpu), data_sheet(PEAK_BANDWIDTH, gpu)
    if flops and bandwidth:
        ridge = flops / bandwidth
        left, right = min(xs) / 2, max(ridge, *xs) * 4
        low, high = left * bandwidth / 1e12, flops / 1e12
        style = {"color": "black", "linewidth": 1, "linestyle": "--", "label": "data sheet"}
        axes.plot([left, ridge, right], [low, high, high], **style)
        middle = (left * ridge) ** 0.5
        slope = f"data sheet: {bandwidth / 1e12:g} TB/s"
        note(axes, slope, (middle, middle * bandwidth / 1e12), (-8, 4), ha="right")
        ceiling = f"data sheet: {high:g} TFLOP/s (16 bits)"
        note(axes, ceiling, (right, high), (0, 8), ha="right")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOPs a byte asked of device memory (counted)",
        ylabel="TFLOP/s, forward (measured)",
    )
    longest = max(row["seq_len"] for row in rows)
    what = f"one attention call, to {longest:,} tokens: {shape_words(rows)}"
    axes.set_title(f"{what}\n{measured_on(data)}", fontsize=9)
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return save(figure, path)


def draw_longest(data: dict[str, Any], path: Path) -> Path | None:
    """The longest sequence against memory. An open marker: the search ended at its time limit, more
    would have fitted.
    """
    hardware = data["environment"]["hardware"]
    everything = hardware.get("gpu_memory_gib") or hardware.get("memory_gib")
    rows = [row for row in data["rows"] if row.get("max_seq_len")]
    rows = [row | {"memory_gib": row["memory_gib"] or everything} for row in rows]
    if not rows:
        return None
    figure, (panels,) = figure_of(2)
    sizes = sorted({row["memory_gib"] for row in rows})
    titles = {"forward": "forward", "training": "forward and backward"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for variant in variants(rows):
            own = [row for row in variant.rows if row["pass"] == name]
            points = {limit: [] for limit in ("memory", "time")}
            for row in own:
                points[row["limited_by"]].append((row["memory_gib"], row["max_seq_len"]))
            line = {"marker": None, "linewidth": 0.8}
            plot(axes, sum(points.values(), []), variant, **line)
            dots = {"linestyle": "none", "markersize": 6}
            plot(axes, points["memory"], variant, **dots, label=variant.label)
            label = f"{variant.label}, at least (time limit)"
            plot(axes, points["time"], variant, **dots, markerfacecolor="none", label=label)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="GiB the process may have",
            ylabel="longest sequence that ran",
        )
        axes.set_title(title, fontsize=9)
        axes.set_xticks(sizes, [f"{x:g}" for x in sizes])
        axes.minorticks_off()
        plain_ticks(axes.yaxis)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"one attention call: {shape_words(rows)}; {measured_on(data)}", fontsize=9)
    return save(figure, path)


@plain_text()
def draw(file: Path, folder: Path, *, baseline: str | None = None) -> list[Path]:
    """Every figure that the file has measurements for. Raises ValueError for a file that is not a
    benchmark's.
    """
    import matplotlib

    matplotlib.use("Agg")
    try:
        data = json.loads(file.read_text())
        measured_on(data)
        name_of(data["rows"][0])
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{file} is not a benchmark; make one with python -m scripts.benchmark out=FILE.json"
        ) from error
    path = str(folder / file.stem)
    check_writable(Path(f"{path}_memory.png"))
    drawn = [
        draw_memory(data, Path(f"{path}_memory.png")),
        draw_time(data, Path(f"{path}_time.png"), baseline=baseline),
        draw_roofline(data, Path(f"{path}_roofline.png")),
        draw_longest(data, Path(f"{path}_longest.png")),
    ]
    return [path for path in drawn if path is not None]


@command("plots", Options)
def main(options: Options) -> None:
    for file in options.paths:
        drawn = draw(file, options.out or file.parent, baseline=options.baseline)
        nothing = f"{file}: nothing was measured in it, nothing is drawn"
        print("\n".join(map(str, drawn)) or nothing)


if __name__ == "__main__":
    main()
