"""Ctrl-C, SIGTERM and SIGHUP: a training saves first, and every run writes its summary.

A script ends with one line.
"""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from training.phases import current


class Stopped(KeyboardInterrupt):
    """A signal asks the process to end. Any other KeyboardInterrupt was raised by a user's code."""


class RaisedAgain:
    """A context that loses no Ctrl-C which comes inside a finalizer, as torch.compile has many:
    Python would print a traceback, and go on.
    """

    def __enter__(self) -> Self:
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._hook

    def _unraisable(self, lost: Any) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt):
            # later, by another thread: now it would be raised in here, and be lost again
            threading.Timer(0.01, _thread.interrupt_main).start()
        else:
            self._hook(lost)


class Signals(RaisedAgain):
    """A context in which _handle() handles the signals that ask a process to end."""

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in _handled()}
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class Interrupt(Signals):
    """While steps are taken: the first signal sets `requested`; a second one stops at once.

    A second SIGHUP does not: closing a terminal sends two, one by itself and one by its shell.
    timeout(1) sends two SIGTERM together, so the second counts from a second later on.
    """

    requested = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self.since = True, time.monotonic()
            current().signal = signal.Signals(number).name  # its thread says so at once
        elif number == signal.SIGINT or (
            number == signal.SIGTERM and time.monotonic() - self.since > 1
        ):
            raise Stopped


class Ending(Signals):
    """Around a run: a signal raises Stopped.

    Once `held` is set, a signal is `noted`, and raised where the context ends.
    """

    held = False
    noted = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.held:
            raise Stopped
        self.noted = True

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.noted:
            raise Stopped


class Noted(Signals):
    """Around processes of one's own: signals are noted, to be passed on to them."""

    came = False

    def __init__(self) -> None:
        self._new: list[signal.Signals] = []

    def new(self) -> list[signal.Signals]:
        """The signals since the last call."""
        new, self._new = self._new, []
        return new

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        self._new.append(signal.Signals(number))


def hide_ctrl_c() -> None:
    """Let a Ctrl-C that nothing handles, as during the imports, end the process without a
    traceback.
    """

    def hook(kind: type[BaseException], *rest: Any) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, *rest)

    sys.excepthook = hook


def _handled() -> list[signal.Signals]:
    # Python lets only the main thread handle signals
    if threading.current_thread() is not threading.main_thread():
        return []
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    # nohup ignores SIGHUP: such a process runs on when its terminal is closed
    hangs_up = hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([hangup] if hangs_up else [])]


@contextmanager
def one_line(script: str) -> Iterator[None]:
    """Decorates a script's main(): reports in one line what ended it early.

    Exits with code 130 after Ctrl-C, with 1 otherwise. Files written by then stay.
    """
    try:
        with RaisedAgain():
            yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{script}: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        sys.exit(f"{script}: {error}")
    except (RuntimeError, MemoryError) as error:
        from training.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        sys.exit(f"{script}: out of memory: {str(error).splitlines()[0]}; ask for smaller sizes")
