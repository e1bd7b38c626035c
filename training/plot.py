"""The loss curve of one run, drawn from its metrics.jsonl."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.files import read_metrics


@contextmanager
def plain_text() -> Iterator[None]:
    """Decorates a function that draws: a dollar sign in a name does not start a formula."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        yield


@plain_text()
def draw_loss_curve(run_dir: Path, *, title: str) -> Path | None:
    """Draw RUN/loss_curve.png: losses against tokens. Returns None if there is nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")  # without a screen
    from matplotlib import pyplot

    rows = read_metrics(run_dir / "metrics.jsonl")
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    styles = {
        "train/loss": {"color": "#9ecae1", "linewidth": 1},
        "val/loss": {"color": "#08519c", "marker": "o", "markersize": 4},
        "val/loss_exact": {"color": "#d94801", "marker": "x", "markersize": 5, "linestyle": "--"},
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
