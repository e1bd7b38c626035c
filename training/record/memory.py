"""How much memory a run used, how much it may use, and what to report when it ran out.

PyTorch's allocator counts tensors: on a GPU always, on a CPU while the profiler records one step.
Linux provides pages only when they are touched. So an oversized allocation on a CPU succeeds, and
the kernel kills the process later. `cpu_memory_limit` turns that into an error that can be caught.
"""

import contextlib
import ctypes
import gc
import math
import os
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from training.record.files import Row
from training.record.text_table import first_line

GIB = 1024**3
MARGIN = GIB // 2  # that a run leaves free on a CPU
LINUX = sys.platform == "linux"
CONTAINER = Path("/sys/fs/cgroup")  # control group v2: in a container, its own


class MemoryMeter:
    """Peak memory of one run in GiB.

    memory/peak_gib      tensors, including weights, gradients and optimizer state. On a GPU the
                         allocator always knows it. On a CPU only steps inside measured() count;
                         before the first it is None.
    memory/reserved_gib  GPU memory that the allocator reserves, with fragmentation; None on a CPU
    memory/process_gib   resident memory of the process, with Python and its libraries

    largest_of(row) returns the largest of each figure among the processes that train together.
    """

    def __init__(
        self, device: torch.device | str, largest_of: Callable[[Row], Row] = lambda row: row
    ) -> None:
        self.device = torch.device(device)
        self.largest_of = largest_of
        self._step_bytes: int | None = None
        self.summary: Row = {}  # the largest values of all rows so far, by the same names
        self.reset()

    def reset(self) -> None:
        """Forget the peak of what ran before."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        # some containers forbid the write; then the peak is that of the whole process
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    @contextlib.contextmanager
    def measured(self, *held: Any) -> Iterator[None]:
        """Measure the peak of this block on a CPU; `held` are nested tensors that exist before it.

        Counts everything that PyTorch's allocator hands out and gets back, in compiled code too.
        Memory that libraries allocate by themselves is not counted.
        """
        # there can be one profiler at a time, and scripts.profile starts one
        if self.device.type != "cpu" or torch.autograd._profiler_enabled():
            yield
            return
        gc.collect()  # PyTorch warns if older garbage is freed while it profiles
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it logs each start and stop
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            yield
        peak = bytes_of(held) + _peak_of(profile.kineto_results.experimental_event_tree())
        self._step_bytes = max(peak, self._step_bytes or 0)

    def peaks(self) -> Row:
        """The peaks of this process: on a GPU of tensors since reset(), on a CPU in the measured
        steps; of its resident memory since reset(), or since its start where that has no effect.
        """
        peak, reserved = self._step_bytes, None
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            reserved = torch.cuda.max_memory_reserved(self.device)
        if LINUX:
            process = _proc_field("/proc/self/status", "VmHWM")
        else:
            process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on a Mac
        found = {"peak": peak, "reserved": reserved, "process": process}
        return {f"memory/{name}_gib": size and size / GIB for name, size in found.items()}

    def row(self) -> Row:
        """The largest peaks() among the processes, all of which must call this."""
        row = self.largest_of(self.peaks())
        self.summary = {
            name: value and max(value, self.summary.get(name) or 0.0) for name, value in row.items()
        }
        return row


def _peak_of(tree: Iterable[Any]) -> int:
    """The most bytes at once of what was allocated during these events of a profiler."""
    live: dict[int, int] = {}
    size = peak = 0
    for event in sorted(_allocations(tree), key=lambda event: event.start_time_ns):
        block, change = event.extra_fields.ptr, event.extra_fields.alloc_size
        if change > 0:
            live[block] = change
        else:  # for an older block PyTorch gives the size of what it last profiled at this address
            change = -live.pop(block, 0)
        size += change
        peak = max(peak, size)
    return peak


def _allocations(tree: Iterable[Any]) -> Iterator[Any]:
    for event in tree:
        if event.name == "[memory]":
            yield event
        yield from _allocations(event.children)


def bytes_of(*trees: Any) -> int:
    """Bytes of the tensors in nested values; a storage that tensors share counts once."""
    storages = (x.untyped_storage() for x in tree_leaves(trees) if isinstance(x, torch.Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextlib.contextmanager
def cpu_memory_limit(at_most: float = math.inf) -> Iterator[None]:
    """Limit this process to the free memory less MARGIN, and to `at_most` bytes.

    An oversized tensor then raises PyTorch's allocator error. Otherwise the kernel's out-of-memory
    killer would end the whole sweep. Does nothing off Linux, nor once CUDA runs, because drivers
    reserve far more addresses than memory. Child processes inherit the limit.
    """
    if not LINUX or torch.cuda.is_initialized():
        yield
        return
    room = max(0, min(free_memory() - MARGIN, at_most))
    limit = _proc_field("/proc/self/status", "VmSize") + int(room)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:  # a lower limit that the user has set stays
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def free_memory() -> int:
    """Bytes that this process can still take on Linux, also in a container with a limit."""
    free = _proc_field("/proc/meminfo", "MemAvailable")
    # without a container there are no such files; without a limit it is "max"
    with contextlib.suppress(OSError, ValueError):
        limit = int((CONTAINER / "memory.max").read_text())
        used = int((CONTAINER / "memory.current").read_text())
        words = (CONTAINER / "memory.stat").read_text().split()
        reclaimable = int(words[words.index("inactive_file") + 1])
        return min(free, limit - used + reclaimable)
    return free


def _proc_field(path: str, name: str) -> int:
    """One line such as `VmHWM:   224320 kB`, in bytes."""
    match = re.search(rf"^{name}:\s*(\d+) kB", Path(path).read_text(), re.MULTILINE)
    assert match, f"{path} has no {name}"
    return int(match[1]) * 1024


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on a GPU or on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    signs = (
        "can't allocate memory",
        "not enough memory",
        "std::bad_alloc",
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def describe_out_of_memory(error: BaseException) -> Row:
    """The first line of the error, and the GiB that were asked for; None if it does not say."""
    asked = None
    size = r"(?:[Tt]ried|Unable) to allocate ([\d.]+) (bytes|[KMGTP]iB)"
    if found := re.search(size, str(error)):
        asked = float(found[1]) * 1024.0 ** ("bKMGTP".index(found[2][0]) - 3)
    return {"asked_gib": asked, "message": first_line(error)}


def release_memory(device: torch.device | str) -> None:
    """Free the memory that a finished run no longer uses, for the next run of the sweep."""
    # compiled graphs hold references to the tensors they were traced with
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif LINUX:
        # glibc keeps freed blocks, which would raise the next run's peak
        ctypes.CDLL(None).malloc_trim(0)
