"""Writes the files of a run: metrics.jsonl row by row, other files so that each is always whole.

Every file is strict JSON. NaN and infinity, which JSON lacks, become null, and the names of those
values are listed beside them as "nonfinite".
"""

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

log = logging.getLogger("tilegpt")

Row = dict[str, Any]  # an object of a JSON file


class MetricsFile:
    """metrics.jsonl: one JSON object per line, passed to the operating system at once."""

    def __init__(self, path: Path):
        self.path = path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def write(self, row: Row) -> None:
        # opened per row: a row costs microseconds, and no handle outlives a run that fails
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(strict(row), allow_nan=False) + "\n")
        except OSError as error:
            raise OSError(f"{self.path} cannot be written: {error}") from error

    def go_back_to(self, step: int, saved: Path) -> None:
        """Drop rows of later steps and a torn last line, because a resumed run writes them again.

        `saved` is the copy in the checkpoint of that step. If it exists, its rows replace those of
        this file, which may have been damaged since.
        """
        rows = [row for row in read_metrics(self.path) if row["step"] <= step]
        if saved.is_file() and (before := read_metrics(saved)) != rows:
            log.warning(
                f"{self.path} was damaged: its rows up to step {step} are put back from {saved}"
            )
            rows = before
        write_file(self.path, "".join(json.dumps(row) + "\n" for row in rows))


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
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def write_json(path: Path, obj: Row) -> None:
    """Write one JSON object so that a reader finds the old file or the new one, whole."""
    write_file(path, layout(strict(obj)) + "\n")


def layout(value: Any, depth: int = 0) -> str:
    """JSON with one row per line, so that a diff shows the rows that changed. A value is one row if
    it fits in 600 characters or holds no list or object; else each of its parts starts a line.
    """
    line = json.dumps(value, allow_nan=False, default=str)
    parts = value.values() if isinstance(value, dict) else value
    kinds = dict, list, tuple
    nested = isinstance(value, kinds) and any(isinstance(part, kinds) for part in parts)
    if not value or (depth and (len(line) <= 600 or not nested)):
        return line
    texts = [layout(part, depth + 1) for part in parts]
    if isinstance(value, dict):
        # dumping an object of one item shows how json writes a key that is not a string
        names = [json.dumps({key: 0})[1:-2] for key in value]
        texts = [f"{name}{text}" for name, text in zip(names, texts, strict=True)]
    start, end = line[0], line[-1]
    inner = " " * (depth + 1)
    return f"{start}\n{inner}" + f",\n{inner}".join(texts) + f"\n{inner[1:]}{end}"


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


class HashedFile:
    """A new binary file whose SHA-256 is computed in another thread while it is written."""

    def __init__(self, path: Path, threads: Executor) -> None:
        self.digest = hashlib.sha256()
        self._file, self._threads = path.open("wb"), threads

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, content: bytes | memoryview) -> int:
        hashed = self._threads.submit(self.digest.update, content)
        try:
            return self._file.write(content)
        finally:
            hashed.result()  # the caller may free the content now

    def flush(self) -> None:
        self._file.flush()


def try_folder(folder: Path, size: int = 4096) -> None:
    """Create the folder, and write and remove a file of `size` bytes in it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
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
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        try_folder(path.parent)
    except OSError as error:
        raise OSError(
            f"{path} cannot be written: {error.strerror or error}; name another file"
        ) from error
