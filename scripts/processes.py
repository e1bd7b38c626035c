"""Run calls in parallel, each in its own process: a crash does not affect the others, and a signal
leaves no process behind.

Ctrl-C at a terminal goes to every process. These processes and the compilers that they start ignore
it, since each would print a traceback. The parent ends them instead.
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
    """The process of a job, the only argument, ended without an answer."""


def in_processes(
    function: Callable[..., Any], jobs: Iterable[Job], limit: int
) -> Generator[tuple[Job, Any]]:
    """Yield (job, function(*job)) in the order in which jobs end; `limit` run at a time. Raises
    Died.
    """
    context, waiting = get_context("spawn"), deque(jobs)
    running: dict[Connection, tuple[BaseProcess, Job]] = {}  # by the pipe of their answers
    resource_tracker.ensure_running()  # started now: its start would unblock Ctrl-C
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=work, args=(theirs, function, waiting[0]))
                with signals_wait():
                    running[ours] = process, waiting.popleft()
                    process.start()
                theirs.close()  # otherwise the end of the process would go unnoticed
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
    """Block signals until the end of the block; in a process started inside, until work() unblocks
    them.
    """
    ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill(process: BaseProcess) -> None:
    """Kill the process, and its compilers if it already has its own group; see work()."""
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def work(answer: Connection, function: Callable[..., Any], job: Job) -> None:
    os.setpgrp()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGHUP})
    threading.Thread(target=end_with_parent, daemon=True).start()
    answer.send(function(*job))


def end_with_parent() -> None:
    """End this process when its parent ends, in any way: nobody waits for the answer then."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
