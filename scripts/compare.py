"""Draw the runs of a sweep against one another, as PNG files and as one self-contained page.

Reads what training left on disk and measures nothing itself. Writes to DIR/compare/:

    loss.png accuracy.png memory.png throughput.png   those for which the runs hold figures
    index.html                                        figures, table and provenance, without any other file
    compare.json                                      the numbers that were drawn

    python -m scripts.compare multirun/2026-01-31_12-00-00
"""

import argparse
import base64
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.compare_page import render_page
from training.metrics import read_metrics, write_json
from training.sweep import differing_settings, load_json, read_sweep

# Okabe and Ito's colours for every kind of colour vision, without the yellow that vanishes on white
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8A8A8A")
# without the marks of a diverged run (X) and of one that ran out of memory (s)
MARKERS = "oD^vPh*<>p"
LIGHT = {"paper": "#ffffff", "ink": "#1c1c1e", "grid": "#e4e4e8"}
DARK = {"paper": "#1c1c1e", "ink": "#ececf0", "grid": "#3a3a3e"}
CURVES = ("train/loss", "val/loss", "val/loss_exact", "val/accuracy", "val/accuracy_exact")


@dataclass
class Run:
    """One training run, as its files tell it."""

    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    env: dict[str, Any]
    variant: str = ""  # what is compared: the attention, and every other override in which the runs differ

    @property
    def status(self) -> str:
        return self.summary["status"]

    @property
    def seq_len(self) -> int:
        return self.summary.get("seq_len") or 0

    def curve(self, metric: str) -> dict[int, float]:
        """Values by tokens; those that were not finite are not in the file as numbers."""
        return {row["tokens"]: row[metric] for row in self.metrics if row.get(metric) is not None and row.get("tokens") is not None}


@dataclass
class Style:
    color: str
    marker: str
    linestyle: Any
    linewidth: float

    @property
    def line(self) -> dict[str, Any]:
        """What matplotlib's plot() takes."""
        return {
            "color": self.color,
            "linestyle": self.linestyle,
            "linewidth": self.linewidth,
            "marker": self.marker,
            "markersize": 4.5 + self.linewidth,
        }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare",
        description="Draw loss, memory and speed of the runs of a sweep: PNG files and one self-contained HTML page.",
        epilog="example: python -m scripts.compare multirun/* --out comparison",
    )
    parser.add_argument("dirs", nargs="+", type=Path, metavar="DIR", help="a sweep, a run, or a folder of either")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write (default: the first DIR's compare/)")
    arguments = parser.parse_args(argv)
    try:
        runs = load_runs(arguments.dirs)
        folder = arguments.out or arguments.dirs[0] / "compare"
        folder.mkdir(parents=True, exist_ok=True)
        write_comparison(runs, folder)
    except (OSError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    print(f"{len(runs)} runs: {folder / 'index.html'}")
    return 0


def load_runs(dirs: Sequence[Path]) -> list[Run]:
    """Every run below `dirs`; ValueError where there is none."""
    for folder in dirs:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
    # a run below two of the folders counts once
    summaries = {Path(row["dir"]).resolve(): row for folder in dirs for row in read_sweep(folder)}
    if not summaries:
        raise ValueError(f"no runs below {', '.join(map(str, dirs))}: a run is a folder with a summary.json or a metrics.jsonl")
    runs = [Run(row, read_metrics(path / "metrics.jsonl"), load_json(path / "env.json")) for path, row in summaries.items()]
    for run, variant in zip(runs, _variants(runs), strict=True):
        run.variant = variant
    return runs


def _variants(runs: list[Run]) -> list[str]:
    """The attention of every run, with the overrides beyond attention, seq_len and seed in which the runs differ."""
    names = []
    for run, setting in zip(runs, differing_settings([run.summary for run in runs]), strict=True):
        others = [f"{key.rpartition('.')[2]}={value}" for key, value in setting.items() if key not in ("attention", "seq_len", "seed")]
        names.append(" ".join([str(run.summary.get("attention") or Path(run.summary["dir"]).name), *others]))
    return names


def write_comparison(runs: list[Run], folder: Path) -> None:
    styles = _styles(runs)
    drawings: dict[str, Callable[[Any], Any]] = {}
    if _curve_lengths(runs, "val/loss", "train/loss"):
        drawings["loss"] = lambda theme: draw_curves(runs, styles, theme, "val/loss", "train/loss")
    if _curve_lengths(runs, "val/accuracy"):
        drawings["accuracy"] = lambda theme: draw_curves(runs, styles, theme, "val/accuracy", None)
    if len(_memory_lengths(runs)) > 1:
        drawings["memory"] = lambda theme: draw_memory(runs, styles, theme)
    if any(run.summary.get("tokens_per_sec") for run in runs):
        drawings["throughput"] = lambda theme: draw_throughput(runs, styles, theme)
    # a figure of an earlier comparison must not pass for one of this
    for name in ("loss", "accuracy", "memory", "throughput"):
        (folder / f"{name}.png").unlink(missing_ok=True)
    images = {}
    for name, draw in drawings.items():
        light, dark = (_png(draw, theme) for theme in (LIGHT, DARK))
        (folder / f"{name}.png").write_bytes(light)
        images[name] = tuple(base64.b64encode(png).decode() for png in (light, dark))
    summaries = [run.summary | {"variant": run.variant} for run in runs]
    (folder / "index.html").write_text(render_page(summaries, [run.env for run in runs], images), encoding="utf-8")
    curves = [{metric: list(run.curve(metric).items()) for metric in CURVES if run.curve(metric)} for run in runs]
    write_json(
        folder / "compare.json",
        {
            "runs": [summary | {"curves": curve} for summary, curve in zip(summaries, curves, strict=True)],
            "environments": [dict(run.env, dir=run.summary["dir"]) for run in runs],
        },
    )


def _styles(runs: list[Run]) -> dict[str, Style]:
    """One colour and marker a variant; defects dashed; exact ones, whose curves coincide, from wide below to narrow on top."""
    defects = {run.summary.get("attention") for run in runs if run.summary.get("defect")}
    is_defect = {run.variant: run.summary.get("attention") in defects for run in runs}
    exact = len(is_defect) - sum(is_defect.values())
    styles = {}
    for i, variant in enumerate(sorted(is_defect, key=lambda variant: (is_defect[variant], variant))):
        styles[variant] = Style(
            color=PALETTE[i % len(PALETTE)],
            marker=MARKERS[i % len(MARKERS)],
            linestyle=(0, (4, 2)) if is_defect[variant] else "-",
            linewidth=1.8 if is_defect[variant] else 1.6 + 3.0 * (exact - 1 - i) / max(1, exact - 1),
        )
    return styles


def _png(draw: Callable[[dict[str, str]], Any], theme: dict[str, str]) -> bytes:
    import matplotlib

    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), theme["ink"])
    paper = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor"), theme["paper"])
    look = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": theme["grid"], "axes.axisbelow": True}
    text = {"font.size": 11, "axes.titlesize": 11.5, "axes.titlelocation": "left", "legend.frameon": False}
    buffer = io.BytesIO()
    with matplotlib.rc_context(ink | paper | look | text):
        draw(theme).savefig(buffer, format="png", dpi=150, bbox_inches="tight", pad_inches=0.15)
    return buffer.getvalue()


def draw_curves(runs: list[Run], styles: dict[str, Style], theme: dict[str, str], metric: str, train_metric: str | None) -> Any:
    """A row a sequence length: on the left each run as it computes, on the right the same weights under exact attention."""
    from matplotlib.figure import Figure

    lengths = _curve_lengths(runs, metric, *([train_metric] if train_metric else []))
    figure = Figure(figsize=(11.5, (4.2 if len(lengths) < 4 else 3.0) * len(lengths)), layout="constrained")
    grid = figure.subplots(len(lengths), 2, sharey="row", sharex="row", squeeze=False)
    for (own, exact), seq_len in zip(grid, lengths, strict=True):
        here = [run for run in runs if run.seq_len == seq_len]
        for variant, style in styles.items():
            group = [run for run in here if run.variant == variant]
            for run in group if train_metric else ():
                own.plot(*_xy(run.curve(train_metric)), color=style.color, alpha=0.3, linewidth=0.9, zorder=1)
            _draw_seeds(own, [run.curve(metric) for run in group], style)
            _draw_seeds(exact, [run.curve(f"{metric}_exact") for run in group], style)
        _limit(own, here, metric, train_metric)
        for run in here:
            _mark_end(own, run, (run.curve(train_metric) if train_metric else {}) | run.curve(metric), styles[run.variant], theme)
        length = f"   seq_len={seq_len}" if seq_len else ""
        own.set_title(f"{metric}: under its own attention{length}")
        exact.set_title(f"{metric}_exact: the same weights under exact attention")
        own.set_ylabel(metric)
        for axes in (own, exact):
            axes.set_xlabel("training tokens")
            axes.xaxis.set_major_formatter(_short)
    ended = {run.status for run in runs if run.metrics}
    marks = {"diverged": ("diverged: last finite value", "X"), "oom": ("out of memory", "s")}
    _legend(figure, styles, theme, dict(mark for status, mark in marks.items() if status in ended))
    return figure


def _draw_seeds(axes: Any, curves: list[dict[int, float]], style: Style) -> None:
    """One seed: a line with markers. Several: each as a thin line, and their mean, where all have a value, with markers."""
    curves = [curve for curve in curves if curve]
    if not curves:
        return
    common = sorted(set.intersection(*map(set, curves)))
    mean = {tokens: sum(curve[tokens] for curve in curves) / len(curves) for tokens in common}
    if len(curves) > 1:
        for curve in curves:
            axes.plot(*_xy(curve), color=style.color, linestyle=style.linestyle, linewidth=0.8, alpha=0.6, zorder=2)
    axes.plot(*_xy(mean), **style.line, markevery=max(1, len(mean) // 12), zorder=3)


def _mark_end(axes: Any, run: Run, curve: dict[int, float], style: Style, theme: dict[str, str]) -> None:
    """A cross where a diverged run had its last finite value; a square where memory ran out on the way."""
    if curve and run.status in ("diverged", "oom"):
        tokens = max(curve)
        marker = "X" if run.status == "diverged" else "s"
        # a curve that shot up has its mark at the upper edge
        height = min(curve[tokens], axes.get_ylim()[1])
        axes.plot([tokens], [height], marker, color=style.color, markeredgecolor=theme["ink"], markersize=11, zorder=5, clip_on=False)


def _limit(axes: Any, runs: list[Run], metric: str, train_metric: str | None) -> None:
    """Limits that a diverging curve does not stretch: nothing above where the runs began matters."""
    if "accuracy" in metric:
        axes.set_ylim(-0.02, 1.02)
        return
    curves = [curve for run in runs for name in (metric, train_metric, f"{metric}_exact") if name and (curve := run.curve(name))]
    low, high = min(min(curve.values()) for curve in curves), max(curve[min(curve)] for curve in curves)
    axes.set_ylim(low - 0.05 * (high - low or 1), high + 0.08 * (high - low or 1))


def draw_memory(runs: list[Run], styles: dict[str, Style], theme: dict[str, str]) -> Any:
    """Peak memory against sequence length, both logarithmic; lengths that did not fit as crosses along the top."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(8.5, 5.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel="seq_len", ylabel="peak memory (GiB)")
    lengths = _memory_lengths(runs)
    out_of_memory = any(run.status == "oom" for run in runs)
    # the crosses stand between the axes and the title
    axes.set_title("Peak memory of training against sequence length", pad=28 if out_of_memory else 6)
    for i, (variant, style) in enumerate(styles.items()):
        group = [run for run in runs if run.variant == variant]
        peaks = {n: [_memory(run) for run in group if run.seq_len == n and _memory(run) is not None] for n in lengths}
        mean = {n: sum(values) / len(values) for n, values in peaks.items() if values}
        axes.plot(*_xy(mean), **style.line)
        for n in {run.seq_len for run in group if run.status == "oom"}.intersection(lengths):
            # the height is a share of the picture: memory that was not there has no amount
            height = 1.03 + 0.035 * (i % 3)
            axes.plot([n], [height], "X", color=style.color, markersize=10, transform=axes.get_xaxis_transform(), clip_on=False)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda gib, _: f"{gib:g}"))
    axes.set_xlim(lengths[0] / 1.15, lengths[-1] * 1.15)
    _legend(figure, styles, theme, {"out of memory": "X"} if out_of_memory else {})
    return figure


def draw_throughput(runs: list[Run], styles: dict[str, Style], theme: dict[str, str]) -> Any:
    """A bar a variant and sequence length: the mean over seeds, with every seed as a dot."""
    from matplotlib.figure import Figure

    lengths = sorted({run.seq_len for run in runs})
    bars = [(n, variant) for n in lengths for variant in styles if any(run.seq_len == n and run.variant == variant for run in runs)]
    # bars of one length stand together
    places = [i + 0.6 * lengths.index(n) for i, (n, _) in enumerate(bars)]
    figure = Figure(figsize=(9.5, 1.3 + 0.36 * (places[-1] + 1)), layout="constrained")
    axes = figure.subplots()
    longest = max(run.summary.get("tokens_per_sec") or 0 for run in runs)
    for place, (n, variant) in zip(places, bars, strict=True):
        group = [run for run in runs if run.seq_len == n and run.variant == variant]
        speeds = [run.summary["tokens_per_sec"] for run in group if run.summary.get("tokens_per_sec")]
        mean = sum(speeds) / len(speeds) if speeds else 0.0
        hatch = None if styles[variant].linestyle == "-" else "///"
        axes.barh(place, mean, height=0.72, color=styles[variant].color, hatch=hatch, edgecolor=theme["paper"], linewidth=0)
        if len(speeds) > 1:
            axes.plot([min(speeds), max(speeds)], [place, place], color=theme["ink"], linewidth=1.4)
            axes.plot(speeds, [place] * len(speeds), "o", color=theme["ink"], markersize=3)
        label = f"{mean:,.0f}" if speeds else ", ".join(sorted({run.status for run in group}))
        axes.text(max([mean, *speeds]) + 0.012 * longest, place, label, va="center", fontsize=9.5)
    title = f"Training speed (seq_len={lengths[0]})" if len(lengths) == 1 else "Training speed"
    axes.set(xlabel="tokens per second", xlim=(0, 1.12 * longest), title=title)
    axes.set_yticks(places, [variant if len(lengths) == 1 else f"{variant}   {n:,}" for n, variant in bars])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(_short)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    return figure


def _legend(figure: Any, styles: dict[str, Style], theme: dict[str, str], marks: dict[str, str]) -> None:
    """The variants, and what the marks (by their meaning) on the curves say."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **style.line | {"linewidth": 2, "markersize": 7}, label=variant) for variant, style in styles.items()]
    look = {"color": theme["ink"], "linestyle": "", "markersize": 9}
    handles += [Line2D([], [], **look, marker=marker, label=meaning) for meaning, marker in marks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), handlelength=3)


def _memory(run: Run) -> float | None:
    return run.summary.get("memory/peak_gib") if run.status != "oom" else None


def _curve_lengths(runs: list[Run], *metrics: str) -> list[int]:
    """Sequence lengths at which some run logged enough for a curve: runs of two steps, made to measure memory, do not."""
    return sorted({run.seq_len for run in runs if any(len(run.curve(metric)) >= 3 for metric in metrics)})


def _memory_lengths(runs: list[Run]) -> list[int]:
    """Sequence lengths with a point or a cross to draw; a run that failed at once has none."""
    return sorted({run.seq_len for run in runs if run.seq_len and (_memory(run) is not None or run.status == "oom")})


def _xy(curve: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(curve), list(curve.values())


def _short(value: float, _: Any = None) -> str:
    """1500 -> 1.5k, 2000000 -> 2M"""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
