"""Files on this machine: which ones make up a corpus. A file counts once, whatever leads to it.

A folder, and a pattern with `**`, go through links to folders. Each folder is read once, so a link
that leads back is no circle.
"""

import glob
import importlib.util
import os
import sysconfig
from collections import deque
from collections.abc import Container, Iterator
from pathlib import Path

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
        for file in files_under(root, left_out)
        if file.suffix == ".py" and not file.relative_to(root).parts[0].startswith(BUILD_RECORDS)
    ]


def text_files(path: str) -> list[Path]:
    """The files that data.path names, sorted."""
    given = Path(path).expanduser().absolute()
    if given.is_dir():
        files = files_under(given)
    elif given.exists():
        files = [given] if given.is_file() else []
    else:
        files = once(Path(name) for name in matches(str(given)) if os.path.isfile(name))
    if not files:
        raise ValueError(
            f"data.path={path} names no file (looked from {Path.cwd()}); name a file of text, a "
            "folder with files, or a glob; '**' goes into folders, as in 'books/**/*.txt'"
        )
    return files


def matches(pattern: str) -> Iterator[str]:
    """glob.glob(pattern, recursive=True), except that `**` goes into each folder once."""
    if pattern.endswith("/**"):
        pattern += "/*"
    before, stars, after = pattern.partition("/**/")
    if not stars:
        yield from glob.iglob(pattern)
    for top in glob.iglob(before or "/") if stars else ():
        for folder in folders_under(Path(top)):
            yield from matches(f"{glob.escape(str(folder))}/{after}")


def files_under(folder: Path, left_out: Container[str] = ()) -> list[Path]:
    """All files under a folder, sorted, except hidden ones, caches and folders in `left_out`."""
    return once(
        Path(entry)
        for parent in folders_under(folder, left_out)
        for entry in entries(parent)
        # isfile leaves out pipes, sockets and broken links
        if os.path.isfile(entry)
    )


def folders_under(top: Path, left_out: Container[str] = ()) -> Iterator[Path]:
    """The folder and those below it, each once. Those that no link leads to come first."""
    seen, waiting = set(), deque([top])
    while waiting:
        folder = waiting.popleft()
        if (key := identity(folder)) in seen:
            continue
        seen.add(key)
        yield folder
        for entry in entries(folder):
            if os.path.isdir(entry) and entry.name not in left_out and entry.name != "__pycache__":
                add = waiting.append if entry.is_symlink() else waiting.appendleft
                add(Path(entry))


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """What a folder holds, sorted, except what is hidden."""
    try:
        with os.scandir(folder) as found:
            visible = [entry for entry in found if not entry.name.startswith(".")]
    except OSError as error:
        raise ValueError(f"the folder {folder} cannot be read ({error.strerror})") from error
    return sorted(visible, key=lambda entry: entry.name)


def identity(path: Path) -> tuple[int, int]:
    """What two paths to the same file or folder have in common."""
    found = path.stat()
    return found.st_dev, found.st_ino


def once(files: Iterator[Path]) -> list[Path]:
    """The files, sorted, each under one path: the one without links, else the first."""
    paths: dict[tuple[int, int], list[Path]] = {}
    for file in files:
        paths.setdefault(identity(file), []).append(file)
    return sorted(
        same[0] if len(same) == 1 else min(same, key=lambda file: (file.resolve() != file, file))
        for same in paths.values()
    )
