"""Calls side by side, each in a process of its own: what it breaks does not reach another, and no
signal leaves one behind.

Ctrl-C at a terminal goes to every process. These do not hear it, nor do the compilers that they
start, which would each print a traceback: who waits for them ends them.
"""

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

Job = tuple[Any, ...]


class Died(Exception):
    """The process of this job ended without an answer."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.job = job


def in_processes(
    function: Callable[..., Any], jobs: Iterable[Job], limit: int
) -> Generator[tuple[Job, Any]]:
    """function(*job) of each, in the order in which they end; `limit` at once. Raises Died."""
    context, waiting = get_context("spawn"), deque(jobs)
    running: dict[Connection, tuple[BaseProcess, Job]] = {}  # by the pipe of the answer
    resource_tracker.ensure_running()  # whose start would let Ctrl-C through again
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=work, args=(theirs, function, waiting[0]))
                with signals_wait():
                    running[ours] = process, waiting.popleft()
                    process.start()
                theirs.close()  # else the end of the process would not be heard
            ready = wait(list(running))
            for ours in [pipe for pipe in running if pipe in ready]:
                process, job = running[ours]
                try:
                    answer = ours.recv()
                except EOFError as error:
                    raise Died(job) from error
                del running[ours]
                ours.close()
                process.join()
                yield job, answer
    finally:
        with signals_wait():
            for process, _ in running.values():
                kill(process)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Until the block ends; in a process that is started inside, until work() hears them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill(process: BaseProcess) -> None:
    """With its compilers, once it has a group of its own; see work()."""
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError, AttributeError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def work(answer: Connection, function: Callable[..., Any], job: Job) -> None:
    if hasattr(signal, "pthread_sigmask"):
        os.setpgrp()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGHUP})
        threading.Thread(target=end_with_parent, daemon=True).start()
    answer.send(function(*job))


def end_with_parent() -> None:
    """However that ends: nobody waits for the answer any more."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
