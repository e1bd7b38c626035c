"""What figures of scripts/ and lab/ share: panels without a screen, files that are whole."""

import io
from pathlib import Path
from typing import Any

from training.files import write_file


def new_figure(*grid: int, size: tuple[float, float], **settings: Any) -> tuple[Any, Any]:
    """A figure and its axes, as pyplot.subplots() gives them; nothing needs to be closed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(*grid, **settings)


def save_figure(figure: Any, path: Path, *, dpi: int) -> Path:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    write_file(path, picture.getvalue())
    return path
