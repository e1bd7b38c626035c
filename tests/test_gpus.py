"""hydra/launcher=gpus: jobs side by side, each a process with GPUs of its own."""

import importlib.util
import os
import re
import shlex
import signal
import time

import pytest
import torch

from hydra_plugins import gpus
from tests.command import (
    Done,
    computed,
    contents,
    finish,
    index,
    metrics,
    run,
    start,
    summary,
    tiny,
    tiny_sweep,
    wait_for_rows,
)
from tests.test_resume import send_at_step
from training.launch.sweep import read_sweep

LAUNCHER = "hydra/launcher=gpus"
TWO = (LAUNCHER, "hydra.launcher.slots=2")

OWN = """
import os
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

KILLED = replace(get_backend("naive"), name="killed", fn=killed)
NO_MEMORY = replace(get_backend("naive"), name="no_memory", fn=no_memory)
"""


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs that this process was given, by UUID and by number."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a1b2,7")


def lines(done: Done, start: str) -> list[str]:
    return [line for line in done.output.splitlines() if line.startswith(start)]


@pytest.mark.slow
def test_no_end_of_a_job_is_the_end_of_another(tmp_path, monkeypatch, two_gpus):
    """Four jobs on two GPUs: one killed, one without memory, the others as they are alone."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    swept = "attention=own:KILLED,own:NO_MEMORY,naive,tiled"
    done = run(*tiny_sweep(tmp_path / "sweep", LAUNCHER, swept, "steps=12"))
    assert done.code == 1 and "Traceback" not in done.output, done.output
    rows = index(tmp_path / "sweep")
    assert [(row["job"], row["status"]) for row in rows] == [
        (0, "failed"),
        (1, "oom"),
        (2, "completed"),
        (3, "completed"),
    ]
    assert "signal 9" in rows[0]["error"]
    assert any("own:KILLED" in line for line in done.output.splitlines() if "signal 9" in line)
    for job, attention in (("2", "naive"), ("3", "tiled")):
        assert run(*tiny(tmp_path / attention, f"attention={attention}", "steps=12")).code == 0
        assert computed(tmp_path / "sweep" / job) == computed(tmp_path / attention)

    first, second = lines(done, "job ")[:2]
    assert first.startswith("job 0 ") and "GPU-a1b2" in first and "own:KILLED" in first
    assert second.startswith("job 1 ") and "GPU 7" in second and "own:NO_MEMORY" in second
    for job, seen in (("0", "GPU-a1b2"), ("1", "7")):
        assert f"it sees {seen}\n" in (tmp_path / "sweep" / job / "output.log").read_text()
    assert {line.split()[4] for line in lines(done, "job 2 on")} <= {"GPU-a1b2:", "7:"}
    loss = f"completed, val/loss {rows[3]['val/loss']:.4f}, "
    assert lines(done, "job 3: ")[0].startswith(f"job 3: {loss}")
    assert not torch.cuda.is_initialized()


@pytest.mark.slow
def test_a_sweep_is_that_of_one_process(tmp_path):
    """Settings that some jobs do not read, names, and what Hydra was told beside."""
    swept = ("attention=naive,tiled", "attention.block_kv=16", "seed=0", "steps=2")
    swept += ("hydra.job_logging.root.level=ERROR",)
    both = {"one": swept, "many": (*swept, *TWO)}
    done = {name: run(*tiny_sweep(tmp_path / name, *asked)) for name, asked in both.items()}
    assert done["one"].code == done["many"].code == 0, done["many"].output
    kept = ("job", "overrides", "attention", "variant", "seed", "status", "left_out", "val/loss")
    one, many = (
        [{key: row.get(key) for key in kept} for row in index(tmp_path / name)] for name in both
    )
    assert one == many
    for job in "01":
        assert computed(tmp_path / "one" / job) == computed(tmp_path / "many" / job)
        for name in ("config.yaml", "overrides.yaml"):
            ours, theirs = ((tmp_path / each / job / name).read_text() for each in both)
            assert ours == theirs
    first, second = (
        [line.split()[:4] for line in (tmp_path / name / "table.txt").read_text().splitlines()]
        for name in both
    )
    assert first == second


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.slow
def test_a_job_has_its_name_and_its_group_in_wandb(tmp_path):
    from tests.test_sweep import records_of, started

    sweep = tmp_path / "2026-11-22/21-09-10"
    asked = ("seed=0,1", "steps=1", "logger=wandb", "hydra.launcher.slots=1", LAUNCHER)
    done = run(*tiny_sweep(sweep, *asked), WANDB_MODE="offline")
    assert done.code == 0, done.output
    record, _ = started(records_of(sweep, "1"))
    assert (record["display_name"], record["run_group"]) == ("tiled seed=1", "2026-11-22_21-09-10")
    assert f"wandb sync {sweep}/wandb/offline-run-*" in done.output


@pytest.mark.slow
def test_ctrl_c_reaches_each_job_once(tmp_path):
    """As a terminal sends it: to every process of the group. The jobs are in other groups."""
    swept = ("seed=0,1,2", "steps=5000", "eval_every=5000")
    process = start(*tiny_sweep(tmp_path, *swept, *TWO), new_group=True)
    for job in "01":
        wait_for_rows(process, tmp_path / job, 20)
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    assert done.code == 130 and "Traceback" not in done.output, done.output
    statuses = [row["status"] for row in index(tmp_path)]
    assert statuses == ["interrupted", "interrupted", "not started"]
    assert not (tmp_path / "2").exists() and "1 of 3 jobs" in done.output
    command = index(tmp_path)[2]["command"]
    assert run(*shlex.split(command)[2:], "steps=2").code == 0
    assert [row["status"] for row in read_sweep(tmp_path)] == [*statuses[:2], "completed"]
    for job in "01":
        log = (tmp_path / job / "output.log").read_text()
        assert "stopped at once" not in log and log.count("interrupted after step") == 1
    steps_done = summary(tmp_path / "0")["steps_done"]
    assert run(f"resume={tmp_path / '0'}", f"steps={steps_done + 2}").code == 0
    assert [row["step"] for row in metrics(tmp_path / "0")] == list(range(steps_done + 3))


def test_a_sweep_goes_on_with_the_jobs_that_are_left(tmp_path, monkeypatch):
    """10 s: each job that is left is a process, one of them resumed and one new."""
    with monkeypatch.context() as patch:
        send_at_step(patch, 2, signal.SIGINT)
        stopped = run(*tiny_sweep(tmp_path, "seed=0,1", "eval_every=2"))
    assert stopped.code == 130 and f"resume={tmp_path}\n" in stopped.output
    (tmp_path / "1").mkdir()
    (tmp_path / "1/train.log").touch()  # of a job that died before it saved
    assert "leave out steps=8" in run(f"resume={tmp_path}", "steps=8").complaint()
    done = run(f"resume={tmp_path}")
    assert done.code == 0, done.output
    assert "2 of 2 jobs" in done.output and f"resume={tmp_path}" not in done.output
    assert [row["status"] for row in index(tmp_path)] == ["completed"] * 2
    assert run(*tiny(tmp_path / "alone", "seed=0", "eval_every=2")).code == 0
    assert metrics(tmp_path / "0")[-1]["val/loss"] == metrics(tmp_path / "alone")[-1]["val/loss"]
    assert [len(summary(tmp_path / job)["starts"]) for job in "01"] == [2, 1]
    before = contents(tmp_path / "0")
    again = run(f"resume={tmp_path}")
    assert again.code == 0 and "0 of 2 jobs" in again.output
    assert contents(tmp_path / "0") == before


@pytest.mark.slow
def test_a_job_that_a_signal_reached_before_its_run_is_not_started(tmp_path):
    process = start(*tiny_sweep(tmp_path, "seed=0,1", LAUNCHER, "hydra.launcher.slots=1"))
    while process.poll() is None and not (tmp_path / "0").exists():
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 130, done.output
    assert [row["status"] for row in index(tmp_path)] == ["not started"] * 2


@pytest.mark.slow
def test_an_error_of_the_launcher_leaves_no_job_behind(tmp_path, monkeypatch):
    def full(*arguments, **more):
        raise OSError("No space left on device")

    monkeypatch.setattr("training.launch.sweep.record_job", full)
    done = run(*tiny_sweep(tmp_path, "steps=1,100000", "eval_every=0", *TWO))
    assert "No space left" in done.complaint()
    assert summary(tmp_path / "1")["status"] == "interrupted"


@pytest.mark.slow
def test_a_job_with_ranks_is_started_by_torchrun(tmp_path):
    done = run(*tiny_sweep(tmp_path, "parallel.context=2", "steps=2", *TWO))
    assert done.code == 0, done.output
    assert "job 0 on slot 0, 1: " in done.output
    log = (tmp_path / "0/output.log").read_text()
    assert "4 x 32" in log and "2 ranks" in log
    (row,) = index(tmp_path)
    assert row["status"] == "completed"


@pytest.mark.slow
def test_another_sweeper_learns_the_loss(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    swept = ("attention=choice(naive,tiled)", "attention.block_kv=16", "optim.lr=choice(1e-2,1e-5)")
    trials = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=2")
    done = run(*tiny_sweep(tmp_path, *swept, *trials, *TWO))
    assert done.code == 0, done.output
    rows = index(tmp_path)
    assert [row["status"] for row in rows] == ["completed"] * 2, done.output
    # it cannot know what each attention reads
    assert all(("left_out" in row) == (row["attention"] == "naive") for row in rows)


@pytest.mark.parametrize(
    "asked, said",
    [
        ("", "slots=2"),
        ("hydra.launcher.slots=0", "slots=0"),
        ("hydra.launcher.slots=2 hydra.launcher.ranks=0", "ranks=0"),
        ("hydra.launcher.slots=2 hydra.launcher.ranks=3", "ranks=3 .* there are 2"),
        ("hydra.launcher.slots=2 hydra.launcher.gpus=[0]", "slots .*gpus "),
        ("hydra.launcher.slots=2 parallel.context=1,4", "parallel.context=4 .* there are 2"),
    ],
    ids=["no-gpu", "slots", "ranks", "more-ranks", "slots-and-gpus", "more-context"],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tells of a machine without a GPU")
def test_what_cannot_run_is_refused_before_any_job(tmp_path, asked, said):
    done = run(*tiny_sweep(tmp_path / "sweep", LAUNCHER, *asked.split()))
    assert re.search(said, done.complaint()) and not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    "visible, numbers, places",
    [
        (None, None, ["0", "1", "2"]),
        (None, [2, 0], ["2", "0"]),
        ("4, 5,6", [1], ["5"]),
        ("GPU-a,GPU-b,MIG-c,-1,3", None, ["GPU-a", "GPU-b", "MIG-c"]),
        ("4,5,6", [3], r"gpus=\[3\] .* 0 to 2"),
        (None, [0, 0], r"gpus=\[0, 0\]"),
        (None, [], r"gpus=\[\]"),
    ],
)
def test_which_gpus(monkeypatch, visible, numbers, places):
    """Of those that whoever started this process gave it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    launcher = gpus.GpusLauncher(numbers, None, 1)
    if isinstance(places, list):
        assert launcher.find_places() == places
    else:
        with pytest.raises(ValueError, match=places):
            launcher.find_places()
