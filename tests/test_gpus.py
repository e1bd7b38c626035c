"""hydra/launcher=gpus: jobs side by side, each a process with a GPU of its own."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hydra_plugins import gpus
from tests.command import computed, index, run, summary, tiny_sweep

LAUNCHER = "hydra/launcher=gpus"
TWO = (LAUNCHER, "hydra.launcher.slots=2")


def use_as_python(monkeypatch, folder: Path, program: str) -> None:
    (folder / "python").write_text(program)
    (folder / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


# in place of python: the first job is killed, the second ends without a word, the others train
PYTHON = f"""#!/bin/sh
echo "it sees $CUDA_VISIBLE_DEVICES"
case "$*" in
  *seed=0*) kill -9 $$ ;;
  *seed=1*) exit 3 ;;
  *) exec '{sys.executable}' "$@" ;;
esac
"""


def test_no_end_of_a_job_is_the_end_of_another(tmp_path, monkeypatch):
    """Three jobs on two GPUs, which were given to this process by UUID and by number. Each process
    sees its GPU alone.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a1b2,7")
    use_as_python(monkeypatch, tmp_path, PYTHON)
    sweep = tmp_path / "sweep"
    done = run(*tiny_sweep(sweep, LAUNCHER, "seed=0,1,2"))
    assert done.code == 1 and "Traceback" not in done.output, done.output
    rows = index(sweep)
    assert [row["status"] for row in rows] == ["failed", "failed", "completed"]
    for row, said in zip(rows, ("signal 9", "exit code 3"), strict=False):
        assert said in row["error"] and row["error"] in (sweep / "table.txt").read_text()
    for job, seen in (("0", "GPU-a1b2"), ("1", "7")):
        assert f"it sees {seen}\n" in (sweep / job / "output.log").read_text()
        assert f"job {job} on GPU {seen}: " in done.output


# in place of python: a job that goes on until it is asked to end
WAITS = """#!/bin/sh
trap 'echo asked to end; exit 130' TERM
echo "process $$"
while :; do sleep 0.05; done
"""


def test_ctrl_c_ends_the_jobs_that_run_and_waits_for_them(tmp_path, monkeypatch):
    """A terminal sends it to every process of a group, so the jobs are in groups of their own."""
    use_as_python(monkeypatch, tmp_path, WAITS)
    logs = [tmp_path / f"sweep/{job}/output.log" for job in "01"]
    groups = []

    def wait_for_both(seconds: float) -> None:
        told = [log.read_text() for log in logs if log.exists()]
        if len(told) == 2 and all(told):
            pids = [int(each.split()[1]) for each in told]
            groups.extend(os.getpgid(pid) == pid for pid in pids)
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.01)

    monkeypatch.setattr(gpus, "time", SimpleNamespace(sleep=wait_for_both))
    done = run(*tiny_sweep(tmp_path / "sweep", *TWO, "seed=0,1,2"))
    assert done.code == 130 and "Traceback" not in done.output, done.output
    assert groups == [True, True]
    assert [log.read_text().splitlines()[1:] for log in logs] == [["asked to end"]] * 2
    statuses = [row["status"] for row in index(tmp_path / "sweep")]
    assert statuses == ["unfinished", "unfinished", "not started"]


@pytest.mark.slow
def test_a_sweep_is_that_of_one_process(tmp_path):
    """Settings that some jobs do not read, and what Hydra was told beside. And it goes on."""
    swept = ("attention=naive,tiled", "attention.block_kv=16", "seed=0", "steps=2")
    swept += ("hydra.job_logging.root.level=ERROR", "hydra.sweep.subdir=${attention.name}/${seed}")
    both = {"one": swept, "many": (*swept, "checkpoint_every=1", *TWO)}
    done = {name: run(*tiny_sweep(tmp_path / name, *asked)) for name, asked in both.items()}
    assert done["one"].code == done["many"].code == 0, done["many"].output
    for job in ("naive/0", "tiled/0"):
        assert computed(tmp_path / "one" / job) == computed(tmp_path / "many" / job)
    # as after a kill in its last step
    lost = tmp_path / "many/tiled/0"
    (lost / "summary.json").unlink()
    for name in ("checkpoint", "checkpoint.best"):
        shutil.rmtree(lost / name)
    assert run(*tiny_sweep(tmp_path / "many", *both["many"])).code == 0
    assert [each["step"] for each in summary(lost)["starts"]] == [0, 1]
    assert computed(tmp_path / "one/tiled/0") == computed(lost)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells of a machine without a GPU")
@pytest.mark.parametrize("slots", [[], ["hydra.launcher.slots=0"]], ids=["no-gpu", "no-slot"])
def test_a_launcher_without_a_place_is_refused(tmp_path, slots):
    answer = run(*tiny_sweep(tmp_path / "sweep", LAUNCHER, *slots)).complaint()
    assert "hydra.launcher.slots=2" in answer and not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    "visible, names",
    [(None, ["0", "1"]), ("4, 5", ["4", "5"]), ("GPU-a,MIG-c,-1,3", ["GPU-a", "MIG-c"])],
)
def test_which_gpus(monkeypatch, visible, names):
    """Of those that whoever started this process gave it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.visible_gpus() == names
