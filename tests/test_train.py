"""One run, from the command line to the files it leaves, and back again: interrupted, killed, resumed."""

import json
import math
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from attention import BACKENDS, Backend
from config import RunConfig, register
from data.batches import TextData
from tests.command import ROOT, checkpoint, computed, finish, metrics, run, same, start, strict_json, summary, tiny, wait_for_rows


def trains_on_a_cpu(backend: Backend) -> bool:
    try:
        backend.check_model(num_heads=2, num_kv_heads=2, head_dim=16, dtype=torch.float32, device=torch.device("cpu"))
    except ValueError:
        return False
    return True


EXACT = [name for name, backend in BACKENDS.items() if backend.exact and trains_on_a_cpu(backend)]

# everything that has state: two passes a step, dropout, and rows, evaluations and checkpoints out of step with one another
STATEFUL = ("model.dropout=0.1", "tokens_per_step=256", "steps=12", "log_every=3", "eval_every=5", "checkpoint_every=4")


@pytest.fixture(scope="session")
def learned(tmp_path_factory) -> Path:
    """A run of 60 steps, long enough to learn something."""
    run_dir = tmp_path_factory.mktemp("learned")
    done = run(*tiny(run_dir, "steps=60", "eval_every=20", "sample_tokens=16"))
    assert done.code == 0, done.output
    return run_dir


@pytest.fixture(scope="session")
def exact_runs(tmp_path_factory) -> dict[str, Path]:
    """Ten steps under each exact attention (two under Triton's interpreter, which is slow), otherwise the same."""
    folder = tmp_path_factory.mktemp("exact")
    for name in EXACT:
        done = run(*tiny(folder / name, f"attention={name}", f"steps={2 if name == 'triton' else 10}", "optim.schedule=constant"))
        assert done.code == 0, done.output
    return {name: folder / name for name in EXACT}


@pytest.fixture(scope="session", params=["fp32", "fp16"])
def straight(request, tmp_path_factory) -> tuple[Path, tuple[str, ...]]:
    """A run that nothing disturbs, with its overrides."""
    run_dir, overrides = tmp_path_factory.mktemp("straight"), (*STATEFUL, f"dtype={request.param}")
    assert run(*tiny(run_dir, *overrides)).code == 0
    return run_dir, overrides


def send_at_step(monkeypatch, step: int, *signals: signal.Signals) -> None:
    """Let this process get the signals while it prepares that step, counted from 0, for the first time."""
    train_batch, pending = TextData.train_batch, list(signals)

    def patched(self, at: int, num_sequences: int):
        while at == step and pending:
            os.kill(os.getpid(), pending.pop(0))
        return train_batch(self, at, num_sequences)

    monkeypatch.setattr(TextData, "train_batch", patched)


def test_a_run_directory_holds_what_the_readme_says(learned):
    names = {path.name for path in learned.iterdir()}
    assert names >= {"config.yaml", "env.json", "metrics.jsonl", "summary.json", "checkpoint", "loss_curve.png", "sample.txt"}
    assert not [name for name in names if "tmp" in name or name.endswith(".old")]
    assert (learned / "loss_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = (learned / "sample.txt").read_text()
    assert text.startswith("def ") and len(text) > len("def ")
    env = strict_json((learned / "env.json").read_text())
    assert {"commit", "dirty", "versions", "hardware", "data_fingerprint"} <= env.keys()
    assert env["versions"]["torch"] == torch.__version__.partition("+")[0] or env["versions"]["torch"] == torch.__version__


def test_metric_names_and_steps(learned):
    rows = metrics(learned)
    assert [row["step"] for row in rows] == list(range(61))
    assert [row["tokens"] for row in rows] == [step * 4 * 32 for step in range(61)]
    validation = {"val/loss", "val/loss_exact"}
    trained = {"train/loss", "lr", "grad_norm", "tokens_per_sec", "mfu", "memory/peak_gib", "memory/reserved_gib", "attention/max_score"}
    for row in rows:
        expected = (trained if row["step"] else set()) | (validation if row["step"] % 20 == 0 else set())
        assert row.keys() == expected | {"step", "tokens"}
    # neither has a meaning on a CPU, and the clock starts after the warm-up
    assert all(row.get("mfu") is None and row.get("memory/reserved_gib") is None for row in rows)
    assert rows[-1]["tokens_per_sec"] > 0 and rows[-1]["memory/peak_gib"] > 0.05


def test_learns(learned):
    rows = metrics(learned)
    # untrained, every one of the 257 tokens is about as likely
    assert rows[1]["train/loss"] == pytest.approx(math.log(257), abs=0.15)
    assert rows[0]["val/loss"] == pytest.approx(math.log(257), abs=0.15)
    assert rows[-1]["val/loss"] < rows[0]["val/loss"] - 1.0


def test_summary_is_the_last_row_and_the_outcome(learned):
    result, last = summary(learned), metrics(learned)[-1]
    assert result["status"] == "completed" and result["attention"] == "tiled" and not result["defect"]
    assert (result["steps_done"], result["tokens"]) == (60, 60 * 4 * 32)
    assert (result["val/loss"], result["val/loss_exact"]) == (last["val/loss"], last["val/loss_exact"])
    assert result["max_score"] == max(row["attention/max_score"] for row in metrics(learned)[1:])
    assert checkpoint(learned)["step"] == 60


def test_config_yaml_is_the_run(learned):
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        asked = OmegaConf.to_object(compose("config", tiny(learned, "steps=60", "eval_every=20", "sample_tokens=16")[:-1]))
    loaded = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.load(learned / "config.yaml")))
    assert loaded == asked
    assert "${" not in (learned / "config.yaml").read_text()


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_attention_is_judged_exact(exact_runs, name):
    for row in metrics(exact_runs[name]):
        if "val/loss" in row:
            assert row["val/loss"] == pytest.approx(row["val/loss_exact"], abs=1e-5)


@pytest.mark.parametrize("name", EXACT)
def test_every_exact_attention_sees_the_same_batches(exact_runs, name):
    ours, naive = ([row["train/loss"] for row in metrics(exact_runs[other])[1:]] for other in (name, "naive"))
    # triton's schedule is the same: it does not depend on the number of steps
    assert ours[:10] == pytest.approx(naive[: len(ours)], abs=1e-4)


def test_another_seed_is_another_run(exact_runs, tmp_path):
    assert run(*tiny(tmp_path, "seed=1", "steps=1")).code == 0
    assert abs(metrics(tmp_path)[1]["train/loss"] - metrics(exact_runs["tiled"])[1]["train/loss"]) > 1e-3


def test_no_rescale_over_several_tiles_is_judged_broken(tmp_path):
    done = run(*tiny(tmp_path, "attention=no_rescale", "attention.block_kv=4", "steps=60"))
    assert done.code == 0 and "broken on purpose" in done.output and "is exact here" not in done.output
    rows = metrics(tmp_path)
    assert rows[0]["val/loss"] == pytest.approx(rows[0]["val/loss_exact"], abs=1e-3)  # untrained, all scores are about 0
    assert abs(rows[-1]["val/loss"] - rows[-1]["val/loss_exact"]) > 1e-3


@pytest.mark.parametrize("number, step", [(signal.SIGINT, 0), (signal.SIGTERM, 6), (signal.SIGINT, 10)], ids=str)
def test_interrupted_and_resumed_is_the_same_run(straight, monkeypatch, tmp_path, number, step):
    """To the last bit: weights, optimizer, loss scale, random state, and every row that was computed, none lost and none twice."""
    reference, overrides = straight
    send_at_step(monkeypatch, step, number)
    stopped = run(*tiny(tmp_path, *overrides))
    assert stopped.code == 130 and f"interrupted after step {step + 1}" in stopped.output
    assert f"python train.py resume={tmp_path}" in stopped.output
    assert summary(tmp_path)["status"] == "interrupted" and checkpoint(tmp_path)["step"] == step + 1

    assert run(f"resume={tmp_path}").code == 0
    assert summary(tmp_path)["status"] == "completed"
    assert same(checkpoint(tmp_path), checkpoint(reference))
    assert computed(tmp_path) == computed(reference)


def test_ctrl_c_in_the_last_step_leaves_a_whole_run(straight, monkeypatch, tmp_path):
    reference, overrides = straight
    send_at_step(monkeypatch, 11, signal.SIGINT)
    run(*tiny(tmp_path, *overrides))
    if summary(tmp_path)["status"] == "interrupted":
        run(f"resume={tmp_path}")
    assert summary(tmp_path)["status"] == "completed"
    assert computed(tmp_path) == computed(reference)


def test_ctrl_c_twice_stops_at_once_and_keeps_the_checkpoint(straight, monkeypatch, tmp_path):
    reference, overrides = straight
    send_at_step(monkeypatch, 7, signal.SIGINT, signal.SIGINT)
    stopped = run(*tiny(tmp_path, *overrides))
    assert stopped.code == 130 and "Traceback" not in stopped.output
    assert "the steps since the last checkpoint are lost" in stopped.output
    assert summary(tmp_path)["status"] == "interrupted" and checkpoint(tmp_path)["step"] == 4
    assert run(f"resume={tmp_path}").code == 0
    assert same(checkpoint(tmp_path), checkpoint(reference))
    assert computed(tmp_path) == computed(reference)


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
    assert not list((tmp_path / "killed").glob("*.tmp")) and not (tmp_path / "killed/checkpoint.old").exists()


def test_resume_may_change_the_attention_and_the_length(learned, tmp_path):
    shutil.copytree(learned, tmp_path / "run")
    assert run(f"resume={tmp_path / 'run'}", "attention=sdpa", "steps=62").code == 0
    assert summary(tmp_path / "run")["attention"] == "sdpa"
    # and what was changed stays changed
    assert run(f"resume={tmp_path / 'run'}", "steps=63").code == 0
    assert summary(tmp_path / "run")["attention"] == "sdpa"
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(64)) and rows[:61] == metrics(learned)


@pytest.fixture(scope="session")
def diverged(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("diverged")
    tiles = ("attention.block_q=8", "attention.block_kv=8")
    recipe = ("attention=no_max", "dtype=fp16", "optim.lr=0.05", "optim.warmup_steps=1", "model.num_layers=2", *tiles)
    return run_dir, run(*tiny(run_dir, *recipe, "steps=60"))


def test_divergence_is_a_result_with_a_diagnosis(diverged):
    run_dir, done = diverged
    assert done.code == 0 and "Traceback" not in done.output, done.output
    result, rows = summary(run_dir), metrics(run_dir)
    assert result["status"] == "diverged" and 1 < result["first_bad_step"] == rows[-1]["step"] < 60
    named = re.fullmatch(
        r"layer [01]: (row_sum|acc) leaves the finite range in the tile of queries (\d+):(\d+) and keys (\d+):(\d+), "
        r"whose largest score is [\d.]+",
        result["diagnosis"],
    )
    assert named, result["diagnosis"]
    rows_start, rows_stop, keys_start, keys_stop = map(int, named.groups()[1:])
    assert 0 <= keys_start < keys_stop <= rows_stop <= 32 and rows_stop - rows_start == keys_stop - keys_start == 8
    assert rows[-1]["train/loss"] is None and "train/loss" in rows[-1]["nonfinite"]


def test_divergence_is_announced_by_the_score(diverged):
    """The score that is logged is at least the one the diagnosis names, in whichever sequence of the batch it was."""
    run_dir, done = diverged
    rows = metrics(run_dir)[1:]
    fatal = float(summary(run_dir)["diagnosis"].rpartition(" ")[2])
    assert fatal > 11.09 and rows[-1]["attention/max_score"] >= fatal - 0.01
    crossed = next(row["step"] for row in rows if row["attention/max_score"] > 11.09)
    warnings = [line for line in done.output.splitlines() if "passed 11.09 (float16)" in line]
    assert len(warnings) == 1 and warnings[0].startswith(f"step {crossed}: attention/max_score ")


def test_the_weights_of_a_diverged_run_are_those_before_the_bad_step(diverged, tmp_path):
    run_dir, _ = diverged
    result = summary(run_dir)
    assert all(tensor.isfinite().all() for tensor in checkpoint(run_dir)["weights"].values())
    assert math.isfinite(result["val/loss_exact"]) and result["val/loss_exact"] < math.log(257)
    # so the run can go on where the broken attention gave up
    shutil.copytree(run_dir, tmp_path / "run")
    done = run(f"resume={tmp_path / 'run'}", "attention=tiled", f"steps={result['first_bad_step'] + 2}")
    assert done.code == 0 and summary(tmp_path / "run")["status"] == "completed"


def test_help_is_quick_and_lists_the_groups():
    begin = time.perf_counter()
    done = finish(start("--help"))
    seconds = time.perf_counter() - begin
    assert done.code == 0 and seconds < 2
    for group in (path for path in (ROOT / "conf").iterdir() if path.is_dir()):
        assert f"{group.name}: {', '.join(sorted(path.stem for path in group.glob('*.yaml')))}" in done.output


def test_the_resolved_config_can_be_printed():
    done = run("--cfg", "job", "--resolve", "seq_len=48")
    assert done.code == 0 and OmegaConf.create(done.output).model.max_seq_len == 48
    assert json.loads(json.dumps(OmegaConf.to_container(OmegaConf.create(done.output)))).keys() >= {"attention", "model", "data"}
