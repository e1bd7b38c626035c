"""Ways into the program from other folders: a Python session, and an installation."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ROOT

OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def python(*arguments: str, cwd: Path, path: Path = ROOT, **variables: str):
    """A fresh process of Python, in which only `variables` say how waiting threads behave."""
    environment = {key: value for key, value in os.environ.items() if key not in OPENMP}
    environment |= {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "2"} | variables
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


PRINTED = "import os, sys; print('torch' in sys.modules, *map(os.environ.get, sys.argv[1:]))"


def test_waiting_threads_sleep_in_a_python_session_too(tmp_path):
    """A regression test: beside another program, run() took 8 to 25 times as long as train.py."""
    done = python("-c", f"from training import run; {PRINTED}", *OPENMP, cwd=tmp_path)
    assert (done.stdout.split(), done.stderr) == (["False", "PASSIVE", "0"], "")
    own = {"OMP_WAIT_POLICY": "ACTIVE"}
    done = python("-c", f"from training import run; {PRINTED}", *OPENMP, cwd=tmp_path, **own)
    assert (done.stdout.split(), done.stderr) == (["False", "ACTIVE", "0"], "")


def test_a_torch_that_was_imported_before_is_said_where_it_matters(tmp_path):
    def said(gpu: bool, **variables: str) -> list[str]:
        before = f"import torch; torch.cuda.is_available = lambda: {gpu}; import training"
        return python("-c", before, cwd=tmp_path, **variables).stderr.splitlines()

    (line,) = said(gpu=False)
    assert "torch" in line and "OMP_WAIT_POLICY=PASSIVE" in line
    assert said(gpu=False, OMP_WAIT_POLICY="PASSIVE") == said(gpu=False, OMP_NUM_THREADS="1") == []
    assert said(gpu=True) == []


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
