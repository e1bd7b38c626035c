"""Shared by the findings: reading runs, drawing figures, and writing results."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.arguments import command
from scripts.drawing import for_both_papers, save_figure
from scripts.runs import runs_below
from scripts.tables import Row
from training.device import pick_device
from training.environment import measured_on
from training.files import check_writable, read_metrics, write_json

OWN, EXACT = "val/loss", "val/loss_exact"


@dataclass
class Options:
    paths: list[Path]
    out: Path | None = None  # NAME.json


def finding(measure: Callable[[list[Path], torch.device], Row]) -> Callable[..., None]:
    """Turn `measure(paths, device)` into the command of its module. The module's in_text(found) is
    printed, and its draw(found, path) draws the figure beside the JSON file.
    """
    module = measure.__globals__

    def main(options: Options) -> None:
        out = options.out or Path(f"{Path(module['__file__']).stem}.json")
        try:
            publish(out, partial(measure, options.paths), module["in_text"], module["draw"])
        except KeyError as error:
            where = ", ".join(map(str, options.paths))
            raise ValueError(
                f"no completed run of {error} in {where}: this finding compares all variants of "
                "its recipe"
            ) from error

    return command(main, of=measure)


def publish(
    out: Path,
    measure: Callable[[torch.device], Row],
    in_text: Callable[[Row], str],
    draw: Callable[[Row, Path], None],
) -> None:
    """Measure, on a GPU if there is one; then print, write and draw."""
    check_writable(out)
    torch.set_num_threads(1)  # the tiles are small: threads would only wait for each other
    device = pick_device("auto")
    found = measure(device)
    print(in_text(found))
    write_json(out, {"environment": measured_on(device)} | found)
    draw(found, out.with_suffix(".png"))


def completed_runs(folders: Iterable[Path], recipe: str, *needed: str) -> dict[Path, Row]:
    """The summary of each completed run. Raises ValueError if there is none, or as check_recipe()
    does.
    """
    found = {path: row for path, row in runs_below(folders).items() if row["status"] == "completed"}
    if not found:
        raise ValueError(f"no completed run in {', '.join(map(str, folders))}")
    check_recipe(found, recipe, *needed)
    return found


def check_recipe(runs: Mapping[Path, Row], recipe: str, *needed: str) -> None:
    """Raise ValueError if a run lacks a setting or figure that those of the recipe have, such as
    max_score or options.scaling.
    """
    for run, summary in runs.items():
        for name in needed:
            value: Any = summary
            for key in name.split("."):
                value = (value or {}).get(key)
            if value is None:
                raise ValueError(
                    f"{run} has no {name}: name only runs of the recipe experiment={recipe}"
                )


def curves(run: Path, *columns: str) -> Row:
    """step and these columns, from the rows that have all of them. A figure that is not finite is
    null in a row.
    """
    rows = [
        row
        for row in read_metrics(run / "metrics.jsonl")
        if all(row.get(name) is not None for name in columns)
    ]
    return {name: [round(row[name], 4) for row in rows] for name in ("step", *columns)}


def losses(row: Row, name: str = OWN) -> dict[int, float]:
    """Losses by step."""
    return dict(zip(row["curves"]["step"], row["curves"][name], strict=True))


def apart(a: dict[int, float], b: dict[int, float], since: int = 0) -> dict[int, float]:
    """a - b at the steps that both have, counted from `since`."""
    return {step - since: a[step] - b[step] for step in a if step in b and step >= since}


def plot_groups(axes: Any, groups: Mapping[str, list[dict[int, float]]], *colors: str) -> None:
    """A colour for each group, a line for each of its runs."""
    for number, (name, lines) in enumerate(groups.items()):
        color = colors[number] if colors else f"C{number}"
        for each in lines:
            label = name if each is lines[0] else None
            axes.plot(list(each), list(each.values()), color=color, label=label, linewidth=1)


def finish(figure: Any, path: Path) -> None:
    """Add grids and missing legends; save the figure for light and dark pages."""
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0] and axes.get_legend() is None:
            axes.legend(fontsize=8)
    for_both_papers(save_figure(figure, path, dpi=110))
