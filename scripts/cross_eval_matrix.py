"""The matrix of scripts/cross_eval.py, from the rows of its JSON: as text and as a heat map.
Measures nothing.
"""

import io
import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from attention import BACKENDS
from training.metrics import write_file
from training.plot import plain_text


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a cross_eval.json. Raises ValueError for any other file."""
    try:
        rows = json.loads(path.read_text())["rows"]
        if rows and all(
            row["trained_under"]["name"] and row["evaluated_under"]["name"] and row["status"]
            for row in rows
        ):
            return rows
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is no cross_eval.json with rows in it")


# from the lowest to the highest colour at the least: the noise of exact attentions must not look
# like a defect
LEAST_SPAN = {"loss": 0.2, "accuracy": 0.1}


class Cell(NamedTuple):
    """The runs of one row, judged by one attention."""

    values: list[float]  # of those that came out finite
    others: list[str]  # non-finite, refused

    def text(self, form: str) -> str:
        if not self.values:
            return self.others[0]
        spread = f" ± {form.format(stdev(self.values))}" if len(self.values) > 1 else ""
        return (
            form.format(fmean(self.values))
            + spread
            + (f" ({len(self.others)} {self.others[0]})" if self.others else "")
        )


class Matrix(NamedTuple):
    metric: str  # loss or accuracy
    judges: list[str]
    cells: dict[str, list[Cell]]  # by what the row was trained under
    own: dict[str, set[int]]  # the judges a row was trained under

    @property
    def form(self) -> str:
        return "{:.1%}" if self.metric == "accuracy" else "{:.3f}"

    @property
    def scale(self) -> tuple[float, float]:
        """The lowest and the highest value of the colours, from the best mean on."""
        means = [
            fmean(cell.values) for row in self.cells.values() for cell in row if cell.values
        ] or [0.0]
        low, high, span = min(means), max(means), LEAST_SPAN[self.metric]
        return (
            (low, max(high, low + span)) if self.metric == "loss" else (min(low, high - span), high)
        )


def build_matrices(rows: list[dict[str, Any]]) -> list[Matrix]:
    """One of losses for runs on text, one of accuracies for runs on last_write, where there are
    such runs.
    """
    # a run of which nothing came out finite is put where it tells most: a run on last_write has
    # some judge that is exact
    scored = {row["run"] for row in rows if row["accuracy"] is not None}
    found = []
    for metric in ("loss", "accuracy"):
        chosen = [row for row in rows if (row["run"] in scored) == (metric == "accuracy")]
        if not chosen:
            continue
        names = labels([attention for row in chosen for attention in parts(row)])
        judges = list(dict.fromkeys(names[key(row["evaluated_under"])] for row in chosen))
        judged_under = [row["evaluated_under"] for row in chosen]
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in chosen:
            setting = [
                f"{name.rpartition('.')[2]}={value}"
                for name, value in row.get("setting", {}).items()
            ]
            groups.setdefault(", ".join([trained_label(row, names), *setting]), []).append(row)
        cells, own = {}, {}
        for label, group in groups.items():
            ended = {
                row["run"]: row["step"]
                for row in group
                if row.get("trained", "completed") != "completed"
            }
            runs = len({row["run"] for row in group})
            count = f"{runs} runs" if runs > 1 else "1 run"
            steps = (
                f", {len(ended)} ended early: step {'/'.join(map(str, ended.values()))}"
                if ended
                else ""
            )
            label = f"{label} ({count}{steps})"
            judged_by = [
                [row for row in group if names[key(row["evaluated_under"])] == judge]
                for judge in judges
            ]
            cells[label] = [
                Cell(
                    [row[metric] for row in own_rows if row["status"] == "ok"],
                    [word(row) for row in own_rows if row["status"] != "ok"],
                )
                for own_rows in judged_by
            ]
            last = group[0]["trained_under"].get("switch_to", group[0]["trained_under"])
            own[label] = {
                judges.index(names[key(x)])
                for x in judged_under
                if key(x) == key(last) or _same_exact(x, last)
            }
        found.append(Matrix(metric, judges, cells, own))
    return found


def _is_exact(name: str) -> bool:
    return name in BACKENDS and BACKENDS[name].exact


def _same_exact(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """One exact attention by tiles of two sizes."""
    return a["name"] == b["name"] and _is_exact(a["name"])


def word(row: dict[str, Any]) -> str:
    return row["status"].partition(":")[0]


def parts(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Every attention that a row names."""
    trained = row["trained_under"]
    return [
        row["evaluated_under"],
        trained,
        *([trained["switch_to"]] if "switch_to" in trained else []),
    ]


def key(attention: dict[str, Any]) -> tuple[Any, ...]:
    return attention["name"], *sorted(
        (name, str(value)) for name, value in attention["options"].items()
    )


def labels(attentions: list[dict[str, Any]]) -> dict[tuple[Any, ...], str]:
    """A name for each: with the options that are not the backend's own defaults, or in which those
    of one name differ.
    """
    names = {}
    for attention in attentions:
        name, options = attention["name"], attention["options"]
        same = [other["options"] for other in attentions if other["name"] == name]
        usual = BACKENDS[name].options if name in BACKENDS else {}
        varied = {
            option for option in options if len({str(other.get(option)) for other in same}) > 1
        }
        # what tiles there are matters where the attention is broken alone, and there it is the
        # tiles of keys
        telling = {
            option
            for option in options
            if option != "block_q" and not (option == "block_kv" and _is_exact(name))
        }
        shown = {
            x: value
            for x, value in options.items()
            if x in varied or (x in telling and value != usual.get(x, value))
        }
        names[key(attention)] = " ".join(
            [name, *(f"{option}={value}" for option, value in shown.items())]
        )
    return names


def trained_label(row: dict[str, Any], names: dict[tuple[Any, ...], str]) -> str:
    trained = row["trained_under"]
    label = names[key(trained)]
    return (
        f"{label}, from step {trained['switch_at']} {names[key(trained['switch_to'])]}"
        if "switch_to" in trained
        else label
    )


def in_text(rows: list[dict[str, Any]]) -> str:
    """The matrices as text, a judge a column."""
    blocks = []
    for matrix in build_matrices(rows):
        lines = [[f"held-out {matrix.metric}: trained under", *matrix.judges]]
        lines += [
            [label, *(cell.text(matrix.form) for cell in row)]
            for label, row in matrix.cells.items()
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in lines
        ]
        blocks.append("\n".join([text[0], "-" * len(text[0]), *text[1:]]))
    reasons = dict.fromkeys(
        f"{row['evaluated_under']['name']} {row['status']}"
        for row in rows
        if row["status"].startswith("refused")
    )
    return "\n\n".join([*blocks, *reasons]) + "\n"


@plain_text()
def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The matrices as heat maps. A thick frame: the attention of the training. Hatched: not finite,
    or refused.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    found = build_matrices(rows)
    widest, height = (
        max(len(matrix.judges) for matrix in found),
        sum(len(matrix.cells) + 1.6 for matrix in found),
    )
    figure = Figure(figsize=(4.2 + 1.35 * widest, 0.9 + 0.62 * height), layout="constrained")
    grid = figure.subplots(
        len(found), squeeze=False, height_ratios=[len(matrix.cells) for matrix in found]
    )[:, 0]
    for axes, matrix in zip(grid, found, strict=True):
        means = [
            [fmean(cell.values) if cell.values else float("nan") for cell in row]
            for row in matrix.cells.values()
        ]
        low, high = matrix.scale
        # dark is good, for both
        colors = colormaps["viridis" if matrix.metric == "loss" else "viridis_r"].copy()
        colors.set_bad("#e4e4e8")
        image = axes.imshow(means, cmap=colors, aspect="auto", vmin=low, vmax=high)
        for y, (label, row) in enumerate(matrix.cells.items()):
            for x, cell in enumerate(row):
                if cell.others:
                    axes.add_patch(
                        Rectangle(
                            (x - 0.5, y - 0.5),
                            1,
                            1,
                            fill=False,
                            hatch="////",
                            edgecolor="#9a9aa2",
                            linewidth=0,
                        )
                    )
                red, green, blue, _ = image.cmap(image.norm(means[y][x]))
                dark = cell.values and 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
                text = (
                    cell.text(matrix.form)
                    .replace(" ± ", "\n± ")
                    .replace(" (", "\n(")
                    .replace(" ", "\n", not cell.values)
                )
                box = (
                    {"facecolor": "#e4e4e8", "edgecolor": "none", "pad": 1.5}
                    if not cell.values
                    else None
                )
                axes.text(
                    x,
                    y,
                    text,
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if dark else "black",
                    bbox=box,
                )
                if x in matrix.own[label]:
                    axes.add_patch(
                        Rectangle(
                            (x - 0.47, y - 0.47),
                            0.94,
                            0.94,
                            fill=False,
                            edgecolor="#D55E00",
                            linewidth=2.4,
                        )
                    )
        axes.set_xticks(
            range(len(matrix.judges)), [judge.replace(" ", "\n") for judge in matrix.judges]
        )
        axes.set_yticks(
            range(len(matrix.cells)),
            [label.replace(" (", "\n(").replace(", from", "\nfrom") for label in matrix.cells],
        )
        axes.tick_params(length=0, labelsize=8.5)
        axes.set(xlabel="evaluated under", ylabel="trained under")
        unit = "nats per token" if matrix.metric == "loss" else "share of queries answered rightly"
        axes.set_title(
            f"held-out {matrix.metric} ({unit}); framed: the attention of the training",
            fontsize=10,
            loc="left",
        )
        figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_file(path, picture.getvalue())
