"""hydra/launcher=gpus: jobs side by side, each a process with a GPU of its own."""

import os
import signal
import sys

import pytest
import torch

from hydra_plugins import gpus
from tests.command import computed, finish, index, run, start, summary, tiny_sweep, wait_until

LAUNCHER = "hydra/launcher=gpus"
TWO = (LAUNCHER, "hydra.launcher.slots=2")

OWN = """
import os
import time
from attention import get_backend
from dataclasses import replace

import torch

print("it sees", os.environ.get("CUDA_VISIBLE_DEVICES"))
calls = []

def killed(*args, **options):
    calls.append(1)
    if len(calls) > 12:
        os.kill(os.getpid(), 9)
    return get_backend("naive").fn(*args, **options)

def no_memory(*args, **options):
    calls.append(1)
    if len(calls) > 12:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return get_backend("naive").fn(*args, **options)

def waits(*args, **options):
    calls.append(1)
    if len(calls) == 30 and "GO" in os.environ:
        print("it waits", flush=True)
        while not os.path.exists(os.environ["GO"]):
            time.sleep(0.01)
    return get_backend("naive").fn(*args, **options)

KILLED = replace(get_backend("naive"), name="killed", fn=killed)
NO_MEMORY = replace(get_backend("naive"), name="no_memory", fn=no_memory)
WAITS = replace(get_backend("naive"), name="waits", fn=waits)
"""


def use_own(folder, monkeypatch) -> None:
    """Make OWN importable as `own`, here and in the processes of jobs."""
    (folder / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.delitem(sys.modules, "own", raising=False)


def test_no_end_of_a_job_is_the_end_of_another(tmp_path, monkeypatch):
    """20 s: of three jobs on two GPUs, one is killed. Each process sees its GPU alone.

    The two GPUs were given to this process, by UUID and by number.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a1b2,7")
    use_own(tmp_path, monkeypatch)
    sweep = tmp_path / "sweep"
    done = run(*tiny_sweep(sweep, LAUNCHER, "attention=own:KILLED,own:NO_MEMORY,tiled", "steps=12"))
    assert done.code == 1 and "Traceback" not in done.output, done.output
    rows = index(sweep)
    assert [row["status"] for row in rows] == ["failed", "oom", "completed"]
    assert "signal 9" in rows[0]["error"] and rows[0]["error"] in (sweep / "table.txt").read_text()
    for job, seen in (("0", "GPU-a1b2"), ("1", "7")):
        assert f"it sees {seen}\n" in (sweep / job / "output.log").read_text()
        assert f"job {job} on GPU {seen}: " in done.output
    assert not torch.cuda.is_initialized()


@pytest.mark.slow
def test_a_sweep_is_that_of_one_process(tmp_path):
    """Settings that some jobs do not read, and what Hydra was told beside."""
    swept = ("attention=naive,tiled", "attention.block_kv=16", "seed=0", "steps=2")
    swept += ("hydra.job_logging.root.level=ERROR", "hydra.sweep.subdir=${attention.name}/${seed}")
    both = {"one": swept, "many": (*swept, *TWO)}
    done = {name: run(*tiny_sweep(tmp_path / name, *asked)) for name, asked in both.items()}
    assert done["one"].code == done["many"].code == 0, done["many"].output
    for job in ("naive/0", "tiled/0"):
        assert computed(tmp_path / "one" / job) == computed(tmp_path / "many" / job)
        for name in ("config.yaml", "overrides.yaml"):
            ours, theirs = ((tmp_path / each / job / name).read_text() for each in both)
            assert ours == theirs


@pytest.mark.slow
def test_ctrl_c_reaches_each_job_once_and_the_same_command_goes_on(tmp_path, monkeypatch):
    """As a terminal sends it: to every process of the group. The jobs are in other groups. They
    stay in a step until they have heard of it.
    """
    use_own(tmp_path, monkeypatch)
    swept = ("attention=own:WAITS", "seed=0,1,2", "steps=40", "eval_every=0", *TWO)
    asked = tiny_sweep(tmp_path / "sweep", *swept)
    process = start(*asked, new_group=True, GO=str(tmp_path / "go"))
    logs = [tmp_path / f"sweep/{job}/output.log" for job in "01"]

    def said(words: str) -> bool:
        return all(log.exists() and words in log.read_text() for log in logs)

    wait_until(lambda: said("it waits"), process)
    os.killpg(process.pid, signal.SIGINT)
    wait_until(lambda: said("SIGTERM"), process)
    (tmp_path / "go").touch()
    done = finish(process)
    assert done.code == 130 and "Traceback" not in done.output, done.output
    statuses = [row["status"] for row in index(tmp_path / "sweep")]
    assert statuses == ["interrupted", "interrupted", "not started"]
    for log in logs:
        assert log.read_text().count("interrupted after step") == 1
        assert "stopped at once" not in log.read_text()
    assert run(*asked).code == 0
    assert [row["status"] for row in index(tmp_path / "sweep")] == ["completed"] * 3
    starts = [len(summary(tmp_path / f"sweep/{job}")["starts"]) for job in "012"]
    assert starts == [2, 2, 1]


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
