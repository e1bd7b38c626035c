"""Ctrl-C and SIGTERM as a request: the step in progress is finished, then the run saves and stops."""

import signal
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
