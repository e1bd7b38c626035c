"""Handles Ctrl-C, SIGTERM and SIGHUP: a training run saves first, and always writes its summary.

A script ends with a one-line message.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, Self

log = logging.getLogger("tilegpt")


class Stopped(KeyboardInterrupt):
    """A signal asks the process to end. Any other KeyboardInterrupt was raised by a user's code."""


class RaisedAgain:
    """A context that raises a Ctrl-C again if it came inside a finalizer, where Python would print
    a traceback and go on. torch.compile has many finalizers.
    """

    def __enter__(self) -> Self:
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._hook

    def _unraisable(self, lost: Any) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt):
            # another thread raises it later; raised in here, it would be lost again
            threading.Timer(0.01, interrupt_main).start()
        else:
            self._hook(lost)


def interrupt_main() -> None:
    """Raise Ctrl-C in the main thread, also while that waits: for a process, a pipe, a lock."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


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
    """Used during the steps: the first signal sets `requested`; a second one stops at once.

    A second SIGHUP is ignored: closing a terminal sends two, one of them from its shell. timeout(1)
    sends two SIGTERMs together, so a second SIGTERM counts only after one second.
    """

    requested = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self.since = True, time.monotonic()
            log.warning(
                f"{signal.Signals(number).name}: the run ends and saves after this step; Ctrl-C or "
                "SIGTERM once more ends it at once, without saving"
            )
        elif number == signal.SIGINT or (
            number == signal.SIGTERM and time.monotonic() - self.since > 1
        ):
            raise Stopped


class Ending(Signals):
    """Used around a run: a signal raises Stopped.

    Once `held` is set, a signal only sets `noted`, and Stopped is raised when the context ends.
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


def hide_ctrl_c() -> None:
    """Let an unhandled Ctrl-C, such as one during the imports, end the process without a
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
    # nohup ignores SIGHUP, so that the process runs on when its terminal is closed
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


def end_unread() -> NoReturn:
    """End the process because nobody reads its standard output any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)


@contextmanager
def one_line(script: str) -> Iterator[None]:
    """Decorates a script's main(): reports in one line what ended it early.

    Exits with code 130 after Ctrl-C, 141 if the reader of its output left, and 1 otherwise. Files
    that were already written stay.
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
        end_unread()
    except OSError as error:
        sys.exit(f"{script}: {error}")
    except (RuntimeError, MemoryError) as error:
        from training.record.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        sys.exit(f"{script}: out of memory: {str(error).splitlines()[0]}; ask for smaller sizes")
