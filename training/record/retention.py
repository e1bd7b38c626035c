"""Which checkpoints a run has, and which of them stay.

    RUN/checkpoint/                 the latest
    RUN/checkpoints/step-000400/    the ones before it, keep - 1 of them
    RUN/checkpoint.best/            the one with the lowest val/loss; a step whose evaluation is a
                                    new lowest is always saved

The best consists of hard links, which take no space while another folder has the same checkpoint.
A run whose latest checkpoint was damaged resumes from an earlier step. The next save then deletes
the checkpoints of later steps, because their rows of metrics were dropped.
"""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from glob import glob
from pathlib import Path
from typing import Any

from data.token_file import sync
from training.record.files import Row

LATEST, EARLIER, BEST, META = "checkpoint", "checkpoints", "checkpoint.best", "meta.json"
FRESH = f"{LATEST}.tmp"  # the folder of a checkpoint that is being written


def newest_first(run_dir: Path) -> list[Path]:
    """The folders of the run's checkpoints, whole or not, latest first.

    For the folder of one checkpoint: that folder alone.
    """
    if (run_dir / META).is_file():
        return [run_dir]
    others = [*run_dir.glob(BEST), *run_dir.glob(f"{EARLIER}/step-*")]
    others.sort(key=step_of, reverse=True)
    return [run_dir / LATEST, *others] if (run_dir / LATEST).is_dir() else others


def run_of(folder: Path) -> Path:
    """The run directory of a checkpoint's folder; a run directory is returned as it is."""
    if not os.path.isfile(folder / META):
        return folder
    return folder.parent.parent if folder.parent.name == EARLIER else folder.parent


def no_run(folder: Path, lacks: str) -> str:
    """Why a folder without the file `lacks` is not a run directory, and which folder may be."""
    hint = ""
    # a run lies in outputs/DAY/TIME; pathlib raises errors for a name that is too long
    found = (sorted(glob(f"{below}/{lacks}", root_dir=folder)) for below in ("*", "*/*"))
    if runs := next(filter(None, found), None):
        hint = f"; it holds runs, such as {(folder / runs[0]).parent}"
    elif (run := run_of(folder)) != folder:
        hint = f"; it is a checkpoint of the run {run}"
    # a run that was refused has only a summary
    elif reason := load_json(folder / "summary.json").get("error"):
        hint = f"; the run ended before it began: {str(reason).splitlines()[0]}"
    return f"{folder} is not a run directory: it has no {lacks}{hint}"


def rotate(fresh: Path, run_dir: Path, *, keep: int) -> None:
    """Make the folder `fresh` the latest checkpoint; delete all but the last `keep` and the best.

    Two renames: whenever the process dies, a whole checkpoint stands under one of the names above.
    """
    latest, best, step = run_dir / LATEST, run_dir / BEST, step_of(fresh)
    if latest.exists():
        place = run_dir / EARLIER / f"step-{step_of(latest):06d}"
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(exist_ok=True)
        latest.rename(place)
    fresh.rename(latest)
    sync(run_dir)

    earlier = sorted(run_dir.glob(f"{EARLIER}/step-*"), key=step_of, reverse=True)
    past = _before(step, earlier)
    # a resumed run may have changed its data: losses on other data do not compare
    lowest = _lowest([*_before(step, [best]), *past, latest], data=_data(latest))
    if lowest is not None and lowest != best:
        _link(lowest, best)
    elif lowest is None and not _before(step, [best]):
        shutil.rmtree(best, ignore_errors=True)
    for folder in set(earlier) - set(past[: keep - 1]):
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty, or not there
        (run_dir / EARLIER).rmdir()


def best_val_loss(run_dir: Path, *, before: int, data: str | None) -> float:
    """The lowest val/loss of earlier steps' checkpoints on this data; infinity if there is none."""
    lowest = _lowest(_before(before, newest_first(run_dir)), data=data)
    return math.inf if lowest is None else _val_loss(lowest)


def _before(step: int, folders: Iterable[Path]) -> list[Path]:
    return [folder for folder in folders if 0 <= step_of(folder) < step]


def _lowest(folders: Iterable[Path], *, data: str | None) -> Path | None:
    evaluated = [folder for folder in folders if _val_loss(folder) is not None]
    comparable = [folder for folder in evaluated if _data(folder) == data]
    return min(comparable, key=_val_loss, default=None)


def step_of(folder: Path) -> int:
    """The step of a checkpoint's folder, by its name or its meta.json; -1 if neither tells it."""
    if match := re.fullmatch(r"step-(\d+)", folder.name):
        return int(match[1])
    return meta_of(folder).get("step", -1)


def _val_loss(folder: Path) -> float | None:
    return meta_of(folder).get("val_loss")


def _data(folder: Path) -> str | None:
    """The fingerprint of the data that a checkpoint was trained and evaluated on."""
    starts = meta_of(folder).get("starts")
    return starts[-1].get("data") if starts else None


def meta_of(folder: Path) -> Row:
    """The content of a checkpoint's meta.json, not verified; {} if it is damaged or missing."""
    meta = load_json(folder / META)
    return meta if misfit(meta) is None else {}


def load_json(path: Path) -> Row:
    """The object in a JSON file; {} if it is damaged or missing."""
    try:
        value = parse(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def parse(path: Path) -> Any:
    """The content of a JSON file. Raises OSError or ValueError."""
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def misfit(meta: Row) -> str | None:
    """What is wrong with the first malformed entry of a meta.json; None if all are right."""
    for key, (is_right, expected) in FORM.items():
        if key in meta and not is_right(meta[key]):
            return f"{key} is not {expected}"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _are_files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        Path(name).name == name
        and isinstance(file, dict)
        and _is_count(file.get("bytes"))
        and isinstance(file.get("sha256"), str)
        for name, file in value.items()
    )


def are_starts(value: Any) -> bool:
    """Whether this is a list of starts; see training/record/starts.py."""
    return isinstance(value, list) and all(map(_is_start, value))


def _is_start(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_count(value.get("step"))
        and isinstance(value.get("seconds", 0), (int, float))
        and isinstance(value.get("data", ""), str)
        and isinstance(value.get("attention"), list)
        and all(map(_is_pair, value["attention"]))
        and all(_is_count(step) and isinstance(name, str) for step, name in value["attention"])
        and isinstance(value.get("changed"), dict)
        and all(map(_is_pair, value["changed"].values()))
    )


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _is_config(value: Any) -> bool:
    if not isinstance(value, dict) or not all(
        isinstance(value.get(group, {}), dict) for group in ("attention", "model", "optim")
    ):
        return False
    attention = value.get("attention", {})
    switch_at = attention.get("switch_at")
    return isinstance(attention.get("name", ""), str) and (
        switch_at is None or _is_count(switch_at)
    )


# {entry of meta.json: (whether a value is right, what it must be)}
FORM: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step": (_is_count, "a number of steps"),
    "tokens": (_is_count, "a number of tokens"),
    "val_loss": (lambda value: value is None or type(value) in (int, float), "a number"),
    "files": (_are_files, "the size and SHA-256 of files by their names"),
    "config": (_is_config, "the settings of a run"),
    "starts": (are_starts, "the list of a run's starts"),
}


def _link(source: Path, target: Path) -> None:
    fresh = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    for file in source.iterdir():
        try:
            os.link(file, fresh / file.name)
        except OSError:  # a file system without hard links
            shutil.copy2(file, fresh / file.name)
    sync(fresh)
    # a process that dies between these two leaves no best; the next save links it again
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
