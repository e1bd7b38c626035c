"""Keeps a run alive if standard output or error is closed, has lost its reader, or fills a disk.

train.log still has every line.
"""

import os
import sys
from typing import Any


class Stream:
    """A standard stream that writes to nowhere after its first failure."""

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
        # replace the descriptor itself, so that buffered text and C libraries do not fail either
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if self._name == "stdout":
            print(
                f"stdout cannot be written to ({error.strerror}): a run goes on, and its train.log "
                "has every line",
                file=sys.stderr,
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_streams(*, lasting: bool) -> None:
    """Open closed standard streams; if `lasting`, failed writes to them raise nothing."""
    # otherwise the next file opened would be descriptor 1 or 2, and get what libraries print
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name in ("stdout", "stderr"):
        # what is opened here stays open to the end of the process
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        if hasattr(stream, "reconfigure"):
            # a sample may hold characters that the terminal lacks
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, Stream(stream, name) if lasting else stream)
