"""Interrupted, killed and resumed: the same run to the last bit, or a refusal that costs nothing."""

import errno
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import training.checkpoint
from data.batches import TextData
from tests.command import checkpoint, computed, contents, finish, metrics, run, same, start, summary, tiny, wait_for_rows
from training.checkpoint import Checkpoints, read_meta
from training.rotation import step_of

# everything that has state: two passes a step, dropout, and rows, evaluations and checkpoints out of step with one another
STATEFUL = ("model.dropout=0.1", "data.documents=true", "tokens_per_step=256")
STATEFUL += ("steps=12", "log_every=3", "eval_every=5", "checkpoint_every=4")


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished")
    assert run(*tiny(run_dir)).code == 0
    return run_dir


@pytest.fixture
def run_dir(finished, tmp_path) -> Path:
    """A finished run of four steps to do harm to."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="session")
def straight(tmp_path_factory) -> dict[str, Path]:
    """Runs that nothing disturbs, by dtype; float16 has a loss scale as well."""
    folder = tmp_path_factory.mktemp("straight")
    for dtype in ("fp32", "fp16"):
        assert run(*tiny(folder / dtype, *STATEFUL, f"dtype={dtype}")).code == 0
    return {dtype: folder / dtype for dtype in ("fp32", "fp16")}


def send_at_step(monkeypatch, step: int, *signals: signal.Signals) -> None:
    """Let this process get the signals while it prepares that step, counted from 0, for the first time."""
    train_batch, pending = TextData.train_batch, list(signals)

    def patched(self, at: int, num_sequences: int):
        while at == step and pending:
            os.kill(os.getpid(), pending.pop(0))
        return train_batch(self, at, num_sequences)

    monkeypatch.setattr(TextData, "train_batch", patched)


@pytest.mark.parametrize(
    "dtype, name, step",
    [("fp32", "SIGINT", 0), ("fp32", "SIGTERM", 6), ("fp32", "SIGINT", 10), ("fp16", "SIGINT", 6)],
    ids=str,
)
def test_interrupted_and_resumed_is_the_same_run(straight, monkeypatch, tmp_path, dtype, name, step):
    """To the last bit: weights, optimizer, loss scale, random state, and every row that was computed, none lost and none twice."""
    send_at_step(monkeypatch, step, signal.Signals[name])
    stopped = run(*tiny(tmp_path, *STATEFUL, f"dtype={dtype}"))
    assert stopped.code == 130 and f"interrupted after step {step + 1}" in stopped.output
    assert f"python train.py resume={tmp_path}" in stopped.output
    assert summary(tmp_path)["status"] == "interrupted"
    assert summary(tmp_path)["steps_done"] == checkpoint(tmp_path)["step"] == step + 1

    assert run(f"resume={tmp_path}").code == 0
    assert summary(tmp_path)["status"] == "completed"
    assert same(checkpoint(tmp_path), checkpoint(straight[dtype]))
    assert computed(tmp_path) == computed(straight[dtype])


def test_written_in_the_background_it_is_the_same_run(straight, monkeypatch, tmp_path):
    """As on a GPU. The interrupted run ends when its checkpoint is on disk, and the next step does not get into it."""
    monkeypatch.setattr(training.checkpoint, "Checkpoints", partial(Checkpoints, background=True))
    send_at_step(monkeypatch, 6, signal.SIGTERM)
    assert run(*tiny(tmp_path, *STATEFUL)).code == 130
    assert checkpoint(tmp_path)["step"] == 7
    assert run(f"resume={tmp_path}").code == 0
    assert same(checkpoint(tmp_path), checkpoint(straight["fp32"]))
    assert computed(tmp_path) == computed(straight["fp32"])


def test_a_write_that_fails_in_the_background_is_said_and_loses_nothing(straight, monkeypatch, tmp_path):
    """The disk is full at the second checkpoint; the third has to wait for it, and finds out."""
    monkeypatch.setattr(training.checkpoint, "Checkpoints", partial(Checkpoints, background=True))
    rotate, steps = training.checkpoint.rotate, []

    def full(fresh: Path, run_dir: Path, *, keep: int) -> None:
        steps.append(step_of(fresh))
        if len(steps) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rotate(fresh, run_dir, keep=keep)

    monkeypatch.setattr(training.checkpoint, "rotate", full)
    answer = run(*tiny(tmp_path, *STATEFUL)).complaint()
    assert f"cannot write a checkpoint to {tmp_path}" in answer and "No space left" in answer and f"resume={tmp_path}" in answer
    assert steps == [4, 8] and checkpoint(tmp_path)["step"] == 4
    assert run(f"resume={tmp_path}").code == 0
    assert same(checkpoint(tmp_path), checkpoint(straight["fp32"]))
    assert computed(tmp_path) == computed(straight["fp32"])


def test_ctrl_c_in_the_last_step_leaves_a_whole_run(straight, monkeypatch, tmp_path):
    send_at_step(monkeypatch, 11, signal.SIGINT)
    run(*tiny(tmp_path, *STATEFUL))
    if summary(tmp_path)["status"] == "interrupted":
        run(f"resume={tmp_path}")
    assert summary(tmp_path)["status"] == "completed"
    assert computed(tmp_path) == computed(straight["fp32"])


def test_ctrl_c_twice_stops_at_once_and_keeps_the_checkpoint(straight, monkeypatch, tmp_path):
    send_at_step(monkeypatch, 7, signal.SIGINT, signal.SIGINT)
    stopped = run(*tiny(tmp_path, *STATEFUL))
    assert stopped.code == 130 and "Traceback" not in stopped.output
    assert "the steps since the last checkpoint are lost" in stopped.output
    assert summary(tmp_path)["status"] == "interrupted" and checkpoint(tmp_path)["step"] == 4
    assert run(f"resume={tmp_path}").code == 0
    assert same(checkpoint(tmp_path), checkpoint(straight["fp32"]))
    assert computed(tmp_path) == computed(straight["fp32"])


def test_a_resumed_run_that_is_stopped_before_its_first_row_says_so(run_dir, monkeypatch):
    send_at_step(monkeypatch, 5, signal.SIGINT)
    assert run(f"resume={run_dir}", "steps=20", "log_every=10").code == 130
    result = summary(run_dir)
    assert result["status"] == "interrupted" and result["steps_done"] == checkpoint(run_dir)["step"] == 6


def test_killed_at_random_and_resumed_is_the_same_run(tmp_path):
    overrides = ("model.dropout=0.1", "steps=80", "eval_every=30", "checkpoint_every=5")
    assert run(*tiny(tmp_path / "straight", *overrides)).code == 0
    moments = sorted(random.sample(range(8, 65), 2))
    for number, rows in enumerate(moments):
        process = start(*([f"resume={tmp_path / 'killed'}"] if number else tiny(tmp_path / "killed", *overrides)))
        wait_for_rows(process, tmp_path / "killed", rows)
        time.sleep(random.uniform(0, 0.01))
        process.kill()
        assert finish(process).code == -signal.SIGKILL, f"it was over before its row {rows}"
    done = run(f"resume={tmp_path / 'killed'}")
    assert done.code == 0, f"killed at rows {moments}: {done.output}"
    assert same(checkpoint(tmp_path / "killed"), checkpoint(tmp_path / "straight")), f"killed at rows {moments}"
    assert computed(tmp_path / "killed") == computed(tmp_path / "straight"), f"killed at rows {moments}"
    assert not list((tmp_path / "killed").glob("*.tmp")) and len(list((tmp_path / "killed/checkpoints").iterdir())) == 1


def test_a_folder_that_another_process_writes_to(tmp_path):
    """Refused however soon, without a trace; free at once when that process is killed."""
    process = start(*tiny(tmp_path, "steps=5000", "checkpoint_every=5"))
    while process.poll() is None and not (tmp_path / ".lock").exists():
        time.sleep(0.001)
    refusal = f"another process is writing to {tmp_path} right now"
    assert refusal in run(*tiny(tmp_path, "seed=1")).complaint()
    assert refusal in run("-m", *tiny(tmp_path, "seed=1,2"), f"hydra.sweep.dir={tmp_path}").complaint()
    wait_for_rows(process, tmp_path, 8)
    assert refusal in run(f"resume={tmp_path}").complaint()
    process.kill()
    assert finish(process).code == -signal.SIGKILL
    steps = read_meta(tmp_path)["step"] + 2
    assert run(f"resume={tmp_path}", f"steps={steps}").code == 0
    assert summary(tmp_path)["seed"] == 0 and [row["step"] for row in metrics(tmp_path)] == list(range(steps + 1))


def test_looking_more_often_changes_nothing(straight, tmp_path):
    """Rows, evaluations and checkpoints draw no random numbers of the run's."""
    assert run(*tiny(tmp_path, *STATEFUL, "log_every=1", "eval_every=1", "checkpoint_every=1")).code == 0
    assert same(checkpoint(tmp_path), checkpoint(straight["fp32"]))


def test_ctrl_c_before_the_run_began(monkeypatch, tmp_path):
    # while Hydra writes down its configuration, say
    monkeypatch.setattr("hydra.core.utils._save_config", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    done = run(*tiny(tmp_path))
    assert done.code == 130 and "Traceback" not in done.output, done.output


def test_resume_may_change_the_attention_and_the_length(run_dir, finished):
    assert run(f"resume={run_dir}", "attention=sdpa", "steps=6").code == 0
    assert summary(run_dir)["attention"] == "sdpa"
    # and what was changed stays changed
    assert run(f"resume={run_dir}", "steps=7").code == 0
    assert summary(run_dir)["attention"] == "sdpa"
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(8)) and rows[:5] == metrics(finished)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def alter(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100] + bytes(100))


HARM = {
    "truncated-weights": ("model.safetensors", truncate, "is truncated"),
    "altered-weights": ("model.safetensors", alter, "was altered"),
    "truncated-optimizer": ("training.pt", truncate, "is truncated"),
    "missing-optimizer": ("training.pt", Path.unlink, "is missing"),
    "torn-meta": ("meta.json", truncate, "cannot be read"),
    "foreign": ("meta.json", lambda file: file.write_text('{"epoch": 3}'), "is of another program"),
}


@pytest.mark.parametrize("name, harm, said", HARM.values(), ids=HARM)
def test_a_damaged_checkpoint_is_refused_by_name(run_dir, name, harm, said):
    shutil.rmtree(run_dir / "checkpoint.best")
    harm(run_dir / "checkpoint" / name)
    answer = run(f"resume={run_dir}", "steps=6").complaint()
    assert str(run_dir / "checkpoint" / name) in answer and said in answer


def test_a_damaged_checkpoint_is_passed_over_for_the_last_good_one(straight, tmp_path):
    """In one line, and the run is the same: the rows since then are computed again."""
    assert run(*tiny(tmp_path, *STATEFUL, "keep=2")).code == 0
    truncate(tmp_path / "checkpoint/training.pt")
    done = run(f"resume={tmp_path}")
    said = [line for line in done.output.splitlines() if "going on from step 8 with" in line]
    assert done.code == 0 and len(said) == 1 and str(tmp_path / "checkpoint/training.pt") in said[0] and "is truncated" in said[0]
    assert same(checkpoint(tmp_path), checkpoint(straight["fp32"]))
    assert computed(tmp_path) == computed(straight["fp32"])


def test_the_last_checkpoints_and_the_best_stay(tmp_path):
    assert run(*tiny(tmp_path, "steps=12", "checkpoint_every=2", "eval_every=4", "keep=3")).code == 0
    held_out = {row["step"]: row["val/loss"] for row in metrics(tmp_path) if "val/loss" in row and row["step"] > 0}
    best = read_meta(tmp_path / "checkpoint.best")
    assert best["val_loss"] == min(held_out.values()) == held_out[best["step"]]
    assert read_meta(tmp_path)["step"] == 12
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000008", "step-000010"]


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["tiled", "sdpa", "triton"])
def test_a_deterministic_run_on_a_gpu_is_the_same_run(monkeypatch, tmp_path, attention):
    """deterministic=true, interrupted and resumed: compiled, in bfloat16, with dropout, to the last bit."""
    overrides = (*STATEFUL, "device=cuda", "dtype=bf16", "deterministic=true", f"attention={attention}")
    overrides += ("data.documents=false",) if attention == "sdpa" else ()  # it has no document masks
    try:
        assert run(*tiny(tmp_path / "straight", *overrides)).code == 0
        send_at_step(monkeypatch, 6, signal.SIGTERM)
        assert run(*tiny(tmp_path / "stopped", *overrides)).code == 130
        assert run(f"resume={tmp_path / 'stopped'}").code == 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert same(checkpoint(tmp_path / "stopped"), checkpoint(tmp_path / "straight"))
    assert computed(tmp_path / "stopped") == computed(tmp_path / "straight")


@pytest.mark.parametrize(
    "overrides, said",
    [
        ([], "has done 4 steps of steps=4; ask for more with steps=N"),
        (["steps=3"], "has done 4 steps of steps=3"),
        (["steps=6", "model.num_layers=2"], "model.num_layers is 1 in the checkpoint and 2 now"),
        (["steps=6", "model.num_heads=4", "model.bias=false"], "model.num_heads is 2 in the checkpoint and 4 now"),
        (["steps=6", "tokenizer=bpe"], "vocab_size is 257 in the checkpoint and"),
        (["steps=6", "seq_len=64"], "model.max_seq_len is 32 in the checkpoint and 64 now"),
    ],
    ids=["finished", "fewer-steps", "layers", "first-difference", "vocabulary", "longer"],
)
def test_a_refused_resume_costs_nothing(run_dir, overrides, said):
    """The run, its result and its settings are as before, and the right command still works."""
    before = contents(run_dir)
    assert said in run(f"resume={run_dir}", *overrides).complaint()
    assert contents(run_dir) == before
    done = run(f"resume={run_dir}", "steps=5")
    assert done.code == 0 and summary(run_dir)["steps_done"] == 5, done.output


def test_what_is_no_run_cannot_be_resumed(run_dir, tmp_path):
    answer = run(f"resume={tmp_path}").complaint()
    assert f"resume={tmp_path} is no run directory" in answer
    assert "cannot be part of a sweep" in run("-m", f"resume={run_dir}", "seed=0,1").complaint()
    for folder in ("checkpoint", "checkpoint.best"):
        shutil.rmtree(run_dir / folder)
    assert "holds no checkpoint" in run(f"resume={run_dir}", "steps=6").complaint()


def test_a_folder_of_any_name_can_be_resumed(tmp_path):
    strange = tmp_path / "a b,c=d (it's)"
    assert run(*tiny(strange)[:-1], f'hydra.run.dir="{strange}"').code == 0
    assert run(f"resume={strange}", "steps=5").code == 0 and len(metrics(strange)) == 6


def test_what_a_resume_replays_stays_what_was_asked_for(run_dir):
    """A regression test: batch_size=... was added at every start, and so to the name that a logger shows."""
    asked_for = [line for line in (run_dir / "overrides.yaml").read_text().splitlines() if not line.startswith("- steps=")]
    for steps in (5, 6):
        assert run(f"resume={run_dir}", f"steps={steps}").code == 0
    assert (run_dir / "overrides.yaml").read_text().splitlines() == [*asked_for, "- steps=6"]
