"""The figures of training runs: exact attention beside the two defects."""

from pathlib import Path
from statistics import fmean
from typing import Any

from attention import LIMITS
from lab.results.tables import finite
from scripts.drawing import new_figure, save_figure
from scripts.tables import Row, by, grouped
from training.palette import BACKENDS

WORDS = {"triton": "exact"}


def points(run: Row, column: str) -> dict[int, float]:
    """Finite values of one curve by step, without step 0."""
    curve = zip(run["curves"]["step"], run["curves"][column], strict=True)
    return {step: value for step, value in curve if step and value is not None}


def plot_run(axes: Any, run: Row, column: str, **style: Any) -> None:
    curve = points(run, column)
    axes.plot(list(curve), list(curve.values()), color=BACKENDS[run["attention"]], **style)


def finish(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path, dpi=150)


def draw_headline(runs: list[Row], retrieval: list[Row], path: Path) -> None:
    """Four panels: loss under the run's own attention, under exact attention, the largest score,
    and accuracy on last_write.
    """
    figure, grid = new_figure(2, 2, size=(11, 7.5))
    own, exact, score, accuracy = grid.flat
    for (name, dtype), group in by(runs, "attention", "dtype").items():
        style = {"linestyle": ":" if dtype == "float16" else "-", "linewidth": 1.2}
        for run in group:
            label = f"{WORDS.get(name, name)}, {dtype}" if run is group[0] else None
            plot_run(own, run, "val/loss", label=label, **style)
            plot_run(exact, run, "val/loss_exact", **style)
            plot_run(score, run, "attention/max_score", **style)
            if run["status"] == "diverged":
                for axes in (own, exact, score):
                    mark_end(axes)
    own.set(title="held-out loss under the run's own attention", ylabel="nats per byte")
    exact.set(title="the same weights under exact attention", ylabel="nats per byte")
    score.set_title("largest attention score, and where its exponential overflows")
    score.set_yscale("log")
    for axes in (own, exact, score):
        axes.set_xlabel("optimizer step")
    low, high = min(LIMITS.values()), max(LIMITS.values())
    for limit in (low, high):
        score.axhline(limit, color="#555555", linestyle="--", linewidth=0.8)
    # where no curve passes
    left, right = score.get_xlim()
    score.text(right, 0.95 * low, "float16", ha="right", va="top", fontsize=8)
    score.text(left, 1.06 * high, " bfloat16, float32", ha="left", va="bottom", fontsize=8)
    draw_accuracy(accuracy, retrieval)
    accuracy.set_title("another task, a small model: accuracy on last_write")
    own.legend(fontsize=8)
    accuracy.legend(fontsize=8)
    finish(figure, path)


def mark_end(axes: Any) -> None:
    """A cross at the last point of the last curve."""
    line = axes.lines[-1]
    where = line.get_xdata()[-1:], line.get_ydata()[-1:]
    axes.plot(*where, "x", color=line.get_color(), markersize=9, markeredgewidth=2)


def draw_accuracy(axes: Any, runs: list[Row]) -> None:
    """Accuracy on last_write by tile size: no_rescale and exact attention."""
    by_name = by(runs, "attention")
    tiles = grouped(by_name["no_rescale"], lambda run: run["options"]["block_kv"])
    by_tile = {size: finite(tiles[size], "val/accuracy") for size in sorted(tiles)}
    color = BACKENDS["no_rescale"]
    axes.plot(list(by_tile), list(map(fmean, by_tile.values())), color=color, label="no_rescale")
    for size, values in by_tile.items():
        axes.plot([size] * len(values), values, "o", color=color, alpha=0.6)
    exact = fmean(finite(by_name["tiled"], "val/accuracy"))
    axes.axhline(exact, color=BACKENDS["triton"], label="exact")
    axes.set(xscale="log", xlabel="keys of a tile (sequence of 128)", ylim=(0, 1.03))
    axes.set(ylabel="held-out accuracy")
    axes.set_xticks(list(by_tile), map(str, by_tile))


def draw_retrieval(runs: list[Row], path: Path) -> None:
    figure, axes = new_figure(size=(6, 4))
    draw_accuracy(axes, runs)
    axes.set_title("last_write")
    axes.legend()
    finish(figure, path)


def draw_text(runs: list[Row], path: Path) -> None:
    """Loss under the run's own attention beside that under exact attention."""
    figure, panels = new_figure(1, 2, size=(11, 4), sharey=True)
    for (name, dtype), group in by(runs, "attention", "dtype").items():
        if dtype != "bfloat16" and name != "no_max":
            continue
        for run in group:
            steps = next(x for x in run["overrides"] if x.startswith("steps=")).partition("=")[2]
            label = f"{name}, {dtype}, schedule of {steps}" if run is group[0] else None
            style = {
                "linestyle": ":" if dtype == "float32" else "-",
                "marker": "x" if run["status"] == "diverged" else None,
            }
            for axes, column in zip(panels, ("val/loss", "val/loss_exact"), strict=True):
                plot_run(axes, run, column, label=label, **style)
    own, exact = panels
    own.set(title="held-out loss under the run's own attention", ylabel="nats per byte")
    exact.set(title="the same weights under exact attention")
    for axes in panels:
        axes.set_xlabel("optimizer step")
        axes.legend()
    finish(figure, path)


def crossing(exact: list[Row], broken: list[Row]) -> int | None:
    """The first evaluated step from which on the broken runs' mean loss stays above the exact
    ones'.
    """
    curves = [points(run, "val/loss") for run in (*exact, *broken)]
    first = None
    for step in sorted(set.intersection(*map(set, curves)), reverse=True):
        losses = [curve[step] for curve in curves]
        if fmean(losses[len(exact) :]) <= fmean(losses[: len(exact)]):
            break
        first = step
    return first


def root_mean_square(values: list[float]) -> float:
    return fmean(x * x for x in values) ** 0.5


def differences(a: Row, b: Row) -> list[float]:
    """Differences of the training losses, step by step."""
    pairs = zip(a["curves"]["train/loss"], b["curves"]["train/loss"], strict=True)
    return [x - y for x, y in pairs if x is not None and y is not None]
