"""The loss curve of one run, drawn from its metrics.jsonl."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.files import read_metrics
from training.palette import INK, mixed, variant_colors


@contextmanager
def plain_text() -> Iterator[None]:
    """Decorates a function that draws: a dollar sign in a name does not start a formula."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        yield


@plain_text()
def draw_loss_curve(run_dir: Path, *, title: str, attention: str) -> Path | None:
    """Draw RUN/loss_curve.png: losses against tokens, in the colour of the run's attention.
    Returns None if there is nothing to draw.
    """
    import matplotlib

    matplotlib.use("Agg")  # without a screen
    from matplotlib import pyplot

    rows = read_metrics(run_dir / "metrics.jsonl")
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    color = variant_colors({attention: attention})[attention]
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
        pyplot.close(figure)
        return None
    axes.set(xlabel="tokens", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    path = run_dir / "loss_curve.png"
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
