"""Pictures and tables of the results of scripts.verify and of the tests on mutants. Only reads; see
lab.results.
"""

from itertools import accumulate
from pathlib import Path
from textwrap import fill
from typing import Any

from scripts.drawing import new_figure, save_figure
from scripts.tables import Row
from scripts.verify import cells_of, mark, not_verified
from training.palette import BLUE, GREEN, ORANGE
from training.plot import plain_text

# an unusual red for results that should not occur
COLORS = {"+": GREEN, "x": ORANGE, "!": "#e00000", ".": "#ededed"}
MEANING = {
    "+": "holds",
    "x": "broken, as documented",
    "!": "not as documented",
    ".": "refused by the backend",
}


def square(symbol: str) -> Row:
    """The look of a mark: hatched if refused, framed if it should not occur."""
    look = {"facecolor": COLORS[symbol], "edgecolor": "white", "linewidth": 1.5}
    if symbol == ".":
        look |= {"hatch": "////", "edgecolor": "#bdbdbd", "linewidth": 0}
    if symbol == "!":
        look |= {"edgecolor": "black", "linewidth": 2.5, "zorder": 3}
    return look


def names_above(axes: Any, columns: list[str], rows: list[str], **size: int) -> None:
    slanted = {"rotation": 60, "ha": "left", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(columns)), columns, **slanted)
    axes.set_yticks(range(len(rows)), rows, **size)
    axes.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)


def draw_grid(axes: Any, marks: list[list[str]]) -> None:
    """A square for every mark."""
    from matplotlib.patches import Rectangle

    white = {"ha": "center", "va": "center_baseline", "color": "white", "weight": "bold"}
    for y, line in enumerate(marks):
        for x, symbol in enumerate(line):
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **square(symbol)))
            if symbol in "x!":
                axes.text(x, y, symbol.replace("x", "×"), size=11, zorder=4, **white)
    axes.set(xlim=(-0.5, len(marks[0]) - 0.5), ylim=(len(marks) - 0.5, -0.5), aspect="equal")


@plain_text()
def draw_matrix(panels: dict[str, Row], path: Path) -> None:
    """A panel for every file of scripts.verify, by title: rows are properties, columns are
    backends.
    """
    from matplotlib.patches import Patch

    widths = [len(data["backends"]) for data in panels.values()]
    height = max(len(data["properties"]) for data in panels.values())
    size = (0.34 * sum(widths) + 2.2 * len(panels), 0.34 * height + 2.4)
    figure, grid = new_figure(1, len(panels), size=size, width_ratios=widths, squeeze=False)
    seen = set()
    for axes, (title, data) in zip(grid[0], panels.items(), strict=True):
        columns, properties = data["backends"], list(data["properties"])
        marks = [
            [mark(cells_of(column, name)) for column in columns.values()] for name in properties
        ]
        draw_grid(axes, marks)
        names_above(axes, list(columns), properties)
        seen |= set().union(*marks)
        broken = [i for i, column in enumerate(columns.values()) if not column["exact"]]
        if broken:
            axes.axvline(broken[0] - 0.5, color="black", linewidth=1.5)
            axes.text(broken[0] - 0.4, len(marks) - 0.3, "broken on purpose", va="top", size=9)
        axes.text(-0.4, len(marks) - 0.3, "exact", va="top", size=9)
        axes.set_xlabel(title, labelpad=18)
    patches = [
        Patch(**square(symbol), label=meaning)
        for symbol, meaning in MEANING.items()
        if symbol in seen
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    save_figure(figure, path, dpi=150)


def effort(data: Row) -> list[list[str]]:
    """A row for every backend: what was tried, and its largest error in green cells."""
    rows, order = [], list(data["properties"])
    for name, column in data["backends"].items():
        tried, worst, cells = column["tried"], column["worst_multiple_of_naive"], column["cells"]
        red = {cell["property"] for cell in cells if cell["status"] == "red"}
        names = ", ".join(sorted(red, key=order.index))
        error = "-" if worst is None else f"{worst:.2f}"
        rows.append(
            [
                name,
                f"{tried['adversarial']} + {tried['random']}",
                tried["checks"],
                "refused" if not_verified(column) else error,
                f"{len(red)}: {names}" if red else "0",
                sum(not cell["ok"] for cell in cells),
            ]
        )
    return rows


EFFORT_HEAD = [
    "attention",
    "fixed + random cases",
    "checks",
    "worst green error / max(naive's own, rounding)",
    "properties red",
    "cells not as documented",
]


def verdict(data: Row) -> str:
    """A sentence that sums up a file of scripts.verify."""
    cells = [cell for column in data["backends"].values() for cell in column["cells"]]
    statuses = [cell["status"] for cell in cells]
    green, red, refused = (statuses.count(status) for status in ("green", "red", "n/a"))
    wrong = sum(not cell["ok"] for cell in cells)
    ending = f"{wrong} of them NOT as documented" if wrong else "every one as documented"
    return (
        f"{len(cells)} cells in {', '.join(data['dtypes'])}: {green} green, {red} red, {refused} "
        f"refused; {ending}."
    )


@plain_text()
def draw_kills(data: Row, path: Path) -> None:
    """Which property (column) catches which mutant (row). Bold properties together catch all
    mutants.
    """

    rows, names = data["mutants"], data["properties"]
    texts = []
    for row in rows:
        says = f"No mistake: {row['survives']}" if row["survives"] else row["says"]
        dtype = "" if row["dtype"] == "fp32" else f" ({row['dtype']})"
        texts.append(fill(says + dtype, 75))
    # a row is as high as its text, with the mark in the middle
    heights = [1 + 0.7 * text.count("\n") for text in texts]
    ys = [bottom - height / 2 for bottom, height in zip(accumulate(heights), heights, strict=True)]
    size = (14, 0.22 * sum(heights) + 1.9)
    figure, axes = new_figure(size=size)
    for y, row, text in zip(ys, rows, texts, strict=True):
        survives = row["survives"]
        for x, name in enumerate(names):
            caught = name in row["killed_by"]
            color = BLUE if caught else GREEN if survives else "#d9d9d9"
            axes.plot(x, y, "s" if caught else ".", color=color, markersize=8)
        look = {"size": 7.5, "color": "#00785a"} if survives else {"size": 8, "color": "black"}
        axes.text(len(names), y, text, va="center", **look)
    axes.set(xlim=(-0.7, len(names) + 13), ylim=(sum(heights) + 0.2, -0.2))
    names_above(axes, names, [])
    axes.set_yticks(ys, [row["name"] for row in rows], size=8)
    for name, tick in zip(names, axes.xaxis.get_major_ticks(), strict=True):
        tick.label2.set_weight("bold" if name in data["cover"] else "normal")
        tick.label2.set_size(9)
    axes.set_xlabel("square: caught; bold: these catch everything between them", loc="left")
    save_figure(figure, path, dpi=110)


def kills(data: Row) -> list[list[Any]]:
    """A row for every property: how many mutants it catches, and which it alone catches."""
    rows = []
    for name in data["properties"]:
        caught = [row for row in data["mutants"] if name in row["killed_by"]]
        alone = [row["name"] for row in caught if row["killed_by"] == [name]]
        rows.append([name, len(caught), ", ".join(alone) or "-"])
    return rows
