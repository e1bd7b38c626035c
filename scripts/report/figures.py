"""The figures of a report. Each function returns its panels as matplotlib figures, which
scripts/report/drawing.py turns into SVG.
"""

from collections.abc import Sequence
from math import floor, log2
from statistics import fmean
from textwrap import wrap
from typing import Any

from attention import LIMITS
from scripts.drawing import new_figure
from scripts.report.drawing import INK, PAPER, SOFT, Style, short
from scripts.report.runs import Run, measured
from scripts.tables import grouped

# exp overflows above these scores; bfloat16 has float32's range
FLOAT16_LIMIT, FLOAT32_LIMIT = min(LIMITS.values()), max(LIMITS.values())
NAME_WIDTH = 40  # characters of a bar's name in one line; a longer line leaves no room for bars
OTHER_POINTS = 5  # least points of a curve other than a loss; a loss needs two
# drawn elsewhere, or only bookkeeping
DRAWN = {
    "step",
    "tokens",
    "seconds",
    "lr",
    "mfu",
    "tokens_per_sec",
    "step_tokens_per_sec",
    "train/loss",
    "val/loss",
    "val/loss_exact",
    "val/bpb",  # the loss times a constant
    "val/bpb_exact",
    "val/accuracy",
    "val/accuracy_exact",
}

PEAK = "memory/peak_gib"
# metrics drawn against length, by title
COSTS = {
    "peak memory (GiB)": PEAK,
    "tokens per second, the steps alone": "step_tokens_per_sec",
}
Curve = dict[float, float]
# by status: marker and legend text
END_MARKS = {"diverged": ("X", "diverged: last finite value"), "oom": ("s", "out of memory")}


def curve_lengths(runs: list[Run], *metrics: str) -> list[int]:
    """Sequence lengths at which some run logged enough values of a metric for a curve."""
    return sorted({run.seq_len for run in runs if not set(metrics).isdisjoint(run.logged)})


def draw_curves(
    runs: list[Run], styles: dict[str, Style], metric: str, train_metric: str | None = None
) -> list[Any]:
    """For each sequence length, a panel with each variant under its own attention, and one with the
    same weights under exact attention.
    """
    exact_metric = f"{metric}_exact"
    lengths = curve_lengths(runs, metric, *([train_metric] if train_metric else []))
    has_exact = any(run.curve(exact_metric) for run in runs)
    figures = []
    for seq_len in lengths:
        here = [run for run in runs if run.seq_len == seq_len]
        limits = _limits(here, metric, train_metric)
        length = f", seq_len={seq_len:,}" if seq_len else ""
        titles = {metric: f"{metric}: own attention{length}"}
        if has_exact:
            titles[exact_metric] = f"{exact_metric}: under exact attention{length}"
        for column, title in titles.items():
            figure, axes = new_figure(size=(4.7, 3.4))
            figures.append(figure)
            for variant, style in styles.items():
                group = [run for run in here if run.variant == variant]
                draw_seeds(axes, [run.curve(column) for run in group], style)
                for tokens in set().union(*(run.switches for run in group)):
                    dotted = {"linewidth": 1, "linestyle": (0, (1, 2)), "zorder": 2}
                    axes.axvline(tokens, color=style.color, **dotted)
                if train_metric and column == metric:
                    mean, _, rest = over_seeds([run.curve(train_metric) for run in group])
                    faint = {"color": style.color, "alpha": 0.3, "linewidth": 0.8, "zorder": 1}
                    for curve in [mean, *rest]:
                        axes.plot(*_xy(curve), **faint)
            axes.set(xlabel="training tokens", title=title, ylim=limits)
            axes.set_ylabel("nats per token" if "loss" in metric else metric.rpartition("/")[2])
            axes.xaxis.set_major_formatter(short)
            for run in here if column == metric else ():
                curve = (run.curve(train_metric) if train_metric else {}) | run.curve(metric)
                _mark_end(axes, run, curve, styles[run.variant])
    return figures


def over_seeds(curves: list[Curve]) -> tuple[Curve, dict[float, list[float]], list[Curve]]:
    """The mean of the curves of several seeds, the values behind it, and the rest of each curve
    after it.

    The mean ends where the first seed ends: over fewer seeds it would have another meaning.
    """
    curves = [curve for curve in curves if curve]
    if len(curves) < 2:
        return (curves[0] if curves else {}), {}, []
    common = sorted(set.intersection(*map(set, curves)))
    if len(common) < 2:
        return {}, {}, curves
    values = {tokens: [curve[tokens] for curve in curves] for tokens in common}
    mean = {tokens: fmean(each) for tokens, each in values.items()}
    rest = [{x: y for x, y in curve.items() if x >= common[-1]} for curve in curves]
    return mean, values, [curve for curve in rest if len(curve) > 1]


def draw_seeds(axes: Any, curves: list[Curve], style: Style) -> None:
    """Draw one seed as a line; several as their mean with a band, plus a thin line for each seed
    that lasts longer.
    """
    mean, values, rest = over_seeds(curves)
    color = style.color
    if values:
        ends = list(map(min, values.values())), list(map(max, values.values()))
        axes.fill_between(list(values), *ends, color=color, alpha=0.2, linewidth=0, zorder=2)
    for curve in rest:
        axes.plot(*_xy(curve), color=color, linestyle=style.linestyle, linewidth=0.9, zorder=3)
    if mean:
        axes.plot(*_xy(mean), **style.line, markevery=max(1, len(mean) // 12), zorder=3)


def _mark_end(axes: Any, run: Run, curve: Curve, style: Style) -> None:
    """Draw a cross at the last finite value of a diverged run, or a square where a run ran out of
    memory.
    """
    if not curve or run.status not in END_MARKS:
        return
    tokens = max(curve)
    # a curve that shot up gets its mark at the upper edge
    height = min(curve[tokens], axes.get_ylim()[1])
    look = {"color": style.color, "markeredgecolor": INK, "markersize": 10}
    marker, _ = END_MARKS[run.status]
    axes.plot([tokens], [height], marker, **look, zorder=5, clip_on=False)


def end_marks(runs: list[Run]) -> dict[str, str]:
    statuses = {run.status for run in runs if run.metrics}
    marks = {words: marker for status, (marker, words) in END_MARKS.items() if status in statuses}
    return marks | ({"attention switched": "|"} if any(run.switches for run in runs) else {})


def _limits(runs: list[Run], metric: str, train_metric: str | None) -> tuple[float, float]:
    """Axis limits that ignore the untrained model and diverging curves."""
    if "accuracy" in metric:
        return -0.02, 1.02

    def curves(runs: list[Run], *metrics: str) -> list[list[float]]:
        return [list(run.curve(name).values()) for run in runs for name in metrics]

    own = (metric, f"{metric}_exact")
    everything = curves(runs, *own, *filter(None, [train_metric]))
    # the first value of a curve is from the untrained model
    held_out = curves([run for run in runs if run.status != "diverged"], *own)
    learnt = [values[1:] for values in held_out if len(values) > 1]
    learnt = learnt or [values[1:2] or values for values in everything]
    bottom = min(x for values in everything for x in values)
    top = max(x for values in learnt for x in values)
    height = top - bottom or 1
    return bottom - 0.05 * height, top + 0.06 * height


def other_metrics(runs: list[Run]) -> list[str]:
    """All other metrics that the runs logged often enough for a curve."""
    names = dict.fromkeys(
        name for run in runs for name in run.logged if len(run.curve(name)) >= OTHER_POINTS
    )
    return [name for name in names if name not in DRAWN and not name.startswith("memory/")]


def draw_others(runs: list[Run], styles: dict[str, Style]) -> list[Any]:
    """A small panel for each metric and sequence length: mean and band over seeds."""
    panels = [
        (metric, length) for metric in other_metrics(runs) for length in curve_lengths(runs, metric)
    ]
    lengths = {seq_len for _, seq_len in panels}
    figures = []
    for metric, seq_len in panels:
        figure, axes = new_figure(size=(3.1, 2.4))
        figures.append(figure)
        here = [run for run in runs if run.seq_len == seq_len and metric in run.logged]
        for variant, style in styles.items():
            draw_seeds(axes, [run.curve(metric) for run in here if run.variant == variant], style)
        values = [value for run in here for value in run.curve(metric).values()]
        _scale(axes, values)
        if metric == "attention/max_score":
            draw_limits(axes, max(values))
        axes.set_title(metric + (f", {seq_len:,}" if len(lengths) > 1 else ""), fontsize=9.5)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_formatter(short)
        axes.locator_params(axis="x", nbins=4)
    return figures


def _scale(axes: Any, values: Sequence[float]) -> None:
    """Use a logarithmic scale if the values span more than a factor of 30."""
    from matplotlib.ticker import LogLocator

    if min(values) > 0 and max(values) > 30 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_formatter("")
        axes.yaxis.set_major_formatter(short)
    elif max(map(abs, values)) >= 1000:
        axes.yaxis.set_major_formatter(short)


def draw_limits(axes: Any, largest: float) -> None:
    """Draw a line at the score above which exp overflows in float16 and, if scores exceed that, one
    for float32 and bfloat16.
    """
    line = {"color": SOFT, "linewidth": 0.9, "linestyle": (0, (2, 2))}
    look = {
        "xycoords": ("axes fraction", "data"),
        "textcoords": "offset points",
        "xytext": (0, -3),
        "fontsize": 7.5,
        "color": SOFT,
        "va": "top",
    }
    axes.axhline(FLOAT16_LIMIT, **line)
    axes.annotate(f"{FLOAT16_LIMIT:.2f} float16", (0.99, FLOAT16_LIMIT), ha="right", **look)
    if largest > FLOAT16_LIMIT:
        # scores grow, so there is room for text on the left below the higher line
        axes.axhline(FLOAT32_LIMIT, **line)
        axes.annotate(f"{FLOAT32_LIMIT:.2f} float32, bfloat16", (0.01, FLOAT32_LIMIT), **look)


def draw_history(history: Curve, bad_step: float | None, style: Style) -> list[Any]:
    """Draw the largest score over the steps of a diverged run."""
    figure, axes = new_figure(size=(4.4, 1.9))
    marker = "o" if len(history) < 12 else None
    axes.plot(*_xy(history), color=style.color, linewidth=1.6, marker=marker, markersize=3)
    _scale(axes, list(history.values()))
    draw_limits(axes, max(history.values()))
    if bad_step is not None:
        axes.axvline(bad_step, color=INK, linewidth=1)
    axes.locator_params(axis="x", nbins=5, integer=True)
    axes.set_xlabel("step", fontsize=8.5)
    axes.set_title("largest score", fontsize=9)
    axes.tick_params(labelsize=8)
    return [figure]


def cost_lengths(runs: list[Run]) -> list[int]:
    """Sequence lengths for which there is a peak, a speed or an out-of-memory run to draw. A run
    that failed at once has none of these.
    """
    told = [run for run in runs if run.status == "oom" or any(map(run.figure, COSTS.values()))]
    return sorted({run.seq_len for run in told} - {0})


def draw_cost(runs: list[Run], styles: dict[str, Style]) -> list[Any]:
    """Peak memory and speed: against the sequence length if there are several, else as a bar per
    variant.
    """
    lengths = cost_lengths(runs)
    by_variant = grouped((run for run in runs if run.seq_len in lengths), lambda run: run.variant)
    groups = [(style, by_variant[name]) for name, style in styles.items() if name in by_variant]
    figures = []
    for title, name in COSTS.items():
        if not any(run.figure(name) for _, group in groups for run in group):
            continue
        several = len(lengths) > 1
        lines = max(bar_name(runs[0]).count("\n") for _, runs in groups) + 1
        bars = 0.7 + (0.34 if lines < 3 else 0.17 * lines) * len(groups)
        figure, axes = new_figure(size=(4.7, 3.6 if several else bars))
        figures.append(figure)
        if several:
            _draw_cost_lines(axes, groups, name)
        else:
            _draw_cost_bars(axes, groups, name)
        if not several:  # beside long names the axes are narrower than the title
            figure.suptitle(title, x=0.01, ha="left", size=10.5)
            continue
        # leave room for out-of-memory crosses between axes and title
        crossed = name == PEAK and any(run.status == "oom" for run in runs)
        axes.set_title(title, pad=26 if crossed else None)
    return figures


def _draw_cost_lines(axes: Any, groups: list[tuple[Style, list[Run]]], name: str) -> None:
    from matplotlib.ticker import LogLocator

    axes.set(xscale="log", yscale="log", xlabel="seq_len")
    for i, (style, runs) in enumerate(groups):
        by_length = sorted(grouped(runs, lambda run: run.seq_len).items())
        values = {length: measured(group, name) for length, group in by_length}
        mean = {length: fmean(found) for length, found in values.items() if any(found)}
        axes.plot(*_xy(mean), **style.line)
        ran_out = sorted({run.seq_len for run in runs if run.status == "oom"})
        if ran_out and name == PEAK:
            # above the axes, because the missing memory has no amount
            where = {"transform": axes.get_xaxis_transform(), "clip_on": False}
            height = [1.03 + 0.035 * (i % 3)] * len(ran_out)
            axes.plot(ran_out, height, "X", color=style.color, markersize=9, **where)
    everything = [run for _, runs in groups for run in runs]
    lengths = sorted({run.seq_len for run in everything})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    drawn = [value for value in measured(everything, name) if value]
    # limits are powers of two, so that there are ticks
    low, high = (floor(log2(value)) for value in (min(drawn), max(drawn)))
    axes.set_ylim(2**low, 2 ** (high + 1))
    axes.yaxis.set_major_locator(LogLocator(base=2))
    axes.yaxis.set_major_formatter(short)
    axes.minorticks_off()
    axes.set_xlim(lengths[0] / 1.15, lengths[-1] * 1.15)
    if len(lengths) > 5:
        axes.tick_params(axis="x", rotation=35)


def bar_name(run: Run) -> str:
    """A variant's name in lines that leave room for its bar."""
    return "\n".join(wrap(run.variant, NAME_WIDTH, break_on_hyphens=False))


def _draw_cost_bars(axes: Any, groups: list[tuple[Style, list[Run]]], name: str) -> None:
    longest = max(value for _, runs in groups for value in measured(runs, name))
    for place, (style, runs) in enumerate(groups):
        values = measured(runs, name)
        label = ", ".join(sorted({run.status for run in runs}))
        if values:
            label = short(fmean(values))
            hatch = None if style.linestyle == "-" else "////"
            look = {"color": style.color, "edgecolor": PAPER, "linewidth": 0, "hatch": hatch}
            axes.barh(place, fmean(values), height=0.7, **look)
        if len(values) > 1:
            axes.plot([min(values), max(values)], [place, place], color=INK, linewidth=1.2)
            axes.plot(values, [place] * len(values), "o", color=INK, markersize=2.5)
        end = max([0, *values]) + 0.015 * longest
        axes.text(end, place, label, va="center", fontsize=9)
    axes.set_xlim(0, 1.14 * longest)
    axes.xaxis.set_major_formatter(short)
    axes.locator_params(axis="x", nbins=4)
    axes.set_yticks(range(len(groups)), [bar_name(runs[0]) for _, runs in groups])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _xy(curve: Curve) -> tuple[Sequence[float], Sequence[float]]:
    return list(curve), list(curve.values())
