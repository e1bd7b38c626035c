"""The files of a run: metrics.jsonl row by row, other files and folders so that each is always
whole, and which checkpoints there are.

    RUN/checkpoint/             the latest
    RUN/checkpoint.previous/    the one before it
    RUN/checkpoint.best/        the one with the lowest val/loss

Every file is strict JSON. NaN and infinity, which JSON lacks, become null, and the names of those
values are listed beside them as "nonfinite". Nothing here imports torch.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from glob import glob
from pathlib import Path
from typing import Any

import yaml

from data.token_file import meta_checksum, sync

log = logging.getLogger("tilegpt")

Row = dict[str, Any]  # an object of a JSON file

LATEST, PREVIOUS, BEST = "checkpoint", "checkpoint.previous", "checkpoint.best"
FRESH = f"{LATEST}.tmp"  # a checkpoint that is being written
META = "meta.json"
# a new number for every change of what a checkpoint holds, or of what a setting is called or means
VERSION = 4


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, with the reason in one line."""


def append_row(path: Path, row: Row) -> None:
    """Add a line to a metrics.jsonl; the operating system has it at once.

    Raises OSError, also where the file was deleted: a new one would lack its earlier rows.
    """
    try:
        with open(os.open(path, os.O_WRONLY | os.O_APPEND), "a") as file:
            file.write(json.dumps(strict(row)) + "\n")
    except OSError as error:
        raise OSError(
            f"{path} cannot be written, so what the run did since its last checkpoint is lost: "
            f"{error}"
        ) from error


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl; see read_lines()."""
    return [row for row in read_lines(path) if isinstance(row.get("step"), int)]


def read_lines(path: Path) -> list[Row]:
    """The object on each line of a .jsonl file; [] if there is no such file.

    Torn or damaged lines are left out, with a warning that names the file.
    """
    # pathlib raises errors for a name that is too long
    lines = path.read_bytes().splitlines() if os.path.isfile(path) else []
    rows = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    rows = [row for row in rows if isinstance(row, dict)]
    if len(rows) < len(lines):
        _warn(f"{path}: {len(lines) - len(rows)} of {len(lines)} lines are torn or damaged")
    return rows


def read_mapping(path: Path) -> Row:
    """The mapping in a .json or .yaml file; {} if there is no such file.

    Also {} for a damaged file, with a warning that names it.
    """
    try:
        return read_data(path) if os.path.exists(path) else {}
    except ValueError as error:
        _warn(str(error))
        return {}


def read_data(path: Path) -> Row:
    """The mapping in a .json or .yaml file.

    Raises ValueError, in one sentence that names the file, for anything else.
    """
    try:
        content = path.read_text("utf-8")
        found = json.loads(content) if path.suffix == ".json" else yaml.safe_load(content)
        if not isinstance(found, dict):
            raise ValueError(f"it holds {type(found).__name__} instead of a mapping")
    except RecursionError:
        raise ValueError(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    return found


@cache
def _warn(sentence: str) -> None:
    """Log a warning, once: a file may be read several times."""
    log.warning(sentence)


def newest_first(run_dir: Path) -> list[Path]:
    """The folders of the run's checkpoints, whole or not, latest first.

    For the folder of one checkpoint: that folder alone.
    """
    if os.path.isfile(run_dir / META):  # pathlib raises errors for a name that is too long
        return [run_dir]
    found = [run_dir / name for name in (LATEST, PREVIOUS, BEST)]
    found = [folder for folder in found if os.path.isdir(folder)]
    return sorted(found, key=lambda folder: (folder.name != LATEST, -step_of(folder)))


def step_of(folder: Path) -> int:
    """The step of a checkpoint; -1 if its meta.json is damaged."""
    try:
        return meta_of(folder)["step"]
    except CheckpointError:
        return -1


def latest(run_dir: Path) -> Path:
    """RUN/checkpoint/, or the one before it if a save died between its two renames.

    For the folder of one checkpoint: that folder. Raises CheckpointError if there is none.
    """
    for folder in newest_first(run_dir):
        if folder.name != BEST or folder == run_dir:
            return folder
    raise CheckpointError(no_checkpoint(run_dir))


def read_meta(run_dir: Path) -> Row:
    """The meta.json of a run's latest checkpoint; see meta_of()."""
    return meta_of(latest(run_dir))


def meta_of(folder: Path) -> Row:
    """The meta.json of a checkpoint. Raises CheckpointError unless it is as it was written."""
    path = folder / META
    try:
        meta = read_data(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if meta.get("sha256") != meta_checksum(meta):
        raise CheckpointError(f"{path} is damaged or another program's: its SHA-256 differs")
    if meta["version"] != VERSION:
        raise CheckpointError(
            f"{folder} is of commit {meta['starts'][-1]['commit']}, which writes version "
            f"{meta['version']} and not {VERSION}: check out that commit to go on or to read it"
        )
    return meta


def newest_meta(run_dir: Path) -> Row:
    """The meta.json of the newest checkpoint that has a whole one.

    Raises CheckpointError if none has.
    """
    for folder in newest_first(run_dir):
        with suppress(CheckpointError):
            return meta_of(folder)
    return read_meta(run_dir)  # raises the reason


def run_of(folder: Path) -> Path:
    """The run directory of a checkpoint's folder; a run directory is returned as it is."""
    return folder.parent if os.path.isfile(folder / META) else folder


def no_checkpoint(folder: Path) -> str:
    """Why there is nothing to go on from in a folder, and which folder may have it."""
    hint = "a run that was stopped before its first checkpoint is started anew"
    # a run lies in outputs/DAY/TIME; pathlib raises errors for a name that is too long
    near, far = (sorted(glob(f"{below}/{LATEST}", root_dir=folder)) for below in ("*", "*/*"))
    if runs := near or far:
        hint = f"it holds runs, such as {(folder / runs[0]).parent}"
    elif (run := run_of(folder)) != folder:
        hint = f"it is a checkpoint of the run {run}"
    return f"{folder} holds no checkpoint: there is no folder {folder / LATEST}; {hint}"


def write_json(path: Path, obj: Row) -> None:
    """Write one JSON object so that a reader finds the old file or the new one, whole."""
    write_file(path, json.dumps(strict(obj), indent=1) + "\n")


def strict(obj: Row) -> Row:
    """`obj` with null for every NaN and infinity, and "nonfinite": the keys that hold any.

    {"loss": nan, "oom": {"free": inf}} -> {"loss": None, "oom": {"free": None}, "nonfinite":
    ["loss", "oom"]}
    """
    cleaned, nonfinite = {}, []
    for key, value in obj.items():
        # json calls `null` for each of them
        null = partial(lambda key, constant: nonfinite.append(key), key)
        cleaned[key] = json.loads(json.dumps(value, default=str), parse_constant=null)
    return cleaned | {"nonfinite": [*dict.fromkeys(nonfinite)]} if nonfinite else cleaned


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader finds the old content or the new, whole. Raises OSError with
    the path if it cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def whole_folder(target: Path, *, former: Path | None = None) -> Iterator[Path]:
    """An empty folder to fill. It becomes `target` at the end of the block, and is removed if the
    block raises an error.

    The folder that was `target` is removed, or becomes `former`. Two renames: whenever the process
    dies, one of the two is whole.
    """
    fresh = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()  # not its parents: a run's folder that was deleted is not created again
    try:
        yield fresh
        for path in (*fresh.iterdir(), fresh):
            sync(path)
        if former is not None and target.exists():
            shutil.rmtree(former, ignore_errors=True)
            target.rename(former)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def try_folder(folder: Path) -> None:
    """Create the folder, and write and remove a file in it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"a full disk raises its error here")


def check_writable(path: Path, ending: str = ".json") -> None:
    """Check that a file can be written, before the work whose result it will hold. Creates its
    folder.

    Raises a one-line OSError that names the path and a way out. Raises ValueError for another
    ending: a file of another kind is probably not to be replaced.
    """
    if path.suffix != ending:
        raise ValueError(f"{path} is not a name for this file; give one that ends in {ending}")
    try:
        try_folder(path.parent)
        if path.exists():
            path.open("a").close()  # raises for a folder, and changes no file
    except OSError as error:
        raise OSError(
            f"{path} cannot be written: {error.strerror or error}; name another file"
        ) from error
