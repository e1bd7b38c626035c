"""`python -m scripts.cross_eval`: which runs it takes, who judges, and what it writes."""

import json
import re
import shutil
from pathlib import Path

import pytest

from scripts import cross_eval
from scripts.cross_eval import in_text
from tests.command import environment as variables
from tests.command import metrics, run, summary, tiny, tiny_sweep

# scores sharp enough that a broken attention shows after 25 steps
SHARP = (
    "optim.lr=0.02",
    "optim.schedule=constant",
    "optim.warmup_steps=1",
    "steps=25",
    "log_every=25",
    "attention.block_kv=4",
)


@pytest.fixture(scope="module", autouse=True)
def same_store():
    """The token store of the runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEGPT_CACHE", variables()["TILEGPT_CACHE"])
        yield


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """Exact attention and no_rescale, two seeds each. 7 s, for all tests of this file."""
    folder = tmp_path_factory.mktemp("cross") / "sweep"
    done = run(*tiny_sweep(folder, *SHARP, "attention=tiled,no_rescale", "seed=0,1"))
    assert done.code == 0, done.output
    return folder


def judged(folder: Path, *arguments: str) -> list[dict]:
    """The rows of cross_eval on that folder."""
    cross_eval.main([str(folder), *arguments, "device=cpu"])
    return json.loads((folder / "cross_eval.json").read_text())["rows"]


@pytest.fixture(scope="module")
def rows(sweep) -> list[dict]:
    return judged(sweep)  # 4 sequences, as the runs evaluate on


def cell(rows: list[dict], job: str, judge: str) -> dict:
    """The row of a job under a judge."""
    own = [row for row in rows if Path(row["run"]).name == job]
    (found,) = (row for row in own if row["evaluated_under"].split()[0] == judge)
    return found


def test_every_run_under_every_judge(sweep, rows):
    assert [Path(row["run"]).name for row in rows] == [job for job in "0123" for _ in range(3)]
    for row in rows:
        assert row["status"] == "ok" and row["accuracy"] is None and row["loss"] > 0
        assert (row["step"], row["sequences"], row["run_status"]) == (25, 4, "completed")
        job = int(Path(row["run"]).name)
        assert row["seed"] == job % 2
        assert row["trained_under"] == f"{('tiled', 'no_rescale')[job // 2]} block_kv=4"
    written = json.loads((sweep / "cross_eval.json").read_text())
    assert {"commit", "hardware", "versions"} <= written["environment"].keys()


def test_the_losses_are_those_that_training_reported(sweep, rows):
    """The same held-out sequences under the run's own attention and under exact attention: the same
    figures, to the last bit. They expose the defect.
    """
    for job, own in (("0", "tiled"), ("2", "no_rescale")):
        last = metrics(sweep / job)[-1]
        assert cell(rows, job, own)["loss"] == last["val/loss"]
        assert cell(rows, job, "sdpa")["loss"] == last["val/loss_exact"]
        apart = abs(last["val/loss"] - last["val/loss_exact"])
        assert apart < 1e-5 if own == "tiled" else apart > 1e-3


def test_the_matrix_shows_means_over_seeds(rows):
    head, exact, broken = (re.split("  +", line) for line in in_text(rows).splitlines())
    assert "loss" in head[0]
    assert head[1:] == ["sdpa", "tiled block_kv=4", "no_rescale block_kv=4"]
    assert [exact[0], broken[0]] == ["tiled block_kv=4", "no_rescale block_kv=4"]
    two = [cell(rows, job, "no_rescale")["loss"] for job in "01"]
    assert exact[3].startswith(f"{sum(two) / 2:.3f} ± ")
    # a seed without a finite loss is named, not averaged
    lost = [row | {"status": "non-finite", "loss": None} for row in rows if row["seed"]]
    _, line, _, _, remark, *_ = in_text([*(row for row in rows if not row["seed"]), *lost]).split(
        "\n"
    )
    assert f"{two[0]:.3f}" in line and "±" not in line
    assert "tiled" in remark and "non-finite" in remark


def test_exact_attention_keeps_documents_apart(tmp_path):
    """sdpa has no mask for them."""
    settings = ("attention=no_rescale", "attention.block_kv=16", "data.documents=true")
    assert run(*tiny(tmp_path / "run", *settings)).code == 0
    exact, own = judged(tmp_path / "run", "sequences=4")
    assert exact["evaluated_under"] == "tiled" and own["status"] == "ok"
    assert exact["loss"] == pytest.approx(summary(tmp_path / "run")["val/loss_exact"], abs=1e-5)


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
        "torn": "unfinished",
        "no_checkpoint": "checkpoint",
        "damaged": "model.safetensors",
    }
    for name in (*left_out, "diverged", "bomb"):
        shutil.copytree(sweep / "0", tmp_path / name)
    # a regression test: weights of no_rescale, copied into another run, were called tiled
    shutil.rmtree(tmp_path / "diverged/checkpoint")
    shutil.copytree(sweep / "2/checkpoint", tmp_path / "diverged/checkpoint")
    for status in ("failed", "diverged"):
        path = tmp_path / status / "summary.json"
        ended = {"status": status, "error": "RuntimeError: no more"}
        path.write_text(json.dumps(json.loads(path.read_text()) | ended))
    (tmp_path / "torn/summary.json").write_text('{"status": "comp')
    shutil.rmtree(tmp_path / "no_checkpoint/checkpoint")
    weights = tmp_path / "damaged/checkpoint/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    # the settings are in the checkpoint
    (tmp_path / "bomb/config.yaml").write_text("attention: " + "[" * 10_000)
    rows = judged(tmp_path, "under=sdpa", "sequences=1")
    said = capsys.readouterr().err.splitlines()
    for name, reason in left_out.items():
        (line,) = (line for line in said if line.startswith(f"left out: {tmp_path / name}: "))
        assert reason in line
    bomb, diverged = rows
    assert (bomb["run_status"], bomb["variant"]) == ("completed", "tiled block_kv=4")
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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [("{tmp}/nowhere", "nowhere"), ("{tmp}", "{tmp}"), ("{run} under=tiled:tile=3", "tile")],
)
def test_refused_in_one_line(sweep, tmp_path, arguments, named):
    with pytest.raises(SystemExit) as ended:
        cross_eval.main(arguments.format(tmp=tmp_path, run=sweep / "0").split())
    line = ended.value.code
    assert line.startswith("cross_eval: ") and "\n" not in line
    assert named.format(tmp=tmp_path) in line
