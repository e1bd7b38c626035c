"""The sweep's index, table and exit code, from a real Hydra application and from fabricated
folders.
"""

import json
import os
import pickle
import re
import shlex
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests import processes
from training.launch.sweep import (
    SweepSummary,
    begin_sweep,
    exit_code,
    finish_sweep,
    index_rows,
    lock,
    not_started,
    read_run,
    read_sweep,
    summary_table,
    write_index_row,
)
from training.record.names import name_runs

CONFIG = """
attention: tiled
hydra:
  sweep: {dir: out/sweep, subdir: "${hydra.job.num}"}
  callbacks: {sweep: {_target_: training.launch.sweep.SweepSummary}}
"""

# each attention stands for one way in which a job can end
APPLICATION = """
import json, os, signal
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig
from training.record.outcome import Objective

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    if config.attention == "raises":
        raise RuntimeError("boom")
    ends = {"no_max": "diverged", "naive": "oom", "bad": "failed", "ctrl_c": "interrupted"}
    status = ends.get(config.attention, "completed")
    hydra_config = HydraConfig.get()
    summary = {"status": status, "attention": config.attention, "val/loss": 1.5,
               "overrides": list(hydra_config.overrides.task)}
    Path(hydra_config.runtime.output_dir, "summary.json").write_text(json.dumps(summary))
    return Objective(summary | {"stopped": False})

main()
print("after main")
"""


@pytest.mark.parametrize(
    "attentions, code, statuses",
    [
        ("raises,bad,tiled", 1, ["failed", "failed", "completed"]),
        pytest.param(
            "tiled,no_max,naive", 0, ["completed", "diverged", "oom"], marks=pytest.mark.slow
        ),
        pytest.param(
            "tiled,ctrl_c,sdpa", 130, ["completed", "interrupted"], marks=pytest.mark.slow
        ),
    ],
)
def test_each_end_of_a_job_is_in_the_index_and_in_the_exit_code(
    tmp_path, attentions, code, statuses
):
    """The code leaves from the callback: nothing after main() is needed."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/config.yaml").write_text(CONFIG)
    (tmp_path / "app.py").write_text(APPLICATION)
    environment = os.environ | {"PYTHONPATH": processes.python_path(processes.ROOT)}
    asked = ("-m", f"attention={attentions}")
    done = processes.run("app.py", *asked, cwd=tmp_path, env=environment)
    assert done.returncode == code, done.stderr
    rows = index_rows(tmp_path / "out/sweep")
    assert [row["status"] for row in rows] == statuses
    assert [row["status"] for row in read_sweep(tmp_path / "out/sweep")] == statuses
    assert "after main" not in done.stdout
    if "raises" in attentions:
        assert rows[0]["error"] == "boom"


def test_an_index_has_every_job_from_the_start_and_one_line_of_each(tmp_path):
    begin_sweep(
        tmp_path, [{"overrides": ["attention=tiled", seed]} for seed in ("seed=0", "seed=it's")]
    )
    first, second = not_started(tmp_path)
    words = shlex.split(second["command"])
    assert second["job"] == 1 and {"seed=it's", f"hydra.run.dir={tmp_path / '1'}"} <= set(words)
    write_index_row(tmp_path, {"job": 1, "status": "completed", "dir": "1"})
    write_index_row(
        tmp_path, {"job": 7, "status": "completed", "dir": "7"}
    )  # of a sweeper that plans as it goes
    rows = index_rows(tmp_path)
    assert [(row["job"], row["status"]) for row in rows] == [
        (0, "not started"),
        (1, "completed"),
        (7, "completed"),
    ]
    assert not_started(tmp_path) == [first]
    (tmp_path / "0").mkdir()  # it runs now
    assert not_started(tmp_path) == []


def test_a_job_that_its_launcher_stopped_is_no_job_that_was_not_started(tmp_path, capsys):
    begin_sweep(tmp_path, [{"overrides": ["seed=0"]}, {"overrides": ["seed=1"]}])
    (tmp_path / "0").mkdir()
    (tmp_path / "0/summary.json").write_text(
        '{"status": "interrupted", "seed": 0, "overrides": ["seed=0"]}'
    )
    (tmp_path / "tensorboard").mkdir()
    with pytest.raises(SystemExit):
        finish_sweep(tmp_path, 130)
    rows = index_rows(tmp_path)
    assert [row["status"] for row in rows] == ["interrupted", "not started"]
    printed = capsys.readouterr().out
    assert "1 of 2 jobs" in printed and f"--logdir {tmp_path}/tensorboard" in printed


def test_jobs_that_end_together_lose_no_line(tmp_path):
    """A launcher may run the jobs of a sweep in processes of their own."""
    begin_sweep(tmp_path, [{"overrides": [f"seed={job}"]} for job in range(40)])
    with ProcessPoolExecutor(4) as pool:
        ended = [{"job": job, "status": "oom"} for job in range(40)]
        list(pool.map(partial(write_index_row, tmp_path), ended))
    rows = index_rows(tmp_path)
    assert [(row["job"], row["status"]) for row in rows] == [(job, "oom") for job in range(40)]


def test_a_copy_of_the_callback_holds_no_lock(tmp_path):
    """A regression test: hydra/launcher=joblib pickles the callback, which held open files."""
    callback = SweepSummary()
    callback.folder, callback.locks[tmp_path] = tmp_path, lock(tmp_path, "")
    copy = pickle.loads(pickle.dumps(callback))
    assert copy.folder == tmp_path and copy.locks == {} and copy.away and not callback.away


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
    assert read_sweep(tmp_path / "empty") == []


def test_a_job_that_still_runs_is_named_by_what_was_planned(tmp_path):
    """A regression test: it had no overrides, so what all jobs share stood in every name."""
    jobs = [["steps=9", f"optim.lr={lr}"] for lr in (1, 2)]
    planned = {"attention": "tiled", "variant": "tiled", "seed": 0}
    begin_sweep(tmp_path, [{"overrides": job} | planned for job in jobs])
    write_run(tmp_path / "0", **planned, overrides=jobs[0])
    (tmp_path / "1").mkdir()
    (tmp_path / "1/metrics.jsonl").write_text('{"step": 3, "tokens": 64}\n')
    rows = read_sweep(tmp_path)
    assert [row["status"] for row in rows] == ["completed", "unfinished"]
    assert [name.variant for name in name_runs(rows)] == ["tiled lr=1", "tiled lr=2"]
    # the name was written when the sweep began, so the job has it when it is shown alone
    assert [row["variant"] for row in index_rows(tmp_path)] == ["tiled lr=1", "tiled lr=2"]


@pytest.mark.parametrize(
    "summary",
    [None, "", '{"status": "comp', "[]", '{"val/loss": 1}'],
    ids=["missing", "empty", "torn", "list", "no-status"],
)
def test_half_written_run_is_unfinished(tmp_path, summary):
    run = tmp_path / "0"
    run.mkdir()
    (run / "config.yaml").write_text("attention: {name: tiled}\nseq_len: 64\nseed: 3\n")
    (run / "metrics.jsonl").write_text(
        '{"step": 10, "tokens": 640, "val/loss": 2.5}\n{"step": 20, "tokens": 1280, '
        '"train/loss": null}\n{"st'
    )
    if summary is not None:
        (run / "summary.json").write_text(summary)
    row = read_run(run)
    settings = {"attention": "tiled", "seq_len": 64, "seed": 3}
    expected = settings | {"status": "unfinished", "steps_done": 20, "tokens": 1280}
    assert row.items() >= (expected | {"val/loss": 2.5}).items()
    assert "unfinished" in summary_table([row])


def test_a_run_with_nothing_readable_is_unfinished(tmp_path):
    (tmp_path / "config.yaml").write_text("a: [unclosed")
    assert read_run(tmp_path) == {"status": "unfinished", "dir": str(tmp_path)}


def test_a_moved_sweep_keeps_its_index(tmp_path):
    (tmp_path / "there/0").mkdir(parents=True)
    (tmp_path / "there/index.jsonl").write_text(
        '{"job": 0, "dir": "0", "status": "failed", "error": "boom", "overrides": []}\n{"torn'
    )
    (row,) = read_sweep(tmp_path / "there")
    assert (row["status"], row["error"], row["dir"]) == (
        "failed",
        "boom",
        str(tmp_path / "there/0"),
    )


def row(**values) -> dict:
    return {"status": "completed", "dir": "0", "attention": "tiled"} | values


def test_table_shows_what_differs_and_fits_110_columns():
    rows = [
        row(
            overrides=["attention=tiled", "seq_len=32768", "steps=2"],
            seq_len=32768,
            tokens_per_sec=1.5e6,
            step_tokens_per_sec=2.5e6,
            **{"val/loss": 1.23456, "val/loss_exact": 1.2},
        ),
        row(
            attention="no_rescale",
            variant="no_rescale block_kv=16",
            overrides=["attention=no_rescale", "seq_len=512", "steps=2", "attention.block_kv=16"],
            seq_len=512,
            status="diverged",
            first_bad_step=1200,
            diagnosis={"message": "layer 2: inf in scores\nmore"},
        ),
    ]
    header, _, first, second, remark = summary_table(rows).splitlines()
    assert header.split()[:4] == ["variant", "seq_len", "status", "val/loss"]
    assert first.split()[:3] == ["tiled", "32768", "completed"]
    assert first.split()[3:] == ["1.2346", "1.2000", "1,500,000", "2,500,000", "-"]
    assert second.split()[:4] == ["no_rescale", "block_kv=16", "512", "diverged"]
    assert second.split()[4:] == ["-"] * 5
    for word in ("no_rescale block_kv=16 seq_len=512", "diverged", "1200", "inf in scores"):
        assert word in remark
    assert max(map(len, (header, first, second))) <= 110  # below it stand remarks
    assert summary_table(rows).isascii()


def test_a_loss_from_before_the_last_step_is_not_shown(tmp_path):
    for number, (last, shown) in enumerate([(0, "-"), (40, "2.5000")]):
        write_run(
            tmp_path / str(number),
            attention="tiled",
            status="interrupted",
            steps_done=40,
            **{"val/loss": 2.5},
        )
        (tmp_path / f"{number}/metrics.jsonl").write_text(
            json.dumps({"step": last, "val/loss": 2.5}) + "\n"
        )
        assert summary_table(read_sweep(tmp_path / str(number))).splitlines()[2].split()[2] == shown


def test_the_peak_of_what_came_before_is_not_that_of_a_run_without_memory():
    shown = [
        summary_table([row(status=status, **{"memory/peak_gib": 6.66})]).splitlines()[2]
        for status in ("completed", "oom")
    ]
    assert [line.split()[-1] for line in shown] == ["6.66", "-"]


def test_accuracy_columns_come_with_accuracy():
    assert "accuracy" not in summary_table([row()])
    table = summary_table([row(**{"val/accuracy": 0.998, "val/accuracy_exact": 0.5})])
    assert "99.8%" in table and "50.0%" in table


def test_exit_code():
    assert (
        exit_code([row(), row(status="oom"), row(status="diverged"), row(status="unfinished")]) == 0
    )
    assert exit_code([row(status="interrupted"), row(status="failed")]) == 1
    assert exit_code([row(), row(status="interrupted")]) == 130


def test_the_table_says_what_a_resume_changed():
    starts = [{"step": 0, "attention": [[0, "tiled"]], "changed": {}}]
    starts += [
        {"step": 50, "attention": [[50, "sdpa"]], "changed": {"attention.name": ["tiled", "sdpa"]}}
    ]
    row = {
        "status": "completed",
        "attention": "sdpa",
        "dir": "0",
        "overrides": ["attention=sdpa"],
        "steps_done": 60,
    }
    *_, line, remark = summary_table([row | {"starts": starts}]).splitlines()
    assert re.findall(r"tiled|sdpa|50|completed", line) == ["tiled", "sdpa", "50", "completed"]
    assert re.findall(r"tiled|sdpa|50", remark)[:3] == ["tiled", "sdpa", "50"]
    assert "attention.name=sdpa (tiled" in remark
    assert summary_table([row]).splitlines()[-1].startswith("sdpa     completed")
