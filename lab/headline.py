"""Draw README's picture, results/headline.png and headline_dark.png, from the JSON files of its
runs.

    python -m lab.headline

Reads results/headline_h200.json and defects_retrieval.json, and measures nothing. Rewrites both
pictures, which git tracks.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

from attention import LIMITS
from lab.results import FOLDER, load
from scripts.arguments import NoOptions, command
from scripts.tables import Row, by, grouped, values
from training.record.palette import BACKENDS
from training.record.plot import new_figure, save_figure

WORDS = {"triton": "exact"}
# CSS's invert(1) hue-rotate(180deg), with black replaced by the background of GitHub's dark pages
HUES = ((-0.574, 1.43, 0.144), (0.426, 0.43, 0.144), (0.426, 1.43, -0.856))
DARK_PAPER = (13 / 255, 17 / 255, 23 / 255)


def plot_run(axes: Any, run: Row, column: str, **style: Any) -> None:
    """Finite values of one curve, without step 0."""
    curve = zip(run["curves"]["step"], run["curves"][column], strict=True)
    points = [(step, value) for step, value in curve if step and value is not None]
    axes.plot(*zip(*points, strict=True), color=BACKENDS[run["attention"]], **style)


def mark_end(axes: Any) -> None:
    """A cross at the last point of the last curve."""
    line = axes.lines[-1]
    where = line.get_xdata()[-1:], line.get_ydata()[-1:]
    axes.plot(*where, "x", color=line.get_color(), markersize=9, markeredgewidth=2)


def draw_runs(own: Any, exact: Any, score: Any, runs: list[Row]) -> None:
    """Three panels: loss under the run's own attention, under exact attention, the largest
    score.
    """
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


def draw_accuracy(axes: Any, runs: list[Row]) -> None:
    """Accuracy on last_write by tile size: no_rescale and exact attention."""
    by_name = by(runs, "attention")
    tiles = grouped(by_name["no_rescale"], lambda run: run["options"]["block_kv"])
    by_tile = {size: values(tiles[size], "val/accuracy") for size in sorted(tiles)}
    color = BACKENDS["no_rescale"]
    axes.plot(list(by_tile), list(map(fmean, by_tile.values())), color=color, label="no_rescale")
    for size, found in by_tile.items():
        axes.plot([size] * len(found), found, "o", color=color, alpha=0.6)
    exact = fmean(values(by_name["tiled"], "val/accuracy"))
    axes.axhline(exact, color=BACKENDS["triton"], label="exact")
    axes.set(xscale="log", xlabel="keys of a tile (sequence of 128)", ylim=(0, 1.03))
    axes.set(ylabel="held-out accuracy")
    axes.set_xticks(list(by_tile), map(str, by_tile))
    axes.set_title("another task, a small model: accuracy on last_write")


def for_both_papers(path: Path) -> None:
    """Write the picture again for dark pages, as NAME_dark.png: light and dark swap, the hues stay.
    Both files get a palette, which makes them small.
    """
    import numpy as np
    from PIL import Image

    light = Image.open(path).convert("RGB")
    colors = np.clip((1 - np.asarray(light) / 255) @ np.array(HUES).T, 0, 1)
    paper = np.array(DARK_PAPER)
    dark = Image.fromarray((255 * (paper + (1 - paper) * colors)).round().astype(np.uint8))
    for image, name in ((light, path.stem), (dark, f"{path.stem}_dark")):
        small = image.quantize(128, dither=Image.Dither.NONE)
        small.save(path.with_stem(name), optimize=True)


@command
def main(options: NoOptions) -> None:
    runs, retrieval = (load(name)["runs"] for name in ("headline_h200", "defects_retrieval"))
    figure, grid = new_figure(2, 2, size=(11, 7.5))
    own, exact, score, accuracy = grid.flat
    draw_runs(own, exact, score, runs)
    draw_accuracy(accuracy, retrieval)
    own.legend(fontsize=8)
    accuracy.legend(fontsize=8)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path = FOLDER / "headline.png"
    save_figure(figure, path, dpi=150)
    for_both_papers(path)
    print(f"{path} and {path.stem}_dark.png")


if __name__ == "__main__":
    main()
