"""The figures of a report, each as inline SVG for the page and as PNG for the Markdown file.

They are drawn once, in the colours of light paper. In the SVG those colours become the page's CSS variables: the same picture
follows the reader from light to dark and onto white paper.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from attention import LIMITS
from scripts.report.runs import MIN_POINTS, Run, in_order

# Okabe and Ito's colours for every kind of colour vision, without the yellow that vanishes on white; beside each its twin on dark paper
PALETTE = {
    "#0072b2": "#4aa8e0",
    "#e69f00": "#f0b840",
    "#009e73": "#2cc79b",
    "#cc79a7": "#e39cc4",
    "#d55e00": "#f08040",
    "#56b4e9": "#8fd0f5",
    "#8a8a8a": "#b4b4b4",
    "#7a5cc4": "#a993ea",
}
INK, SOFT, GRID, PAPER = "#1c1c1e", "#6a6a70", "#e4e4e8", "#ffffff"
VARIABLES = {INK: "--ink", SOFT: "--soft", GRID: "--grid", PAPER: "--paper"} | {color: f"--series-{i}" for i, color in enumerate(PALETTE)}
# without the marks of a diverged run (X) and of one that ran out of memory (s)
MARKERS = "oD^vPh*<>p"
# past these scores exp overflows; bfloat16 has float32's range
FLOAT16_LIMIT, FLOAT32_LIMIT = min(LIMITS.values()), max(LIMITS.values())
# drawn elsewhere, or no more than bookkeeping
DRAWN = {"step", "tokens", "lr", "mfu", "tokens_per_sec", "train/loss", "val/loss", "val/loss_exact", "val/accuracy", "val/accuracy_exact"}


class Drawing(NamedTuple):
    svg: str  # one <svg> element without ids that another drawing has
    png: bytes


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
            "markersize": 3.5 + self.linewidth,
        }


def variant_styles(runs: list[Run]) -> dict[str, Style]:
    """One colour and marker a variant; defects last and dashed; exact ones, whose curves coincide, from wide below to narrow on top."""
    # a run that failed at once does not say that its attention is a defect; another of the same attention does
    defects = {run.summary.get("attention") for run in runs if run.is_defect}
    is_defect = {run.variant: run.summary.get("attention") in defects for run in runs}
    exact = len(is_defect) - sum(is_defect.values())
    colors, styles = list(PALETTE), {}
    for i, variant in enumerate(sorted(is_defect, key=lambda variant: (is_defect[variant], in_order(variant)))):
        styles[variant] = Style(
            color=colors[i % len(colors)],
            marker=MARKERS[i % len(MARKERS)],
            linestyle=(0, (4, 2)) if is_defect[variant] else "-",
            linewidth=1.7 if is_defect[variant] else 1.5 + 2.5 * (exact - 1 - i) / max(1, exact - 1),
        )
    return styles


def render(name: str, draw: Callable[[], Any]) -> Drawing:
    """Draw a matplotlib figure under the report's look. `name` keeps its ids apart from those of other drawings."""
    import matplotlib

    look = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    look |= {"axes.edgecolor": SOFT, "grid.color": GRID, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    look |= {"axes.grid": True, "axes.titlelocation": "left", "axes.titlesize": 10.5, "legend.frameon": False, "font.size": 10}
    look |= {"xtick.color": SOFT, "ytick.color": SOFT}
    # letters stay letters: they can be searched, copied and read aloud
    look |= {"svg.fonttype": "none", "svg.hashsalt": name}
    # a dollar sign in somebody's file name is no formula
    look |= {"text.parse_math": False}
    with matplotlib.rc_context(look):
        figure = draw()
        # the layout is the same for both
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        figure.savefig(png, format="png", dpi=150)
    text = svg.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub("|".join(VARIABLES), lambda found: f"var({VARIABLES[found[0]]})", text)
    return Drawing(text, png.getvalue())


def curve_lengths(runs: list[Run], *metrics: str) -> list[int]:
    """Sequence lengths at which some run logged enough of a metric for a curve."""
    return sorted({run.seq_len for run in runs if not set(metrics).isdisjoint(run.logged)})


def draw_curves(runs: list[Run], styles: dict[str, Style], metric: str, train_metric: str | None) -> Any:
    """A row a sequence length: on the left each variant as it computes, on the right the same weights under exact attention."""
    from matplotlib.figure import Figure

    lengths = curve_lengths(runs, metric, *([train_metric] if train_metric else []))
    columns = [metric, f"{metric}_exact"] if any(run.curve(f"{metric}_exact") for run in runs) else [metric]
    figure = Figure(figsize=(9.6, (3.5 if len(lengths) < 4 else 2.7) * len(lengths) + 0.4), layout="constrained")
    grid = figure.subplots(len(lengths), len(columns), sharey="row", sharex="row", squeeze=False)
    for row, seq_len in zip(grid, lengths, strict=True):
        here = [run for run in runs if run.seq_len == seq_len]
        for axes, column in zip(row, columns, strict=True):
            for variant, style in styles.items():
                group = [run for run in here if run.variant == variant]
                if train_metric and axes is row[0]:
                    for run in group:
                        axes.plot(*_xy(run.curve(train_metric)), color=style.color, alpha=0.25, linewidth=0.7, zorder=1)
                draw_seeds(axes, [run.curve(column) for run in group], style)
            axes.set_xlabel("training tokens")
            axes.xaxis.set_major_formatter(short)
        _limit(row[0], here, metric, train_metric)
        for run in here:
            curve = (run.curve(train_metric) if train_metric else {}) | run.curve(metric)
            _mark_end(row[0], run, curve, styles[run.variant])
        length = f", seq_len={seq_len:,}" if seq_len else ""
        row[0].set_title(f"{metric}: own attention{length}")
        if len(row) > 1:
            row[1].set_title(f"{metric}_exact: same weights, exact attention")
        row[0].set_ylabel("nats per token" if metric == "val/loss" else metric.rpartition("/")[2])
    _legend(figure, styles, _end_marks(runs))
    return figure


def draw_seeds(axes: Any, curves: list[dict[float, float]], style: Style) -> None:
    """One seed: a line. Several: their mean and, as a band, all between the lowest and the highest, as long as all of them last.

    A mean over those that are left would change its meaning on the way: they go on as a thin line each.
    """
    curves = [curve for curve in curves if curve]
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    if len(curves) > 1 and len(common) > 1:
        values = [[curve[tokens] for curve in curves] for tokens in common]
        axes.fill_between(common, [min(x) for x in values], [max(x) for x in values], color=style.color, alpha=0.2, linewidth=0, zorder=2)
        mean = {tokens: sum(x) / len(x) for tokens, x in zip(common, values, strict=True)}
        rest = [{tokens: value for tokens, value in curve.items() if tokens >= common[-1]} for curve in curves]
    elif len(curves) == 1:
        mean, rest = curves[0], []
    else:
        mean, rest = {}, curves
    for curve in rest:
        if len(curve) > 1:
            axes.plot(*_xy(curve), color=style.color, linestyle=style.linestyle, linewidth=0.9, zorder=3)
    if mean:
        axes.plot(*_xy(mean), **style.line, markevery=max(1, len(mean) // 12), zorder=3)


def _mark_end(axes: Any, run: Run, curve: dict[float, float], style: Style) -> None:
    """A cross where a diverged run had its last finite value; a square where memory ran out on the way."""
    if curve and run.status in ("diverged", "oom"):
        tokens = max(curve)
        marker = "X" if run.status == "diverged" else "s"
        # a curve that shot up has its mark at the upper edge
        height = min(curve[tokens], axes.get_ylim()[1])
        axes.plot([tokens], [height], marker, color=style.color, markeredgecolor=INK, markersize=10, zorder=5, clip_on=False)


def _end_marks(runs: list[Run]) -> dict[str, str]:
    ended = {run.status for run in runs if run.metrics}
    marks = {"diverged": ("diverged: last finite value", "X"), "oom": ("out of memory", "s")}
    return dict(mark for status, mark in marks.items() if status in ended)


def _limit(axes: Any, runs: list[Run], metric: str, train_metric: str | None) -> None:
    """Limits that neither the untrained model nor a diverging curve stretches."""
    if "accuracy" in metric:
        axes.set_ylim(-0.02, 1.02)
        return
    held_out = [list(run.curve(name).values()) for run in runs for name in (metric, f"{metric}_exact") if run.status != "diverged"]
    everything = [list(run.curve(name).values()) for run in runs for name in (metric, f"{metric}_exact", train_metric) if name]
    # the first value of a curve is the untrained model's
    learnt = [values[1:] for values in held_out if len(values) > 1] or [values[1:2] or values for values in everything]
    bottom, top = min(x for values in everything for x in values), max(x for values in learnt for x in values)
    axes.set_ylim(bottom - 0.05 * (top - bottom or 1), top + 0.06 * (top - bottom or 1))


def other_metrics(runs: list[Run]) -> list[str]:
    """What else the runs logged often enough for a curve, whatever its name."""
    names = dict.fromkeys(name for run in runs for name in run.logged)
    return [name for name in names if name not in DRAWN and not name.startswith("memory/")]


def draw_others(runs: list[Run], styles: dict[str, Style]) -> Any:
    """A small panel a metric (and sequence length): mean and band over seeds."""
    from matplotlib.figure import Figure

    panels = [(metric, seq_len) for metric in other_metrics(runs) for seq_len in curve_lengths(runs, metric)]
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(9.6 if columns > 1 else 5, 2.5 * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    lengths = {seq_len for _, seq_len in panels}
    for axes, (metric, seq_len) in zip(grid, panels, strict=False):
        here = [run for run in runs if run.seq_len == seq_len and len(run.curve(metric)) >= MIN_POINTS]
        for variant, style in styles.items():
            draw_seeds(axes, [run.curve(metric) for run in here if run.variant == variant], style)
        values = [value for run in here for value in run.curve(metric).values()]
        _scale(axes, values)
        if metric == "attention/max_score":
            draw_limits(axes, max(values))
        axes.set_title(metric + (f", {seq_len:,}" if len(lengths) > 1 else ""), fontsize=9.5)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_formatter(short)
        axes.xaxis.set_major_locator(_few_ticks())
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    _legend(figure, styles, {})
    return figure


def _scale(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic scale for values over more than a factor of 30."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if min(values) > 0 and max(values) > 30 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(short)


def draw_limits(axes: Any, largest: float) -> None:
    """Lines at the scores past which exp overflows: the one of float16 and, once that is passed, the one of float32 and bfloat16."""
    axes.axhline(FLOAT16_LIMIT, color=SOFT, linewidth=0.9, linestyle=(0, (2, 2)))
    look = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "fontsize": 7.5, "color": SOFT, "va": "top"}
    # scores grow: below the higher line there is room on the left
    axes.annotate(f"{FLOAT16_LIMIT:.2f} float16", (0.99, FLOAT16_LIMIT), xytext=(0, -3), ha="right", **look)
    if largest > FLOAT16_LIMIT:
        axes.axhline(FLOAT32_LIMIT, color=SOFT, linewidth=0.9, linestyle=(0, (2, 2)))
        axes.annotate(f"{FLOAT32_LIMIT:.2f} float32, bfloat16", (0.01, FLOAT32_LIMIT), xytext=(0, -3), **look)


def draw_history(history: dict[float, float], bad_step: float | None, style: Style) -> Any:
    """The largest score over the steps of one run that diverged."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.4, 1.9), layout="constrained")
    axes = figure.subplots()
    axes.plot(*_xy(history), color=style.color, linewidth=1.6, marker="o" if len(history) < 12 else None, markersize=3)
    _scale(axes, list(history.values()))
    draw_limits(axes, max(history.values()))
    if bad_step is not None:
        axes.axvline(bad_step, color=INK, linewidth=1)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("step", fontsize=8.5)
    axes.set_title("largest score", fontsize=9)
    axes.tick_params(labelsize=8)
    return figure


def cost_lengths(runs: list[Run]) -> list[int]:
    """Sequence lengths with a peak, a speed or a lack of memory to draw; a run that failed at once has none."""
    known = [run for run in runs if run.peak_gib is not None or run.status == "oom" or run.figure("tokens_per_sec")]
    return sorted({run.seq_len for run in known if run.seq_len})


def draw_cost(runs: list[Run], styles: dict[str, Style]) -> Any:
    """Peak memory and speed: against the sequence length where there are several, else a bar a variant."""
    lengths = cost_lengths(runs)
    runs = [run for run in runs if run.seq_len in lengths]
    figures = {"peak memory (GiB)": [run.peak_gib for run in runs], "tokens per second": [run.figure("tokens_per_sec") for run in runs]}
    figures = {title: values for title, values in figures.items() if any(values)}
    return (_draw_cost_lines if len(lengths) > 1 else _draw_cost_bars)(runs, styles, figures)


def _draw_cost_lines(runs: list[Run], styles: dict[str, Style], figures: dict[str, list[float | None]]) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    lengths = sorted({run.seq_len for run in runs})
    figure = Figure(figsize=(9.6 if len(figures) > 1 else 6.4, 4.2), layout="constrained")
    grid = figure.subplots(1, len(figures), squeeze=False)[0]
    out_of_memory = {(run.variant, run.seq_len) for run in runs if run.status == "oom"}
    for axes, (title, values) in zip(grid, figures.items(), strict=True):
        axes.set(xscale="log", yscale="log", xlabel="seq_len")
        crossed = out_of_memory and title.startswith("peak")
        # the crosses stand between the axes and the title
        axes.set_title(title, pad=26 if crossed else 6)
        for i, (variant, style) in enumerate(styles.items()):
            mean = {n: _mean(x for run, x in zip(runs, values, strict=True) if (run.variant, run.seq_len) == (variant, n)) for n in lengths}
            axes.plot(*_xy({n: value for n, value in mean.items() if value}), **style.line)
            for n in lengths if crossed else ():
                if (variant, n) in out_of_memory:
                    # the height is a share of the picture: memory that was not there has no amount
                    height = 1.03 + 0.035 * (i % 3)
                    axes.plot([n], [height], "X", color=style.color, markersize=9, transform=axes.get_xaxis_transform(), clip_on=False)
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(base=2))
        axes.yaxis.set_major_formatter(short)
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlim(lengths[0] / 1.15, lengths[-1] * 1.15)
        if len(lengths) > 5:
            axes.tick_params(axis="x", rotation=35)
    _legend(figure, styles, {"out of memory": "X"} if out_of_memory else {})
    return figure


def _draw_cost_bars(runs: list[Run], styles: dict[str, Style], figures: dict[str, list[float | None]]) -> Any:
    from matplotlib.figure import Figure

    variants = [variant for variant in styles if any(run.variant == variant for run in runs)]
    figure = Figure(figsize=(9.6 if len(figures) > 1 else 6.4, 0.9 + 0.34 * len(variants)), layout="constrained")
    grid = figure.subplots(1, len(figures), squeeze=False, sharey=True)[0]
    for axes, (title, values) in zip(grid, figures.items(), strict=True):
        longest = max(value for value in values if value is not None)
        for place, variant in enumerate(variants):
            group = [(run, value) for run, value in zip(runs, values, strict=True) if run.variant == variant]
            known = [value for _, value in group if value is not None]
            mean = _mean(known)
            if mean is not None:
                hatch = None if styles[variant].linestyle == "-" else "////"
                axes.barh(place, mean, height=0.7, color=styles[variant].color, hatch=hatch, edgecolor=PAPER, linewidth=0)
            if len(known) > 1:
                axes.plot([min(known), max(known)], [place, place], color=INK, linewidth=1.2)
                axes.plot(known, [place] * len(known), "o", color=INK, markersize=2.5)
            label = short(mean) if mean is not None else ", ".join(sorted({run.status for run, _ in group}))
            axes.text(max([0, *known]) + 0.015 * longest, place, label, va="center", fontsize=9)
        axes.set(title=title, xlim=(0, 1.14 * longest))
        axes.xaxis.set_major_formatter(short)
        axes.xaxis.set_major_locator(_few_ticks())
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    grid[0].set_yticks(range(len(variants)), variants)
    grid[0].invert_yaxis()
    return figure


def _legend(figure: Any, styles: dict[str, Style], marks: dict[str, str]) -> None:
    """The variants, and what the marks (by their meaning) on the curves say."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **style.line | {"linewidth": 2, "markersize": 6}, label=variant) for variant, style in styles.items()]
    look = {"color": INK, "linestyle": "", "markersize": 8}
    handles += [Line2D([], [], **look, marker=marker, label=meaning) for meaning, marker in marks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), handlelength=3, fontsize=9)


def _few_ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4)


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _xy(curve: dict[float, float]) -> tuple[Sequence[float], Sequence[float]]:
    return list(curve), list(curve.values())


def short(value: float, _: Any = None) -> str:
    """1500 -> 1.5k, 2000000 -> 2M"""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
