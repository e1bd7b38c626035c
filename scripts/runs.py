"""Find the runs in a command's arguments: folders of runs, sweeps, or folders of either."""

from collections.abc import Iterable
from pathlib import Path

from scripts.tables import Row
from training.record.runs import read_sweep


def runs_below(folders: Iterable[Path]) -> dict[Path, Row]:
    """What read_sweep() says about each run, by the run's folder. A run below two of the folders
    counts once. Raises ValueError for a path that is not a folder.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
    return {Path(row["dir"]).resolve(): row for folder in folders for row in read_sweep(folder)}
