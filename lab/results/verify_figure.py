"""The picture and the table of what scripts.verify and the mutants' tests measured. Only reads; see
lab.results.
"""

from pathlib import Path
from textwrap import fill
from typing import Any

from scripts.verify import cells_of, mark, not_verified
from training.plot import plain_text

# Okabe and Ito's colours, and a red that is none of theirs for what should not be
COLORS = {"+": "#009E73", "x": "#E69F00", "!": "#E00000", ".": "#EDEDED"}
MEANING = {
    "+": "holds",
    "x": "broken, as documented",
    "!": "not as documented",
    ".": "refused by the backend",
}


def draw_grid(axes: Any, marks: list[list[str]], columns: list[str], rows: list[str]) -> None:
    """A square for every mark; what is refused is hatched, what should not be is framed."""
    from matplotlib.patches import Rectangle

    for y, line in enumerate(marks):
        for x, symbol in enumerate(line):
            style = (
                {"hatch": "////", "edgecolor": "#BDBDBD"}
                if symbol == "."
                else {"edgecolor": "white"}
            )
            axes.add_patch(
                Rectangle(
                    (x - 0.5, y - 0.5),
                    1,
                    1,
                    facecolor=COLORS[symbol],
                    linewidth=0 if symbol == "." else 1.5,
                    **style,
                )
            )
            if symbol in "x!":
                axes.text(
                    x,
                    y,
                    "×" if symbol == "x" else "!",
                    ha="center",
                    va="center_baseline",
                    color="white",
                    weight="bold",
                    size=11,
                )
            if symbol == "!":
                axes.add_patch(
                    Rectangle(
                        (x - 0.5, y - 0.5),
                        1,
                        1,
                        fill=False,
                        edgecolor="black",
                        linewidth=2.5,
                        zorder=3,
                    )
                )
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5), aspect="equal")
    axes.set_xticks(range(len(columns)), columns, rotation=60, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)


@plain_text()
def draw_matrix(panels: dict[str, dict[str, Any]], path: Path) -> None:
    """Properties down, backends across, a panel for every file of scripts.verify: title -> its
    contents.
    """
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    widths = [len(data["backends"]) for data in panels.values()]
    height = max(len(data["properties"]) for data in panels.values())
    figure, all_axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(0.34 * sum(widths) + 2.2 * len(panels), 0.34 * height + 2.4),
        width_ratios=widths,
        squeeze=False,
        layout="constrained",
    )
    seen = set()
    for axes, (title, data) in zip(all_axes[0], panels.items(), strict=True):
        columns = data["backends"]
        marks = [
            [mark(cells_of(column, name)) for column in columns.values()]
            for name in data["properties"]
        ]
        draw_grid(axes, marks, list(columns), list(data["properties"]))
        seen |= {symbol for line in marks for symbol in line}
        broken = [i for i, column in enumerate(columns.values()) if not column["exact"]]
        if broken:
            axes.axvline(broken[0] - 0.5, color="black", linewidth=1.5)
            axes.text(broken[0] - 0.4, len(marks) - 0.3, "broken on purpose", va="top", size=9)
        axes.text(-0.4, len(marks) - 0.3, "exact", va="top", size=9)
        axes.set_xlabel(title, labelpad=18)
    hatch = {".": {"hatch": "////", "edgecolor": "#BDBDBD"}}
    patches = [
        Patch(facecolor=COLORS[symbol], label=MEANING[symbol], **hatch.get(symbol, {}))
        for symbol in COLORS
        if symbol in seen
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def effort(data: dict[str, Any]) -> list[list[str]]:
    """A row for every backend: what was tried, and its largest error where it is green."""
    rows = []
    for name, column in data["backends"].items():
        tried, worst, cells = column["tried"], column["worst_multiple_of_naive"], column["cells"]
        red = sorted(
            {cell["property"] for cell in cells if cell["status"] == "red"},
            key=list(data["properties"]).index,
        )
        wrong = sum(not cell["ok"] for cell in cells)
        rows.append(
            [
                name,
                f"{tried['adversarial']} + {tried['random']}",
                tried["checks"],
                "refused" if not_verified(column) else "-" if worst is None else f"{worst:.2f}",
                f"{len(red)}: {', '.join(red)}" if red else "0",
                wrong,
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


def verdict(data: dict[str, Any]) -> str:
    """One sentence a file of scripts.verify comes to."""
    cells = [cell for column in data["backends"].values() for cell in column["cells"]]
    counts = {
        status: sum(cell["status"] == status for cell in cells)
        for status in ("green", "red", "n/a")
    }
    wrong = sum(not cell["ok"] for cell in cells)
    ending = "every one as documented" if wrong == 0 else f"{wrong} of them NOT as documented"
    green, red, refused = counts.values()
    return (
        f"{len(cells)} cells in {', '.join(data['dtypes'])}: {green} green, {red} red, {refused} "
        f"refused; {ending}."
    )


@plain_text()
def draw_kills(data: dict[str, Any], path: Path) -> None:
    """Mutants down, properties across: what catches what. The properties that are enough between
    them are in bold.
    """
    from matplotlib import pyplot

    rows, names = data["mutants"], data["properties"]
    figure, axes = pyplot.subplots(figsize=(14, 0.22 * len(rows) + 1.9), layout="constrained")
    for y, row in enumerate(rows):
        color = COLORS["+"] if row["survives"] else "#D9D9D9"
        for x, name in enumerate(names):
            axes.plot(
                x,
                y,
                "s" if name in row["killed_by"] else ".",
                color="#0072B2" if name in row["killed_by"] else color,
                markersize=8,
            )
        says = f"No mistake: {row['survives']}" if row["survives"] else row["says"]
        dtype = "" if row["dtype"] == "fp32" else f" ({row['dtype']})"
        axes.text(
            len(names),
            y,
            fill(says + dtype, 75),
            va="center",
            size=7 if row["survives"] else 8,
            color=COLORS["+"] if row["survives"] else "black",
        )
    axes.set(xlim=(-0.7, len(names) + 13), ylim=(len(rows) - 0.3, -0.7))
    axes.set_xticks(
        range(len(names)), names, rotation=60, ha="left", rotation_mode="anchor", size=9
    )
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], size=8)
    for name, tick in zip(names, axes.xaxis.get_major_ticks(), strict=True):
        tick.label2.set_weight("bold" if name in data["cover"] else "normal")
    axes.set_xlabel("square: caught; bold: these catch everything between them", loc="left")
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def kills(data: dict[str, Any]) -> list[list[Any]]:
    """A row for every property: how many mutants it catches, and which of them no other does."""
    rows = []
    for name in data["properties"]:
        caught = [row for row in data["mutants"] if name in row["killed_by"]]
        alone = [row["name"] for row in caught if row["killed_by"] == [name]]
        rows.append([name, len(caught), ", ".join(alone) or "-"])
    return rows
