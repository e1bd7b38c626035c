"""Files on this machine: which ones make up a corpus. A file counts once, whatever leads to it.

A folder, and a pattern with `**`, go through links to folders. Each folder is read once, so a link
that leads back is no circle.
"""

import glob
import importlib.util
import os
import sysconfig
from collections import deque
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from config import DataConfig

CACHES = {"__pycache__"}
# not every installation ships its tests and bundled tools; encodings and pydoc_data hold tables
STDLIB_LEFT_OUT = {
    *CACHES,
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
        root, left_out = Path(importlib.util.find_spec("torch").origin).parent, CACHES
    files = once(matches(f"{glob.escape(str(root))}/**/*.py", left_out))
    return root, [
        file for file in files if not file.relative_to(root).parts[0].startswith(BUILD_RECORDS)
    ]


def text_files(path: str) -> list[Path]:
    """The files that data.path names, sorted."""
    given = os.path.abspath(os.path.expanduser(path))
    pattern = glob.escape(given) if os.path.exists(given) else given
    if os.path.isdir(given):
        pattern += "/**"
    files = once(matches(pattern, CACHES))
    if not files:
        raise ValueError(
            f"data.path={path} names no file (looked from {Path.cwd()}); name a file of text, a "
            "folder with files, or a glob; '**' goes into folders, as in 'books/**/*.txt'"
        )
    return files


def matches(pattern: str, left_out: Container[str]) -> Iterator[str]:
    """glob.glob(pattern, recursive=True), except that `**` goes into each folder once."""
    if pattern.endswith("/**"):
        pattern += "/*"
    before, stars, after = pattern.partition("/**/")
    if not stars:
        yield from glob.iglob(pattern)
        return
    for top in glob.iglob(before or "/"):
        for folder in folders_under(Path(top), left_out):
            yield from matches(f"{glob.escape(str(folder))}/{after}", left_out)


def folders_under(top: Path, left_out: Container[str]) -> Iterator[Path]:
    """The folder and those below it, each once. Those that no link leads to come first."""
    seen, waiting = set(), deque([top])
    while waiting:
        folder = waiting.popleft()
        if not os.path.isdir(folder) or identity(folder) in seen:
            continue
        seen.add(identity(folder))
        yield folder
        for child in sorted(folder.iterdir()):
            if child.name not in left_out and not child.name.startswith("."):
                add = waiting.append if child.is_symlink() else waiting.appendleft
                add(child)


def identity(path: str | Path) -> tuple[int, int]:
    """What two paths to the same file or folder have in common."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def once(names: Iterable[str]) -> list[Path]:
    """The files, sorted, each under one path: the one without links, else the first."""
    paths: dict[tuple[int, int], list[Path]] = {}
    for name in names:
        if os.path.isfile(name):  # no pipe, socket or broken link
            paths.setdefault(identity(name), []).append(Path(name))
    return sorted(
        same[0] if len(same) == 1 else min(same, key=lambda file: (file.resolve() != file, file))
        for same in paths.values()
    )
