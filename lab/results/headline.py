"""The headline: exact attention beside no_rescale and no_max in one GPT-2-sized model, drawn from
results/headline_h200.json.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.plots import COLORS

Runs = list[dict[str, Any]]
WORDS = {"triton": "exact", "no_rescale": "no_rescale", "no_max": "no_max"}


def points(run: dict[str, Any], column: str) -> tuple[list[int], list[float]]:
    """Steps and values of one curve, without step 0 and where the value is finite."""
    curves = run["curves"]
    found = [
        (step, value)
        for step, value in zip(curves["step"], curves[column], strict=True)
        if value is not None and step
    ]
    return [step for step, _ in found], [value for _, value in found]


def draw_headline(runs: Runs, retrieval: Runs, path: Path) -> None:
    """Four panels: loss under the run's own attention, under exact attention, the largest score,
    and accuracy on last_write.
    """
    from matplotlib import pyplot

    figure, ((own, exact), (score, accuracy)) = pyplot.subplots(
        2, 2, figsize=(11, 7.5), layout="constrained"
    )
    labelled = set()
    for run in runs:
        name, dtype = run["attention"], run["dtype"]
        label = None if (name, dtype) in labelled else f"{WORDS[name]}, {dtype}"
        labelled.add((name, dtype))
        style = {
            "color": COLORS[name],
            "linestyle": ":" if dtype == "float16" else "-",
            "linewidth": 1.2,
        }
        for axis, column in (
            (own, "val/loss"),
            (exact, "val/loss_exact"),
            (score, "attention/max_score"),
        ):
            steps, values = points(run, column)
            axis.plot(steps, values, label=label, **style)
            if run["status"] == "diverged":
                axis.plot(
                    steps[-1:],
                    values[-1:],
                    "x",
                    color=COLORS[name],
                    markersize=9,
                    markeredgewidth=2,
                )
    own.set(
        title="held-out loss under the run's own attention",
        ylabel="nats per byte",
        xlabel="optimizer step",
    )
    exact.set(
        title="the same weights under exact attention",
        ylabel="nats per byte",
        xlabel="optimizer step",
    )
    score.set(
        title="largest attention score, and where its exponential overflows",
        yscale="log",
        xlabel="optimizer step",
    )
    for limit in (11.09, 88.72):
        score.axhline(limit, color="#555555", linestyle="--", linewidth=0.8)
    # where no curve passes
    score.text(score.get_xlim()[1], 10.5, "float16", ha="right", va="top", fontsize=8)
    score.text(score.get_xlim()[0], 94, " bfloat16, float32", ha="left", va="bottom", fontsize=8)
    by_tile: dict[int, list[float]] = {}
    for run in sorted(
        (run for run in retrieval if run["attention"] == "no_rescale"),
        key=lambda run: run["options"]["block_kv"],
    ):
        by_tile.setdefault(run["options"]["block_kv"], []).append(run["val/accuracy"])
    accuracy.plot(
        list(by_tile),
        [fmean(values) for values in by_tile.values()],
        "-",
        color=COLORS["no_rescale"],
        label="no_rescale",
    )
    for size, values in by_tile.items():
        accuracy.plot([size] * len(values), values, "o", color=COLORS["no_rescale"], alpha=0.6)
    reference = fmean(run["val/accuracy"] for run in retrieval if run["attention"] == "tiled")
    accuracy.axhline(reference, color=COLORS["triton"], label="exact")
    accuracy.set(
        title="another task, a small model: accuracy on last_write",
        xscale="log",
        xlabel="keys of a tile",
        ylim=(0, 1.03),
    )
    accuracy.set_xticks(list(by_tile), [str(size) for size in by_tile])
    for axis in (own, exact, score, accuracy):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    own.legend(fontsize=8)
    accuracy.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def crossing(exact: Runs, broken: Runs) -> int | None:
    """The first evaluated step from which on the broken runs' mean loss stays above the exact
    ones'.
    """
    means = []
    for runs in (exact, broken):
        curves = [dict(zip(*points(run, "val/loss"), strict=True)) for run in runs]
        means.append(
            {
                step: fmean(curve[step] for curve in curves)
                for step in sorted(set.intersection(*({*curve} for curve in curves)))
            }
        )
    shared = [step for step in means[0] if step in means[1]]
    above = [
        step
        for step in shared
        if all(means[1][later] > means[0][later] for later in shared if later >= step)
    ]
    return above[0] if above else None
