"""The look of a report's figures, and their way to the page.

A figure is drawn once, in the colours of light paper. In its SVG those colours become the page's
CSS variables: the same picture follows the reader from light to dark and onto white paper. The
Markdown file gets a PNG.
"""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from scripts.palette import ON_DARK
from scripts.report.runs import Run, in_order

INK, SOFT, GRID, PAPER = "#1c1c1e", "#6a6a70", "#e4e4e8", "#ffffff"
VARIABLES = {INK: "--ink", SOFT: "--soft", GRID: "--grid", PAPER: "--paper"} | {
    color: f"--series-{i}" for i, color in enumerate(ON_DARK)
}
# without the marks of a diverged run (X) and of one that ran out of memory (s)
MARKERS = "oD^vPh*<>p"


class Drawing(NamedTuple):
    svg: str  # one <svg> element without ids that another drawing has
    png: bytes


@dataclass
class Style:
    color: str
    marker: str
    linestyle: Any
    linewidth: float

    @property
    def line(self) -> dict[str, Any]:
        """What matplotlib's plot() takes."""
        return {
            "color": self.color,
            "linestyle": self.linestyle,
            "linewidth": self.linewidth,
            "marker": self.marker,
            "markersize": 3.5 + self.linewidth,
        }


def variant_styles(runs: list[Run]) -> dict[str, Style]:
    """One colour and marker a variant; defects last and dashed; exact ones, whose curves coincide,
    from wide below to narrow on top.
    """
    # a run that failed at once does not say that its attention is a defect; another of the same
    # attention does
    defects = {run.summary.get("attention") for run in runs if run.is_defect}
    is_defect = {run.variant: run.summary.get("attention") in defects for run in runs}
    exact = len(is_defect) - sum(is_defect.values())
    colors, styles = list(ON_DARK), {}
    ordered = sorted(is_defect, key=lambda variant: (is_defect[variant], in_order(variant)))
    for i, variant in enumerate(ordered):
        color, marker = colors[i % len(colors)], MARKERS[i % len(MARKERS)]
        if is_defect[variant]:
            styles[variant] = Style(color, marker, linestyle=(0, (4, 2)), linewidth=1.7)
        else:
            width = 1.5 + 2.5 * (exact - 1 - i) / max(1, exact - 1)
            styles[variant] = Style(color, marker, linestyle="-", linewidth=width)
    return styles


def render(name: str, draw: Callable[[], Any]) -> Drawing:
    """Draw a matplotlib figure under the report's look. `name` keeps its ids apart from those of
    other drawings.
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
        "legend.frameon": False,
        "font.size": 10,
        # letters stay letters: they can be searched, copied and read aloud
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        # a dollar sign in a file name does not begin a formula
        "text.parse_math": False,
    }
    with matplotlib.rc_context(look):
        figure = draw()
        # the layout is the same for both
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(
            svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
        figure.savefig(png, format="png", dpi=150)
    text = svg.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub("|".join(VARIABLES), lambda found: f"var({VARIABLES[found[0]]})", text)
    return Drawing(text, png.getvalue())


def legend(figure: Any, styles: dict[str, Style], marks: dict[str, str]) -> None:
    """The variants, and what the marks (by their meaning) on the curves say."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], **style.line | {"linewidth": 2, "markersize": 6}, label=variant)
        for variant, style in styles.items()
    ]
    look = {"color": INK, "linestyle": "", "markersize": 8}
    handles += [
        Line2D([], [], **look, marker=marker, label=meaning) for meaning, marker in marks.items()
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(4, len(handles)),
        handlelength=3,
        fontsize=9,
    )


def short(value: float, _: Any = None) -> str:
    """1500 -> 1.5k, 2000000 -> 2M"""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
