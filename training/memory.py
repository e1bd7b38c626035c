"""How much memory a run used, how much it may use, and what to say when it asked for too much.

On a GPU the numbers are PyTorch's allocator's; on a CPU they are the peak resident set of the
process, which Linux lets a process reset. Without a limit an oversized allocation on a CPU
succeeds, because Linux hands out pages only when they are touched, and the kernel then kills the
process: `cpu_memory_limit` turns that into an error that can be caught.
"""

import contextlib
import ctypes
import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

GIB = 1024**3
UNITS = {
    "bytes": 1,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": GIB,
    "TiB": 1024 * GIB,
    "PiB": 1024**2 * GIB,
}
LINUX = sys.platform == "linux"


class MemoryMeter:
    """Peak memory of one run on one device, in GiB."""

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self._largest: dict[str, float | None] = {}
        self.reset()

    def reset(self) -> None:
        """Forget the peak of what ran before."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            # some containers forbid the write: the peak is then that of the whole process
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def peak_gib(self) -> float:
        """Largest amount in use since reset(): tensors on a GPU, resident memory of the process on
        a CPU.
        """
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / GIB
        if LINUX:
            return _proc_field("/proc/self/status", "VmHWM") / GIB
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024) / GIB

    def row(self) -> dict[str, float | None]:
        """Both figures by their names in metrics.jsonl."""
        row = {"memory/peak_gib": self.peak_gib(), "memory/reserved_gib": self.reserved_gib()}
        self._largest = {
            name: value and max(value, self._largest.get(name) or 0.0)
            for name, value in row.items()
        }
        return row

    def summary(self) -> dict[str, float | None]:
        """The largest of the rows so far, by the same names; nothing before the first."""
        return self._largest

    def reserved_gib(self) -> float | None:
        """What PyTorch's allocator holds of the GPU, fragmentation included; None on a CPU."""
        return (
            torch.cuda.max_memory_reserved(self.device) / GIB
            if self.device.type == "cuda"
            else None
        )


def in_use_gib() -> float:
    """What this process holds now: tensors on a GPU where there is one, else its resident memory
    (where the system tells it, or 0).
    """
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() / GIB
    return _proc_field("/proc/self/status", "VmRSS") / GIB if LINUX else 0.0


@contextlib.contextmanager
def cpu_memory_limit(
    *, margin_bytes: int = 512 * 1024**2, at_most: int | None = None
) -> Iterator[None]:
    """Let this process take the memory that is free now, less a margin, and no more than `at_most`
    bytes.

    An oversized tensor then raises PyTorch's allocator error instead of calling the kernel's
    out-of-memory killer, which would take the whole sweep down. Does nothing off Linux, and once
    CUDA runs: drivers reserve far more addresses than memory. Processes started inside inherit the
    limit.
    """
    if not LINUX or torch.cuda.is_initialized():
        yield
        return
    import resource

    address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    room = max(0, available_bytes() - margin_bytes)
    limit = address_space + (room if at_most is None else min(room, at_most))
    # a limit that the user has set stays where it is lower
    limit = min([limit, *(bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def available_bytes() -> int:
    """Memory this process could still take on Linux: what the kernel says, or what its control
    group leaves of that.
    """
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
    """(limit, bytes that cannot be reclaimed) of this process's control group (v2) and of each one
    above it that has a limit.
    """
    try:
        name = next(
            line[3:]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        )
    except (OSError, StopIteration):
        return []
    root = Path("/sys/fs/cgroup")
    group = root / name.lstrip("/")
    found = []
    for folder in [group, *group.parents][: len(group.parts) - len(root.parts) + 1]:
        # a group without the memory controller lacks the files; one without a limit says "max"
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            cache = re.search(
                r"^inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE
            )
            found.append((limit, used - int(cache[1]) if cache else used))
    return found


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
    """What was asked for and what was there, in GiB (None where PyTorch does not say), with the
    first line of the error.
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
    """Give back everything that a finished run no longer refers to, so that the next run of the
    sweep starts clean.
    """
    # compiled graphs hold references to the tensors they were traced with
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif LINUX:
        # glibc keeps freed blocks; the next run's resident peak would start from them (musl has no
        # malloc_trim)
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
