"""Standard output and standard error that a run outlives: closed, a pipe without a reader, a disk
that is full.

What they lose stands in train.log all the same.
"""

import os
import sys
from typing import Any


class Stream:
    """A standard stream whose first failure sends everything after it to nowhere."""

    def __init__(self, stream: Any, name: str):
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        # on the descriptor itself: what waits in a buffer, or comes from a library in C, must not
        # fail either
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if self._name == "stdout":
            print(
                f"{self._name} cannot be written to ({error.strerror}): a run goes on, and its "
                "train.log has every line",
                file=sys.stderr,
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_streams(*, lasting: bool = True) -> None:
    """Open what is closed of standard input, output and error, and, if lasting, let the last two
    fail without an exception.
    """
    # a file that was opened as number 1 or 2 would get what libraries print
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115, it stays open to the end
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a sample may hold letters that the terminal lacks
        setattr(sys, name, Stream(stream, name) if lasting else stream)
