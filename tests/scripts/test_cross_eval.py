"""`python -m scripts.cross_eval`: which runs it takes, whom it lets judge, what it writes, and one
line for what is wrong.
"""

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


@pytest.fixture(scope="module")
def table(sweep) -> dict:
    cross_eval.main([str(sweep), "device=cpu"])  # 4 sequences, as the runs evaluate on
    return json.loads((sweep / "cross_eval.json").read_text())


def cell(table: dict, run: str, name: str, **options) -> dict:
    """The row of a run under a judge with these options."""
    found = []
    for row in table["rows"]:
        judge = row["evaluated_under"]
        if (row["run"], judge["name"]) == (run, name):
            found += [row] if options.items() <= judge["options"].items() else []
    (row,) = found
    return row


def judged(folder: Path, *arguments: str) -> list[dict]:
    """The rows of cross_eval on that folder."""
    cross_eval.main([str(folder), *arguments, "device=cpu"])
    return json.loads((folder / "cross_eval.json").read_text())["rows"]


def test_every_run_under_every_judge(table):
    assert [row["run"] for row in table["rows"]] == [job for job in "0123" for _ in range(5)]
    for row in table["rows"]:
        assert row["status"] == "ok" and row["accuracy"] is None and row["loss"] > 0
        assert row["step"] == 25 and row["sequences"] == 4
        assert row["seed"] == int(row["run"]) % 2
        assert row["trained_under"]["name"] == ("tiled" if row["run"] in "01" else "no_rescale")
        assert row["trained_under"]["options"]["block_kv"] == 4
    assert {"commit", "hardware", "versions"} <= table["environment"].keys()


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
    exact = cell(table, "0", "sdpa")["loss"]
    assert cell(table, "0", "tiled")["loss"] == pytest.approx(exact, abs=1e-5)
    losses = {cell(table, "2", "no_rescale", block_kv=size)["loss"] for size in (2, 4, 8)}
    losses.add(cell(table, "2", "sdpa")["loss"])
    assert len(losses) == 4 and max(losses) - min(losses) > 1e-3


def test_the_matrix_shows_means_over_seeds_and_marks_the_own_attention(table):
    head, _, exact, broken, *_ = in_text(table["rows"]).splitlines()
    columns = re.split("  +", head)
    judges = ["sdpa", "tiled block_kv=4", *(f"no_rescale block_kv={size}" for size in (2, 4, 8))]
    assert "loss" in columns[0] and columns[1:] == judges
    exact, broken = re.split("  +", exact), re.split("  +", broken)
    assert [exact[0], broken[0]] == ["tiled block_kv=4 (2 runs)", "no_rescale block_kv=4 (2 runs)"]
    marked = [[text.startswith("*") for text in line[1:]] for line in (exact, broken)]
    assert marked == [[False, True, False, False, False], [False, False, False, True, False]]
    two = [cell(table, job, "no_rescale", block_kv=8)["loss"] for job in "01"]
    assert exact[5].startswith(f"{sum(two) / 2:.3f} ± ")


def test_a_file_is_shown_again(sweep, table, tmp_path, capsys):
    """Also names with markup, with 120 characters, and with control characters."""
    rows = [
        row | {"variant": row["variant"].replace("tiled", "<b>\x1b" * 40)} for row in table["rows"]
    ]
    (tmp_path / "kept.json").write_text(json.dumps({"rows": rows}))
    cross_eval.main([str(tmp_path / "kept.json")])
    assert in_text(rows).replace("\x1b", r"\x1b") in capsys.readouterr().out


def test_exact_attention_keeps_documents_apart(tmp_path):
    """sdpa has no mask for them; the loss under exact attention is the one that training
    reported.
    """
    settings = ("attention=no_rescale", "attention.block_kv=16", "data.documents=true")
    assert run(*tiny(tmp_path / "run", *settings)).code == 0
    rows = judged(tmp_path / "run", "sequences=4")
    assert all(row["status"] == "ok" for row in rows)
    (exact,) = (row for row in rows if row["evaluated_under"]["name"] == "tiled")
    assert exact["loss"] == pytest.approx(summary(tmp_path / "run")["val/loss_exact"], abs=1e-5)


def test_judges_of_ones_own(sweep, tmp_path):
    out = tmp_path / "new" / "x.json"
    own = [f"tests.user_backends:{name}" for name in ("RIGHT", "NAN", "RAISES")]
    under = ",".join(["no_rescale:block_kv=16,block_q=8", *own])
    cross_eval.main([str(sweep / "0"), f"under={under}", "sequences=2", f"out={out}", "device=cpu"])
    tiles, right, nan, raises = json.loads(out.read_text())["rows"]
    options = tiles["evaluated_under"]["options"]
    assert (tiles["run"], options["block_kv"], options["block_q"]) == ("0", 16, 8)
    assert right["status"] == "ok" and not (sweep / "0/cross_eval.json").exists()
    # a loss that is not finite has no figures
    assert (nan["status"], nan["loss"], nan["accuracy"]) == ("non-finite", None, None)
    assert re.match(r"refused: KeyError: .*user_backends\.py", raises["status"])


def test_a_matrix_without_a_figure_replaces_nothing(sweep, table):
    """A regression test: where no judge could run, a matrix of refusals took the place of a good
    one, with exit code 0.
    """
    before = (sweep / "cross_eval.json").read_bytes()
    with pytest.raises(SystemExit, match="^cross_eval: .*RAISES.*KeyError"):
        cross_eval.main([str(sweep), "under=tests.user_backends:RAISES", "device=cpu"])
    assert (sweep / "cross_eval.json").read_bytes() == before


def test_weights_are_named_by_their_own_checkpoint(sweep, tmp_path):
    """A regression test: weights of no_rescale, copied into another run, were called tiled."""
    folder = shutil.copytree(sweep / "0", tmp_path / "run")
    shutil.rmtree(folder / "checkpoint")
    shutil.copytree(sweep / "2/checkpoint", folder / "checkpoint")
    (row,) = judged(tmp_path, "under=sdpa", "sequences=1")
    assert row["trained_under"]["name"] == "no_rescale"
    assert row["variant"].split()[0] == "no_rescale"


def test_a_folder_of_ruins(sweep, tmp_path, capsys):
    """Failed, out of memory, half written, without a checkpoint, with a damaged one: a line each,
    and the rest is judged.
    """
    left_out = {
        "failed": "no more",
        "oom": "oom",
        "torn": "unfinished",
        "no_checkpoint": "checkpoint",
        "damaged": "model.safetensors",
    }
    for name in (*left_out, "good", "bomb"):
        shutil.copytree(sweep / "1", tmp_path / name)
    for status in ("failed", "oom"):
        path = tmp_path / status / "summary.json"
        ended = {"status": status, "error": "RuntimeError: no more"}
        path.write_text(json.dumps(json.loads(path.read_text()) | ended))
    (tmp_path / "torn/summary.json").write_text('{"status": "comp')
    shutil.rmtree(tmp_path / "no_checkpoint/checkpoint")
    weights = tmp_path / "damaged/checkpoint/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    # the settings are in the checkpoint
    (tmp_path / "bomb/config.yaml").write_text("attention: " + "[" * 10_000)
    (tmp_path / "empty").mkdir()
    rows = judged(tmp_path, "under=sdpa", "sequences=1")
    said = capsys.readouterr().err.splitlines()
    for name, reason in left_out.items():
        (line,) = (line for line in said if line.startswith(f"left out: {tmp_path / name}: "))
        assert reason in line
    assert sorted(row["run"] for row in rows) == ["bomb", "good"]


def test_a_diverged_run_is_judged(tmp_path):
    recipe = ("attention=no_max", "dtype=fp16", "optim.lr=0.05", "optim.warmup_steps=1", "steps=60")
    assert run(*tiny(tmp_path / "run", *recipe)).code == 0
    rows = judged(tmp_path / "run", "sequences=4", "under=sdpa")
    (row,) = rows
    assert row["status"] == "ok" and row["loss"] > 0
    assert row["trained"] == "diverged" and row["dtype"] == "float16"
    assert f"step {row['step']}" in in_text(rows)


def test_accuracy_and_a_switched_run(tmp_path):
    name = "attention"
    chosen = (f"{name}=no_rescale", f"{name}.block_kv=4")
    switch = (f"{name}.switch_at=2", f"{name}.switch_to=tiled")
    assert run(*tiny(tmp_path / "run", "data=last_write", *chosen, *switch)).code == 0
    rows = judged(tmp_path / "run", "sequences=4")
    last = metrics(tmp_path / "run")[-1]
    tiled = next(row for row in rows if row["evaluated_under"]["name"] == "tiled")
    assert (tiled["loss"], tiled["accuracy"]) == (last["val/loss"], last["val/accuracy"])
    trained = rows[0]["trained_under"]
    assert (trained["name"], trained["switch_at"]) == ("no_rescale", 2)
    assert trained["switch_to"]["name"] == "tiled"
    head, _, line, *_ = in_text(rows).splitlines()
    assert "accuracy" in head and "sdpa" in head and "tiled after step 2" in line
    assert re.findall(r"\*[\d.]+%", line) == [f"*{last['val/accuracy']:.1%}"]


# arguments, and what the refusal names
REFUSED = {
    "{tmp}/nowhere": "nowhere",
    "{tmp}/empty": "empty",
    "{tmp}/other.json": "other.json",
    "{tmp}/deep.json": "deep.json",
    "{run} under=flashy": "under=flashy",
    "{run} under=tiled:tile=3": "under=tiled:tile=3",
}


@pytest.mark.parametrize(("arguments", "named"), REFUSED.items(), ids=REFUSED)
def test_refused_in_one_line(sweep, tmp_path, arguments, named):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text('{"rows": []}')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(SystemExit) as ended:
        cross_eval.main(arguments.format(tmp=tmp_path, run=sweep / "0").split())
    line = ended.value.code
    assert line.startswith("cross_eval: ") and "\n" not in line and named in line
