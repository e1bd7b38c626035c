"""From the shell to Hydra: what is refused before anything is written, and what a process needs
before its first job.
"""

import os
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

from config import options_first, quoted, replay_overrides
from training.interrupt import Ending
from training.streams import keep_streams

# options of Hydra that print and run nothing: what they print is all there is
ANSWERS = (
    "--help",
    "-h",
    "--hydra-help",
    "--version",
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--shell-completion",
    "-sc",
)


def start(main: Callable[[], Any]) -> None:
    """Run `main`, Hydra's, under the command line of this process."""
    refuse_several_processes()
    keep_streams(lasting=not any(argument.startswith(ANSWERS) for argument in sys.argv[1:]))
    arguments = replay_overrides(sys.argv[1:])
    refuse_unreadable(options_first(arguments)[1])
    sys.argv[1:] = arguments
    try:
        with Ending():
            main()
    except KeyboardInterrupt:  # before or between jobs
        sys.exit(130)


def refuse_several_processes() -> None:
    """End each process that torchrun started: they would train the same run, each on its own. The
    first one says so.
    """
    told = os.environ.get("WORLD_SIZE", "")
    if not told.isdecimal() or int(told) < 2:
        return
    if os.environ.get("RANK", "0") != "0":
        time.sleep(
            2
        )  # torchrun stops them all when the first one ends: that shall be the one that speaks
        sys.exit(1)
    sys.exit(
        f"error: WORLD_SIZE={told}, but a run is trained by one process on one GPU: start python "
        "train.py without torchrun, "
        "or a run or sweep of its own for each GPU with CUDA_VISIBLE_DEVICES=0, "
        "CUDA_VISIBLE_DEVICES=1 and so on"
    )


def refuse_unreadable(overrides: list[str]) -> None:
    """End the program at an override that is not of Hydra's grammar."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    for override in overrides:
        try:
            OverridesParser.create().parse_override(override)
        except HydraException as error:
            key, equals, value = override.partition("=")
            reason = next(
                line
                for line in str(error).splitlines()
                if not line.startswith("Error parsing override")
            )
            way_out = (
                f"if the value is text, write {shlex.quote(f'{key}={quoted(value)}')}"
                if equals
                else "write key=value"
            )
            raise SystemExit(
                f"error: Hydra cannot read {override!r} ({reason}); {way_out}"
            ) from None
