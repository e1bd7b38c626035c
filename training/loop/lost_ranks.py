"""Notices that another rank ended. NCCL alone would wait for that rank until its timeout.

In each rank a thread watches the other ranks' processes on this host, and looks for a failure that
a rank on any host reported. Then it aborts NCCL's communication, so that a wait for the GPU ends.
`RankLost` is raised before anyone uses the data that arrived.
"""

import atexit
import contextlib
import json
import os
import select
import socket
from threading import Event, Thread
from typing import Any

from training.record.files import Row

PAUSE = 1000  # milliseconds between two looks for a reported failure


class RankLost(RuntimeError):
    """Another rank ended, and this one cannot go on."""


class Watch:
    """Watches the other ranks. `lost` is what summary.json says of one that ended, or None."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store, self.rank = store, rank
        self.lost: Row | None = None
        self.noticed = Event()
        self.others: dict[int, int] = {}  # rank by the file descriptor of its process
        store.set(f"process {rank}", json.dumps([_place(), os.getpid()]))
        for other in range(world):
            place, pid = json.loads(store.get(f"process {other}"))
            # only Linux has pidfd_open(), and some sandboxes refuse it
            if other != rank and place == _place() and hasattr(os, "pidfd_open"):
                with contextlib.suppress(OSError):
                    self.others[os.pidfd_open(pid)] = other
        self.wake, self.sleeper = os.pipe()
        self.thread = Thread(target=self._watch, name="lost ranks", daemon=True)
        self.thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop watching: the run is over, and the ranks now end one by one."""
        if self.thread.is_alive():
            os.write(self.sleeper, b"x")
            self.thread.join(10)
        atexit.unregister(self.stop)

    def check(self) -> None:
        """Raise RankLost if another rank ended."""
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
        """Why this rank cannot go on; None if it can. ended: ranks whose process is gone."""
        try:
            if self.store.check(["failed"]):
                told = json.loads(self.store.get("failed"))
                if told["rank"] != self.rank:
                    return told
            ended = [rank for rank in ended if not self.store.check([f"left {rank}"])]
            if not ended:
                return None
        except RuntimeError:  # the process that keeps the store is gone
            pass
        who = f"rank {ended[0]}" if ended else "another rank"
        reason = f"{who} ended and did not say why: it was killed, or lost"
        return {"status": "failed", "error": reason} | ({"rank": ended[0]} if ended else {})


def _place() -> list[str]:
    """The host and the PID namespace in which this process has its id."""
    with contextlib.suppress(OSError):
        return [socket.gethostname(), os.readlink("/proc/self/ns/pid")]
    return [socket.gethostname(), ""]


def abort_nccl() -> None:
    """Abort the kernels of all NCCL groups at the same time. A group that ends frees memory, and
    CUDA delays that until the kernels of the other groups have ended too.
    """
    import torch
    from torch.distributed import distributed_c10d

    threads = []
    for group in list(distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # the group has no GPU backend
            backend = group._get_backend(torch.device("cuda"))
            if backend.name() == "nccl":
                threads.append(Thread(target=backend.abort, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
