"""Runs as they are read from their folders and shown: whole, half-written, or never begun."""

import json
import re
from pathlib import Path

import pytest

from training.record.names import name_runs
from training.record.runs import not_started, read_run, read_sweep, summary_table


def write_run(folder: Path, **summary) -> None:
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"status": "completed"} | summary))


def test_read_sweep_finds_runs_however_they_lie(tmp_path):
    for job in (0, 2, 10):
        write_run(tmp_path / f"sweeps/a/{job}", attention="tiled", seed=job)
    write_run(tmp_path / "single", attention="naive")
    # what lies in a run is no run
    write_run(tmp_path / "single/checkpoint", attention="wrong")
    write_run(tmp_path / "sweeps/a/wandb/offline-run-1", attention="wrong")
    write_run(tmp_path / "sweeps/a/0/.hydra", attention="wrong")
    assert [row.get("seed") for row in read_sweep(tmp_path / "sweeps/a")] == [0, 2, 10]
    assert [row["attention"] for row in read_sweep(tmp_path)] == ["naive"] + ["tiled"] * 3
    assert [row["attention"] for row in read_sweep(tmp_path / "single")] == ["naive"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/circle").symlink_to(tmp_path / "empty")
    assert read_sweep(tmp_path / "empty") == []


def test_a_job_that_still_runs_is_named_by_what_was_planned(tmp_path):
    """A regression test: it had no overrides, so what all jobs share stood in every name."""
    planned = {"attention": "tiled", "variant": "tiled", "seed": 0}
    lines = [
        {"dir": f"lr/{lr}", "overrides": ["steps=9", f"optim.lr={lr}"]} | planned
        for lr in (1, 2, 3)
    ]
    (tmp_path / "index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_run(tmp_path / "lr/1", **planned, overrides=lines[0]["overrides"])
    (tmp_path / "lr/2").mkdir()
    (tmp_path / "lr/2/metrics.jsonl").write_text('{"step": 3, "tokens": 64}\n')
    rows = read_sweep(tmp_path)
    assert [row["status"] for row in rows] == ["completed", "unfinished"]
    assert [name.variant for name in name_runs(rows)] == ["tiled lr=1", "tiled lr=2"]
    assert read_sweep(tmp_path / "lr/2") == rows[1:]
    assert not_started(tmp_path) == lines[2:]


STARTED = {"attention": "tiled", "seq_len": 64, "seed": 3, "steps_done": 0}
STARTED = json.dumps({"status": "unfinished"} | STARTED)


@pytest.mark.parametrize("written", [None, '{"status": "comp', STARTED])
def test_half_written_run_is_unfinished(tmp_path, written):
    rows = '{"step": 10, "tokens": 640, "val/loss": 2.5}\n{"step": 20, "tokens": 1280}\n{"st'
    (tmp_path / "metrics.jsonl").write_text(rows)
    if written is not None:
        (tmp_path / "summary.json").write_text(written)
    row = read_run(tmp_path)
    expected = {"status": "unfinished", "steps_done": 20, "tokens": 1280, "val/loss": 2.5}
    if written == STARTED:
        expected |= {"attention": "tiled", "seq_len": 64, "seed": 3}
    assert row.items() >= expected.items()
    assert "unfinished" in summary_table([row])
    # with nothing that can be read, too
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    assert read_run(tmp_path)["status"] == "unfinished"


def row(**values) -> dict:
    return {"status": "completed", "dir": "0", "attention": "tiled"} | values


def test_table_shows_what_differs_and_fits_110_columns():
    figures = {"tokens_per_sec": 1.5e6, "step_tokens_per_sec": 2.5e6}
    figures |= {"val/loss": 1.23456, "val/loss_exact": 1.2}
    broken = {"status": "diverged", "first_bad_step": 1200, "variant": "no_rescale block_kv=16"}
    broken |= {"diagnosis": {"message": "layer 2: inf in scores\nmore"}}
    typed = ["attention=no_rescale", "seq_len=512", "attention.block_kv=16"]
    rows = [
        row(overrides=["attention=tiled", "seq_len=32768"], seq_len=32768, **figures),
        row(attention="no_rescale", overrides=typed, seq_len=512, **broken),
    ]
    header, _, first, second, remark = summary_table(rows).splitlines()
    assert header.split()[:4] == ["variant", "seq_len", "status", "val/loss"]
    shown = "tiled 32768 completed 1.2346 1.2000 1,500,000 2,500,000 -"
    assert first.split() == shown.split()
    assert second.split() == ["no_rescale", "block_kv=16", "512", "diverged", *("-" * 5)]
    for word in ("no_rescale block_kv=16 seq_len=512", "diverged", "1200", "inf in scores"):
        assert word in remark
    assert max(map(len, (header, first, second))) <= 110  # below it stand remarks
    assert summary_table(rows).isascii()


def test_what_a_table_shows_of_loss_memory_and_accuracy(tmp_path):
    """Not a loss from before the last step, nor the peak of a run that had too little memory;
    accuracy only where there is one.
    """
    loss = {"val/loss": 2.5}
    for name, last, shown in (("early", 0, "-"), ("last", 40, "2.5000")):
        write_run(tmp_path / name, attention="tiled", status="interrupted", steps_done=40, **loss)
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": last} | loss) + "\n")
        table = summary_table(read_sweep(tmp_path / name))
        assert table.splitlines()[2].split()[2] == shown
    for status, shown in (("completed", "6.66"), ("oom", "-")):
        table = summary_table([row(status=status, **{"memory/peak_gib": 6.66})])
        assert table.splitlines()[2].split()[-1] == shown and "accuracy" not in table
    table = summary_table([row(**{"val/accuracy": 0.998, "val/accuracy_exact": 0.5})])
    assert "99.8%" in table and "50.0%" in table


def test_the_table_says_what_a_resume_changed():
    changed = {"attention.name": ["tiled", "sdpa"], "optim.lr": [None, 0.1]}
    starts = [
        {"step": 0, "attention": [[0, "tiled"]], "changed": {}},
        {"step": 50, "attention": [[50, "sdpa"]], "changed": changed},
        {"step": 55, "attention": [[55, "sdpa"]], "changed": {}},
    ]
    resumed = row(attention="sdpa", overrides=["attention=sdpa"], steps_done=60, starts=starts)
    *_, line, remark = summary_table([resumed]).splitlines()
    assert re.findall(r"tiled|sdpa|50|completed", line) == ["tiled", "sdpa", "50", "completed"]
    for words in (r"at step 50 with attention.name=sdpa \(tiled", r"optim.lr=0.1 \(null"):
        assert len(re.findall(words, remark)) == 1
    assert "step 55" not in remark
