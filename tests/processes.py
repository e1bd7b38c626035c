"""`python ...` in a process of its own, for what a test cannot see from inside: signals, exit
codes, memory, and what is imported.
"""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300  # that a process may take where several share a core


class Process(subprocess.Popen):
    """python ARGUMENTS. It writes to a file: a pipe that nobody reads would stop it."""

    def __init__(self, *arguments: str, **options) -> None:
        # it stays open as long as this object lives
        self.file = tempfile.TemporaryFile("a+")  # noqa: SIM115
        given = {"cwd": ROOT, "stdin": subprocess.DEVNULL}
        given |= {"stdout": self.file, "stderr": subprocess.STDOUT}
        super().__init__([sys.executable, *arguments], **(given | options))

    def output(self) -> str:
        """All that it has written so far."""
        self.file.seek(0)
        return self.file.read()

    def end(self, seconds: float = SECONDS) -> str:
        """Wait for its end; what it has written. One that does not end is ended."""
        try:
            self.wait(seconds)
        except subprocess.TimeoutExpired:
            self.terminate()  # torchrun then ends its ranks
            raise AssertionError(f"it ran for {seconds} s: {self.output()}") from None
        return self.output()


def run(*arguments: str, check: bool = False, **options) -> subprocess.CompletedProcess:
    """python ARGUMENTS to its end, with what it writes."""
    given = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "text": True, "timeout": SECONDS}
    given |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = subprocess.run([sys.executable, *arguments], **(given | options))
    assert not (check and done.returncode), done.stderr
    return done


@contextmanager
def limited(what: int, limit: int) -> Iterator[None]:
    """This process may use less of `what`, as resource.RLIMIT_FSIZE: files beyond that many bytes
    fail as on a full disk.
    """
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


def python_path(folder: Path | str) -> str:
    """PYTHONPATH with this folder before those that it has: packages may lie there."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
