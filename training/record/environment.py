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
from training.record.memory import GIB, LINUX

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
    versions = {name: _version(name) for name in PACKAGES}
    return {
        **_git(),
        "versions": {"python": platform.python_version()} | versions,
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
    # with its folder named, git does not find the repository that a copy without .git lies in
    git = ("git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}")
    commit = _output(*git, "rev-parse", "HEAD")
    changes = _output(*git, "status", "--porcelain")
    return {"commit": commit, "dirty": None if changes is None else changes != ""}


def _version(package: str) -> str | None:
    # read from the installed metadata: importing wandb or datasets takes seconds
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    if LINUX and (named := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())):
        return named[1]
    return platform.processor() or platform.machine()


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
