"""The figures of a report. Each function returns a matplotlib figure; scripts/report/drawing.py
takes it to the page.
"""

import math
from collections.abc import Sequence
from typing import Any

from attention import LIMITS
from scripts.report.drawing import INK, PAPER, SOFT, Style, legend, short
from scripts.report.runs import MIN_POINTS, Run

# past these scores exp overflows; bfloat16 has float32's range
FLOAT16_LIMIT, FLOAT32_LIMIT = min(LIMITS.values()), max(LIMITS.values())
# drawn elsewhere, or no more than bookkeeping
DRAWN = {"step", "tokens", "seconds", "lr", "mfu", "tokens_per_sec", "step_tokens_per_sec"}
DRAWN |= {"train/loss", "val/loss", "val/loss_exact", "val/accuracy", "val/accuracy_exact"}


def curve_lengths(runs: list[Run], *metrics: str) -> list[int]:
    """Sequence lengths at which some run logged enough of a metric for a curve."""
    return sorted({run.seq_len for run in runs if not set(metrics).isdisjoint(run.logged)})


def draw_curves(
    runs: list[Run], styles: dict[str, Style], metric: str, train_metric: str | None
) -> Any:
    """A row a sequence length: on the left each variant as it computes, on the right the same
    weights under exact attention.
    """
    from matplotlib.figure import Figure

    lengths = curve_lengths(runs, metric, *([train_metric] if train_metric else []))
    columns = (
        [metric, f"{metric}_exact"]
        if any(run.curve(f"{metric}_exact") for run in runs)
        else [metric]
    )
    figure = Figure(
        figsize=(9.6, (3.5 if len(lengths) < 4 else 2.7) * len(lengths) + 0.4), layout="constrained"
    )
    grid = figure.subplots(len(lengths), len(columns), sharey="row", sharex="row", squeeze=False)
    for row, seq_len in zip(grid, lengths, strict=True):
        here = [run for run in runs if run.seq_len == seq_len]
        for axes, column in zip(row, columns, strict=True):
            for variant, style in styles.items():
                group = [run for run in here if run.variant == variant]
                if train_metric and axes is row[0]:
                    mean, _, rest = over_seeds([run.curve(train_metric) for run in group])
                    for curve in [mean, *rest]:
                        axes.plot(
                            *_xy(curve), color=style.color, alpha=0.3, linewidth=0.8, zorder=1
                        )
                draw_seeds(axes, [run.curve(column) for run in group], style)
                for tokens in set().union(*(run.switches for run in group)):
                    axes.axvline(
                        tokens, color=style.color, linewidth=1, linestyle=(0, (1, 2)), zorder=2
                    )
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
    legend(figure, styles, _end_marks(runs))
    return figure


def over_seeds(
    curves: list[dict[float, float]],
) -> tuple[dict[float, float], dict[float, tuple[float, float]], list[dict[float, float]]]:
    """Of the curves of several seeds the mean, the lowest and highest value, and what is left of
    each curve after that.

    Mean and band end with the first seed that ends: a mean over those that are left would change
    its meaning on the way.
    """
    curves = [curve for curve in curves if curve]
    if len(curves) < 2:
        return (curves[0] if curves else {}), {}, []
    common = sorted(set.intersection(*map(set, curves)))
    if len(common) < 2:
        return {}, {}, curves
    values = {tokens: [curve[tokens] for curve in curves] for tokens in common}
    rest = [
        {tokens: value for tokens, value in curve.items() if tokens >= common[-1]}
        for curve in curves
    ]
    mean = {tokens: sum(x) / len(x) for tokens, x in values.items()}
    return (
        mean,
        {tokens: (min(x), max(x)) for tokens, x in values.items()},
        [curve for curve in rest if len(curve) > 1],
    )


def draw_seeds(axes: Any, curves: list[dict[float, float]], style: Style) -> None:
    """One seed: a line. Several: their mean, a band around it, and each of those that last longer
    as a thin line.
    """
    mean, band, rest = over_seeds(curves)
    if band:
        axes.fill_between(
            list(band),
            *zip(*band.values(), strict=True),
            color=style.color,
            alpha=0.2,
            linewidth=0,
            zorder=2,
        )
    for curve in rest:
        axes.plot(
            *_xy(curve), color=style.color, linestyle=style.linestyle, linewidth=0.9, zorder=3
        )
    if mean:
        axes.plot(*_xy(mean), **style.line, markevery=max(1, len(mean) // 12), zorder=3)


def _mark_end(axes: Any, run: Run, curve: dict[float, float], style: Style) -> None:
    """A cross where a diverged run had its last finite value; a square where memory ran out on the
    way.
    """
    if curve and run.status in ("diverged", "oom"):
        tokens = max(curve)
        marker = "X" if run.status == "diverged" else "s"
        # a curve that shot up has its mark at the upper edge
        height = min(curve[tokens], axes.get_ylim()[1])
        axes.plot(
            [tokens],
            [height],
            marker,
            color=style.color,
            markeredgecolor=INK,
            markersize=10,
            zorder=5,
            clip_on=False,
        )


def _end_marks(runs: list[Run]) -> dict[str, str]:
    ended = {run.status for run in runs if run.metrics}
    marks = {"diverged": ("diverged: last finite value", "X"), "oom": ("out of memory", "s")}
    switched = {"attention switched": "|"} if any(run.switches for run in runs) else {}
    return dict(mark for status, mark in marks.items() if status in ended) | switched


def _limit(axes: Any, runs: list[Run], metric: str, train_metric: str | None) -> None:
    """Limits that neither the untrained model nor a diverging curve stretches."""
    if "accuracy" in metric:
        axes.set_ylim(-0.02, 1.02)
        return
    held_out = [
        list(run.curve(name).values())
        for run in runs
        for name in (metric, f"{metric}_exact")
        if run.status != "diverged"
    ]
    everything = [
        list(run.curve(name).values())
        for run in runs
        for name in (metric, f"{metric}_exact", train_metric)
        if name
    ]
    # the first value of a curve is the untrained model's
    learnt = [values[1:] for values in held_out if len(values) > 1] or [
        values[1:2] or values for values in everything
    ]
    bottom, top = (
        min(x for values in everything for x in values),
        max(x for values in learnt for x in values),
    )
    axes.set_ylim(bottom - 0.05 * (top - bottom or 1), top + 0.06 * (top - bottom or 1))


def other_metrics(runs: list[Run]) -> list[str]:
    """What else the runs logged often enough for a curve, whatever its name."""
    names = dict.fromkeys(name for run in runs for name in run.logged)
    return [name for name in names if name not in DRAWN and not name.startswith("memory/")]


def draw_others(runs: list[Run], styles: dict[str, Style]) -> Any:
    """A small panel a metric (and sequence length): mean and band over seeds."""
    from matplotlib.figure import Figure

    panels = [
        (metric, seq_len)
        for metric in other_metrics(runs)
        for seq_len in curve_lengths(runs, metric)
    ]
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(9.6 if columns > 1 else 5, 2.5 * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    lengths = {seq_len for _, seq_len in panels}
    for axes, (metric, seq_len) in zip(grid, panels, strict=False):
        here = [
            run for run in runs if run.seq_len == seq_len and len(run.curve(metric)) >= MIN_POINTS
        ]
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
    legend(figure, styles, {})
    return figure


def _scale(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic scale for values over more than a factor of 30."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if min(values) > 0 and max(values) > 30 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(short)
    elif max(map(abs, values)) >= 1000:
        axes.yaxis.set_major_formatter(short)


def draw_limits(axes: Any, largest: float) -> None:
    """Lines at the scores past which exp overflows: the one of float16 and, once that is passed,
    the one of float32 and bfloat16.
    """
    axes.axhline(FLOAT16_LIMIT, color=SOFT, linewidth=0.9, linestyle=(0, (2, 2)))
    look = {
        "xycoords": ("axes fraction", "data"),
        "textcoords": "offset points",
        "fontsize": 7.5,
        "color": SOFT,
        "va": "top",
    }
    # scores grow: below the higher line there is room on the left
    axes.annotate(
        f"{FLOAT16_LIMIT:.2f} float16", (0.99, FLOAT16_LIMIT), xytext=(0, -3), ha="right", **look
    )
    if largest > FLOAT16_LIMIT:
        axes.axhline(FLOAT32_LIMIT, color=SOFT, linewidth=0.9, linestyle=(0, (2, 2)))
        axes.annotate(
            f"{FLOAT32_LIMIT:.2f} float32, bfloat16", (0.01, FLOAT32_LIMIT), xytext=(0, -3), **look
        )


def draw_history(history: dict[float, float], bad_step: float | None, style: Style) -> Any:
    """The largest score over the steps of one run that diverged."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.4, 1.9), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        *_xy(history),
        color=style.color,
        linewidth=1.6,
        marker="o" if len(history) < 12 else None,
        markersize=3,
    )
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
    """Sequence lengths with a peak, a speed or a lack of memory to draw; a run that failed at once
    has none.
    """
    known = [
        run
        for run in runs
        if run.peak_gib is not None or run.status == "oom" or run.figure("step_tokens_per_sec")
    ]
    return sorted({run.seq_len for run in known if run.seq_len})


def draw_cost(runs: list[Run], styles: dict[str, Style]) -> Any:
    """Peak memory and speed: against the sequence length where there are several, else a bar a
    variant.
    """
    lengths = cost_lengths(runs)
    runs = [run for run in runs if run.seq_len in lengths]
    speeds = [run.figure("step_tokens_per_sec") for run in runs]
    figures = {
        "peak memory (GiB)": [run.peak_gib for run in runs],
        "tokens per second, the steps alone": speeds,
    }
    figures = {title: values for title, values in figures.items() if any(values)}
    return (_draw_cost_lines if len(lengths) > 1 else _draw_cost_bars)(runs, styles, figures)


def _draw_cost_lines(
    runs: list[Run], styles: dict[str, Style], figures: dict[str, list[float | None]]
) -> Any:
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
            mean = {
                n: _mean(
                    x
                    for run, x in zip(runs, values, strict=True)
                    if (run.variant, run.seq_len) == (variant, n)
                )
                for n in lengths
            }
            axes.plot(*_xy({n: value for n, value in mean.items() if value}), **style.line)
            for n in lengths if crossed else ():
                if (variant, n) in out_of_memory:
                    # the height is a share of the picture: memory that was not there has no amount
                    height = 1.03 + 0.035 * (i % 3)
                    axes.plot(
                        [n],
                        [height],
                        "X",
                        color=style.color,
                        markersize=9,
                        transform=axes.get_xaxis_transform(),
                        clip_on=False,
                    )
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(base=2))
        axes.yaxis.set_major_formatter(short)
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlim(lengths[0] / 1.15, lengths[-1] * 1.15)
        if len(lengths) > 5:
            axes.tick_params(axis="x", rotation=35)
    legend(figure, styles, {"out of memory": "X"} if out_of_memory else {})
    return figure


def _draw_cost_bars(
    runs: list[Run], styles: dict[str, Style], figures: dict[str, list[float | None]]
) -> Any:
    from matplotlib.figure import Figure

    variants = [variant for variant in styles if any(run.variant == variant for run in runs)]
    figure = Figure(
        figsize=(9.6 if len(figures) > 1 else 6.4, 0.9 + 0.34 * len(variants)), layout="constrained"
    )
    grid = figure.subplots(1, len(figures), squeeze=False, sharey=True)[0]
    for axes, (title, values) in zip(grid, figures.items(), strict=True):
        longest = max(value for value in values if value is not None)
        for place, variant in enumerate(variants):
            group = [
                (run, value)
                for run, value in zip(runs, values, strict=True)
                if run.variant == variant
            ]
            known = [value for _, value in group if value is not None]
            mean = _mean(known)
            if mean is not None:
                hatch = None if styles[variant].linestyle == "-" else "////"
                axes.barh(
                    place,
                    mean,
                    height=0.7,
                    color=styles[variant].color,
                    hatch=hatch,
                    edgecolor=PAPER,
                    linewidth=0,
                )
            if len(known) > 1:
                axes.plot([min(known), max(known)], [place, place], color=INK, linewidth=1.2)
                axes.plot(known, [place] * len(known), "o", color=INK, markersize=2.5)
            label = (
                short(mean)
                if mean is not None
                else ", ".join(sorted({run.status for run, _ in group}))
            )
            axes.text(max([0, *known]) + 0.015 * longest, place, label, va="center", fontsize=9)
        axes.set(title=title, xlim=(0, 1.14 * longest))
        axes.xaxis.set_major_formatter(short)
        axes.xaxis.set_major_locator(_few_ticks())
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    grid[0].set_yticks(range(len(variants)), variants)
    grid[0].invert_yaxis()
    return figure


def _few_ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4)


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _xy(curve: dict[float, float]) -> tuple[Sequence[float], Sequence[float]]:
    return list(curve), list(curve.values())
