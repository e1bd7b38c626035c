"""Ctrl-C and SIGTERM as a request: the step in progress is finished, then the run saves and stops. A script simply ends, in one line."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Use as a context manager; `requested` turns true at the first signal. A second Ctrl-C stops at once, without saving."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "Interrupt":
        self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def one_line(script: str) -> Iterator[None]:
    """Decorates a script's main(): Ctrl-C ends it with one line and exit code 130, a file that fails with one line and 1.

    What has been written by then stays.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(f"{script}: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        sys.exit(f"{script}: {error}")
