"""One run, from the command line to the files it leaves."""

import math
import re
import shutil
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from config import RunConfig
from tests.command import checkpoint, metrics, run, strict_json, summary, tiny
from training import compose
from training.record.starts import flat

LONG = ("steps=60", "eval_every=20", "sample_tokens=16")


@pytest.fixture(scope="session")
def learned(tmp_path_factory) -> Path:
    """A run of 60 steps, long enough to learn something."""
    run_dir = tmp_path_factory.mktemp("learned")
    done = run(*tiny(run_dir, *LONG), curve=True)
    assert done.code == 0, done.output
    said = [line for line in done.output.splitlines() if line.startswith("step ")]
    said = [line.split()[1] for line in said if " val/loss " in line]
    assert said == ["0/60", "20/60", "40/60", "60/60"]
    return run_dir


def test_a_run_directory_holds_what_the_readme_says(learned):
    names = {path.name for path in learned.iterdir()}
    assert names >= {"config.yaml", "env.json", "metrics.jsonl", "summary.json", "checkpoint"}
    assert names >= {"loss_curve.png", "sample.txt"}
    assert not [name for name in names if "tmp" in name or name.endswith(".old")]
    assert (learned / "loss_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = (learned / "sample.txt").read_text()
    assert text.startswith("def ") and len(text) > len("def ")
    env = strict_json((learned / "env.json").read_text())
    assert {"commit", "dirty", "versions", "hardware", "data_fingerprint"} <= env.keys()


def test_metric_names_and_steps(learned):
    rows = metrics(learned)
    assert [row["step"] for row in rows] == list(range(61))
    assert [row["tokens"] for row in rows] == [step * 4 * 32 for step in range(61)]
    validation = {"val/loss", "val/loss_exact", "val/bpb", "val/bpb_exact"}
    trained = {"train/loss", "lr", "grad_norm", "tokens_per_sec", "step_tokens_per_sec", "mfu"}
    trained |= {"mfu_causal", "attention/max_score", "attention/max_score_by_head"}
    trained |= {"memory/peak_gib", "memory/reserved_gib", "memory/process_gib"}
    compared = {
        f"attention/{tensor}_{figure}"
        for tensor in ("out", "dq", "dk", "dv")
        for figure in ("error", "cosine")
    }
    for row in rows:
        evaluated = row["step"] % 20 == 0
        expected = (trained if row["step"] else set()) | (validation if evaluated else set())
        expected |= compared if evaluated and row["step"] else set()
        assert row.keys() == expected | {"step", "tokens", "seconds"}
    # neither has a meaning on a CPU, and the clock starts after the warm-up
    assert all(row.get("mfu") is None and row.get("memory/reserved_gib") is None for row in rows)
    assert rows[-1]["step_tokens_per_sec"] > rows[-1]["tokens_per_sec"] > 0
    # tensors are counted in the second step, beside the libraries of a process
    assert rows[1]["memory/peak_gib"] is None
    assert len({row["memory/peak_gib"] for row in rows[2:]}) == 1
    assert all(row["memory/process_gib"] > 0.05 > row["memory/peak_gib"] > 0 for row in rows[2:])


def test_the_speed_is_by_the_wall_clock_and_that_of_the_steps_stands_beside_it(learned):
    """A regression test: the speed left out the cost of metrics, which was more than the steps'."""
    rows, result = metrics(learned), summary(learned)
    for before, after in pairwise(rows[1:]):
        seconds = after["seconds"] - before["seconds"]
        assert after["tokens_per_sec"] == pytest.approx(4 * 32 / seconds)
    assert result["step_tokens_per_sec"] > result["tokens_per_sec"] > 0
    # from the evaluation before the training to the last checkpoint, with all that lies between
    span = rows[-1]["seconds"] - rows[0]["seconds"]
    tokens = result["tokens"]
    assert tokens / result["wall_seconds"] < result["tokens_per_sec"] < 1.5 * tokens / span


def test_learns(learned, tmp_path):
    rows = metrics(learned)
    # untrained, every one of the 257 tokens is about as likely
    assert rows[1]["train/loss"] == pytest.approx(math.log(257), abs=0.15)
    assert rows[0]["val/loss"] == pytest.approx(math.log(257), abs=0.15)
    assert rows[-1]["val/loss"] < rows[0]["val/loss"] - 1.0
    assert run(*tiny(tmp_path, "seed=1", "steps=1")).code == 0
    assert abs(metrics(tmp_path)[1]["train/loss"] - rows[1]["train/loss"]) > 1e-3


def test_summary_is_the_last_row_and_the_outcome(learned):
    result, last = summary(learned), metrics(learned)[-1]
    assert (result["status"], result["attention"]) == ("completed", "tiled")
    assert not result["defect"]
    assert (result["steps_done"], result["tokens"]) == (60, 60 * 4 * 32)
    assert all(result[key] == last[key] for key in ("val/loss", "val/loss_exact"))
    assert result["max_score"] == max(row["attention/max_score"] for row in metrics(learned)[1:])
    assert checkpoint(learned)["step"] == 60
    # a single run has its table as a sweep has
    header, _, line = (learned / "train.log").read_text().splitlines()[-3:]
    assert header.split()[:2] == ["variant", "status"]
    assert line.split()[:2] == ["tiled", "completed"]


def test_config_yaml_is_the_run(learned):
    schema, written = OmegaConf.structured(RunConfig), OmegaConf.load(learned / "config.yaml")
    assert OmegaConf.to_object(OmegaConf.merge(schema, written)) == compose(
        *tiny(learned, *LONG)[:-1]
    )
    assert "${" not in (learned / "config.yaml").read_text()


def test_a_run_under_kernels_is_judged_exact(tmp_path):
    """Triton's, interpreted. Every evaluation judges the same weights under PyTorch's attention."""
    done = run(*tiny(tmp_path, "attention=triton", "steps=2"))
    assert done.code == 0, done.output
    first, *_, last = metrics(tmp_path)
    for row in (first, last):
        assert row["val/loss"] == pytest.approx(row["val/loss_exact"], abs=1e-5)


@pytest.fixture(scope="session")
def diverged(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("diverged")
    recipe = ("attention=no_max", "attention.block_q=8", "attention.block_kv=8", "dtype=fp16")
    recipe += ("optim.lr=0.05", "optim.warmup_steps=1", "model.num_layers=2")
    return run_dir, run(*tiny(run_dir, *recipe, "steps=60"))


def test_divergence_is_a_result_with_a_diagnosis(diverged):
    """Announced by the score. tests/training/test_health.py has more of its card."""
    run_dir, done = diverged
    assert done.code == 0 and "Traceback" not in done.output, done.output
    result, rows = summary(run_dir), metrics(run_dir)[1:]
    card, last = result["diagnosis"], rows[-1]
    assert result["status"] == "diverged" and last["step"] < 60
    assert card["step"] == result["first_bad_step"] == last["step"]
    assert card["layer"] in (0, 1) and card["tensor"] in ("row_sum", "acc")
    assert card["message"] in done.output
    assert last["train/loss"] is None and "train/loss" in last["nonfinite"]
    assert "val/loss_exact" in last  # though no evaluation is due
    # the logged score is the largest of all sequences, so at least the tile's
    assert last["attention/max_score"] == card["max_score"] >= card["tile_max_score"] > 11.09
    crossed = next(row["step"] for row in rows if row["attention/max_score"] > 11.09)
    assert result["float16_overflow_step"] == card["float16_overflow_step"] == crossed
    assert sum("11.09 (float16)" in line for line in done.output.splitlines()) == 1


def test_the_weights_of_a_diverged_run_are_those_before_the_bad_step(diverged, tmp_path):
    run_dir, _ = diverged
    result = summary(run_dir)
    assert all(tensor.isfinite().all() for tensor in checkpoint(run_dir)["weights"].values())
    assert math.isfinite(result["val/loss_exact"]) and result["val/loss_exact"] < math.log(257)
    # so the run can go on where the broken attention gave up
    shutil.copytree(run_dir, tmp_path / "run")
    more = f"steps={result['first_bad_step'] + 2}"
    assert run(f"resume={tmp_path / 'run'}", "attention=tiled", more).code == 0
    assert summary(tmp_path / "run")["status"] == "completed"


def test_help_explains_every_key():
    """With the sentence above the field in config.py, and the value in this command."""
    output = run("--help", "seq_len=48").output
    explained = dict(re.findall(r"^  ([\w.]+)=\S+ +(\S.*(?:\n {20}.*)*)", output, re.MULTILINE))
    assert explained.keys() == flat(asdict(RunConfig())).keys()
    assert all(len(sentence.split()) > 1 for sentence in explained.values())
    assert "  model.max_seq_len=48 " in output and "  parallel.context=1 " in output


def test_a_row_without_a_loss_has_its_memory_too(tmp_path):
    """The process's peak since the row before, that is: what follows would not know it any more."""
    assert run(*tiny(tmp_path, "eval_every=1", "log_every=3")).code == 0
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows if "train/loss" in row] == [3, 4]
    assert all(row["memory/process_gib"] > 0.05 for row in rows[1:])
    assert "memory/process_gib" not in rows[0]
    largest = max(row["memory/process_gib"] for row in rows[1:])
    assert summary(tmp_path)["memory/process_gib"] == largest


def test_eval_every_0_trains_without_an_evaluation(tmp_path):
    done = run(*tiny(tmp_path, "eval_every=0"))
    assert done.code == 0 and re.search(r"4/4  [\d,]+ tokens  train/loss", done.output)
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4]
    names = {name for row in metrics(tmp_path) for name in row}
    assert not any(name.startswith(("val/", "attention/out")) for name in names)
    assert summary(tmp_path)["status"] == "completed"


def test_an_attention_that_stops_being_exact_is_named(tmp_path):
    """It passes the check before the run. A regression test: it was named after the last step."""
    drifts = ("attention=tests.user_backends:DRIFTS", "steps=40", "eval_every=10")
    done = run(*tiny(tmp_path, *drifts))
    assert done.code == 0, done.output
    lines, drifted = done.output.splitlines(), r"attention=.* exact .*val/loss \d"
    (told,) = [i for i, line in enumerate(lines) if re.search(drifted, line)]
    (end,) = [i for i, line in enumerate(lines) if line.startswith("step    40/40")]
    rows = [row for row in metrics(tmp_path) if "val/loss" in row]
    apart = [row["step"] for row in rows if abs(row["val/loss"] - row["val/loss_exact"]) > 1e-3]
    assert 0 < apart[0] < 40 and told < end, done.output
    assert summary(tmp_path)["status"] == "completed"
