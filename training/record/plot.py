"""The picture of one run, drawn from its metrics.jsonl: its losses."""

from pathlib import Path

from training.record.files import read_metrics
from training.record.palette import INK, attention_color


def draw_loss_curve(run_dir: Path, *, title: str, attention: str) -> Path | None:
    """Draw RUN/loss_curve.png: losses against tokens, in the colour of the run's attention.
    Returns None if there is nothing to draw.
    """
    from matplotlib.figure import Figure

    rows = read_metrics(run_dir / "metrics.jsonl")
    figure = Figure(figsize=(7, 4), layout="constrained")  # unlike pyplot's, it needs no screen
    axes = figure.subplots()
    color = attention_color(attention)
    styles = {
        "train/loss": {"color": color, "alpha": 0.45, "linewidth": 1},
        "val/loss": {"color": color, "marker": "o", "markersize": 4},
        "val/loss_exact": {"color": INK, "marker": "x", "markersize": 5, "linestyle": "--"},
    }
    for name, style in styles.items():
        points = [(row["tokens"], row[name]) for row in rows if row.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, **style)
    if not axes.lines:
        return None
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.set_title(title, parse_math=False)  # a dollar sign in a name starts no formula
    axes.grid(alpha=0.3)
    axes.legend()
    picture = run_dir / "loss_curve.png"
    figure.savefig(picture, dpi=150)
    return picture
