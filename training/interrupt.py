"""Ctrl-C, SIGTERM and SIGHUP: a training saves first, and nothing comes between a run and its
summary. A script ends in one line.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(KeyboardInterrupt):
    """A signal ends what was going on. A KeyboardInterrupt of another kind was raised by somebody's
    code.
    """


class Signals:
    """A context in which _handle() answers the signals that ask a process to end."""

    def __enter__(self) -> "Signals":
        self._previous = {number: signal.signal(number, self._handle) for number in _answered()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class Interrupt(Signals):
    """While steps are made: `requested` turns true at the first signal. A second Ctrl-C stops at
    once, without saving.

    A second signal of another kind does not: a terminal that is closed sends SIGHUP twice, once by
    itself and once by its shell.
    """

    requested = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise Stopped
        self.requested = True


class Ending(Signals):
    """Around a run: a signal raises Stopped, until `held` is set. From then on it is `noted`, and
    raised where the context ends.
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


def _answered() -> list[signal.Signals]:
    # Python hands signals to the main thread alone
    if threading.current_thread() is not threading.main_thread():
        return []
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    # what nohup started goes on when its terminal is closed
    hangs_up = hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([hangup] if hangs_up else [])]


@contextmanager
def one_line(script: str) -> Iterator[None]:
    """Decorates a script's main(): what ends it early is said in one line, with exit code 130 after
    Ctrl-C and 1 otherwise.

    What has been written by then stays.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{script}: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        sys.exit(f"{script}: {error}")
    except (RuntimeError, MemoryError) as error:
        from training.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        sys.exit(f"{script}: out of memory: {str(error).splitlines()[0]}; ask for smaller sizes")
