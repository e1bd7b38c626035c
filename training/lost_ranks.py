"""Notices that another rank ended, for which NCCL would wait until its timeout.

A thread of each rank waits for the ends of the others' processes on this host, and for word from
one that failed anywhere. Then it aborts NCCL's messages: whoever waits for the GPU goes on, and
`RankLost` is raised before what it got is used.
"""

import atexit
import contextlib
import json
import os
import select
import socket
from threading import Event, Thread
from typing import Any

from training.files import Row

PAUSE = 1000  # milliseconds between two looks for word from another host


class RankLost(RuntimeError):
    """Another rank ended, and this one cannot go on."""


class Watch:
    """`lost` is what summary.json says of the rank that ended; None as long as all are there."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store, self.rank = store, rank
        self.lost: Row | None = None
        self.noticed = Event()
        self.others: dict[int, int] = {}  # rank by the file descriptor of its process
        store.set(f"process {rank}", json.dumps([_place(), os.getpid()]))
        for other in range(world):
            place, pid = json.loads(store.get(f"process {other}"))
            # pidfd_open() is Linux's, and not every sandbox has it
            if other != rank and place == _place() and hasattr(os, "pidfd_open"):
                with contextlib.suppress(OSError):
                    self.others[os.pidfd_open(pid)] = other
        self.wake, self.sleeper = os.pipe()
        self.thread = Thread(target=self._watch, name="lost ranks", daemon=True)
        self.thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """The run is over: from here on ranks end one by one."""
        if self.thread.is_alive():
            os.write(self.sleeper, b"x")
            self.thread.join(10)
        atexit.unregister(self.stop)

    def check(self) -> None:
        """Raise RankLost where another rank ended."""
        if self.lost is not None:
            raise RankLost(self.lost.get("error") or self.lost["status"])

    def _watch(self) -> None:
        poll = select.poll()
        for descriptor in (*self.others, self.wake):
            poll.register(descriptor, select.POLLIN)
        try:
            while self.lost is None:
                ended = [descriptor for descriptor, _ in poll.poll(PAUSE)]
                if self.wake in ended:
                    return
                for descriptor in ended:
                    poll.unregister(descriptor)
                self.lost = self._reason([self.others[each] for each in ended])
        finally:
            for descriptor in self.others:
                os.close(descriptor)
        self.noticed.set()
        abort_nccl()

    def _reason(self, ended: list[int]) -> Row | None:
        """Why this rank cannot go on; None where it can. ended: ranks whose process is gone."""
        try:
            if told := self._word():
                return told
            ended = [rank for rank in ended if not self.store.check([f"left {rank}"])]
            if not ended:
                return None
        except RuntimeError:  # whoever keeps the store is gone
            pass
        who = f"rank {ended[0]}" if ended else "another rank"
        reason = f"{who} ended and did not say why: it was killed, or lost"
        return {"status": "failed", "error": reason} | ({"rank": ended[0]} if ended else {})

    def _word(self) -> Row | None:
        """What another rank says of its failure."""
        if not self.store.check(["failed"]):
            return None
        told = json.loads(self.store.get("failed"))
        return None if told["rank"] == self.rank else told


def _place() -> list[str]:
    """Where a process's id means this process."""
    with contextlib.suppress(OSError):
        return [socket.gethostname(), os.readlink("/proc/self/ns/pid")]
    return [socket.gethostname(), ""]


def abort_nccl() -> None:
    """End NCCL's kernels. All groups at the same time: one that ends frees memory, for which CUDA
    waits until the others' kernels have ended too.
    """
    import torch
    from torch.distributed import distributed_c10d

    threads = []
    for group in list(distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # it has no backend for a GPU
            backend = group._get_backend(torch.device("cuda"))
            if backend.name() == "nccl":
                threads.append(Thread(target=backend.abort, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
