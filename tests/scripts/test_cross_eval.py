"""`python -m scripts.cross_eval`: which runs it takes, who judges, and what it writes."""

import json
import re
import shutil
from pathlib import Path

import pytest

from config import AttentionConfig, DataConfig
from scripts import cross_eval
from scripts.cross_eval import in_text
from tests.command import environment as variables
from tests.command import metrics, run, tiny, tiny_sweep
from tests.run_folder import write_run

# scores sharp enough that a broken attention shows after 25 steps
SHARP = ("optim.lr=0.02", "optim.schedule=constant", "optim.warmup_steps=1", "steps=25")
SHARP += ("log_every=25", "attention.block_kv=4")


@pytest.fixture(scope="module", autouse=True)
def same_store():
    """The token store of the runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEGPT_CACHE", variables()["TILEGPT_CACHE"])
        yield


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """Exact attention and no_rescale. 4 s, for all tests of this file."""
    folder = tmp_path_factory.mktemp("cross") / "sweep"
    done = run(*tiny_sweep(folder, *SHARP, "attention=tiled,no_rescale"))
    assert done.code == 0, done.output
    return folder


def judged(folder: Path, *arguments: str) -> list[dict]:
    """The rows of cross_eval on that folder."""
    cross_eval.main([str(folder), *arguments, "device=cpu"])
    return json.loads((folder / "cross_eval.json").read_text())["rows"]


@pytest.fixture(scope="module")
def rows(sweep) -> list[dict]:
    return judged(sweep)  # 4 sequences, as the runs evaluate on


def test_every_run_under_every_judge(sweep, rows):
    assert [Path(row["run"]).name for row in rows] == [job for job in "01" for _ in range(3)]
    for row in rows:
        assert row["status"] == "ok" and row["accuracy"] is None
        assert (row["step"], row["sequences"], row["run_status"]) == (25, 4, "completed")
        name = ("tiled", "no_rescale")[int(Path(row["run"]).name)]
        assert row["trained_under"] == f"{name} block_kv=4"
    written = json.loads((sweep / "cross_eval.json").read_text())
    assert {"commit", "hardware", "versions"} <= written["environment"].keys()


def test_the_losses_are_those_that_training_reported(sweep, rows):
    """The same held-out sequences under the run's own attention and under exact attention: the same
    figures, to the last bit. They expose the defect.
    """
    cells = {(Path(row["run"]).name, row["evaluated_under"]): row["loss"] for row in rows}
    for job, own in (("0", "tiled"), ("1", "no_rescale")):
        last = metrics(sweep / job)[-1]
        assert cells[job, f"{own} block_kv=4"] == last["val/loss"]
        assert cells[job, "sdpa"] == last["val/loss_exact"]
        apart = abs(last["val/loss"] - last["val/loss_exact"])
        assert apart < 1e-5 if own == "tiled" else apart > 1e-3


def test_the_matrix_shows_means_over_seeds():
    """A seed without a finite loss is named, not averaged."""
    rows = [
        {"variant": name, "seed": seed, "evaluated_under": judge, "metric": "loss"}
        | {"loss": loss + seed, "status": "ok"}
        for name, loss in (("tiled", 1.0), ("no_rescale", 2.0))
        for judge in ("sdpa", name)
        for seed in (0, 1)
    ]
    rows[-1] |= {"loss": None, "status": "non-finite"}
    head, exact, broken, remark = filter(None, in_text(rows).splitlines())
    assert "loss" in head and head.split()[-3:] == ["sdpa", "tiled", "no_rescale"]
    assert exact.split() == ["tiled", *("1.500", "±", "0.707") * 2, "-"]
    assert broken.split() == ["no_rescale", "2.500", "±", "0.707", "-", "2.000"]
    assert "no_rescale" in remark and "non-finite" in remark


def test_exact_attention_keeps_documents_apart(tmp_path):
    """sdpa has no mask for them. A regression test: its refusal named a line of this project."""
    data = DataConfig(source="stdlib", documents=True)
    write_run(tmp_path / "run", attention=AttentionConfig("no_rescale", block_kv=16), data=data)
    rows = judged(tmp_path / "run", "sequences=4")
    assert [row["evaluated_under"] for row in rows] == ["tiled", "no_rescale block_kv=16"]
    naive, sdpa = judged(tmp_path / "run", "sequences=4", "under=naive,sdpa")
    assert sdpa["status"].startswith("refused: attention=sdpa") and ".py" not in sdpa["status"]
    assert rows[0]["loss"] == pytest.approx(naive["loss"], rel=1e-4)
    assert rows[1]["loss"] != pytest.approx(naive["loss"], rel=1e-3)


def test_judges_of_ones_own(sweep, rows, tmp_path):
    out = tmp_path / "new" / "x.json"
    names = ["tiled:block_kv=16", *(f"tests.user_backends:{x}" for x in ("NAN", "RAISES"))]
    asked = [str(sweep / "0"), "sequences=2", "device=cpu"]
    # one that is named twice judges once: each would count as a seed
    cross_eval.main([*asked, f"under={','.join([*names, names[0]])}", f"out={out}"])
    tiled, nan, raises = json.loads(out.read_text())["rows"]
    assert tiled["status"] == "ok" and tiled["evaluated_under"] == "tiled block_kv=16"
    # a loss that is not finite has no figures
    assert (nan["status"], nan["loss"], nan["accuracy"]) == ("non-finite", None, None)
    assert re.match(r"refused: KeyError: .*user_backends\.py", raises["status"])
    # a regression test: a matrix of refusals alone took the place of a good one
    with pytest.raises(SystemExit, match="^cross_eval: .*RAISES.*KeyError"):
        cross_eval.main([*asked, f"under={names[-1]}", f"out={sweep / 'cross_eval.json'}"])
    assert json.loads((sweep / "cross_eval.json").read_text())["rows"] == rows


def test_a_run_whose_weights_broke_is_left_out(sweep, tmp_path, capsys):
    """A regression test: one diverged run ended scripts.agree for its whole sweep."""
    options = cross_eval.Evaluation([sweep], device="cpu", out=tmp_path / "out.json")
    runs = cross_eval.trained_runs(options)

    def evaluate(config, data, trained):
        if config is runs[0].config:
            raise FloatingPointError("the logits are not finite")
        return [{"status": "ok"}]

    cross_eval.evaluate_runs(options, runs, evaluate, "unused", in_text=str)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["run"] for row in rows] == [str(run.folder) for run in runs[1:]]
    assert f"left out: {runs[0].folder}" in capsys.readouterr().err


def test_a_folder_of_ruins(sweep, tmp_path, capsys):
    """Failed, half written, without a checkpoint, with a damaged one: a line each, and the rest is
    judged.
    """
    left_out = {
        "failed": "no more",
        "torn": "summary.json",
        "bomb": "config.yaml",
        "no_checkpoint": "checkpoint",
        "damaged": "model.safetensors",
    }
    for name in (*left_out, "diverged"):
        shutil.copytree(sweep / "0", tmp_path / name)
    # a regression test: weights of no_rescale, copied into another run, were called tiled
    shutil.rmtree(tmp_path / "diverged/checkpoint")
    shutil.copytree(sweep / "1/checkpoint", tmp_path / "diverged/checkpoint")
    for status in ("failed", "diverged"):
        path = tmp_path / status / "summary.json"
        ended = {"status": status, "error": "RuntimeError: no more"}
        path.write_text(json.dumps(json.loads(path.read_text()) | ended))
    (tmp_path / "torn/summary.json").write_text('{"status": "comp')
    shutil.rmtree(tmp_path / "no_checkpoint/checkpoint")
    weights = tmp_path / "damaged/checkpoint/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    (tmp_path / "bomb/config.yaml").write_text("attention: " + "[" * 10_000)
    rows = judged(tmp_path, "under=sdpa", "sequences=1")
    said = capsys.readouterr().err.splitlines()
    for name, reason in left_out.items():
        (line,) = (line for line in said if line.startswith(f"left out: {tmp_path / name}: "))
        assert reason in line
    (diverged,) = rows
    assert (diverged["run_status"], diverged["variant"]) == ("diverged", "no_rescale block_kv=4")
    assert diverged["trained_under"] == "no_rescale block_kv=4"


def test_accuracy_and_a_switched_run(tmp_path):
    """It was trained under the attention of its last steps."""
    switch = ("attention.switch_at=2", "attention.switch_to=tiled")
    settings = ("data=last_write", "attention=no_rescale", *switch)
    assert run(*tiny(tmp_path / "run", *settings)).code == 0
    rows = judged(tmp_path / "run", "sequences=4")
    last = metrics(tmp_path / "run")[-1]
    (tiled,) = (row for row in rows if row["evaluated_under"] == "tiled")
    assert (tiled["loss"], tiled["accuracy"]) == (last["val/loss"], last["val/accuracy"])
    assert {row["trained_under"] for row in rows} == {"tiled"}
    head, line, *_ = in_text(rows).splitlines()
    assert "accuracy" in head and "no_rescale" in head and "tiled after step 2" in line
    assert f"{last['val/accuracy']:.1%}" in line
