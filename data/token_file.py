"""The files of a token store: reading tokens by position, checksums, and syncing to disk.

Nothing is mapped into memory. If another program truncates a mapped file, the system ends the
process with SIGBUS. A read past the end is an OSError that names the file.
"""

import hashlib
import json
import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

CHUNK = 1 << 20  # bytes read at once while a file is checked

# XXH3 detects damage, not forgery, and is as fast as the page cache: on a core with SHA
# instructions, SHA-256 takes six times as long, and CRC-32 more than three times
CHECKSUM = "xxh3_128"


class TokenFile:
    """A file of T tokens. `rows(starts, length)` and `tokens[start:stop]` read it at every call.

    The file stays open as long as the object lives, so a run can go on reading its store after
    another process replaced it.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self.dtype = path, np.dtype(dtype)
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._length = os.fstat(self._descriptor).st_size // self.dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self._length)
        return self.rows(np.array([start]), stop - start)[0]

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """`length` tokens from each of B starts, (B, length), read-only.

        Raises OSError, naming the file, if it cannot be read or became shorter.
        """
        size = length * self.dtype.itemsize
        positions = (starts * self.dtype.itemsize).tolist()
        try:
            # as fast as copying rows out of a mapped file; reading into the rows of an array takes
            # 1.4 times as long
            content = b"".join(
                [os.pread(self._descriptor, size, position) for position in positions]
            )
            if len(content) < len(positions) * size:
                content = b"".join([self._read_all(size, position) for position in positions])
        except OSError as error:
            raise OSError(f"{self.path} cannot be read ({error.strerror or error})") from error
        return np.frombuffer(content, self.dtype).reshape(len(positions), length)

    def _read_all(self, size: int, position: int) -> bytes:
        """Exactly `size` bytes. One read may give fewer, and gives none at the end of the file."""
        content = b""
        while len(content) < size:
            more = os.pread(self._descriptor, size - len(content), position + len(content))
            if not more:
                raise OSError(
                    f"it became shorter than its {self._length:,} tokens while the run read it; "
                    "the next start builds it again"
                )
            content += more
        return content


def checksums(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int | str]]:
    """Size and checksum of each file. On a terminal, a progress bar appears after a second."""
    from tqdm import tqdm

    total = sum((folder / name).stat().st_size for name in names)
    entries = {}
    with tqdm(
        total=total,
        desc=f"checking {folder.name}",
        unit="B",
        unit_scale=True,
        delay=1,
        disable=None,
    ) as progress:
        for name in names:
            checksum, buffer = xxhash.xxh3_128(), memoryview(bytearray(CHUNK))
            with open(folder / name, "rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    checksum.update(buffer[:count])
                    progress.update(count)
                entries[name] = {"bytes": file.tell(), CHECKSUM: checksum.hexdigest()}
    return entries


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
