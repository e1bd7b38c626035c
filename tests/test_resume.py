"""Interrupted, killed and resumed: the same run to the last bit, or a refusal without loss."""

import errno
import hashlib
import json
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import training.checkpoint
from data.batches import TextData
from tests.command import (
    QUICK,
    ROOT,
    checkpoint,
    computed,
    contents,
    finish,
    metrics,
    run,
    same,
    start,
    summary,
    tiny,
    wait_for_rows,
)
from training.checkpoint import Checkpoints, read_meta
from training.retention import step_of
from training.trained import load_trained, read_run_config

# everything that has state: two passes a step, dropout, and rows, evaluations and checkpoints out
# of step with one another
STATEFUL = ("model.dropout=0.1", "data.documents=true", "tokens_per_step=256")
STATEFUL += ("steps=12", "log_every=3", "eval_every=5", "checkpoint_every=4")
STATEFUL += ("optim.qk_clip=0.001", "optim.z_loss=0.1")


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished")
    assert run(*tiny(run_dir)).code == 0
    return run_dir


@pytest.fixture
def run_dir(finished, tmp_path) -> Path:
    """A finished run of four steps, for tests to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="session")
def straight(tmp_path_factory) -> dict[str, Path]:
    """Undisturbed runs by dtype; float16 has a loss scale too."""
    folder = tmp_path_factory.mktemp("straight")
    for dtype in ("fp32", "fp16"):
        assert run(*tiny(folder / dtype, *STATEFUL, f"dtype={dtype}")).code == 0
    return {dtype: folder / dtype for dtype in ("fp32", "fp16")}


def send_at_step(monkeypatch, step: int, *signals: signal.Signals) -> None:
    """Send the signals to this process while it first prepares that step, counted from 0."""
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
def test_interrupted_and_resumed_is_the_same_run(
    straight, monkeypatch, tmp_path, dtype, name, step
):
    """To the last bit: weights, optimizer, loss scale and random state.

    Every computed row of metrics is there once.
    """
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
    """As on a GPU: an interrupted run ends when its checkpoint is on disk.

    The next step does not get into that checkpoint.
    """
    monkeypatch.setattr(training.checkpoint, "Checkpoints", partial(Checkpoints, background=True))
    send_at_step(monkeypatch, 6, signal.SIGTERM)
    assert run(*tiny(tmp_path, *STATEFUL)).code == 130
    assert checkpoint(tmp_path)["step"] == 7
    assert run(f"resume={tmp_path}").code == 0
    assert same(checkpoint(tmp_path), checkpoint(straight["fp32"]))
    assert computed(tmp_path) == computed(straight["fp32"])


def test_a_write_that_fails_in_the_background_is_said_and_loses_nothing(
    straight, monkeypatch, tmp_path
):
    """The disk is full at the second checkpoint, that of a best evaluation.

    The third has to wait for it, and raises its error.
    """
    monkeypatch.setattr(training.checkpoint, "Checkpoints", partial(Checkpoints, background=True))
    rotate, steps = training.checkpoint.rotate, []

    def full(fresh: Path, run_dir: Path, *, keep: int) -> None:
        steps.append(step_of(fresh))
        if len(steps) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rotate(fresh, run_dir, keep=keep)

    monkeypatch.setattr(training.checkpoint, "rotate", full)
    answer = run(*tiny(tmp_path, *STATEFUL)).complaint()
    assert (
        f"cannot write a checkpoint to {tmp_path}" in answer
        and "No space left" in answer
        and f"resume={tmp_path}" in answer
    )
    assert steps == [4, 5] and checkpoint(tmp_path)["step"] == 4
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
    assert (
        summary(tmp_path)["status"] == "interrupted" and checkpoint(tmp_path)["step"] == 5
    )  # the last evaluation, the best so far
    assert run(f"resume={tmp_path}").code == 0
    assert same(checkpoint(tmp_path), checkpoint(straight["fp32"]))
    assert computed(tmp_path) == computed(straight["fp32"])


def test_a_resumed_run_that_is_stopped_before_its_first_row_says_so(run_dir, monkeypatch):
    send_at_step(monkeypatch, 5, signal.SIGINT)
    assert run(f"resume={run_dir}", "steps=20", "log_every=10").code == 130
    result = summary(run_dir)
    assert (
        result["status"] == "interrupted"
        and result["steps_done"] == checkpoint(run_dir)["step"] == 6
    )


def test_killed_at_random_and_resumed_is_the_same_run(tmp_path):
    overrides = ("model.dropout=0.1", "steps=80", "eval_every=30", "checkpoint_every=5")
    assert run(*tiny(tmp_path / "straight", *overrides)).code == 0
    moments = sorted(random.sample(range(8, 65), 2))
    for number, rows in enumerate(moments):
        process = start(
            *(
                [f"resume={tmp_path / 'killed'}"]
                if number
                else tiny(tmp_path / "killed", *overrides)
            ),
            loaded=QUICK,
        )
        wait_for_rows(process, tmp_path / "killed", rows)
        time.sleep(random.uniform(0, 0.01))
        process.kill()
        assert finish(process).code == -signal.SIGKILL, f"it was over before its row {rows}"
    done = run(f"resume={tmp_path / 'killed'}")
    assert done.code == 0, f"killed at rows {moments}: {done.output}"
    assert same(checkpoint(tmp_path / "killed"), checkpoint(tmp_path / "straight")), (
        f"killed at rows {moments}"
    )
    assert computed(tmp_path / "killed") == computed(tmp_path / "straight"), (
        f"killed at rows {moments}"
    )
    assert (
        not list((tmp_path / "killed").glob("*.tmp"))
        and len(list((tmp_path / "killed/checkpoints").iterdir())) == 1
    )


def test_a_folder_that_another_process_writes_to(tmp_path):
    """A second process is refused without a trace; a kill of the first frees the folder at once."""
    process = start(*tiny(tmp_path, "steps=5000", "checkpoint_every=5"), loaded=QUICK)
    while process.poll() is None and not (tmp_path / ".lock").exists():
        time.sleep(0.001)
    refusal = f"another process is writing to {tmp_path} right now"
    assert refusal in run(*tiny(tmp_path, "seed=1")).complaint()
    assert (
        refusal in run("-m", *tiny(tmp_path, "seed=1,2"), f"hydra.sweep.dir={tmp_path}").complaint()
    )
    wait_for_rows(process, tmp_path, 8)
    assert refusal in run(f"resume={tmp_path}").complaint()
    process.kill()
    assert finish(process).code == -signal.SIGKILL
    steps = read_meta(tmp_path)["step"] + 2
    assert run(f"resume={tmp_path}", f"steps={steps}").code == 0
    assert summary(tmp_path)["seed"] == 0 and [row["step"] for row in metrics(tmp_path)] == list(
        range(steps + 1)
    )


def test_looking_more_often_changes_nothing(straight, tmp_path):
    """Rows, evaluations and checkpoints do not draw from the run's random numbers."""
    assert (
        run(*tiny(tmp_path, *STATEFUL, "log_every=1", "eval_every=1", "checkpoint_every=1")).code
        == 0
    )
    assert same(checkpoint(tmp_path), checkpoint(straight["fp32"]))


def test_ctrl_c_before_the_run_began(monkeypatch, tmp_path):
    # while Hydra writes down its configuration, say
    monkeypatch.setattr(
        "hydra.core.utils._save_config", lambda *_: os.kill(os.getpid(), signal.SIGINT)
    )
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


def rewritten(folder: Path, change) -> None:
    """Change a meta.json, and its own checksum with it."""
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    meta = change(meta) if callable(change) else meta | change
    if isinstance(meta, dict):
        meta["sha256"] = training.checkpoint.meta_checksum(meta)
    path.write_text(json.dumps(meta))


CRAFTED = {
    "list": (lambda meta: [meta], "is of another program"),
    "word": (lambda meta: "checkpoint", "is of another program"),
    "nothing": (lambda meta: None, "is of another program"),
    "deep": (lambda meta: {"a": "DEEP"}, "nested too deeply"),
    "step": ({"step": "four"}, "step is not a number of steps"),
    "step-negative": ({"step": -4}, "step is not"),
    "step-huge": ({"step": 10**30}, "step is not"),
    "tokens": ({"tokens": None}, "tokens is not"),
    "val_loss": ({"val_loss": ["low"]}, "val_loss is not a number"),
    "files-list": ({"files": []}, "files is not"),
    "files-number": ({"files": {"model.safetensors": 5}}, "files is not"),
    "files-elsewhere": (
        {"files": {"../metrics.jsonl": {"bytes": 1, "sha256": ""}}},
        "files is not",
    ),
    "files-none": ({"files": {}}, "it lacks model.safetensors, training.pt"),
    "config-number": ({"config": 5}, "config is not the settings"),
    "config-empty": ({"config": {}}, "optim.name is None in the checkpoint"),
    "config-model": (
        {"config": {"model": [], "optim": {}, "attention": {"name": "tiled"}}},
        "config is not the settings",
    ),
    "starts-number": ({"starts": 5}, "starts is not"),
    "starts-of-numbers": ({"starts": [5]}, "starts is not"),
    "starts-attention": (
        {"starts": [{"step": 0, "attention": [[0]], "changed": {}}]},
        "starts is not",
    ),
    "starts-changed": (
        {"starts": [{"step": 0, "attention": [[0, "tiled"]], "changed": {"seed": 1}}]},
        "starts is not",
    ),
}


@pytest.mark.parametrize("change, said", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_meta_is_refused_in_one_line(run_dir, change, said):
    """A regression test: each was a traceback."""
    shutil.rmtree(run_dir / "checkpoint.best")
    rewritten(run_dir / "checkpoint", change)
    path = run_dir / "checkpoint/meta.json"
    path.write_text(path.read_text().replace('"DEEP"', "[" * 100_000 + "]" * 100_000))
    before = contents(run_dir)
    answer = run(f"resume={run_dir}", "steps=6").complaint()
    assert str(path.parent) in answer and said in answer and "go on with" not in answer
    assert contents(run_dir) == before


@pytest.mark.parametrize(
    "change",
    [{"val_loss": ["low"]}, {"starts": [5]}, {"step": "four"}],
    ids=["val_loss", "starts", "step"],
)
def test_an_earlier_checkpoint_of_any_form_stops_no_run(tmp_path, change):
    assert run(*tiny(tmp_path, "steps=6", "checkpoint_every=2", "keep=3")).code == 0
    rewritten(tmp_path / "checkpoints/step-000002", change)
    rewritten(tmp_path / "checkpoint.best", change)
    done = run(f"resume={tmp_path}", "steps=8")
    assert done.code == 0, done.output


class Harm:
    """An object whose unpickling would run code."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("kind", ["pickle", "list", "empty", "optimizer", "random", "words"])
def test_a_crafted_state_is_refused_and_not_run(run_dir, tmp_path, kind):
    """A regression test: PyTorch ended with a traceback. It never ran the code inside."""
    path = run_dir / "checkpoint/training.pt"
    state = torch.load(path, weights_only=True)
    crafted = {
        "list": [1, 2],
        "empty": {},
        "optimizer": state | {"optimizer": 5},
        "random": state | {"random": {"python": 3}},
    }
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    elif kind == "words":
        path.write_text("words")
    else:
        torch.save(crafted[kind], path)
    size, sha256 = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
    rewritten(
        run_dir / "checkpoint",
        lambda meta: (
            meta | {"files": meta["files"] | {"training.pt": {"bytes": size, "sha256": sha256}}}
        ),
    )
    before = contents(run_dir)
    answer = run(f"resume={run_dir}", "steps=6").complaint()
    assert (
        f"{path} does not hold what this program writes, and nothing in it was run" in answer
        and "go on with: " not in answer
    )
    assert contents(run_dir) == before and not (tmp_path / "harm").exists()


def test_weights_that_are_none_are_refused(run_dir):
    path = run_dir / "checkpoint/model.safetensors"
    path.write_bytes(b"words that are no weights")
    size, sha256 = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
    rewritten(
        run_dir / "checkpoint",
        lambda meta: (
            meta | {"files": meta["files"] | {path.name: {"bytes": size, "sha256": sha256}}}
        ),
    )
    assert f"{path} holds no weights" in run(f"resume={run_dir}", "steps=6").complaint()


def test_a_damaged_checkpoint_is_passed_over_for_the_last_good_one(straight, tmp_path):
    """In one line, and the run is the same: the rows since then are computed again."""
    assert run(*tiny(tmp_path, *STATEFUL, "keep=2")).code == 0
    truncate(tmp_path / "checkpoint/training.pt")
    done = run(f"resume={tmp_path}")
    said = [line for line in done.output.splitlines() if "going on from step 10 with" in line]
    assert (
        done.code == 0
        and len(said) == 1
        and str(tmp_path / "checkpoint/training.pt") in said[0]
        and "is truncated" in said[0]
    )
    assert same(checkpoint(tmp_path), checkpoint(straight["fp32"]))
    assert computed(tmp_path) == computed(straight["fp32"])


def best_and_evaluated(run_dir: Path) -> tuple[int, dict[int, float]]:
    """The step of checkpoint.best, and val/loss by step of all evaluations but the first."""
    held_out = {
        row["step"]: row["val/loss"]
        for row in metrics(run_dir)
        if "val/loss" in row and row["step"] > 0
    }
    best = read_meta(run_dir / "checkpoint.best")
    assert best["val_loss"] == held_out[best["step"]]
    return best["step"], held_out


def test_the_last_checkpoints_and_the_best_stay(tmp_path):
    assert (
        run(*tiny(tmp_path, "steps=12", "checkpoint_every=2", "eval_every=4", "keep=3")).code == 0
    )
    best, held_out = best_and_evaluated(tmp_path)
    assert held_out[best] == min(held_out.values()) and read_meta(tmp_path)["step"] == 12
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-000008",
        "step-000010",
    ]


def test_the_best_is_that_of_all_evaluations(tmp_path):
    """Even if none falls on a step of checkpoint_every, and across a resume.

    The learning rate makes the loss go up and down.
    """
    rates = (
        "optim.lr=0.1",
        "optim.schedule=constant",
        "optim.warmup_steps=0",
        "checkpoint_every=1000",
        "eval_every=2",
    )
    for steps, resume in ((10, ()), (22, (f"resume={tmp_path}",))):
        assert run(*(resume or tiny(tmp_path, *rates)), f"steps={steps}").code == 0
        best, held_out = best_and_evaluated(tmp_path)
        assert len(held_out) == steps // 2 and held_out[best] == min(held_out.values())
        losses = list(held_out.values())
        assert losses != sorted(losses) and losses != sorted(losses, reverse=True), (
            "nothing to choose from"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["tiled", "sdpa", "triton"])
def test_a_deterministic_run_on_a_gpu_is_the_same_run(monkeypatch, tmp_path, attention):
    """deterministic=true, compiled, in bfloat16, with dropout: the same to the last bit."""
    overrides = (
        *STATEFUL,
        "device=cuda",
        "dtype=bf16",
        "deterministic=true",
        f"attention={attention}",
    )
    overrides += (
        ("data.documents=false",) if attention == "sdpa" else ()
    )  # it has no document masks
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
        (
            ["steps=6", "model.num_layers=2"],
            "model.num_layers is 1 in the checkpoint and 2 now; keep model.num_layers=1, or start",
        ),
        (
            ["steps=6", "model.num_heads=4", "model.bias=false"],
            "model.num_heads is 2 in the checkpoint and 4 now",
        ),
        (["steps=6", "tokenizer=bpe"], "8193 now; keep the tokenizer and data of the run, or"),
        (["steps=6", "optim=muon"], "in the checkpoint and muon now; keep optim=adamw, or"),
        (["steps=6", "seq_len=64"], "seq_len is 32 in the checkpoint and 64 now; keep seq_len=32"),
        (["steps=6", "seq_len=16"], "in the checkpoint and 16 now; keep model.max_seq_len=32, or"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_refused_resume_costs_nothing(run_dir, overrides, said):
    """The run, its result and its settings are as before, and the right command still works."""
    before = contents(run_dir)
    assert said in run(f"resume={run_dir}", *overrides).complaint()
    assert contents(run_dir) == before
    done = run(f"resume={run_dir}", "steps=5")
    assert done.code == 0 and summary(run_dir)["steps_done"] == 5, done.output


@pytest.fixture
def books(tmp_path) -> Path:
    """A text of the user's own, which tests can change."""
    file = tmp_path / "books.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\n\n" * 200)
    return file


def test_changed_data_are_refused(tmp_path, books):
    """With other data it would not be the same run. On request it goes on, and says so."""
    run_dir = tmp_path / "run"
    assert run(*tiny(run_dir, "data=text", f"data.path={books}")).code == 0
    before, fingerprint = contents(run_dir), summary(run_dir)["data"]
    books.write_text("sphinx of black quartz, judge my vow\n\n" * 300)
    answer = run(f"resume={run_dir}", "steps=6").complaint()
    found = re.search(
        rf"the data have changed since: data=text had the fingerprint {fingerprint} and has "
        r"(\w+) now",
        answer,
    )
    assert found and f"add data.fingerprint={found[1]}" in answer
    assert contents(run_dir) == before

    assert run(f"resume={run_dir}", "steps=6", f"data.fingerprint={found[1]}").code == 0
    first, second = summary(run_dir)["starts"]
    assert (first["data"], second["data"]) == (fingerprint, found[1])
    assert (second["step"], second["changed"]) == (
        4,
        {"data.fingerprint": [None, found[1]], "steps": [4, 6]},
    )
    books.write_text("pack my box with five dozen liquor jugs\n\n" * 300)
    answer = run(f"resume={run_dir}", "steps=8").complaint()
    assert (
        f"data.fingerprint={found[1]} is asked for, and data=text has" in answer
        and "data.fingerprint=null takes what is there" in answer
    )
    assert run(f"resume={run_dir}", "steps=8", "data.fingerprint=null").code == 0


def test_other_data_can_be_asked_for(tmp_path, books):
    assert (
        run(
            *tiny(tmp_path / "run", "data=text", f"data.path={books}", "data.val_fraction=0.1")
        ).code
        == 0
    )
    assert run(f"resume={tmp_path / 'run'}", "steps=6", "data=stdlib").code == 0
    changed = summary(tmp_path / "run")["starts"][1]["changed"]
    assert changed == {
        "data.source": ["text", "stdlib"],
        "data.path": [str(books), None],
        "steps": [4, 6],
    }
    assert "val_fraction: 0.1" in (tmp_path / "run/config.yaml").read_text()


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "it is not a list of settings"),
        (bytes(200), "special characters are not allowed"),
        (b"- steps=4\n- [", "while parsing"),
        (b"steps: 4\n", "it is not a list of settings"),
        (b"- 4\n", "it is not a list of settings"),
        (b"- steps=4\n- attention.block_kv=[1\n", "no viable alternative"),
        (b"- stepz=4\n", "there is no key 'stepz'"),
    ],
    ids=["empty", "zeros", "torn", "mapping", "number", "value", "key"],
)
def test_damaged_overrides_are_refused(run_dir, content, said):
    (run_dir / "overrides.yaml").write_bytes(content)
    before = contents(run_dir)
    answer = run(f"resume={run_dir}", "steps=6").complaint()
    assert (
        f"{run_dir}/overrides.yaml is damaged: " in answer
        and said in answer
        and f"{run_dir}/config.yaml" in answer
    )
    assert contents(run_dir) == before


@pytest.mark.parametrize("damaged", ["overrides.yaml", "overrides.yaml and config.yaml", "conf"])
def test_settings_that_nobody_asked_for_are_refused(run_dir, damaged):
    """For example, a line of overrides.yaml is lost, or a default has changed."""
    if damaged == "conf":
        path, line, lost = run_dir / "config.yaml", "keep: 2\n", "keep: 3\n"
        key, then, now = "keep", 3, 2
    else:
        path, line, lost = run_dir / "overrides.yaml", "- batch_size=4\n", ""
        key, then, now = "batch_size", 4, 16
    assert path.read_text().count(line) == 1
    path.write_text(path.read_text().replace(line, lost))
    if "and" in damaged:
        (run_dir / "config.yaml").write_bytes(bytes(100))
    before = contents(run_dir)
    answer = run(f"resume={run_dir}", "steps=6").complaint()
    assert f"{key} was {then} and is {now} now, which nobody asked for" in answer
    assert f"to go on as before add {key}={then}, or else {key}={now}" in answer
    assert contents(run_dir) == before
    for steps, value in ((6, now), (7, then)):
        assert run(f"resume={run_dir}", f"steps={steps}", f"{key}={value}").code == 0
    assert run(f"resume={run_dir}", "steps=8").code == 0, "what was asked for is recorded"
    assert f"{key}: {then}\n" in (run_dir / "config.yaml").read_text()


def test_all_of_them_are_named_with_one_way_out(run_dir, books):
    """The command is in Hydra's syntax, and leaves out settings that follow from others."""
    strange = books.rename(books.with_name("it's, all = mine.txt"))
    path = "data.path='" + str(strange).replace("'", "\\'") + "'"
    assert run(f"resume={run_dir}", "steps=5", "data=text", path, "seed=1").code == 0
    (run_dir / "overrides.yaml").write_text("- seq_len=16\n- steps=5\n- data.val_fraction=0.05\n")
    answer = run(f"resume={run_dir}", "steps=6").complaint()
    assert "seq_len was 32 and is 16" in answer and "max_seq_len" not in answer
    way_out = re.search(r"to go on as before add (.*), or else ", answer)[1]
    assert run(f"resume={run_dir}", "steps=6", *shlex.split(way_out)).code == 0
    config = (run_dir / "config.yaml").read_text()
    assert (
        "seed: 1" in config
        and "seq_len: 32" in config
        and strange.name in config.replace("''", "'")
    )


def test_what_is_asked_for_is_never_refused(tmp_path):
    """Regression tests: an argument that repeated a line of overrides.yaml did not count.

    And a NaN differs from itself.
    """
    assert run(*tiny(tmp_path, "batch_size=4", "tokens_per_step=128")).code == 0
    assert run(f"resume={tmp_path}", "steps=5", "batch_size=4").code == 0
    recorded = tmp_path / "overrides.yaml"
    recorded.write_text(recorded.read_text().replace("log_every=1", "log_every=2"))
    assert "log_every was 1 and is 2" in run(f"resume={tmp_path}", "steps=6").complaint()
    assert run(f"resume={tmp_path}", "steps=6", "log_every=2").code == 0
    custom = (
        "attention=custom",
        "attention.target=tests.user_backends:WITH_AN_OPTION",
        "+attention.options.a=nan",
    )
    assert run(*tiny(tmp_path / "nan", *custom)).code == 0
    assert run(f"resume={tmp_path / 'nan'}", "steps=5").code == 0


def test_a_configuration_of_ones_own_is_found_again(tmp_path):
    """--config-dir is replayed, and may be given again, anywhere."""
    (tmp_path / "it's mine/attention").mkdir(parents=True)
    (tmp_path / "it's mine/attention/small.yaml").write_text("name: tiled\nblock_kv: 8\n")
    options = ("--config-dir", str(tmp_path / "it's mine"))
    assert run(*options, *tiny(tmp_path / "run", "attention=small")).code == 0
    for steps, given in ((5, ()), (6, options), (7, ())):
        assert run(f"resume={tmp_path / 'run'}", *given, f"steps={steps}").code == 0
    assert (tmp_path / "run/overrides.yaml").read_text().count("searchpath") == 1
    assert summary(tmp_path / "run")["options"]["block_kv"] == 8


def test_a_logger_that_is_not_installed_costs_nothing(run_dir, monkeypatch):
    """A regression test: the finished run was marked as failed."""
    monkeypatch.setattr("training.loggers.installed", lambda package: False)
    before = contents(run_dir)
    assert (
        "logger=tensorboard needs pip install"
        in run(f"resume={run_dir}", "steps=6", "logger=tensorboard").complaint()
    )
    assert contents(run_dir) == before


def test_the_best_on_other_data_is_no_measure(tmp_path, books):
    """The other data may be an easier text."""
    assert (
        run(
            *tiny(tmp_path / "run", "data=text", f"data.path={books}", "optim.lr=0.03", "steps=20")
        ).code
        == 0
    )
    easy = read_meta(tmp_path / "run/checkpoint.best")["val_loss"]
    # until there is another, it stays
    assert run(f"resume={tmp_path / 'run'}", "data=stdlib", "steps=21", "eval_every=0").code == 0
    assert read_meta(tmp_path / "run/checkpoint.best")["val_loss"] == easy
    assert run(f"resume={tmp_path / 'run'}", "steps=22", "eval_every=1").code == 0
    best = read_meta(tmp_path / "run/checkpoint.best")
    assert best["step"] > 20 and best["val_loss"] > easy


def test_a_run_that_saved_nothing_is_started_anew(tmp_path):
    """A regression test: each refusal named the other command as the way out."""
    assert run(*tiny(tmp_path)).code == 0
    for folder in ("checkpoint", "checkpoint.best"):
        shutil.rmtree(tmp_path / folder)
    assert "it saved nothing" in run(*tiny(tmp_path)).complaint()
    assert "is started anew" in run(f"resume={tmp_path}", "steps=5").complaint()


@pytest.mark.parametrize("harm", ["cut", "emptied", "removed", "hole", "altered", "step"])
def test_damaged_metrics_are_put_back(straight, monkeypatch, tmp_path, harm):
    """They are restored from the checkpoint, and equal those of an undisturbed run."""
    send_at_step(monkeypatch, 6, signal.SIGTERM)
    assert run(*tiny(tmp_path, *STATEFUL)).code == 130
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if harm == "removed":
        path.unlink()
    else:
        whole = b"".join(lines)
        altered = {
            "altered": whole.replace(b'"lr": ', b'"lr": 1', 1),
            "step": b'{"step": "five", "tokens": 3}\n' + b"".join(lines[1:]),
        }
        path.write_bytes(
            (
                altered
                | {"cut": whole[:300], "emptied": b"", "hole": b"".join(lines[:1] + lines[2:])}
            )[harm]
        )
    done = run(f"resume={tmp_path}")
    assert (
        done.code == 0
        and done.output.count(f"{path} was damaged: its rows up to step 7 are put back") == 1
    ), done.output
    assert computed(tmp_path) == computed(straight["fp32"])


def test_every_start_is_recorded(run_dir):
    """A resume with other settings does not make the earlier steps its own, and time adds up."""
    (first,) = summary(run_dir)["starts"]
    assert (first["step"], first["attention"], first["changed"]) == (0, [[0, "tiled"]], {})
    assert 0 < first["seconds"] == summary(run_dir)["wall_seconds"]
    assert run(f"resume={run_dir}", "attention=sdpa", "steps=6").code == 0
    then, second = summary(run_dir)["starts"]
    assert second["attention"] == [[4, "sdpa"]] and second["changed"] == {
        "attention.name": ["tiled", "sdpa"],
        "steps": [4, 6],
    }
    # to the checkpoint that the second went on from
    assert then == first | {"seconds": then["seconds"]} and 0 < then["seconds"] < first["seconds"]
    assert summary(run_dir)["wall_seconds"] == then["seconds"] + second["seconds"]
    seconds = [row["seconds"] for row in metrics(run_dir)]
    assert (
        seconds == sorted(seconds)
        and seconds[-2] > then["seconds"]
        and seconds[-1] < summary(run_dir)["wall_seconds"]
    )
    # the speed is the second start's alone: its two steps by its time
    a_step = summary(run_dir)["tokens"] / 6
    until_last_row = sum(a_step / row["tokens_per_sec"] for row in metrics(run_dir)[-2:])
    assert (
        2 * a_step / second["seconds"]
        < summary(run_dir)["tokens_per_sec"]
        < 2 * a_step / until_last_row
    )
    assert [start["step"] for start in read_meta(run_dir)["starts"]] == [0, 4]


def test_a_switch_in_the_past_cannot_be_asked_for(run_dir):
    before = contents(run_dir)
    answer = run(
        f"resume={run_dir}", "steps=6", "attention.switch_at=2", "attention.switch_to=sdpa"
    ).complaint()
    assert (
        "attention.switch_at=2 lies behind step 4" in answer
        and "attention.switch_at=null" in answer
    )
    assert contents(run_dir) == before


def test_a_switched_run_goes_on_under_a_third_attention(tmp_path):
    """Not under the second by a switch that was, nor without a word."""
    assert run(*tiny(tmp_path, "attention.switch_at=2", "attention.switch_to=sdpa")).code == 0
    assert (
        "attention.switch_at=2 lies behind step 4"
        in run(f"resume={tmp_path}", "steps=6", "attention=naive").complaint()
    )
    assert (
        run(f"resume={tmp_path}", "steps=6", "attention=naive", "attention.switch_at=null").code
        == 0
    )
    assert [start["attention"] for start in summary(tmp_path)["starts"]] == [
        [[0, "tiled"], [2, "sdpa"]],
        [[4, "naive"]],
    ]


def test_what_is_no_run_cannot_be_resumed(run_dir, tmp_path):
    answer = run(f"resume={tmp_path}").complaint()
    assert f"resume={tmp_path} is not a run directory" in answer
    assert answer.endswith(f"; it holds runs, such as {run_dir}")
    answer = run(f"resume={run_dir}/checkpoint.best").complaint()
    assert answer.endswith(f"; it is a checkpoint of the run {run_dir}")
    assert run("resume=").complaint() == "error: resume= is empty: name a run directory"
    assert "cannot be part of a sweep" in run("-m", f"resume={run_dir}", "seed=0,1").complaint()
    for folder in ("checkpoint", "checkpoint.best"):
        shutil.rmtree(run_dir / folder)
    assert "holds no checkpoint" in run(f"resume={run_dir}", "steps=6").complaint()


def test_a_run_whose_attention_lies_in_another_folder_says_where(tmp_path, monkeypatch):
    """A regression test. The error named the module, and not the folder that has it."""
    module, folder = tmp_path / "history.py", tmp_path / "run"
    module.write_text("from tests.user_backends import RIGHT as BACKEND\n")
    with monkeypatch.context() as there:
        there.syspath_prepend(tmp_path)
        assert run(*tiny(folder, "attention=history:BACKEND", "steps=1")).code == 0
    monkeypatch.delitem(sys.modules, "history")
    recorded = folder / ".hydra/hydra.yaml"  # the tests start every run in the same folder
    began, moved = f"\n    cwd: {ROOT}\n", f"\n    cwd: {tmp_path}\n"
    assert began in recorded.read_text()
    recorded.write_text(recorded.read_text().replace(began, moved))
    todo = "run this in the folder with history.py, or set PYTHONPATH to that folder"
    where = f"; the run began in {tmp_path}, which has it"
    assert run(f"resume={folder}", "steps=2").complaint().endswith(f"'history'; {todo}{where}")
    with pytest.raises(ValueError, match=re.escape(todo + where)):
        load_trained(folder / "checkpoint", read_run_config(folder), 257)
    module.unlink()
    assert run(f"resume={folder}", "steps=2").complaint().endswith(todo)


def test_a_folder_of_any_name_can_be_resumed(tmp_path):
    strange = tmp_path / "a b,c=d (it's)"
    assert run(*tiny(strange)[:-1], f'hydra.run.dir="{strange}"').code == 0
    assert run(f"resume={strange}", "steps=5").code == 0 and len(metrics(strange)) == 6


def test_what_a_resume_replays_stays_what_was_asked_for(run_dir):
    """A regression test: every start added batch_size=..., also to the name that a logger shows."""
    asked_for = [
        line
        for line in (run_dir / "overrides.yaml").read_text().splitlines()
        if not line.startswith("- steps=")
    ]
    for steps in (5, 6):
        assert run(f"resume={run_dir}", f"steps={steps}").code == 0
    assert (run_dir / "overrides.yaml").read_text().splitlines() == [*asked_for, "- steps=6"]
