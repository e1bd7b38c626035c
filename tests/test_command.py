"""Ways into the program from other folders: a Python session, and an installation."""

import os
import shutil
from pathlib import Path

import pytest

from tests import processes
from tests.processes import ROOT

OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def python(*arguments: str, cwd: Path, path: Path = ROOT, **variables: str):
    """A fresh process of Python, in which only `variables` say how waiting threads behave."""
    environment = {key: value for key, value in os.environ.items() if key not in OPENMP}
    environment |= {"PYTHONPATH": str(path)} | variables
    return processes.run(*arguments, cwd=cwd, env=environment)


@pytest.mark.parametrize("policy", ["PASSIVE", "ACTIVE"], ids=["ours", "the-users-own"])
def test_waiting_threads_sleep_in_a_python_session_too(tmp_path, policy):
    """A regression test: beside another program, run() took 8 to 25 times as long as train.py."""
    own = {} if policy == "PASSIVE" else {"OMP_WAIT_POLICY": policy}
    printed = "import os, sys; print('torch' in sys.modules, *map(os.environ.get, sys.argv[1:]))"
    done = python("-c", f"from training import run; {printed}", *OPENMP, cwd=tmp_path, **own)
    assert (done.stdout.split(), done.stderr) == (["False", policy, "0"], "")


# in place of torch, which takes seconds to import
TORCH = """
import sys
from types import SimpleNamespace as Module
cuda = Module(is_available=lambda: {gpu})
sys.modules["torch"] = Module(get_num_threads=lambda: {threads}, cuda=cuda)
import training
"""


@pytest.mark.parametrize(
    "gpu, threads, own, told",
    [
        (False, 2, {}, True),
        (True, 2, {}, False),
        (False, 1, {}, False),
        (False, 2, {"OMP_WAIT_POLICY": "PASSIVE"}, False),
    ],
)
def test_a_torch_that_was_imported_before_is_said_where_it_matters(
    tmp_path, gpu, threads, own, told
):
    done = python("-c", TORCH.format(gpu=gpu, threads=threads), cwd=tmp_path, **own)
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and len(lines) == told, done.stderr
    assert all("torch" in line and "OMP_WAIT_POLICY=PASSIVE" in line for line in lines)


@pytest.mark.parametrize(
    "arguments",
    [("-c", "from training import run"), ("-m", "train"), ("-m", "scripts.trace")],
    ids=["run", "train", "script"],
)
def test_an_installation_without_e_says_so(tmp_path, arguments):
    """A regression test: it lacks conf/, and a traceback ended with that folder's name."""
    installed = tmp_path / "installed"
    for name in ("attention", "data", "model", "scripts", "training"):
        shutil.copytree(ROOT / name, installed / name)
    for name in ("config.py", "train.py"):
        shutil.copy(ROOT / name, installed)
    done = python(*arguments, cwd=tmp_path, path=installed)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "pip install -e ." in line
