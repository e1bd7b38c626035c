"""What a launch brings the CUDA driver, without a GPU: attention/kernels/launch.py starts a kernel
by a shorter way than Triton's launcher, and must bring the same.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
C_COMPILER = shutil.which("gcc") or shutil.which("cc")
POINTER = 16  # digits of an address in hex: an argument, or the beginning of a tensor map


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """A CUDA driver that runs nothing."""
    made = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = ROOT / "tests/attention/no_device/driver.c"
    subprocess.run([C_COMPILER, "-shared", "-fPIC", "-o", made, source], check=True)
    return made


def address(argument: str) -> int:
    return int.from_bytes(bytes.fromhex(argument[:POINTER]), "little")


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or C_COMPILER is None or torch.cuda.is_available(),
    reason="needs Triton's compiler, a C compiler and no other CUDA driver",
)
@pytest.mark.parametrize(
    ("kernels", "launches"),
    [
        ("portable", "forward delta dkdv dq"),
        pytest.param(
            "hopper", "forward prepare backward join_shares convert_dq", marks=pytest.mark.slow
        ),
    ],
)
def test_the_short_way_brings_what_tritons_launcher_brings(library, kernels, launches):
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_LIBCUDA_PATH": library.parent, "LD_LIBRARY_PATH": library.parent}
    command = [sys.executable, "-m", "tests.attention.no_device.launches", library, kernels]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    names = [f"{name}_kernel" for name in launches.split()]
    rows, count = [json.loads(line) for line in done.stdout.splitlines()], len(names)
    tritons, short, others = rows[: 2 * count : 2], rows[1 : 2 * count : 2], rows[2 * count :]
    assert [row["kernel"] for row in tritons] == names
    assert short == tritons
    for row, other in zip(tritons, others, strict=True):
        assert (row["kernel"], row["shape"]) == (other["kernel"], other["shape"])
        for mine, its in zip(row["arguments"], other["arguments"], strict=True):
            if mine != its:  # a tensor that lies elsewhere, and nothing else
                assert mine[POINTER:] == its[POINTER:] and address(its) in other["tensors"]
        assert set(other["tensors"]) <= set(map(address, other["arguments"]))
