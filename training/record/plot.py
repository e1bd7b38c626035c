"""Pictures of one run, drawn from its metrics.jsonl: its losses, and its largest scores."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attention import LIMITS
from training.record.files import read_metrics
from training.record.palette import INK, attention_color, mixed


@contextmanager
def plain_text() -> Iterator[None]:
    """Decorates a function that draws: a dollar sign in a name does not start a formula."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        yield


def new_figure(*grid: int, size: tuple[float, float], **settings: Any) -> tuple[Any, Any]:
    """A figure and its axes, like pyplot.subplots(), but it needs no screen and no close()."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(*grid, **settings)


def save_figure(figure: Any, path: Path, *, dpi: int = 150) -> Path:
    figure.savefig(path, dpi=dpi)
    return path


@plain_text()
def draw_loss_curve(run_dir: Path, *, title: str, attention: str) -> Path | None:
    """Draw RUN/loss_curve.png: losses against tokens, in the colour of the run's attention.
    Returns None if there is nothing to draw.
    """
    rows = read_metrics(run_dir / "metrics.jsonl")
    figure, axes = new_figure(size=(7, 4))
    color = attention_color(attention)
    styles = {
        "train/loss": {"color": mixed(color, 0.55), "linewidth": 1},
        "val/loss": {"color": color, "marker": "o", "markersize": 4},
        "val/loss_exact": {"color": INK, "marker": "x", "markersize": 5, "linestyle": "--"},
    }
    for name, style in styles.items():
        points = [(row["tokens"], row[name]) for row in rows if row.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, **style)
    if not axes.lines:
        return None
    axes.set(xlabel="tokens", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    return save_figure(figure, run_dir / "loss_curve.png")


@plain_text()
def draw_max_scores(run_dir: Path, *, title: str) -> Path | None:
    """Draw RUN/max_scores.png: the largest attention score of each layer and head against tokens.

    Returns None if there is nothing to draw.
    """
    import numpy as np

    rows = read_metrics(run_dir / "metrics.jsonl")
    by_tokens = {row["tokens"]: row.get("attention/max_score_by_head") for row in rows}
    by_tokens = {tokens: scores for tokens, scores in by_tokens.items() if scores}
    if len(by_tokens) < 2:
        return None
    by_head = np.array([*by_tokens.values()], dtype=float)
    count, layers, heads = by_head.shape
    scores = by_head.reshape(count, -1).T  # (layers * heads, count)
    tokens = [0, *by_tokens]  # a row of metrics covers the time since the row before it
    figure, axes = new_figure(size=(7, 4))
    image = axes.pcolormesh(tokens, np.arange(layers * heads + 1), scores)
    bar = figure.colorbar(image, label="largest score of the step")
    for limit, name in ((min(LIMITS.values()), "float16"), (max(LIMITS.values()), "float32")):
        if np.nanmin(scores) < limit < np.nanmax(scores):
            bar.ax.axhline(limit, color="red")
            bar.ax.text(0.5, limit, f"exp overflows {name}", color="red", fontsize=6, ha="center")
    middles = (np.arange(layers) + 0.5) * heads
    axes.set_yticks(middles, [f"layer {layer}" for layer in range(layers)])
    axes.hlines(np.arange(1, layers) * heads, 0, tokens[-1], color="white", linewidth=1)
    axes.set_ylim(layers * heads, 0)
    axes.set(xlabel="tokens", ylabel=f"{heads} heads each", title=title)
    return save_figure(figure, run_dir / "max_scores.png")
