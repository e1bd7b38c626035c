"""Documents on this machine: which files make up a corpus, and how to read one of them."""

import glob
import importlib.util
import logging
import os
import sysconfig
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from config import DataConfig

# not every installation ships its tests and bundled tools; encodings and pydoc_data hold tables
STDLIB_LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
}
# files that differ between two builds of the same version
BUILD_RECORDS = ("_sysconfigdata", "config-", "version.py")
# suffix -> its reader in `datasets`
TABLES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def list_files(config: DataConfig) -> tuple[Path, list[Path]]:
    """The root folder of a local corpus, and its files in a fixed order."""
    if config.source == "text":
        files = text_files(config.path)
        return Path(os.path.commonpath([file.parent for file in files])), files
    if config.source == "stdlib":
        root, left_out = Path(sysconfig.get_path("stdlib")), STDLIB_LEFT_OUT
    else:
        # find_spec locates torch without importing it
        root, left_out = Path(importlib.util.find_spec("torch").origin).parent, ()
    return root, [
        file
        for file in walk(root, left_out)
        if file.suffix == ".py" and not file.relative_to(root).parts[0].startswith(BUILD_RECORDS)
    ]


def walk(folder: Path, left_out: Container[str] = ()) -> list[Path]:
    """All files under a folder, sorted, except hidden ones, caches and folders in `left_out`."""

    def refuse(error: OSError) -> None:
        raise ValueError(
            f"the folder {error.filename} cannot be read ({error.strerror})"
        ) from error

    files = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [
            name
            for name in folders
            if name not in left_out and name != "__pycache__" and not name.startswith(".")
        ]
        # isfile leaves out pipes, sockets and broken links
        files += [
            Path(parent, name)
            for name in names
            if not name.startswith(".") and os.path.isfile(os.path.join(parent, name))
        ]
    return sorted(files)


def text_files(path: str) -> list[Path]:
    """The files that data.path names, sorted."""
    given, files = Path(path).expanduser().absolute(), []
    if given.is_file():
        files = [given]
    elif given.is_dir():
        files = walk(given)
        problem = (
            "is a folder without files; put text files into it or name another folder, file or glob"
        )
    elif given.exists():
        problem = "is neither a file nor a folder; write what comes through it to a file first"
    elif glob.has_magic(path):
        matches = glob.glob(str(given), recursive=True)
        files = sorted(Path(match) for match in matches if os.path.isfile(match))
        problem = (
            f"matches no file (looked from {Path.cwd()}); '**' goes into folders, as in "
            "'books/**/*.txt'"
        )
    else:
        problem = (
            f"does not exist (looked from {Path.cwd()}); name a file, a folder or a glob of text "
            "files"
        )
    if not files:
        raise ValueError(f"data.path={path} {problem}")
    return files


def read_text(file: Path) -> str:
    """A file as text.

    Raises UnicodeDecodeError for a file that is not UTF-8 text, ValueError for one that cannot be
    read.
    """
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read ({error.strerror}); change its permissions or leave it "
            "out of data.path"
        ) from error
    # NUL is valid UTF-8, but text does not contain it: the file is binary, or UTF-16
    if (position := raw.find(b"\0")) >= 0:
        raise UnicodeDecodeError("utf-8", raw, position, position + 1, "NUL")
    return raw.decode("utf-8-sig")


def read_table(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON, JSONL or parquet file."""
    import datasets

    # `datasets` would log a broken file before it raises the error that is reported below
    datasets.logging.set_verbosity(logging.CRITICAL)
    kind = TABLES[file.suffix]
    try:
        if file.stat().st_size > 0:
            yield from datasets.load_dataset(
                kind, data_files=glob.escape(str(file)), split="train", streaming=True
            )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{file} cannot be read as {kind} ({error}); repair it or leave it out of data.path"
        ) from error
