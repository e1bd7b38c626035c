"""Where something ran: commit, versions, hardware."""

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from textwrap import shorten

import torch

from training.own_modules import ROOT
from training.record.files import Row
from training.record.memory import GIB

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
PEERS = ("flash-attn-4",)  # recorded if installed, because scripts.benchmark measures them


def environment(data_fingerprint: str, device: torch.device | str) -> Row:
    """Commit, versions, hardware, command line and data of this run; None for what is missing."""
    return {
        "data_fingerprint": data_fingerprint,
        **_git(),
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in PACKAGES}
        | {name: version for name in PEERS if (version := _version(name))},
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


def measured_on(device: torch.device | str) -> Row:
    """environment() for a measurement outside a run: without data, and without the command line,
    which may hold paths of the machine.
    """
    return {
        key: value
        for key, value in environment("", device).items()
        if key not in ("command", "data_fingerprint")
    }


def first_difference(before: Row, now: Row, prefix: str = "") -> str | None:
    """Says which value of `now` was another in `before`; None if all are the same."""
    for name, value in now.items():
        old, name = before.get(name), f"{prefix}{name}"
        if isinstance(old, dict) and isinstance(value, dict):
            if found := first_difference(old, value, f"{name}."):
                return found
        elif old != value:
            old, value = (shorten(str(x), 60, placeholder="...") for x in (old, value))
            return f"{name} was {old} and is {value}"
    return None


def _git() -> Row:
    # TILEGPT_COMMIT names the commit of a copy without its own .git
    if told := os.environ.get("TILEGPT_COMMIT"):
        return {"commit": told, "dirty": None}
    top = _output("git", "-C", str(ROOT), "rev-parse", "--show-toplevel")
    # a copy without .git may lie inside another repository, whose commit must not be reported
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
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1)


def _gpu(device: torch.device) -> Row:
    if device.type != "cuda":
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / GIB, 1),
        "gpu_count": torch.cuda.device_count(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": (
            _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or ""
        ).split("\n")[0]
        or None,
    }


def _output(*command: str) -> str | None:
    """What a command prints, or None if it is missing, fails or hangs."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
