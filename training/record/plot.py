"""The picture of one run, drawn from its metrics.jsonl: its losses."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
