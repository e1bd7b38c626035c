"""Decides whether a run or a sweep may write into a folder, and keeps other processes out of it."""

import fcntl
import os
from collections import Counter
from itertools import count
from pathlib import Path
from typing import IO, Any

from omegaconf import read_write

from training.launch.command_line import as_written
from training.record.files import try_folder

LOCK = ".lock"
# what may be there before a run: an old lock, and the file to which a launcher sends the output
BEFORE = {LOCK, "output.log"}


class Taken(SystemExit):
    """Something else is in the folder."""


def claim(folder: Path, key: str, *, goes_on: bool = False) -> IO:
    """Create and lock the folder of a run or a sweep, before anything else is written to it.

    It must be new or empty, unless the run or the sweep in it goes on. `key` is the setting that
    names it. Ends the program with the reason if the folder cannot be used. The system unlocks it
    when the returned file is closed, however this process ends.
    """
    way_out = f"name a new folder, as {key}=outputs/NAME"
    if goes_on:
        way_out = f"copy it elsewhere, and name the copy, as {key}=COPY"
    try:
        held = set(os.listdir(folder)) - BEFORE if os.path.lexists(folder) else set()
        if held and not goes_on:
            names = ", ".join(sorted(held)[:3])
            raise Taken(f"error: {key}={folder} holds other files already ({names}); {way_out}")
        try_folder(folder)
        file = (folder / LOCK).open("a")
    except OSError as error:
        raise SystemExit(
            f"error: {key}={folder} cannot be written to: {error}; {way_out}"
        ) from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise Taken(f"error: another process is writing to {folder} right now") from None
    except OSError:  # a file system without locks
        pass
    return file


def claim_run(config: Any) -> IO:
    """Claim the folder of a single run. If several start in the same second, the others get a
    number after their time stamp.
    """
    folder = named = Path(config.hydra.run.dir)
    has_stamp = "${now:" in as_written(config.hydra.run)["dir"]
    key = "resume" if config.resume else "hydra.run.dir"
    for number in count(2):
        try:
            file = claim(folder, key, goes_on=bool(config.resume))
            break
        except Taken:
            if not has_stamp:
                raise
            folder = named.with_name(f"{named.name}-{number}")
    with read_write(config):
        config.hydra.run.dir = str(folder)
    return file


def check_names(names: list[str]) -> None:
    """Refuse folders that the jobs of a sweep cannot have, as hydra.sweep.subdir names them."""
    places = [Path(name) for name in names]
    taken = Counter(parent for place in places for parent in (place, *place.parents))
    for place in places:
        is_outside = not place.parts or place.is_absolute() or ".." in place.parts
        is_too_long = any(len(os.fsencode(part)) > 255 for part in place.parts)
        if is_outside or is_too_long or taken[place] > 1:
            raise SystemExit(
                f"error: hydra.sweep.subdir={place} must be inside the folder of the sweep, of one "
                "job alone, and each part of at most 255 bytes, as is ${hydra.job.num}"
            )
