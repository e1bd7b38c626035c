"""Files on this machine: which ones make up a corpus. A file counts once, whatever leads to it."""

import glob
import importlib.util
import os
import sysconfig
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from config import DataConfig

CACHE = "__pycache__"
# not every installation ships its tests and bundled tools; encodings and pydoc_data hold tables
STDLIB_LEFT_OUT = {
    CACHE,
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


def list_files(config: DataConfig) -> tuple[Path, list[Path]]:
    """The root folder of a local corpus, and its files in a fixed order."""
    if config.source == "text":
        files = text_files(config.path)
        return Path(os.path.commonpath([file.parent for file in files])), files
    if config.source == "stdlib":
        root, left_out = Path(sysconfig.get_path("stdlib")), STDLIB_LEFT_OUT
    else:
        # find_spec locates torch without importing it
        root, left_out = Path(importlib.util.find_spec("torch").origin).parent, {CACHE}
    names = (name for name in files_below(str(root), left_out) if name.endswith(".py"))
    return root, [
        file
        for file in once(names)
        if not file.relative_to(root).parts[0].startswith(BUILD_RECORDS)
    ]


def text_files(path: str) -> list[Path]:
    """The files that data.path names, sorted."""
    given = os.path.abspath(os.path.expanduser(path))
    if os.path.isdir(given):
        names = files_below(given, {CACHE})
    else:
        pattern = glob.escape(given) if os.path.exists(given) else given
        names = glob.iglob(pattern, recursive=True)
    files = once(names)
    if not files:
        raise ValueError(
            f"data.path={path} names no file (looked from {Path.cwd()}); name a file of text, a "
            "folder with files, or a glob; '**' goes into folders, as in 'books/**/*.txt'"
        )
    return files


def files_below(
    folder: str, left_out: Container[str], around: frozenset[str] = frozenset()
) -> Iterator[str]:
    """The files in a folder and below it, without hidden ones, through links too. A link that leads
    back into a folder `around` this one is left out.
    """
    real = os.path.realpath(folder)
    for entry in () if real in around else os.scandir(folder):
        if entry.name.startswith(".") or entry.name in left_out:
            continue
        if entry.is_dir():
            yield from files_below(entry.path, left_out, around | {real})
        else:
            yield entry.path


def once(names: Iterable[str]) -> list[Path]:
    """The files, sorted, each under one path: the one without links, else the shortest."""
    paths: dict[tuple[int, int], list[Path]] = {}
    for name in names:
        # no pipe, socket or broken link
        if os.path.isfile(name) and CACHE not in name.split(os.sep):
            file = os.stat(name)
            paths.setdefault((file.st_dev, file.st_ino), []).append(Path(name))
    return sorted(
        same[0] if len(same) == 1 else min(same, key=plainness) for same in paths.values()
    )


def plainness(file: Path) -> tuple[bool, int, Path]:
    return file.resolve() != file, len(file.parts), file
