"""Draw README's picture, results/headline.png and headline_dark.png, from the JSON file of its
runs.

    python -m lab.headline

Reads results/headline_h200.json, and measures nothing. Rewrites both pictures, which git tracks.
"""

from pathlib import Path
from typing import Any

from lab.results import FOLDER, load
from scripts.arguments import NoOptions, command
from scripts.tables import Row, by
from training.record.palette import BACKENDS

PANELS = {
    "val/loss": "Loss under its own attention",
    "val/loss_exact": "Loss of the same weights under exact attention",
}
WORDS = {"triton": "exact", "no_max": "no_max dies"}
# CSS's invert(1) hue-rotate(180deg), with black replaced by the background of GitHub's dark pages
HUES = ((-0.574, 1.43, 0.144), (0.426, 0.43, 0.144), (0.426, 1.43, -0.856))
DARK_PAPER = (13 / 255, 17 / 255, 23 / 255)


def draw(axes: Any, name: str, runs: list[Row], column: str) -> None:
    """One curve for each seed of an attention, without step 0, and the name at their end."""
    ends = []
    for run in runs:
        curve = zip(run["curves"]["step"], run["curves"][column], strict=True)
        points = [(step, value) for step, value in curve if step and value is not None]
        axes.plot(*zip(*points, strict=True), color=BACKENDS[name], linewidth=1.4)
        ends.append(points[-1])
        if run["status"] == "diverged":
            axes.plot(*ends[-1], "x", color=BACKENDS[name], markersize=9, markeredgewidth=2)
    at = max(ends)[0], sum(value for _, value in ends) / len(ends)
    style = {"color": BACKENDS[name], "fontsize": 11, "va": "center"}
    axes.annotate(WORDS.get(name, name), at, xytext=(9, 0), textcoords="offset points", **style)


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
    from matplotlib.figure import Figure

    runs = [run for run in load("headline_h200")["runs"] if run["dtype"] == "bfloat16"]
    figure = Figure(figsize=(11, 4), layout="constrained")
    grid = figure.subplots(1, 2)
    for axes, (column, title) in zip(grid.flat, PANELS.items(), strict=True):
        for name, group in by(runs, "attention").items():
            draw(axes, name, group, column)
        axes.set(title=title, xlabel="optimizer step", xlim=(0, 3150), ylim=(0.5, 3.7))
        axes.set_xticks(range(0, 2501, 500))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    grid.flat[0].set_ylabel("held-out loss, nats per byte")
    path = FOLDER / "headline.png"
    figure.savefig(path, dpi=150)
    for_both_papers(path)
    print(f"{path} and {path.stem}_dark.png")


if __name__ == "__main__":
    main()
