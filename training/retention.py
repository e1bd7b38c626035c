"""Which checkpoints of a run there are, and which of them stay.

    RUN/checkpoint/                 the latest
    RUN/checkpoints/step-000400/    the ones before it, keep - 1 of them
    RUN/checkpoint.best/            the one with the lowest val/loss: a step whose evaluation finds
                                    a new lowest is saved, too

The best is made of hard links, which take no room while the same checkpoint stands elsewhere. Steps
that a run has gone back behind, because its latest checkpoint was damaged, go with the next save,
as their rows of metrics have gone.
"""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from data.token_file import sync

LATEST, EARLIER, BEST, META = "checkpoint", "checkpoints", "checkpoint.best", "meta.json"


def newest_first(run_dir: Path) -> list[Path]:
    """The folders with a checkpoint of the run, whole or not, the latest first. The folder of a
    checkpoint stands for itself.
    """
    run_dir = Path(run_dir)
    if (run_dir / META).is_file():
        return [run_dir]
    others = sorted(
        [*run_dir.glob(BEST), *run_dir.glob(f"{EARLIER}/step-*")], key=step_of, reverse=True
    )
    return [run_dir / LATEST, *others] if (run_dir / LATEST).is_dir() else others


def run_of(folder: Path) -> Path:
    """The run directory that the folder of a checkpoint lies in; a run directory stands for
    itself.
    """
    folder = Path(folder)
    if not (folder / META).is_file():
        return folder
    return folder.parent.parent if folder.parent.name == EARLIER else folder.parent


def rotate(fresh: Path, run_dir: Path, *, keep: int) -> Path:
    """Make the folder `fresh` the latest checkpoint, and drop what is neither among the last `keep`
    nor the best.

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
    data = _data(latest)
    # losses on other data, which a resumed run may have changed to, are no measure
    lowest = _lowest(
        folder for folder in [*_before(step, [best]), *past, latest] if _data(folder) == data
    )
    if lowest is not None and lowest != best:
        _link(lowest, best)
    elif lowest is None and not _before(step, [best]):
        shutil.rmtree(best, ignore_errors=True)
    for folder in set(earlier) - set(past[: keep - 1]):
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty, or not there
        (run_dir / EARLIER).rmdir()
    return latest


def best_val_loss(run_dir: Path, *, before: int, data: str | None = None) -> float:
    """The lowest val/loss of the checkpoints of earlier steps on this data; infinity where none was
    evaluated.
    """
    lowest = _lowest(
        folder for folder in _before(before, newest_first(run_dir)) if _data(folder) == data
    )
    return math.inf if lowest is None else _val_loss(lowest)


def _before(step: int, folders: Iterable[Path]) -> list[Path]:
    return [folder for folder in folders if 0 <= step_of(folder) < step]


def _lowest(folders: Iterable[Path]) -> Path | None:
    return min(
        (folder for folder in folders if _val_loss(folder) is not None), key=_val_loss, default=None
    )


def step_of(folder: Path) -> int:
    """The step of a checkpoint's folder, from its name or its meta.json; -1 where neither says
    it.
    """
    if match := re.fullmatch(r"step-(\d+)", folder.name):
        return int(match[1])
    step = meta_of(folder).get("step")
    return step if isinstance(step, int) else -1


def _val_loss(folder: Path) -> float | None:
    return meta_of(folder).get("val_loss")


def _data(folder: Path) -> str | None:
    """The fingerprint of the data that a checkpoint was trained and evaluated on."""
    starts = meta_of(folder).get("starts")
    return starts[-1].get("data") if starts else None


def meta_of(folder: Path) -> dict[str, Any]:
    """What the meta.json of a checkpoint says; empty where it cannot be read or is not in its form.
    Not verified.
    """
    try:
        meta = parse(folder / META)
    except (OSError, ValueError):
        return {}
    return meta if isinstance(meta, dict) and misfit(meta) is None else {}


def parse(path: Path) -> Any:
    """What a JSON file holds. Raises OSError or ValueError."""
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def misfit(meta: dict[str, Any]) -> str | None:
    """What a meta.json has in another form than a checkpoint gives it."""
    return next(
        (
            f"{key} is not {words}"
            for key, (is_right, words) in FORM.items()
            if key in meta and not is_right(meta[key])
        ),
        None,
    )


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


def _is_start(value: Any) -> bool:
    if (
        not isinstance(value, dict)
        or not _is_count(value.get("step"))
        or not isinstance(value.get("changed"), dict)
    ):
        return False
    attention, seconds = value.get("attention"), value.get("seconds", 0)
    pairs = isinstance(attention, list) and all(
        isinstance(pair, list) and len(pair) == 2 for pair in attention
    )
    changed = all(isinstance(pair, list) and len(pair) == 2 for pair in value["changed"].values())
    named = pairs and all(_is_count(step) and isinstance(name, str) for step, name in attention)
    return (
        changed
        and named
        and isinstance(seconds, (int, float))
        and isinstance(value.get("data", ""), str)
    )


def _is_config(value: Any) -> bool:
    if not isinstance(value, dict) or not all(
        isinstance(value.get(group, {}), dict) for group in ("attention", "model", "optim")
    ):
        return False
    chosen = value.get("attention", {})
    switch_at = chosen.get("switch_at")
    return isinstance(chosen.get("name", ""), str) and (switch_at is None or _is_count(switch_at))


# what each entry must be
FORM: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step": (_is_count, "a number of steps"),
    "tokens": (_is_count, "a number of tokens"),
    "val_loss": (lambda value: value is None or type(value) in (int, float), "a number"),
    "files": (_are_files, "the size and SHA-256 of files by their names"),
    "config": (_is_config, "the settings of a run"),
    "starts": (
        lambda value: isinstance(value, list) and all(map(_is_start, value)),
        "the list of a run's starts",
    ),
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
    # dying between these two leaves no best: the next save finds it again, where it was linked from
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
