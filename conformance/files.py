"""Atomic writes: a reader finds either the old file or the new one, complete."""

import contextlib
import os
import tempfile
from pathlib import Path


def write_file(path: Path, content: str) -> None:
    """Raises OSError with the path if it cannot be written; the old file then stays."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


def check_writable(said: str, path: Path, ending: str) -> None:
    """Raise ValueError, beginning with `said`, if the file cannot be written later, or has another
    ending: a file of another kind is probably not to be replaced.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{said}: its folder does not exist")
    if path.is_dir():
        raise ValueError(f"{said} is a folder: name a file in it")
    if path.suffix != ending:
        raise ValueError(f"{said}: give a name that ends in {ending}")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"{said} cannot be written: {error.strerror or error}; name another file"
        ) from error
