"""Handles Ctrl-C, SIGTERM and SIGHUP: a run saves first, and always writes its summary."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

log = logging.getLogger("tilegpt")


class Signals:
    """A context in which _handle() handles the signals that ask a process to end."""

    requested = False

    def __enter__(self) -> Self:
        numbers = [signal.SIGINT, signal.SIGTERM]
        # nohup ignores SIGHUP, so that the process runs on when its terminal is closed
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        # Python lets only the main thread handle signals
        here = threading.current_thread() is threading.main_thread()
        self._before = {each: signal.signal(each, self._handle) for each in numbers if here}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class Interrupt(Signals):
    """Used during the steps: the first signal sets `requested`; a Ctrl-C after it stops at once.

    Any other second signal says the same once more: closing a terminal sends two SIGHUP. `summary`
    notes it, because a signal ends a sweep too.
    """

    def __init__(self, summary: dict[str, Any]) -> None:
        self.summary = summary

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested = self.summary["stopped"] = True
            log.warning(
                f"{signal.Signals(number).name}: the run ends and saves after this step; Ctrl-C "
                "once more ends it at once, without saving"
            )


class Ending(Signals):
    """Used around a run: a signal raises KeyboardInterrupt.

    Once `held` is set it only sets `requested`, and the context raises when it ends.
    """

    held = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.held:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.requested:
            raise KeyboardInterrupt


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Ends the process quietly if nobody reads its standard output to the end, as with `| head`."""
    try:
        try:
            yield
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
