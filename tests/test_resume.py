"""Interrupted, killed and resumed: the same run to the last bit, or a refusal without loss."""

import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from data.token_file import meta_checksum
from tests.command import (
    at_step,
    checkpoint,
    computed,
    contents,
    finish,
    metrics,
    run,
    same,
    send_at_step,
    start,
    summary,
    tiny,
    wait_until,
)
from training.loop.trained import read_run_config
from training.record.files import read_meta
from training.record.runs import read_run

# everything that has state: two passes a step, dropout, and rows, evaluations and checkpoints out
# of step with one another
STATEFUL = ("model.dropout=0.1", "data.documents=true", "tokens_per_step=256")
STATEFUL += ("steps=12", "log_every=3", "eval_every=5", "checkpoint_every=4")


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


# dtype, signals, the step that they come in, and the step of the checkpoint that they leave
STOPPED = {
    "sigterm": ("fp32", ["SIGTERM"], 10, 11),
    "ctrl-c": ("fp16", ["SIGINT"], 6, 7),
    "ctrl-c-twice": ("fp32", ["SIGINT", "SIGINT"], 7, 5),  # the last evaluation, the best so far
}


@pytest.mark.parametrize("dtype, signals, step, saved", STOPPED.values(), ids=STOPPED)
def test_interrupted_and_resumed_is_the_same_run(
    straight, monkeypatch, tmp_path, dtype, signals, step, saved
):
    """To the last bit: weights, optimizer, loss scale and random state.

    Every computed row of metrics is there once.
    """
    send_at_step(monkeypatch, step, *(signal.Signals[name] for name in signals))
    stopped = run(*tiny(tmp_path, *STATEFUL, f"dtype={dtype}"))
    assert stopped.code == 130 and "Traceback" not in stopped.output, stopped.output
    assert (f"resume={tmp_path}" in stopped.output) == (len(signals) == 1)
    assert summary(tmp_path)["status"] == "interrupted"
    assert checkpoint(tmp_path)["step"] == saved

    assert run(f"resume={tmp_path}").code == 0
    assert summary(tmp_path)["status"] == "completed"
    assert same(checkpoint(tmp_path), checkpoint(straight[dtype]))
    assert computed(tmp_path) == computed(straight[dtype])


def test_killed_and_resumed_is_the_same_run(tmp_path):
    """While it runs, nobody else may write to its folder. A kill frees the folder at once."""
    folder, straight = tmp_path / "killed", tmp_path / "straight"
    overrides = ("model.dropout=0.1", "checkpoint_every=5", "eval_every=0")
    # which do not depend on the number of steps
    overrides += ("optim.schedule=constant", "optim.warmup_steps=0")
    process = start(*tiny(folder, *overrides, "steps=100000"))
    wait_until((folder / "checkpoint/meta.json").exists, process)
    assert f"{folder} right now" in run(f"resume={folder}").complaint()
    assert f"{folder} holds" in run(*tiny(folder, "seed=1")).complaint()
    process.kill()
    assert finish(process).code == -signal.SIGKILL
    steps = f"steps={read_meta(folder)['step'] + 4}"
    assert run(f"resume={folder}", steps).code == 0
    assert run(*tiny(straight, *overrides, steps)).code == 0
    assert same(checkpoint(folder), checkpoint(straight))
    assert computed(folder) == computed(straight)
    assert not list(folder.glob("*.tmp"))


def test_looking_more_often_changes_nothing(straight, tmp_path):
    """Rows, evaluations and checkpoints do not draw from the run's random numbers."""
    often = ("log_every=1", "eval_every=1", "checkpoint_every=1")
    assert run(*tiny(tmp_path, *STATEFUL, *often)).code == 0
    assert same(checkpoint(tmp_path), checkpoint(straight["fp32"]))


def test_the_best_is_that_of_all_evaluations(tmp_path):
    """Even if none falls on a step of checkpoint_every, and across a resume.

    The learning rate makes the loss go up and down.
    """
    rates = ("optim.lr=0.1", "optim.schedule=constant", "optim.warmup_steps=0", "eval_every=2")
    rates += ("checkpoint_every=1000",)
    for steps, resume in ((10, ()), (22, (f"resume={tmp_path}",))):
        assert run(*(resume or tiny(tmp_path, *rates)), f"steps={steps}").code == 0
        rows, best = metrics(tmp_path)[1:], read_meta(tmp_path / "checkpoint.best")
        losses = {row["step"]: row["val/loss"] for row in rows if "val/loss" in row}
        assert len(losses) == steps // 2 and best["val_loss"] == losses[best["step"]]
        assert best["val_loss"] == min(losses.values())
        assert sorted(losses.values()) != list(losses.values())[::-1], "nothing to choose from"


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["tiled", "sdpa", "triton"])
def test_a_deterministic_run_on_a_gpu_is_the_same_run(monkeypatch, tmp_path, attention):
    """deterministic=true, compiled, in bfloat16, with dropout: the same to the last bit."""
    overrides = (*STATEFUL, "device=cuda", "dtype=bf16", "deterministic=true")
    overrides += (f"attention={attention}", f"data.documents={attention != 'sdpa'}")
    try:
        assert run(*tiny(tmp_path / "straight", *overrides)).code == 0
        send_at_step(monkeypatch, 6, signal.SIGTERM)
        assert run(*tiny(tmp_path / "stopped", *overrides)).code == 130
        assert run(f"resume={tmp_path / 'stopped'}").code == 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert same(checkpoint(tmp_path / "stopped"), checkpoint(tmp_path / "straight"))
    assert computed(tmp_path / "stopped") == computed(tmp_path / "straight")


# what is typed behind resume=HERE/run, and what the answer says
REFUSED = {
    "nothing-to-do": ("steps=4", "steps=4"),
    "first-of-two": ("steps=6 model.num_heads=4 model.bias=false", "model.num_heads .*2.* 4"),
    "tokenizer": ("steps=6 tokenizer=bpe", r"\(257, .* \(8193, .* the tokenizer"),
    "optimizer": ("steps=6 optim=muon", "keep optim=adamw"),
    "longer": ("steps=6 seq_len=64", r"\(32, .* \(64, .* seq_len"),
    "switch": ("steps=6 attention.switch_at=2 attention.switch_to=sdpa", "switch_at=2 .* step 4"),
    "not-installed": ("steps=6 logger=tensorboard", "logger=tensorboard needs"),
}
REFUSED = {name: (f"resume=HERE/run {typed}", said) for name, (typed, said) in REFUSED.items()}
REFUSED |= {
    "no-run": ("resume=HERE", "resume=HERE .*HERE/run$"),
    "checkpoint": ("resume=HERE/run/checkpoint.best", "the run HERE/run$"),
    "no-name": ("resume=", "resume= must name"),
    "sweep": ("-m resume=HERE/run seed=0,1", "resume=HERE/run .* sweep"),
    "long-name": ("resume=HERE/" + "a" * 300, "resume=HERE/aaa"),  # for a file system
}


@pytest.mark.parametrize("typed, said", REFUSED.values(), ids=REFUSED)
def test_a_refused_resume_costs_nothing(run_dir, tmp_path, monkeypatch, typed, said):
    """The run, its result and its settings are as before, so the right command still works.

    A regression test: a logger that is not installed marked the finished run as failed.
    """
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it was not installed
    before = contents(run_dir)
    typed, said = (text.replace("HERE", str(tmp_path)) for text in (typed, said))
    assert re.search(said, run(*typed.split()).complaint())
    assert contents(run_dir) == before


@pytest.fixture
def books(tmp_path) -> Path:
    """A text of the user's own, which tests can change."""
    file = tmp_path / "books.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\n\n" * 200)
    return file


def test_changed_data_are_refused(tmp_path, books):
    """With other data it would not be the same run. Under another name it goes on, and says so."""
    run_dir = tmp_path / "run"
    assert run(*tiny(run_dir, "data=text", f"data.path={books}")).code == 0
    before, fingerprint = contents(run_dir), summary(run_dir)["data"]
    books.write_text("sphinx of black quartz, judge my vow\n\n" * 300)
    answer = run(f"resume={run_dir}", "steps=6").complaint()
    assert fingerprint in answer and "data.path=" in answer
    assert contents(run_dir) == before

    copy = shutil.copy(books, tmp_path / "copy.txt")
    assert run(f"resume={run_dir}", "steps=6", f"data.path={copy}").code == 0
    first, second = summary(run_dir)["starts"]
    assert first["data"] == fingerprint != second["data"] and second["step"] == 4
    assert second["changed"] == {"data.path": [str(books), str(copy)], "steps": [4, 6]}


def test_ruined_files_cost_a_resume_nothing(run_dir):
    """A regression test: some were a traceback, or hung. The checkpoint has what is needed."""
    for name in ("config.yaml", "env.json", "metrics.jsonl", "summary.json"):
        (run_dir / name).write_bytes(b"[" * 100_000)
    done = run(f"resume={run_dir}", "steps=5")
    assert done.code == 0 and "Traceback" not in done.output, done.output
    assert [row["step"] for row in metrics(run_dir)] == list(range(6))


def test_settings_that_nobody_asked_for_are_refused(run_dir):
    """As after an edit of conf/: the overrides of the run no longer mean its settings."""
    path = run_dir / "checkpoint/meta.json"
    meta = json.loads(path.read_text())
    meta["overrides"].remove("batch_size=4")
    path.write_text(json.dumps(meta | {"sha256": meta_checksum(meta)}))
    before = contents(run_dir)
    answer = run(f"resume={run_dir}", "steps=6").complaint()
    assert "batch_size=16 (4 before)" in answer and contents(run_dir) == before
    for steps, value in ((6, 16), (7, 4)):
        assert run(f"resume={run_dir}", f"steps={steps}", f"batch_size={value}").code == 0
    assert run(f"resume={run_dir}", "steps=8").code == 0
    assert "batch_size: 4\n" in (run_dir / "config.yaml").read_text()


def test_the_settings_in_the_checkpoint_count(run_dir):
    """A regression test: weights were read under the settings of a config.yaml of another run."""
    path = run_dir / "config.yaml"
    path.write_text(path.read_text().replace("name: tiled", "name: no_max"))
    assert read_run_config(run_dir).attention.name == "tiled"
    done = run(f"resume={run_dir}", "steps=5")
    assert done.code == 0 and "steps=5 (4 before)" in done.output
    assert summary(run_dir)["attention"] == "tiled"
    path.unlink()
    assert read_run_config(run_dir).seed == 0


def test_a_resume_that_saved_nothing_changed_nothing(run_dir, monkeypatch):
    with monkeypatch.context() as stopped:
        send_at_step(stopped, 4, signal.SIGINT, signal.SIGINT)
        assert run(f"resume={run_dir}", "steps=6", "log_every=2").code == 130
    assert run(f"resume={run_dir}", "steps=5").code == 0
    assert summary(run_dir)["starts"][-1]["changed"] == {"steps": [4, 5]}


def test_the_best_on_other_data_is_no_measure(tmp_path, books):
    """The other data may be an easier text."""
    own = ("data=text", f"data.path={books}", "optim.lr=0.03", "steps=20")
    first = run(*tiny(tmp_path / "run", *own))
    assert first.code == 0, first.output
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
    for folder in tmp_path.glob("checkpoint*"):
        shutil.rmtree(folder)
    assert f"hydra.run.dir={tmp_path}" in run(*tiny(tmp_path)).complaint()
    assert "started anew" in run(f"resume={tmp_path}", "steps=5").complaint()


def test_every_start_is_recorded(run_dir):
    """A resume with other settings does not make the earlier steps its own, and time adds up.

    What it changed stays changed.
    """
    asked_for = [each for each in summary(run_dir)["overrides"] if not each.startswith("steps=")]
    (first,) = summary(run_dir)["starts"]
    assert (first["step"], first["attention"], first["changed"]) == (0, [[0, "tiled"]], {})
    assert 0 < first["seconds"] == summary(run_dir)["wall_seconds"]
    assert run(f"resume={run_dir}", "attention=sdpa", "steps=6").code == 0
    then, second = summary(run_dir)["starts"]
    changed = {"attention.name": ["tiled", "sdpa"], "steps": [4, 6]}
    assert (second["attention"], second["changed"]) == ([[4, "sdpa"]], changed)
    # to the checkpoint that the second went on from
    assert then == first | {"seconds": then["seconds"]} and 0 < then["seconds"] < first["seconds"]
    assert summary(run_dir)["wall_seconds"] == then["seconds"] + second["seconds"]
    seconds = [row["seconds"] for row in metrics(run_dir)]
    assert seconds == sorted(seconds) and seconds[-2] > then["seconds"]
    assert seconds[-1] < summary(run_dir)["wall_seconds"]
    # the speed is the second start's alone: its two steps by its time
    a_step = summary(run_dir)["tokens"] / 6
    until_last_row = sum(a_step / row["tokens_per_sec"] for row in metrics(run_dir)[-2:])
    speed = summary(run_dir)["tokens_per_sec"]
    assert 2 * a_step / second["seconds"] < speed < 2 * a_step / until_last_row
    assert [start["step"] for start in read_meta(run_dir)["starts"]] == [0, 4]
    assert run(f"resume={run_dir}", "steps=7").code == 0
    assert summary(run_dir)["attention"] == "sdpa"
    # a regression test: every start added batch_size=..., also to the name that a logger shows
    recorded = read_meta(run_dir)["overrides"]
    now = [each for each in recorded if not each.startswith("resume=")]
    assert sorted(now) == sorted([*asked_for, "attention=sdpa", "steps=7"])


def test_a_resume_that_is_killed_is_unfinished(run_dir, monkeypatch):
    """A regression test: it read as completed, with the figures of the start before."""
    seen = []
    at_step(monkeypatch, 4, lambda: seen.append(read_run(run_dir)))
    assert run(f"resume={run_dir}", "steps=5").code == 0
    assert [(row["status"], row["variant"]) for row in seen] == [("unfinished", "tiled")]


def test_settings_that_change_no_weight_may_change(tmp_path):
    assert run(*tiny(tmp_path, "model.positions=rope")).code == 0
    new = ("steps=5", "seq_len=64", "model.dropout=0.1", "model.name=other")
    done = run(f"resume={tmp_path}", *new)
    assert done.code == 0 and "model.max_seq_len=64 (32 before)" in done.output, done.output


def test_a_switched_run_goes_on_under_a_third_attention(tmp_path):
    """Not under the second by a switch that was, nor without a word."""
    assert run(*tiny(tmp_path, "attention.switch_at=2", "attention.switch_to=sdpa")).code == 0
    third = (f"resume={tmp_path}", "steps=6", "attention=naive")
    assert "attention.switch_at=2" in run(*third).complaint()
    assert run(*third, "attention.switch_at=null").code == 0
    assert [start["attention"] for start in summary(tmp_path)["starts"]] == [
        [[0, "tiled"], [2, "sdpa"]],
        [[4, "naive"]],
    ]
