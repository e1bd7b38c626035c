"""The files of a run: metrics.jsonl row by row, other files and folders so that each is always
whole, and which checkpoints there are.

    RUN/checkpoint/             the latest
    RUN/checkpoint.previous/    the one before it
    RUN/checkpoint.best/        the one with the lowest val/loss

Every file is strict JSON. NaN and infinity, which JSON lacks, become null, and the names of those
values are listed beside them as "nonfinite". Nothing here imports torch.
"""

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Any

import yaml

from data.token_file import meta_checksum, sync

Row = dict[str, Any]  # an object of a JSON file

LATEST, PREVIOUS, BEST = "checkpoint", "checkpoint.previous", "checkpoint.best"
FRESH = f"{LATEST}.tmp"  # a checkpoint that is being written
META = "meta.json"
# a new number for every change of what a setting is called or means: scripts read the weights of
# older versions, and a resume takes only this one
VERSION = 2


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, with the reason in one line."""


class MetricsFile:
    """metrics.jsonl: one JSON object per line, passed to the operating system at once."""

    def __init__(self, path: Path):
        self.path = path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def write(self, row: Row) -> None:
        if not self.path.is_file():  # opening would create it again, without the earlier rows
            raise OSError(
                f"{self.path} was deleted while the run wrote to it: what the run did since its "
                "last checkpoint is lost"
            )
        # opened per row: a row costs microseconds, and no handle outlives a run that fails
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(strict(row), allow_nan=False) + "\n")
        except OSError as error:
            raise OSError(f"{self.path} cannot be written: {error}") from error


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl, without torn or damaged lines; [] if the file is missing."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [row for row in parse_rows(lines) if isinstance(row.get("step"), int)]


def parse_rows(lines: Iterable[str]) -> Iterator[Row]:
    """The JSON object of each line; torn or damaged lines are skipped."""
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def read_mapping(path: Path) -> Row:
    """The mapping in a .json or .yaml file; {} if it is damaged or missing."""
    try:
        content = path.read_bytes()
        value = json.loads(content) if path.suffix == ".json" else yaml.safe_load(content)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


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
    """The step of a checkpoint; -1 if its meta.json does not tell it."""
    step = read_mapping(folder / META).get("step")
    return step if isinstance(step, int) else -1


def latest(run_dir: Path) -> Path:
    """RUN/checkpoint/, or the one before it if a save died between its two renames.

    For the folder of one checkpoint: that folder. Raises CheckpointError if there is none.
    """
    for folder in newest_first(run_dir):
        if folder.name != BEST or folder == run_dir:
            return folder
    raise CheckpointError(
        f"{run_dir} holds no checkpoint: there is no folder {run_dir / LATEST}; a run that "
        "was stopped before its first checkpoint is started anew"
    )


def read_meta(run_dir: Path) -> Row:
    """The meta.json of a run's latest checkpoint; see meta_of()."""
    return meta_of(latest(run_dir))


def meta_of(folder: Path) -> Row:
    """The meta.json of a checkpoint. Raises CheckpointError unless it is as it was written."""
    meta = read_mapping(folder / META)
    if meta.get("version", 0) > VERSION:
        raise CheckpointError(
            f"{folder} has version {meta['version']} of the format; this program reads versions up "
            f"to {VERSION}"
        )
    if meta.get("sha256") != meta_checksum(meta):
        raise CheckpointError(
            f"{folder / META} is missing, damaged or another program's: it has not the SHA-256 "
            "that it names"
        )
    return meta


def check_version(run_dir: Path) -> None:
    """Raise CheckpointError if an older version of this program trained the run."""
    for folder in newest_first(run_dir)[:1]:
        meta = read_mapping(folder / META)
        if meta.get("version", VERSION) != VERSION:
            raise CheckpointError(
                f"resume={run_dir}: it is a run of commit {commit_of(meta, run_dir)}, which has "
                "other settings; check out that commit to resume it. scripts.sample, report and "
                "cross_eval read it as it is"
            )


def commit_of(meta: Row, run_dir: Path) -> str | None:
    """The commit that wrote a checkpoint, by its last start or by RUN/env.json."""
    starts = meta.get("starts") or [{}]
    return starts[-1].get("commit") or read_mapping(run_dir / "env.json").get("commit")


def run_of(folder: Path) -> Path:
    """The run directory of a checkpoint's folder; a run directory is returned as it is."""
    return folder.parent if os.path.isfile(folder / META) else folder


def no_run(folder: Path, lacks: str) -> str:
    """Why a folder without the file `lacks` is not a run directory, and which folder may be."""
    hint = ""
    # a run lies in outputs/DAY/TIME; pathlib raises errors for a name that is too long
    found = (sorted(glob(f"{below}/{lacks}", root_dir=folder)) for below in ("*", "*/*"))
    if runs := next(filter(None, found), None):
        hint = f"; it holds runs, such as {(folder / runs[0]).parent}"
    elif (run := run_of(folder)) != folder:
        hint = f"; it is a checkpoint of the run {run}"
    return f"{folder} is not a run directory: it has no {lacks}{hint}"


def write_json(path: Path, obj: Row) -> None:
    """Write one JSON object so that a reader finds the old file or the new one, whole."""
    write_file(path, json.dumps(strict(obj), indent=1, allow_nan=False, default=str) + "\n")


def strict(obj: Row) -> Row:
    """`obj` with null for every NaN and infinity, and a list "nonfinite" of their names.

    {"loss": nan, "oom": {"free": inf}} -> {"loss": None, "oom": {"free": None}, "nonfinite":
    ["loss", "oom.free"]}
    """
    nonfinite: list[str] = []

    def clean(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {
                key: clean(item, f"{name}.{key}" if name else str(key))
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [clean(item, f"{name}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite.append(name)
            return None
        return value

    cleaned = clean(obj, "")
    return cleaned | {"nonfinite": nonfinite} if nonfinite else cleaned


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
        with contextlib.suppress(OSError):
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


def try_folder(folder: Path, size: int = 4096) -> None:
    """Create the folder, and write and remove a file of `size` bytes in it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:  # buffered: a raw write may end early
        file.write(bytes(size))


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
