"""Reading tokens by position, and what makes a file on disk trustworthy: checksums and syncing.

Nothing is mapped into memory. A mapped file counts as memory that the run takes, and if another
program truncates it, the system ends the process. Here a read past the end is an OSError.
"""

import hashlib
import json
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np


class TokenFile:
    """A file of tokens. `len` is their number; `rows(starts, length)` reads some of them.

    The file stays open as long as the object lives, so a run goes on after its store was deleted.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self.dtype = path, np.dtype(dtype)
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._length = path.stat().st_size // self.dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """`length` tokens from each of B starts, (B, length), read-only.

        Raises OSError, naming the file, if it became shorter.
        """
        size = length * self.dtype.itemsize
        positions = (starts * self.dtype.itemsize).tolist()
        content = b"".join([os.pread(self._descriptor, size, each) for each in positions])
        if len(content) < len(starts) * size:
            raise OSError(
                f"{self.path} became shorter than its {self._length:,} tokens while the run read "
                "it; the next start builds it again"
            )
        return np.frombuffer(content, self.dtype).reshape(len(starts), length)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_and_time(path: Path) -> list[int]:
    """Bytes, and nanoseconds of the last change."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def entry(path: Path) -> dict[str, Any]:
    """What tells whether the file is still the one that was written."""
    return {"size_and_time": size_and_time(path), "sha256": sha256_of(path)}


def check(path: Path, written: dict[str, Any]) -> None:
    """Raise ValueError if a file is not what was written. It is read only if its size or time stamp
    changed.
    """
    unchanged = size_and_time(path) == written["size_and_time"]
    if not unchanged and sha256_of(path) != written["sha256"]:
        raise ValueError(f"{path.name} was altered: its checksum differs")


def meta_checksum(meta: dict[str, Any]) -> str:
    """The SHA-256 of all other entries of a meta.json, whatever the layout of the file."""
    content = {key: value for key, value in meta.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
