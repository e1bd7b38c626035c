"""List what was trained: when, under which attention, how it ended, and where it lies.

    python -m scripts.runs multirun

The newest start comes first. The arguments are runs, sweeps or folders of either; without one they
are outputs/ and multirun/. A folder with a damaged file has a line below the table.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from scripts.arguments import command
from scripts.tables import Row, text_table
from training.record.files import read_mapping
from training.record.names import belies_exact, name_runs
from training.record.runs import RUN_FILES, is_stale, read_sweep, remark
from training.record.text_table import first_line, printable

LOSSES = ("val/loss", "val/loss_exact")
COLUMNS = ("started", "variant", "status", "steps", *LOSSES, "path")


def usual_folders() -> list[Path]:
    """Where train.py puts runs and sweeps, if there are any."""
    return [folder for folder in (Path("outputs"), Path("multirun")) if folder.is_dir()]


@dataclass
class Options:
    paths: list[Path] = field(default_factory=usual_folders)


def runs_below(folders: Iterable[Path]) -> dict[Path, Row]:
    """What read_sweep() says about each run, by the run's folder. A run below two of the folders
    counts once. Of one with a damaged file only "dir" is left, the status "damaged", and in "error"
    why. Raises ValueError for a path that is not a folder.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
    rows = (row for folder in folders for row in read_sweep(folder))
    return {Path(row["dir"]).resolve(): checked(row) for row in rows}


def checked(run: Row) -> Row:
    try:
        for name in ("summary.json", "config.yaml", "env.json"):
            file = Path(run["dir"], name)
            if os.path.lexists(file) and not read_mapping(file):
                raise ValueError(f"{name} is damaged")
        for reader in (line, remark, belies_exact):
            reader(run)
    # what a damaged or foreign file holds may break any of it
    except Exception as error:
        return {"status": "damaged", "error": first_line(error), "dir": run["dir"]}
    return run


def line(run: Row) -> list[str]:
    """A run's entry for each of COLUMNS."""
    folder = Path(run["dir"])
    written = [folder / name for name in RUN_FILES if os.path.lexists(folder / name)]
    # a run that never trained has no start, and one that was killed no summary
    last_start = (run.get("starts") or [{}])[-1].get("started")
    when = last_start or max(file.stat().st_mtime for file in [*written, folder])
    known = [None if is_stale(run) else run.get(key) for key in LOSSES]
    return [
        datetime.fromtimestamp(when).strftime("%Y-%m-%d %H:%M:%S"),
        name_runs([run])[0].variant,
        str(run["status"]),
        str(run.get("steps_done", "-")),
        *("-" if loss is None else f"{loss:.4f}" for loss in known),
        run["dir"],
    ]


@command
def main(options: Options) -> None:
    runs = list(runs_below(options.paths).values())
    if not runs:
        where = ", ".join(map(str, options.paths)) or "outputs or multirun"
        raise ValueError(f"no run below {where}")
    damaged = [run for run in runs if run["status"] == "damaged"]
    lines = sorted((line(run) for run in runs if run not in damaged), reverse=True)
    print(printable(text_table([COLUMNS, *lines], words=len(COLUMNS))))
    for run in damaged:
        print(printable(f"damaged: {run['dir']}: {run['error']}"))


if __name__ == "__main__":
    main()
