"""Show the matrix of scripts/cross_eval.py from the rows of its JSON, as text and as a heat map.
This module measures nothing.
"""

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from attention import BACKENDS
from scripts.drawing import new_figure, save_figure
from scripts.tables import Row, by, grouped, mean_and_deviation, text_table
from training.record.names import attention_name
from training.record.palette import VERMILION
from training.record.plot import plain_text


def read_rows(path: Path) -> list[Row]:
    """The rows of a cross_eval.json. Raises ValueError for any other file."""
    try:
        rows = json.loads(path.read_text())["rows"]
        if rows and all(
            row["variant"] and row["evaluated_under"]["name"] and row["status"] for row in rows
        ):
            return rows
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"{path} is no cross_eval.json with rows in it")


# least range of the colour scale: the noise of exact attentions must not look like a defect
LEAST_SPAN = {"loss": 0.2, "accuracy": 0.1}
NO_FIGURE = "#e4e4e8"


class Cell(NamedTuple):
    """The runs of one row, judged by one attention."""

    values: list[float]  # results that are finite
    others: list[str]  # non-finite, refused

    def text(self, form: str) -> str:
        if not self.values:
            return self.others[0]
        others = f" ({len(self.others)} {self.others[0]})" if self.others else ""
        return mean_and_deviation(self.values, form) + others

    @property
    def mean(self) -> float:
        """The mean of the finite results; NaN if there is none."""
        return fmean(self.values or [math.nan])


class Matrix(NamedTuple):
    metric: str  # loss or accuracy
    judges: list[str]
    cells: dict[str, list[Cell]]  # by the attention of the training
    own: dict[str, set[int]]  # places of the judges that a row was trained under

    @property
    def form(self) -> str:
        return "{:.1%}" if self.metric == "accuracy" else "{:.3f}"

    @property
    def scale(self) -> tuple[float, float]:
        """The lowest and the highest value of the colour scale, which starts at the best mean."""
        means = [cell.mean for row in self.cells.values() for cell in row if cell.values] or [0.0]
        low, high, span = min(means), max(means), LEAST_SPAN[self.metric]
        if self.metric == "loss":
            return low, max(high, low + span)
        return min(low, high - span), high


def build_matrices(rows: list[Row]) -> list[Matrix]:
    """One matrix of losses for runs on text, and one of accuracies for runs on a synthetic task, if
    there are such runs.
    """
    # a run on a task has an exact judge, and so an accuracy
    scored = {row["run"] for row in rows if row["accuracy"] is not None}
    chosen = grouped(rows, lambda row: "accuracy" if row["run"] in scored else "loss")
    return [build_matrix(name, chosen[name]) for name in ("loss", "accuracy") if name in chosen]


def build_matrix(metric: str, rows: list[Row]) -> Matrix:
    by_judge = by_judges(rows)
    cells, own = {}, {}
    for variant, group in by(rows, "variant").items():
        label = f"{variant} ({count_of_runs(group)})"
        own_rows = by_judges(group)
        cells[label] = []
        for judge in by_judge:
            statuses = grouped(own_rows.get(judge, ()), lambda row: row["status"] == "ok")
            values = [row[metric] for row in statuses.get(True, ())]
            others = [row["status"].partition(":")[0] for row in statuses.get(False, ())]
            cells[label].append(Cell(values, others))
        last = group[0]["trained_under"]
        last = last.get("switch_to", last)
        own[label] = {
            place
            for place, judged in enumerate(by_judge.values())
            if any(is_same(row["evaluated_under"], last) for row in judged)
        }
    return Matrix(metric, list(by_judge), cells, own)


def count_of_runs(group: list[Row]) -> str:
    """For example: 2 runs, 1 ended early: step 300"""
    steps = {row["run"]: row["step"] for row in group}
    early = {row["run"] for row in group if row["trained"] != "completed"}
    count = f"{len(steps)} runs" if len(steps) > 1 else "1 run"
    if early:
        ends = "/".join(str(step) for run, step in steps.items() if run in early)
        count += f", {len(early)} ended early: step {ends}"
    return count


def by_judges(rows: list[Row]) -> dict[str, list[Row]]:
    return grouped(rows, lambda row: attention_name(**row["evaluated_under"]))


def is_same(a: Row, b: Row) -> bool:
    """Whether both are the same attention; tile sizes do not matter for an exact one."""
    exact = a["name"] in BACKENDS and BACKENDS[a["name"]].exact
    return a["name"] == b["name"] and (exact or a["options"] == b["options"])


def in_text(rows: list[Row]) -> str:
    """The matrices as text, with a column per judge."""
    blocks = []
    for matrix in build_matrices(rows):
        lines = [[f"held-out {matrix.metric}: trained under", *matrix.judges]]
        for label, cells in matrix.cells.items():
            lines.append([label, *(cell.text(matrix.form) for cell in cells)])
        head, *body = text_table(lines).splitlines()
        blocks.append("\n".join([head, "-" * len(head), *body]))
    return "\n\n".join([*blocks, *reasons(rows)]) + "\n"


def reasons(rows: list[Row]) -> list[str]:
    """The reasons why judges refused, each once."""
    refused = [row for row in rows if str(row["status"]).startswith("refused")]
    return list(
        dict.fromkeys(f"{row['evaluated_under']['name']} {row['status']}" for row in refused)
    )


@plain_text()
def draw(rows: list[Row], path: Path) -> None:
    """The matrices as heat maps. A thick frame marks the attention of the training, hatching a
    result that is not finite or was refused.
    """
    matrices = build_matrices(rows)
    heights = [len(matrix.cells) for matrix in matrices]
    widest = max(len(matrix.judges) for matrix in matrices)
    size = (4.2 + 1.35 * widest, 0.9 + 0.62 * (sum(heights) + 1.6 * len(heights)))
    figure, grid = new_figure(len(matrices), size=size, squeeze=False, height_ratios=heights)
    for axes, matrix in zip(grid[:, 0], matrices, strict=True):
        image = draw_matrix(axes, matrix)
        figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02)
    save_figure(figure, path, dpi=150)


def draw_matrix(axes: Any, matrix: Matrix) -> Any:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    means = [[cell.mean for cell in row] for row in matrix.cells.values()]
    low, high = matrix.scale
    # dark is good for both metrics
    colors = colormaps["viridis" if matrix.metric == "loss" else "viridis_r"]
    colors = colors.with_extremes(bad=NO_FIGURE)
    image = axes.imshow(means, cmap=colors, aspect="auto", vmin=low, vmax=high)
    hatched = {"fill": False, "hatch": "////", "edgecolor": "#9a9aa2", "linewidth": 0}
    framed = {"fill": False, "edgecolor": VERMILION, "linewidth": 2.4}
    plate = {"facecolor": NO_FIGURE, "edgecolor": "none", "pad": 1.5}
    for y, (label, row) in enumerate(matrix.cells.items()):
        for x, cell in enumerate(row):
            if cell.others:
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **hatched))
            red, green, blue, _ = image.cmap(image.norm(means[y][x]))
            dark = cell.values and 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
            look = {"color": "white" if dark else "black", "bbox": None if cell.values else plate}
            text = cell.text(matrix.form).replace(" ± ", "\n± ").replace(" (", "\n(")
            if not cell.values:
                text = text.replace(" ", "\n")
            axes.text(x, y, text, ha="center", va="center", fontsize=8, **look)
            if x in matrix.own[label]:
                axes.add_patch(Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, **framed))
    rows = [label.replace(" (", "\n(") for label in matrix.cells]
    axes.set_xticks(range(len(matrix.judges)), [x.replace(" ", "\n") for x in matrix.judges])
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0, labelsize=8.5)
    axes.set(xlabel="evaluated under", ylabel="trained under")
    unit = "nats per token" if matrix.metric == "loss" else "share of queries answered rightly"
    title = f"held-out {matrix.metric} ({unit}); framed: the attention of the training"
    axes.set_title(title, fontsize=10, loc="left")
    return image
