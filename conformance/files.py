"""Files that attn-conform writes: a reader finds the old one or the new one, whole."""

import contextlib
import os
import tempfile
from pathlib import Path


def write_file(path: Path, content: str | bytes) -> None:
    """Raises OSError with the path where it cannot be written; what was there stays."""
    temporary = path.with_name(f"{path.name}.tmp")
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


def check_writable(said: str, path: Path) -> None:
    """Raise ValueError, with what was `said`, before the work for a file that cannot be written."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{said}: its folder does not exist")
    if path.is_dir():
        raise ValueError(f"{said} is a folder: name a file in it")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"{said} cannot be written: {error.strerror or error}; name another file"
        ) from error
