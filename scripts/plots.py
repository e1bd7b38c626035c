"""Draw what scripts.benchmark measured: memory against length, time and speed-up, the roofline, and
the longest sequences.

    python -m scripts.plots results/memory_h200.json out=outputs/plots baseline=naive

Only reads the file; draws nothing that was not measured. FILE.json becomes FILE_memory.png,
FILE_time.png, FILE_roofline.png, or FILE_longest.png for a search by --max-length, in out=DIR
(default: the file's folder). baseline= names the variant that speed-ups are against (default: naive
where it was measured, else the first). The lines of a roofline are a data sheet's, and say so.
"""

import io
import json
import sys
from math import log
from pathlib import Path
from typing import Any

from training import traffic
from training.interrupt import one_line
from training.metrics import PEAK_BANDWIDTH, PEAK_FLOPS, check_writable, data_sheet, write_file
from training.plan import MATERIALISED, RECOMPUTED, TILE_LOOP, kind_of
from training.plot import plain_text

COLORS = {
    "triton": "#0072B2",
    "tiled": "#009E73",
    "sdpa": "#56B4E9",
    "flex": "#E69F00",
    "naive": "#8A8A8A",
    "no_rescale": "#D55E00",
    "no_max": "#CC79A7",
}
OTHER_COLORS = ("#332288", "#882255", "#999933", "#AA4499", "#44AA99")
MARKERS = "osv^D<>P*X"
ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def name_of(row: dict[str, Any]) -> str:
    return row["attention"].partition(":")[0]


def variants(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each variant, by what tells it from the others: its name and options, then dtype,
    head_dim and shape where they vary.
    """
    several = {key: len({row[key] for row in rows}) > 1 for key in ("dtype", "head_dim", "heads")}
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        label = row["attention"].replace(":backend=", " ").replace(":", " ")
        label += "".join(
            f", {key} {row[key]}" if key != "dtype" else f", {row[key]}"
            for key, differ in several.items()
            if differ
        )
        found.setdefault(label + (" (wrong results)" if row.get("broken") else ""), []).append(row)
    return found


def styles(rows: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """A colour a backend, and a marker for each of its variants."""
    found, seen, others = {}, {}, {}
    for label, own in variants(rows).items():
        name = name_of(own[0])
        if name not in COLORS:
            others.setdefault(name, OTHER_COLORS[len(others) % len(OTHER_COLORS)])
        seen[name] = seen.get(name, -1) + 1
        found[label] = {
            "color": COLORS.get(name) or others[name],
            "marker": MARKERS[seen[name] % len(MARKERS)],
        }
    return found


def done(row: dict[str, Any]) -> bool:
    return "oom" not in row and "refused" not in row


def measured_on(data: dict[str, Any]) -> str:
    hardware, versions = data["environment"]["hardware"], data["environment"]["versions"]
    chip = (
        hardware.get("gpu") or f"{hardware.get('cpu')}, {hardware.get('torch_threads')} thread(s)"
    )
    return (
        f"{chip}, torch {versions.get('torch')}, commit "
        f"{(data['environment'].get('commit') or 'unknown')[:7]}"
    )


def shape_words(rows: list[dict[str, Any]]) -> str:
    parts = []
    for key, words in (
        ("batch", "batch {}"),
        ("heads", "{} heads"),
        ("head_dim", "of {}"),
        ("dtype", "{}"),
    ):
        values = {row[key] for row in rows}
        if len(values) == 1:
            parts.append(words.format(values.pop()))
    return ", ".join([*parts, "causal" if rows[0]["causal"] else "no mask"]).replace(
        " heads, of", " heads of"
    )


def length_axis(axes: Any, lengths: list[int]) -> None:
    axes.set(xscale="log", xlabel="sequence length")
    axes.set_xticks(
        lengths,
        [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths],
        rotation=45 if len(lengths) > 8 else 0,
    )
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def plain_ticks(axis: Any) -> None:
    """1, 2, 5, 10 ... beside a logarithmic axis, and never fewer than two of them; decades alone
    where there are many.
    """
    low, high = axis.get_view_interval()
    if high < 6.3 * low:
        middle = (low * high) ** 0.5
        low, high = middle / 2.51, middle * 2.51
        axis.axes.set(**{f"{axis.axis_name}lim": (low, high)})
    from matplotlib.ticker import LogLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter("")


def lengths_of(rows: list[dict[str, Any]]) -> list[int]:
    return sorted({row["seq_len"] for row in rows})


def figure_of(columns: int, *, width: float = 6.5, height: float = 4.5) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(
        1, columns, figsize=(width * columns, height), layout="constrained", squeeze=False
    )


def save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_file(path, picture.getvalue())
    pyplot.close(figure)
    return path


def growth(points: list[tuple[int, float]]) -> str:
    """How the last two points grow: as N^1, or as N^2."""
    (n, a), (m, b) = points[-2:] if len(points) > 1 else (points[0], points[0])
    return f": N^{log(b / a) / log(m / n):.2f}" if n != m else ""


def draw_memory(data: dict[str, Any], path: Path) -> Path | None:
    """Peak above the inputs against length, both passes on one pair of axes, with the exponent of
    the last doubling.

    A square stands where a variant ran out, at what it asked for.
    """
    rows = [
        row
        for row in data["rows"]
        if "seq_len" in row and ("oom" in row or row.get("forward_bytes"))
    ]
    if not any(done(row) for row in rows):
        return None
    figure, ((axes,),) = figure_of(1, width=10, height=5.5)
    look = styles(rows)
    asked_any = False
    for label, own in variants(rows).items():
        for column, line, end in (
            ("training_bytes", "-", ""),
            ("forward_bytes", ":", ", forward only"),
        ):
            points = [
                (row["seq_len"], row[column] / 2**30)
                for row in own
                if done(row) and row.get(column)
            ]
            if points:
                words = label + end + growth(points)
                axes.plot(
                    *zip(*points, strict=True),
                    linestyle=line,
                    markersize=4,
                    label=words,
                    **look[label],
                )
        asked = [
            (row["seq_len"], row["oom"]["asked_gib"])
            for row in own
            if "oom" in row and row["oom"].get("asked_gib")
        ]
        for length, gib in asked:
            axes.plot(
                length,
                gib,
                marker="s",
                markersize=9,
                markerfacecolor="none",
                color=look[label]["color"],
                linestyle="none",
            )
            axes.annotate(
                f"asked for {gib:,.4g} GiB",
                (length, gib),
                textcoords="offset points",
                xytext=(-8, 4),
                ha="right",
                fontsize=8,
            )
            asked_any = True
    card = data["environment"]["hardware"].get("gpu_memory_gib")
    if card:
        axes.axhline(card, color="black", linewidth=0.8, linestyle="--")
        axes.annotate(
            f"this card: {card:g} GiB",
            (lengths_of(rows)[0], card),
            textcoords="offset points",
            xytext=(0, 3),
            fontsize=8,
        )
    axes.set(
        yscale="log",
        ylabel="peak GiB above q, k, v" + (" (square: out of memory)" if asked_any else ""),
    )
    axes.set_title(f"one attention call: {shape_words(rows)}\n{measured_on(data)}", fontsize=9)
    length_axis(axes, lengths_of(rows))
    plain_ticks(axes.yaxis)
    figure.legend(loc="outside right upper", fontsize=8)
    return save(figure, path)


def time_column(rows: list[dict[str, Any]], name: str) -> str:
    """Old files have the backward inside the training's time only."""
    return (
        "training"
        if name == "backward" and not any("backward_seconds" in row for row in rows)
        else name
    )


def draw_time(data: dict[str, Any], path: Path, *, baseline: str | None = None) -> Path | None:
    """Median time with its 20th to 80th percentile, and how many times faster than the baseline,
    forward and backward apart.
    """
    rows = [row for row in data["rows"] if "forward_seconds" in row and done(row)]
    if not rows:
        return None
    groups = variants(rows)
    baseline = pick_baseline(groups, baseline)
    columns = [
        "forward",
        *(
            [time_column(rows, "backward")]
            if any("training_seconds" in row for row in rows)
            else []
        ),
    ]
    figure, ((*times, speedup),) = figure_of(len(columns) + 1)
    look = styles(rows)
    for axes, column in zip(times, columns, strict=True):
        for label, own in groups.items():
            points = [
                (row["seq_len"], *(1e3 * row[f"{column}_{x}"] for x in ("seconds", "p20", "p80")))
                for row in own
                if f"{column}_p20" in row
            ]
            if points:
                lengths, middle, low, high = zip(*sorted(points), strict=True)
                axes.plot(lengths, middle, markersize=4, label=label, **look[label])
                axes.fill_between(lengths, low, high, color=look[label]["color"], alpha=0.2)
        axes.set(yscale="log", ylabel="milliseconds (median, 20th to 80th percentile)")
        axes.set_title("forward and backward" if column == "training" else column, fontsize=9)
        length_axis(axes, lengths_of(rows))
        plain_ticks(axes.yaxis)
    times[0].legend(fontsize=8)
    reference = {row["seq_len"]: row for row in groups[baseline]}
    for label, own in groups.items():
        for column, line in zip(columns, ("-", ":"), strict=False):
            name = f"{column}_seconds"
            both = [row for row in own if name in row and name in reference.get(row["seq_len"], {})]
            points = sorted(
                (row["seq_len"], reference[row["seq_len"]][name] / row[name]) for row in both
            )
            if points:
                axes_label = label if line == "-" else None
                speedup.plot(
                    *zip(*points, strict=True),
                    linestyle=line,
                    markersize=4,
                    label=axes_label,
                    **look[label],
                )
    speedup.set(
        yscale="log",
        ylabel=f"times as fast as {baseline}"
        + (f" (dotted: {columns[1]})" if len(columns) > 1 else ""),
    )
    length_axis(speedup, lengths_of(rows))
    plain_ticks(speedup.yaxis)
    figure.suptitle(f"one attention call: {shape_words(rows)}; {measured_on(data)}", fontsize=9)
    return save(figure, path)


def pick_baseline(groups: dict[str, Any], baseline: str | None) -> str:
    """Raises ValueError for one that was not measured."""
    if baseline is None:
        return next(
            (label for label, own in groups.items() if name_of(own[0]) == "naive"),
            next(iter(groups)),
        )
    found = [
        label
        for label, own in groups.items()
        if baseline in (label, own[0]["attention"], name_of(own[0]))
    ]
    if not found:
        raise ValueError(f"baseline={baseline} was not measured; measured are: {', '.join(groups)}")
    return found[0]


def intensity(row: dict[str, Any], device: str) -> float | None:
    """FLOPs a byte of device memory, of the forward pass, by training.traffic; None for a backend
    that is not in the table.
    """
    from scripts.arguments import parse_backend

    try:
        backend = parse_backend(row["attention"])
    except ValueError:
        return None
    sizes = (row["batch"], row["heads"], row["seq_len"], row["head_dim"], ELEMENT[row["dtype"]])
    kind = kind_of(backend, device)
    if kind == MATERIALISED:
        return traffic.naive(*sizes, causal=row["causal"]).intensity
    tiles = {
        name: backend.options[name] for name in ("block_q", "block_kv") if backend.options.get(name)
    }
    return (traffic.tile_loop if kind in (TILE_LOOP, RECOMPUTED) else traffic.fused)(
        *sizes, **tiles, causal=row["causal"]
    ).intensity


def draw_roofline(data: dict[str, Any], path: Path) -> Path | None:
    """Measured forward TFLOP/s over the FLOPs a byte that a variant's accesses come to, under the
    data sheet's ceilings.

    A point above the slope is not faster than the memory: its repeated reads were served by a
    cache.
    """
    rows = [row for row in data["rows"] if "forward_tflops" in row and done(row)]
    device = "cuda" if data["environment"]["hardware"].get("gpu") else "cpu"
    placed = [(row, x) for row in rows if (x := intensity(row, device)) is not None]
    if not placed:
        return None
    figure, ((axes,),) = figure_of(1, width=10, height=5.5)
    look = styles([row for row, _ in placed])
    longest = max(row["seq_len"] for row, _ in placed)
    for label, own in variants([row for row, _ in placed]).items():
        points = sorted(
            (row["seq_len"], intensity(row, device), row["forward_tflops"]) for row in own
        )
        axes.plot(
            [x for _, x, _ in points],
            [y for *_, y in points],
            linewidth=0.7,
            markersize=5,
            label=label,
            **look[label],
        )
        for length, x, y in (points[0], points[-1]):
            axes.annotate(
                f"{length // 1024}k" if length >= 1024 else str(length),
                (x, y),
                textcoords="offset points",
                xytext=(5, -9),
                fontsize=7,
            )
    gpu = data["environment"]["hardware"].get("gpu") or ""
    flops, bandwidth = data_sheet(PEAK_FLOPS, gpu), data_sheet(PEAK_BANDWIDTH, gpu)
    if flops and bandwidth:
        ridge = flops / bandwidth
        xs = [min(x for _, x in placed) / 2, ridge, max(ridge, *(x for _, x in placed)) * 4]
        axes.plot(
            xs,
            [min(x * bandwidth, flops) / 1e12 for x in xs],
            color="black",
            linewidth=1,
            linestyle="--",
            label="data sheet",
        )
        for words, x, side in (
            (f"{bandwidth / 1e12:g} TB/s", xs[0], "left"),
            (f"{flops / 1e12:g} TFLOP/s (16 bits)", xs[-1], "right"),
        ):
            where = (x, min(x * bandwidth, flops) / 1e12)
            axes.annotate(
                f"data sheet: {words}",
                where,
                textcoords="offset points",
                xytext=(0, 8),
                ha=side,
                fontsize=8,
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOPs a byte asked of device memory (counted)",
        ylabel="TFLOP/s, forward (measured)",
    )
    axes.set_title(
        f"one attention call, to {longest:,} tokens: {shape_words(rows)}\n{measured_on(data)}",
        fontsize=9,
    )
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return save(figure, path)


def draw_longest(data: dict[str, Any], path: Path) -> Path | None:
    """The longest sequence against memory. An open marker: the search ended at its time limit, more
    would have fitted.
    """
    rows = [row for row in data["rows"] if row.get("max_seq_len")]
    if not rows:
        return None
    figure, (panels,) = figure_of(2)
    look = styles(rows)
    hardware = data["environment"]["hardware"]
    everything = hardware.get("gpu_memory_gib") or hardware.get("memory_gib")
    for axes, name in zip(panels, ("forward", "training"), strict=True):
        for label, own in variants(rows).items():
            points = sorted(
                (row["memory_gib"] or everything, row["max_seq_len"], row["limited_by"])
                for row in own
                if row["pass"] == name
            )
            axes.plot(
                [x for x, *_ in points],
                [y for _, y, _ in points],
                color=look[label]["color"],
                linewidth=0.8,
            )
            for limit, fill in (("memory", look[label]["color"]), ("time", "none")):
                chosen = [(x, y) for x, y, limited_by in points if limited_by == limit]
                if chosen:
                    words = label if limit == "memory" else f"{label}, at least (time limit)"
                    axes.plot(
                        *zip(*chosen, strict=True),
                        linestyle="none",
                        markerfacecolor=fill,
                        label=words,
                        **look[label],
                    )
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="GiB the process may have",
            ylabel="longest sequence that ran",
        )
        axes.set_title("forward" if name == "forward" else "forward and backward", fontsize=9)
        sizes = sorted({row["memory_gib"] or everything for row in rows})
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
    try:
        data = json.loads(file.read_text())
        (
            data["rows"][0]["attention"],
            data["environment"]["hardware"]["cpu"],
            data["environment"]["versions"]["torch"],
        )
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{file} is no benchmark; make one with python -m scripts.benchmark --out FILE.json"
        ) from error
    check_writable(folder / f"{file.stem}_memory.png")
    paths = [
        draw_memory(data, folder / f"{file.stem}_memory.png"),
        draw_time(data, folder / f"{file.stem}_time.png", baseline=baseline),
        draw_roofline(data, folder / f"{file.stem}_roofline.png"),
        draw_longest(data, folder / f"{file.stem}_longest.png"),
    ]
    return [path for path in paths if path is not None]


@one_line("plots")
def main() -> None:
    arguments = sys.argv[1:]
    if {"--help", "-h"} & set(arguments) or not arguments:
        print(__doc__)
        return
    files = [Path(argument) for argument in arguments if "=" not in argument]
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    try:
        if unknown := options.keys() - {"out", "baseline"}:
            raise ValueError(f"{sorted(unknown)[0]}= is not one of: out=DIR, baseline=NAME")
        if not files:
            raise ValueError("name a FILE.json that python -m scripts.benchmark --out wrote")
        for file in files:
            folder = Path(options["out"]) if "out" in options else file.parent
            drawn = draw(file, folder, baseline=options.get("baseline"))
            print(
                "\n".join(map(str, drawn))
                or f"{file}: nothing was measured in it, nothing is drawn"
            )
    except ValueError as error:
        sys.exit(f"plots: {error}")


if __name__ == "__main__":
    main()
