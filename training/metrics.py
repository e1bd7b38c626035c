"""The numbers of a run: its files on disk, its speed, and where it ran.

metrics.jsonl grows row by row; summary.json and env.json are written at once. All three are strict
JSON: NaN and infinity, which JSON lacks, become null, and the names of those values are listed
beside them as "nonfinite".
"""

import contextlib
import errno
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from training.hardware import PEAK_FLOPS, data_sheet

log = logging.getLogger("tilegpt")

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "hydra-core",
    "datasets",
    "tiktoken",
    "safetensors",
    "wandb",
)
ROOT = Path(__file__).resolve().parent.parent


class MetricsFile:
    """metrics.jsonl: one JSON object a line, on its way to the disk as soon as it is written."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def write(self, row: dict[str, Any]) -> None:
        # opened per row: a row costs microseconds, and no handle outlives a run that fails
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(strict(row), allow_nan=False) + "\n")
        except OSError as error:
            raise OSError(f"{self.path} cannot be written: {error}") from error

    def go_back_to(self, step: int, saved: Path) -> None:
        """Drop the rows of later steps, and a torn last line: what a resumed run writes again.

        `saved`: the copy in the checkpoint of that step, whose rows count where there is one. This
        file may have been damaged since.
        """
        rows = [row for row in read_metrics(self.path) if row["step"] <= step]
        if saved.is_file() and (before := read_metrics(saved)) != rows:
            log.warning(
                f"{self.path} was damaged: its rows up to step {step} are put back from {saved}"
            )
            rows = before
        write_file(self.path, "".join(json.dumps(row) + "\n" for row in rows))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; none where the file is missing, and without lines that were torn
    or damaged.
    """
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def write_json(path: Path, obj: dict[str, Any]) -> None:
    """Write one JSON object so that a reader finds the old file or the new one, whole."""
    write_file(path, json.dumps(strict(obj), indent=2, allow_nan=False, default=str) + "\n")


def strict(obj: dict[str, Any]) -> dict[str, Any]:
    """`obj` with null for every NaN and infinity, and a list "nonfinite" of the names that had one.

    {"loss": nan, "oom": {"free": inf}} -> {"loss": None, "oom": {"free": None}, "nonfinite":
    ["loss", "oom.free"]}
    """
    nonfinite: list[str] = []

    def clean(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {
                key: clean(item, f"{name}.{key}" if name else str(key))
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [clean(item, f"{name}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite.append(name)
            return None
        return value

    cleaned = clean(obj, "")
    return cleaned | {"nonfinite": nonfinite} if nonfinite else cleaned


def write_file(path: Path, content: str | bytes) -> None:
    """The old file or the new one, whole. Raises OSError with the path where it cannot be
    written.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


def check_writable(path: Path) -> None:
    """Find out before the work whether its file can be written: make the folder, try a block beside
    the file and leave nothing there.

    Raises OSError in one line, with the path and the way out.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent, buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise OSError(
            f"{path} cannot be written: {error.strerror or error}; name another file"
        ) from error


def peak_flops(device: torch.device | str, dtype: torch.dtype) -> float | None:
    """Dense peak of a known GPU in FLOP/s, for bfloat16 and float16; None for other types, for a
    CPU and for an unknown GPU.
    """
    device = torch.device(device)
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return data_sheet(PEAK_FLOPS, torch.cuda.get_device_name(device))


class WallClock:
    """What a user waits for. A run has two speeds, in every row of metrics after the first step and
    in summary.json:

    tokens_per_sec        by the wall clock, with everything in it. In a row: the tokens trained
                          since the row before, divided by the seconds since that row was written.
                          These hold steps, compilation, metrics and evaluation of this row, and
                          logging and checkpoint of the row before. In the summary: from the first
                          step to the end of the training.
    step_tokens_per_sec   the steps alone, by which variants are compared: see Throughput, which
                          makes mfu of it too.

    seconds, in a row, is the time since the run began, start-up and earlier starts included, as
    wall_seconds in the summary counts it. So tokens_per_sec is the difference of tokens divided by
    that of seconds, row by row; the first row of each start counts from its first step, with or
    without a row of step 0. Of a resumed run both speeds in the summary are its newest start's,
    which ran where env.json says.

    clock.begin(tokens)                             # before the first step; earlier starts have
                                                    trained `tokens`
    for step in ...: train(); row |= clock.row(tokens)

    The tokens are those of steps whose loss the host has waited for, never those of a step that is
    only queued.
    """

    def __init__(self, *, seconds: float = 0.0, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self._zero = clock() - seconds  # when the run would have begun, had it had this start alone
        self._began: tuple[int, float] | None = None  # tokens and time at the first step
        self._row: tuple[int, float] | None = None  # and at the last row

    def begin(self, tokens: int) -> None:
        self._began = self._row = tokens, self.clock()

    def row(self, tokens: int) -> dict[str, float]:
        """seconds and, once the training has begun, tokens_per_sec of a row that is written now."""
        now = self.clock()
        found = {"seconds": now - self._zero}
        if self._row is not None:
            found["tokens_per_sec"] = (tokens - self._row[0]) / (now - self._row[1])
            self._row = tokens, now
        return found

    def tokens_per_sec(self, tokens: int) -> float | None:
        """Of all steps so far; None before the first is done."""
        if self._began is None or tokens == self._began[0]:
            return None
        return (tokens - self._began[0]) / (self.clock() - self._began[1])


class Throughput:
    """step_tokens_per_sec: tokens per second of the steps alone, without the first ones
    (compilation, warm-up) and what is in paused().

    for step in ...:
        train(); throughput.step(tokens)
        with throughput.paused(): evaluate()
        row |= throughput.row()

    flops_per_token: named counts of one token's FLOPs, each reported by its name as a share of
    `peak` FLOP/s. On a GPU nothing here waits for it until a number is asked for: the clock is read
    by events that its stream reaches in turn.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        flops_per_token: dict[str, float] | None = None,
        peak: float | None = None,
        warmup_steps: int = 3,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.device = torch.device(device)
        self.flops_per_token = flops_per_token or {}
        self.peak = peak
        self.warmup_steps = warmup_steps
        self.clock = clock
        self.tokens = 0
        self._cold = warmup_steps  # steps that will not count
        self._seconds = 0.0
        self._stretches: list[
            tuple[Any, Any]
        ] = []  # starts and stops of the clock that are not in _seconds yet
        self._since: Any = None  # when the clock last started; None while it stands
        self._window = (0, 0.0)  # tokens and seconds at the last window()

    def step(self, tokens: int) -> None:
        """Count one optimizer step; the clock starts after the warm-up."""
        if not self._cold:
            self.tokens += tokens
            return
        self._cold -= 1
        if not self._cold:
            self._since = self._now()

    def warm_up(self) -> None:
        """The next steps are slow like the first ones: another attention, for one, is compiled in
        them.
        """
        self.pause()
        self._cold = self.warmup_steps

    def pause(self) -> None:
        if self._since is not None:
            self._stretches.append((self._since, self._now()))
            self._since = None

    def resume(self) -> None:
        if not self._cold and self._since is None:
            self._since = self._now()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    @property
    def step_tokens_per_sec(self) -> float | None:
        """Average of this start of the run; None until a step after the warm-up is done."""
        return self.tokens / self._elapsed() if self.tokens else None

    def window(self) -> float | None:
        """Average since the last call, for one row of metrics; None where no step was measured. To
        be called between two steps.
        """
        tokens, seconds = self._window
        self._window = (self.tokens, self._elapsed())
        return (
            (self.tokens - tokens) / (self._window[1] - seconds) if self.tokens > tokens else None
        )

    def row(self) -> dict[str, float | None]:
        """window() as step_tokens_per_sec, and by each name of flops_per_token the share of the
        peak; None where one is not known.
        """
        speed = self.window()
        shares = {
            name: speed * flops / self.peak if speed and self.peak else None
            for name, flops in self.flops_per_token.items()
        }
        return {"step_tokens_per_sec": speed, **shares}

    def _elapsed(self) -> float:
        running = [] if self._since is None else [(self._since, self._now())]
        self._seconds += sum(self._between(*stretch) for stretch in self._stretches)
        self._stretches.clear()
        return self._seconds + sum(self._between(*stretch) for stretch in running)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return self.clock()
        # kernels run behind the Python program: the clock of this machine would time their launches
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, start: Any, stop: Any) -> float:
        if self.device.type != "cuda":
            return stop - start
        stop.synchronize()
        return start.elapsed_time(stop) / 1000  # from milliseconds


class Progress:
    """What a person reads while a run goes on.

    for step in ...:
        train(); due = progress.step(step)
        if due: print(progress.line(step, row))
    """

    def __init__(
        self,
        steps: int,
        *,
        tokens_per_step: int,
        first_step: int = 0,
        every: float = 15.0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.steps = steps
        self.tokens_per_step = tokens_per_step
        self.every = every
        self.clock = clock
        self._since: tuple[int, float] | None = (
            None  # step and time at which the clock of the time left started
        )
        self._said = first_step, clock()  # step and time of the last line

    def step(self, step: int) -> bool:
        """Count `step` as done; whether the last line is `every` seconds old. The first step, which
        compiles, starts the clock.
        """
        now = self.clock()
        self._since = self._since or (step, now)
        return now - self._said[1] >= self.every

    def line(self, step: int, row: dict[str, Any]) -> str:
        """The losses of a row of metrics, the speed since the last line by the wall clock, and the
        time left where it is known.
        """
        (said_step, said), now = self._said, self.clock()
        self._said = step, now
        parts = [f"step {step:>5}/{self.steps}"]
        parts += [
            f"{name} {value:.4f}"
            for name, value in row.items()
            if name == "train/loss" or name.startswith("val/")
        ]
        if step > said_step:
            parts.append(
                f"{(step - said_step) * self.tokens_per_step / (now - said):,.0f} tokens/s"
            )
        if self._since and self._since[0] < step < self.steps:
            seconds = (now - self._since[1]) / (step - self._since[0]) * (self.steps - step)
            parts.append(f"{tqdm.format_interval(seconds)} left")
        return "  ".join(parts)


def environment(data_fingerprint: str, device: torch.device | str) -> dict[str, Any]:
    """Commit, versions, hardware, command line and data of this run. What does not exist here is
    None.
    """
    return {
        "data_fingerprint": data_fingerprint,
        **_git(),
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in PACKAGES},
        "hardware": {
            "cpu": _cpu_model(),
            "cpu_cores": os.cpu_count(),
            "memory_gib": _memory_gib(),
            "torch_threads": torch.get_num_threads(),
            **_gpu(torch.device(device)),
        },
        "platform": platform.platform(),
        "command": [Path(sys.executable).name, *sys.argv],
    }


def measured_on(device: torch.device | str) -> dict[str, Any]:
    """environment() of a measurement that is no run: without a command line, which may hold paths
    of the machine, and without data.
    """
    return {
        key: value
        for key, value in environment("", device).items()
        if key not in ("command", "data_fingerprint")
    }


def _git() -> dict[str, Any]:
    # a copy without its history, or with somebody else's, can be told what it is a copy of
    if told := os.environ.get("TILEGPT_COMMIT"):
        return {"commit": told, "dirty": None}
    top = _output("git", "-C", str(ROOT), "rev-parse", "--show-toplevel")
    # a copy without .git that lies inside somebody's own repository must not report that one's
    # commit
    if top is None or Path(top).resolve() != ROOT:
        return {"commit": None, "dirty": None}
    return {
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "dirty": _output("git", "-C", str(ROOT), "status", "--porcelain") != "",
    }


def _version(package: str) -> str | None:
    # read from the installed metadata: importing wandb or datasets takes seconds
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        match = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3, 1)


def _gpu(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 1024**3, 1),
        "gpu_count": torch.cuda.device_count(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": (
            _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or ""
        ).split("\n")[0]
        or None,
    }


def _output(*command: str) -> str | None:
    """What a command prints, or None where it is missing, fails or hangs."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
