"""Where something ran: commit, versions, hardware."""

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

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
    "flash-attn-4",  # a peer in scripts.benchmark
)


def environment(data_fingerprint: str, device: torch.device | str) -> Row:
    """measured_on(), and the command line and the data of this run."""
    command = [Path(sys.executable).name, *sys.argv]
    return measured_on(device) | {"command": command, "data_fingerprint": data_fingerprint}


def measured_on(device: torch.device | str) -> Row:
    """Commit, versions and hardware; None for what is missing. For a measurement outside a run it
    has no command line, which may hold paths of the machine.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        **_git(),
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in PACKAGES},
        "hardware": {
            "cpu": _cpu_model(),
            "cpu_cores": os.cpu_count(),
            "memory_gib": round(memory / GIB, 1),
            "torch_threads": torch.get_num_threads(),
            **_gpu(torch.device(device)),
        },
        "platform": platform.platform(),
    }


def _git() -> Row:
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
        described = Path("/proc/cpuinfo").read_text()
    except OSError:  # not on Linux
        described = ""
    match = re.search(r"^model name\s*:\s*(.+)$", described, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


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
        "driver": _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"
        ),
    }


def _output(*command: str) -> str | None:
    """What a command prints, or None if it is missing, fails or hangs."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
