"""`python -m scripts.cross_eval`: which runs it takes, whom it lets judge, what it writes, and one
line for what is wrong.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import cross_eval
from scripts.cross_eval_matrix import Cell, Matrix, build_matrices, in_text
from tests import processes
from tests.command import ROOT, metrics, run, summary, tiny, tiny_sweep
from tests.command import environment as variables

# scores sharp enough that a broken attention shows after 25 steps
SHARP = (
    "optim.lr=0.02",
    "optim.schedule=constant",
    "optim.warmup_steps=1",
    "steps=25",
    "log_every=25",
    "attention.block_kv=4",
)


@pytest.fixture(autouse=True)
def same_store(monkeypatch):
    """The token store of the runs."""
    monkeypatch.setenv("TILEGPT_CACHE", variables()["TILEGPT_CACHE"])


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """Exact attention and no_rescale, two seeds each."""
    folder = tmp_path_factory.mktemp("cross") / "sweep"
    done = run(*tiny_sweep(folder, *SHARP, "attention=tiled,no_rescale", "seed=0,1"))
    assert done.code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def table(sweep) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEGPT_CACHE", variables()["TILEGPT_CACHE"])
        cross_eval.main([str(sweep), "device=cpu"])  # 4 sequences, as the runs evaluate on
    return json.loads((sweep / "cross_eval.json").read_text())


def cell(table: dict, run: str, name: str, **options) -> dict:
    (row,) = (
        row
        for row in table["rows"]
        if row["run"] == run
        and row["evaluated_under"]["name"] == name
        and options.items() <= row["evaluated_under"]["options"].items()
    )
    return row


def test_every_run_under_every_judge(table):
    assert {row["run"] for row in table["rows"]} == {"0", "1", "2", "3"}
    judges = [
        (row["evaluated_under"]["name"], row["evaluated_under"]["options"].get("block_kv"))
        for row in table["rows"][:5]
    ]
    assert judges == [
        ("sdpa", None),
        ("tiled", 4),
        ("no_rescale", 2),
        ("no_rescale", 4),
        ("no_rescale", 8),
    ]
    assert len(table["rows"]) == 4 * 5
    for row in table["rows"]:
        assert (
            row["status"] == "ok"
            and row["accuracy"] is None
            and row["loss"] > 0
            and row["step"] == 25
        )
        assert row["seed"] == int(row["run"]) % 2
        assert row["trained_under"]["name"] == ("tiled" if row["run"] in "01" else "no_rescale")
        assert row["trained_under"]["options"]["block_kv"] == 4
    assert {"commit", "hardware", "versions"} <= table["environment"].keys()
    assert {row["sequences"] for row in table["rows"]} == {4}


def test_the_losses_are_those_that_training_reported(sweep, table):
    """The same held-out sequences under the run's own attention and under exact attention: the same
    figures, to the last bit.
    """
    for job, own in (("0", "tiled"), ("2", "no_rescale")):
        last = metrics(sweep / job)[-1]
        assert cell(table, job, own, block_kv=4)["loss"] == last["val/loss"]
        assert cell(table, job, "sdpa")["loss"] == last["val/loss_exact"]


def test_the_matrix_exposes_the_defect(table):
    """An exact model is judged alike by all exact attention; the broken one's judges disagree."""
    assert cell(table, "0", "tiled")["loss"] == pytest.approx(
        cell(table, "0", "sdpa")["loss"], abs=1e-5
    )
    losses = [cell(table, "2", "no_rescale", block_kv=size)["loss"] for size in (2, 4, 8)] + [
        cell(table, "2", "sdpa")["loss"]
    ]
    assert max(losses) - min(losses) > 1e-3 and len(set(losses)) == 4


def test_the_heat_map_shows_means_over_seeds_and_frames_the_own_attention(table, sweep):
    (matrix,) = build_matrices(table["rows"])
    assert matrix.metric == "loss" and list(matrix.cells) == [
        "tiled (2 runs)",
        "no_rescale block_kv=4 (2 runs)",
    ]
    assert matrix.judges == [
        "sdpa",
        "tiled",
        "no_rescale block_kv=2",
        "no_rescale block_kv=4",
        "no_rescale block_kv=8",
    ]
    assert [matrix.own[label] for label in matrix.cells] == [{1}, {3}]
    two = [cell(table, job, "no_rescale", block_kv=8)["loss"] for job in "01"]
    found = matrix.cells["tiled (2 runs)"][4]
    assert found.values == two and found.text("{:.3f}").startswith(f"{sum(two) / 2:.3f} ± ")
    assert (sweep / "cross_eval.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("metric", "values", "scale"),
    [("loss", (3.268, 3.286), (3.268, 3.468)), ("accuracy", (1.0, 0.98), (0.9, 1.0))],
)
def test_noise_has_no_colour(metric, values, scale):
    """A regression test: losses of 3.268 and 3.286 had the two ends of the colour scale."""
    cells = {"tiled": [Cell([value], []) for value in values]}
    assert Matrix(metric, ["tiled", "sdpa"], cells, {}).scale == pytest.approx(scale)


def test_what_was_written_is_drawn_again(sweep, table, tmp_path, capsys):
    shutil.copy(sweep / "cross_eval.json", tmp_path / "kept.json")
    cross_eval.main([str(tmp_path / "kept.json")])
    assert (tmp_path / "kept.png").exists() and in_text(table["rows"]) in capsys.readouterr().out
    assert json.loads((tmp_path / "kept.json").read_text()) == table


def test_exact_attention_keeps_documents_apart(tmp_path):
    """sdpa has no mask for them; the loss under exact attention is the one that training
    reported.
    """
    assert (
        run(
            *tiny(
                tmp_path / "run",
                "attention=no_rescale",
                "attention.block_kv=16",
                "data.documents=true",
            )
        ).code
        == 0
    )
    cross_eval.main([str(tmp_path / "run"), "sequences=4", "device=cpu"])
    rows = json.loads((tmp_path / "run/cross_eval.json").read_text())["rows"]
    assert all(row["status"] == "ok" for row in rows)
    (exact,) = (row for row in rows if row["evaluated_under"]["name"] == "tiled")
    assert exact["loss"] == pytest.approx(summary(tmp_path / "run")["val/loss_exact"], abs=1e-5)


def test_judges_of_ones_own(sweep, tmp_path):
    out = tmp_path / "new" / "x.json"
    own = "tests.user_backends:RIGHT"
    judges = ["no_rescale:block_kv=16,block_q=8", "triton", own, "tests.user_backends:RAISES"]
    under = ",".join(judges)
    cross_eval.main([str(sweep / "0"), f"under={under}", "sequences=2", f"out={out}", "device=cpu"])
    first, second, third, fourth = json.loads(out.read_text())["rows"]
    assert (
        first["run"],
        first["evaluated_under"]["options"]["block_kv"],
        first["evaluated_under"]["options"]["block_q"],
    ) == ("0", 16, 8)
    assert second["evaluated_under"]["name"] == "triton" and second["status"].split(":")[0] in (
        "ok",
        "refused",
    )
    assert third["status"] == "ok" and not (sweep / "0/cross_eval.json").exists()
    said = r"refused: KeyError: .* \(.*user_backends.py, line \d+\)"
    assert re.fullmatch(said, fourth["status"])


def test_a_matrix_without_a_figure_replaces_nothing(sweep, table, monkeypatch):
    """A regression test: where no judge could run, a matrix of refusals took the place of a good
    one, with exit code 0.
    """
    before = (sweep / "cross_eval.json").read_bytes()

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("attention=triton needs a GPU")

    monkeypatch.setattr(cross_eval, "evaluate_under", refuse)
    with pytest.raises(SystemExit) as ended:
        cross_eval.main([str(sweep), "under=triton"])
    line = ended.value.code
    assert (
        "nothing could be evaluated, nothing is written: triton refused: ValueError: "
        "attention=triton needs a GPU (" in line
    )
    assert (sweep / "cross_eval.json").read_bytes() == before


def test_a_folder_of_ruins(sweep, tmp_path, capsys):
    """Failed, out of memory, half written, without a checkpoint, with a damaged one: a line each,
    and the rest is judged.
    """
    shutil.copytree(sweep / "0", tmp_path / "good")
    for name, status in (("failed", "failed"), ("oom", "oom")):
        shutil.copytree(sweep / "0", tmp_path / name)
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        summary |= {"status": status, "error": "RuntimeError: no more"}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    shutil.copytree(sweep / "1", tmp_path / "torn")
    (tmp_path / "torn/summary.json").write_text('{"status": "comp')
    shutil.copytree(sweep / "1", tmp_path / "no_checkpoint")
    shutil.rmtree(tmp_path / "no_checkpoint/checkpoint")
    shutil.copytree(sweep / "1", tmp_path / "no_config")
    (tmp_path / "no_config/config.yaml").write_text("attention: [")
    shutil.copytree(sweep / "1", tmp_path / "damaged")
    weights = tmp_path / "damaged/checkpoint/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    (tmp_path / "empty").mkdir()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/config.yaml").write_text("steps: 3")
    cross_eval.main([str(tmp_path), "under=sdpa", "sequences=1"])
    said = capsys.readouterr().err.splitlines()
    for name, reason in {
        "failed": "failed: RuntimeError: no more; only runs that are completed, ",
        "oom": "oom",
        "torn": "unfinished",
        "conf": "no run directory",
        "no_checkpoint": "holds no checkpoint",
        "no_config": "is not the configuration of a run",
        "damaged": "is truncated",
    }.items():
        (line,) = (line for line in said if line.startswith(f"left out: {tmp_path / name}: "))
        assert reason in line
    assert [
        row["run"] for row in json.loads((tmp_path / "cross_eval.json").read_text())["rows"]
    ] == ["good"]


def test_a_diverged_run_is_judged_and_a_judge_that_overflows_is_marked(tmp_path, capsys):
    recipe = ("attention=no_max", "dtype=fp16", "optim.lr=0.05", "optim.warmup_steps=1", "steps=60")
    assert run(*tiny(tmp_path / "run", *recipe)).code == 0
    cross_eval.main([str(tmp_path / "run"), "sequences=4", "device=cpu"])
    rows = json.loads((tmp_path / "run/cross_eval.json").read_text())["rows"]
    status = {row["evaluated_under"]["name"]: row["status"] for row in rows}
    losses = {row["evaluated_under"]["name"]: row["loss"] for row in rows}
    assert (
        status["sdpa"] == "ok"
        and losses["sdpa"] > 0
        and rows[0]["trained"] == "diverged"
        and rows[0]["dtype"] == "float16"
    )
    if status["no_max"] == "non-finite":
        assert losses["no_max"] is None and "non-finite" in capsys.readouterr().out
    assert "ended early: step " in in_text(rows)


def test_a_loss_that_is_not_finite_has_no_figures(monkeypatch, sweep, tmp_path):
    monkeypatch.setattr(cross_eval, "evaluate_under", lambda *_, **__: (float("nan"), 0.25))
    cross_eval.main([str(sweep / "0"), "under=no_max,sdpa", f"out={tmp_path / 'x.json'}"])
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [(row["status"], row["loss"], row["accuracy"]) for row in rows] == [
        ("non-finite", None, None)
    ] * 2


def test_accuracy_and_a_switched_run(tmp_path, capsys):
    switch = (
        "attention=no_rescale",
        "attention.block_kv=4",
        "attention.switch_at=2",
        "attention.switch_to=tiled",
    )
    assert run(*tiny(tmp_path / "run", "data=last_write", *switch)).code == 0
    cross_eval.main([str(tmp_path / "run"), "sequences=4", "device=cpu"])
    rows = json.loads((tmp_path / "run/cross_eval.json").read_text())["rows"]
    last = metrics(tmp_path / "run")[-1]
    by_name = {row["evaluated_under"]["name"]: row for row in rows}
    assert (by_name["tiled"]["loss"], by_name["tiled"]["accuracy"]) == (
        last["val/loss"],
        last["val/accuracy"],
    )
    trained = rows[0]["trained_under"]
    assert (trained["name"], trained["switch_at"], trained["switch_to"]["name"]) == (
        "no_rescale",
        2,
        "tiled",
    )
    (matrix,) = build_matrices(rows)
    assert matrix.metric == "accuracy" and matrix.judges[0] == "sdpa"
    (label,) = matrix.cells
    assert label == "no_rescale block_kv=4, from step 2 tiled (1 run)" and matrix.own[label] == {
        matrix.judges.index("tiled")
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["{empty}"], "no runs below|no run with a checkpoint below"),
        (["{file}"], "is no cross_eval.json with rows in it"),
        (["{run}", "under=flashy"], "under=flashy: attention=flashy is not known; valid: "),
        (
            ["{run}", "under=no_rescale:block_kv"],
            "under=no_rescale:block_kv: 'block_kv' is not option=value",
        ),
        (
            ["{run}", "under=tiled:tile=3"],
            "under=tiled:tile=3: attention=tiled has no option 'tile'",
        ),
        (["{run}", "sequences=0"], "sequences=0 must be at least 1"),
    ],
    ids=["missing", "empty", "other-file", "judge", "option", "unknown-option", "sequences"],
)
def test_complaints(sweep, tmp_path, arguments, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text('{"rows": []}')
    names = {
        "{empty}": str(tmp_path / "empty"),
        "{file}": str(tmp_path / "other.json"),
        "{run}": str(sweep / "0"),
    }
    with pytest.raises(SystemExit) as ended:
        cross_eval.main([names.get(argument, argument) for argument in arguments])
    line = ended.value.code
    assert line.startswith("cross_eval: ") and "\n" not in line
    assert re.search(said, line) or said in line


def test_command_in_the_help_runs_as_typed(sweep, tmp_path):
    shutil.copytree(sweep, tmp_path / "multirun/day/time")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

    def command(line: str) -> subprocess.CompletedProcess:
        python, *arguments = shlex.split(line)
        return processes.run(*arguments, cwd=tmp_path, env=variables(PYTHONPATH=path))

    shown = command("python -m scripts.cross_eval --help").stdout
    line = re.search(r"^    (python -m scripts\.cross_eval .*)$", shown, re.MULTILINE)[1]
    line = line.replace("2026-01-31_12-00-00", "day/time")
    done = command(f"{line} sequences=1 under=sdpa,no_rescale:block_kv=16")
    assert done.returncode == 0 and "no_rescale block_kv=16" in done.stdout, done.stderr
    assert (tmp_path / "multirun/day/time/cross_eval.json").exists()
