"""How much memory a run used, how much it may use, and what to report when it ran out.

PyTorch's allocator counts tensors: on a GPU always, on a CPU while the profiler records one step.
Linux provides pages only when they are touched. So an oversized allocation on a CPU succeeds, and
the kernel kills the process later. `cpu_memory_limit` turns that into an error that can be caught.
"""

import contextlib
import ctypes
import gc
import os
import re
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from training.loop.ranks import ALONE, Ranks

GIB = 1024**3
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
LINUX = sys.platform == "linux"


class MemoryMeter:
    """Peak memory of one run in GiB, on the rank that needs most.

    memory/peak_gib      tensors, including weights, gradients and optimizer state. On a GPU the
                         allocator always knows it. On a CPU only steps inside measured() count;
                         before the first it is None.
    memory/reserved_gib  GPU memory that the allocator reserves, with fragmentation; None on a CPU
    memory/process_gib   resident memory of the process, with Python and its libraries
    """

    def __init__(self, device: torch.device | str, ranks: Ranks = ALONE):
        self.device = torch.device(device)
        self.ranks = ranks
        self._step_bytes: int | None = None
        self._largest: dict[str, float | None] = {}
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
        events = (event for event in profile.kineto_results.events() if event.name() == "[memory]")
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        peak = bytes_of(held) + max(accumulate(changes, initial=0))
        self._step_bytes = max(peak, self._step_bytes or 0)

    def peak_gib(self) -> float | None:
        """Peak of tensors: on a GPU since reset(), on a CPU in the measured steps."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / GIB
        return self._step_bytes and self._step_bytes / GIB

    def reserved_gib(self) -> float | None:
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_reserved(self.device) / GIB

    def process_gib(self) -> float:
        """Peak resident memory since reset(), or of the whole process if reset() has no effect."""
        if LINUX:
            return _proc_field("/proc/self/status", "VmHWM") / GIB
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024) / GIB

    def row(self) -> dict[str, float | None]:
        """The three peaks by their names in metrics.jsonl. All ranks must call it."""
        row = self.ranks.largest_of(
            {
                "memory/peak_gib": self.peak_gib(),
                "memory/reserved_gib": self.reserved_gib(),
                "memory/process_gib": self.process_gib(),
            }
        )
        self._largest = {
            name: value and max(value, self._largest.get(name) or 0.0)
            for name, value in row.items()
        }
        return row

    def summary(self) -> dict[str, float | None]:
        """The largest values of all rows so far, by the same names."""
        return self._largest


def bytes_of(*trees: Any) -> int:
    """Bytes of the tensors in nested values; a storage that tensors share counts once."""
    storages = (x.untyped_storage() for x in tree_leaves(trees) if isinstance(x, torch.Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def in_use_gib() -> float:
    """GiB that this process holds: tensors on a GPU, else resident memory, or 0 off Linux."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() / GIB
    return _proc_field("/proc/self/status", "VmRSS") / GIB if LINUX else 0.0


@contextlib.contextmanager
def cpu_memory_limit(
    *, margin_bytes: int = 512 * 1024**2, at_most: int | None = None
) -> Iterator[None]:
    """Limit this process to the free memory less a margin, and to `at_most` bytes.

    An oversized tensor then raises PyTorch's allocator error. Otherwise the kernel's out-of-memory
    killer would end the whole sweep. Does nothing off Linux, nor once CUDA runs, because drivers
    reserve far more addresses than memory. Child processes inherit the limit.
    """
    if not LINUX or torch.cuda.is_initialized():
        yield
        return
    import resource

    address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    room = max(0, available_bytes() - margin_bytes)
    limit = address_space + (room if at_most is None else min(room, at_most))
    # a lower limit that the user has set stays
    limit = min([limit, *(bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def available_bytes() -> int:
    """Memory that this process can still take on Linux, by the kernel and its control group."""
    available = _proc_field("/proc/meminfo", "MemAvailable")
    return min([available, *(limit - used for limit, used in _cgroup_memory())])


def total_bytes() -> int:
    return min(
        [_proc_field("/proc/meminfo", "MemTotal"), *(limit for limit, _ in _cgroup_memory())]
    )


def _proc_field(path: str, name: str) -> int:
    """One line such as `VmHWM:   224320 kB`, in bytes."""
    match = re.search(rf"^{name}:\s*(\d+) kB", Path(path).read_text(), re.MULTILINE)
    assert match, f"{path} has no {name}"
    return int(match[1]) * 1024


def _cgroup_memory() -> list[tuple[int, int]]:
    """(limit, unreclaimable bytes) of this process's control group (v2) and all above it."""
    try:
        name = re.search(r"^0::/?(.*)", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    except OSError:
        return []
    if name is None:
        return []
    root = Path("/sys/fs/cgroup")
    group = root / name[1]
    limits = []
    for folder in (group, *group.parents):
        # a group without the memory controller lacks the files; one without a limit says "max"
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            stat = (folder / "memory.stat").read_text()
            cache = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
            limits.append((limit, used - int(cache[1]) if cache else used))
        if folder == root:
            break
    return limits


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


def describe_out_of_memory(error: BaseException, device: torch.device | str) -> dict:
    """The requested and the free memory in GiB, and the first line of the error.

    A value is None if PyTorch's message lacks it.
    """
    message = str(error)
    asked = _gib(r"(?:[Tt]ried to allocate|Unable to allocate) ([\d.]+) (bytes|[KMGTP]iB)", message)
    free = _gib(r"of which ([\d.]+) (bytes|[KMGTP]iB) is free", message)
    total = _gib(r"total capacity of ([\d.]+) (bytes|[KMGTP]iB)", message)
    device = torch.device(device)
    if device.type == "cuda" and total is None:
        free_bytes, total_in_bytes = torch.cuda.mem_get_info(device)
        free, total = free_bytes / GIB, total_in_bytes / GIB
    elif device.type == "cpu" and LINUX:
        free, total = available_bytes() / GIB, total_bytes() / GIB
    return {
        "asked_gib": asked,
        "free_gib": free,
        "total_gib": total,
        "message": (message or type(error).__name__).splitlines()[0],
    }


def _gib(pattern: str, message: str) -> float | None:
    match = re.search(pattern, message)
    return float(match[1]) * UNITS[match[2]] / GIB if match else None


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
        # glibc keeps freed blocks, which would raise the next run's peak (musl has no malloc_trim)
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
