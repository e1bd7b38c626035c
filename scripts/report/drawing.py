"""The style of a report's figures, and their conversion to SVG.

A figure consists of panels. Each is drawn once in the colours of light paper, and is small enough
for a phone. Its SVG uses the page's CSS variables for colours, so the same picture works in light
mode, in dark mode and in print.
"""

import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from scripts.report.runs import Run
from scripts.tables import Row
from training.record.palette import INK, variant_colors
from training.record.runs import in_order

SOFT, GRID, PAPER = "#6a6a70", "#e4e4e8", "#ffffff"
VARIABLES = {INK: "--ink", SOFT: "--soft", GRID: "--grid", PAPER: "--paper"}
# without X, which marks a diverged run, and s, which marks one that ran out of memory
MARKERS = "oD^vPh*<>p"


@dataclass
class Style:
    color: str
    marker: str
    linestyle: Any
    linewidth: float

    @property
    def line(self) -> Row:
        """Arguments for matplotlib's plot()."""
        return {
            "color": self.color,
            "linestyle": self.linestyle,
            "linewidth": self.linewidth,
            "marker": self.marker,
            "markersize": 3.5 + self.linewidth,
        }


def variant_styles(runs: list[Run]) -> dict[str, Style]:
    """One colour and marker per variant. Defects come last and are dashed. Exact variants have
    coinciding curves, so their lines get narrower from bottom to top.
    """
    # a run that failed at once does not record that its attention is a defect, but another run of
    # that attention does
    defects = {run.summary.get("attention") for run in runs if run.is_defect}
    names = {run.variant: run.summary.get("attention", run.variant) for run in runs}
    is_defect = {variant: name in defects for variant, name in names.items()}
    exact = len(is_defect) - sum(is_defect.values())
    ordered = sorted(names, key=lambda variant: (is_defect[variant], in_order(variant)))
    colors = variant_colors({variant: names[variant] for variant in ordered})
    styles = {}
    for i, variant in enumerate(ordered):
        marker = MARKERS[i % len(MARKERS)]
        if is_defect[variant]:
            styles[variant] = Style(colors[variant], marker, linestyle=(0, (4, 2)), linewidth=1.7)
        else:
            width = 1.5 + 2.5 * (exact - 1 - i) / max(1, exact - 1)
            styles[variant] = Style(colors[variant], marker, linestyle="-", linewidth=width)
    return styles


def render(name: str, draw: Callable[[], Iterable[Any]]) -> list[str]:
    """Draw matplotlib figures in the report's style, each as an <svg> element. `name` makes their
    ids unique on the page.
    """
    import matplotlib

    look = {
        "text.color": INK,
        "axes.labelcolor": INK,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "axes.edgecolor": SOFT,
        "grid.color": GRID,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.titlelocation": "left",
        "axes.titlesize": 10.5,
        "font.size": 10,
        # keep text as text, which can be searched, copied and read aloud
        "svg.fonttype": "none",
        # a dollar sign in a file name does not start a formula
        "text.parse_math": False,
    }
    with matplotlib.rc_context(look | {"svg.hashsalt": name}):
        return [_svg(f"{name}{i}", figure) for i, figure in enumerate(draw())]


def _svg(name: str, figure: Any) -> str:
    file = io.StringIO()
    metadata = {"Date": None, "Creator": None}
    figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)

    def variable(found: re.Match) -> str:
        color = found[2]
        return f"{found[1]}var({VARIABLES.get(color) or '--c-' + color[1:]})"

    return re.sub(r"((?:fill|stroke): )(#[0-9a-f]{6})", variable, text)


def legend(name: str, styles: dict[str, Style], marks: dict[str, str]) -> dict[str, str]:
    """SVG samples by their labels: the variants, and the marks by their meanings."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    look = {"color": INK, "linestyle": "", "markersize": 8}
    looks = {
        variant: style.line | {"linewidth": 2, "markersize": 6} for variant, style in styles.items()
    } | {meaning: look | {"marker": marker} for meaning, marker in marks.items()}

    def draw() -> Iterable[Any]:
        for sample in looks.values():
            figure = Figure(figsize=(0.5, 0.18))
            figure.add_artist(Line2D([0, 0.5, 1], [0.5] * 3, **sample, markevery=[1]))
            yield figure

    return dict(zip(looks, render(f"{name}_legend", draw), strict=True))


def short(value: float, _: Any = None) -> str:
    """1500 -> 1.5k, 2000000 -> 2M"""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
