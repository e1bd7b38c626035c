"""Several runs from one command: plan, table, exit code, and no job harms another."""

import importlib.util
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import yaml

from tests import processes
from tests.command import (
    ROOT,
    TINY,
    computed,
    contents,
    environment,
    finish,
    index,
    metrics,
    run,
    send_at_step,
    start,
    summary,
    tiny,
    tiny_sweep,
)

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed"
)
linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only there does a process have a limit of memory"
)

# the scores grow past what float16 holds
DIVERGES = ("attention=no_max", "dtype=fp16", "optim.lr=0.05", "optim.warmup_steps=1", "steps=40")

OWN = "tests.user_backends:RIGHT"


@pytest.fixture(scope="session")
def sweep(tmp_path_factory):
    """Four jobs: two attentions, two seeds."""
    folder = tmp_path_factory.mktemp("sweep")
    return folder, run(*tiny_sweep(folder, "attention=no_rescale,tiled", "seed=0,1"))


def table(output: str) -> list[list[str]]:
    """The cells of the last table, header first."""
    lines = output.splitlines()
    (rule,) = (number for number, line in enumerate(lines) if line and set(line) == {"-"})
    rows = [lines[rule - 1], *lines[rule + 1 :]]
    end = next(number for number, line in enumerate(rows) if line.startswith("/"))
    return [line.split() for line in rows[:end]]


def test_every_job_is_in_the_table(sweep):
    folder, done = sweep
    assert done.code == 0 and "Traceback" not in done.output, done.output
    jobs = [(name, seed) for name in ("no_rescale", "tiled") for seed in (0, 1)]
    rows = index(folder)
    assert [(row["job"], row["attention"], row["seed"]) for row in rows] == [
        (number, *job) for number, job in enumerate(jobs)
    ]
    header, *lines = table(done.output)
    assert header[:5] == ["variant", "seed", "status", "val/loss", "val/loss_exact"]
    assert [line[:3] for line in lines] == [[name, str(seed), "completed"] for name, seed in jobs]
    for line, row in zip(lines, rows, strict=True):
        assert line[3:5] == [f"{row['val/loss']:.4f}", f"{row['val/loss_exact']:.4f}"]
    assert (folder / "table.txt").read_text() in done.output


def test_a_job_of_a_sweep_is_the_run_it_would_be_alone(sweep, tmp_path):
    assert run(*tiny(tmp_path / "alone", "attention=tiled", "seed=1")).code == 0
    assert computed(sweep[0] / "3") == computed(tmp_path / "alone")


def test_a_sweep_keeps_no_file_open_for_each_job(tmp_path):
    """A regression test: a sweep of 1,000 jobs ended at the limit of open files."""
    assert run(*tiny_sweep(tmp_path / "first", "seed=0", "steps=1", "eval_every=0")).code == 0
    before = len(os.listdir("/proc/self/fd"))
    done = run(*tiny_sweep(tmp_path / "second", "seed=range(4)", "steps=1", "eval_every=0"))
    assert done.code == 0 and len(os.listdir("/proc/self/fd")) <= before + 1, done.output


def test_a_failed_job_costs_the_exit_code_and_a_diverged_one_nothing(tmp_path):
    (tmp_path / "book.txt").write_text("words " * 1000)
    books = f"data.path={tmp_path}/no_such.txt,{tmp_path}/book.txt"
    done = run(*tiny_sweep(tmp_path / "sweep", *DIVERGES, "data=text", books, "log_every=10"))
    assert done.code == 1 and "Traceback" not in done.output
    failed, diverged = index(tmp_path / "sweep")
    assert (failed["status"], diverged["status"]) == ("failed", "diverged")
    assert f"data.path={tmp_path}/no_such.txt" in failed["error"]
    assert failed["error"] in done.output and diverged["diagnosis"]["message"] in done.output


def test_an_option_that_one_attention_lacks_is_left_out_of_it(tmp_path):
    """Jobs that are the same without it are one, and one line says what is left out."""
    swept = (f"attention=naive,tiled,{OWN}", "attention.block_kv=16,8", "steps=1")
    done = run(*tiny_sweep(tmp_path, *swept))
    assert done.code == 0 and "Traceback" not in done.output, done.output
    rows = index(tmp_path)
    variants = ["naive", "tiled block_kv=16", "tiled block_kv=8", OWN]
    assert [row["variant"] for row in rows] == variants
    assert {row["status"] for row in rows} == {"completed"}
    assert [x for x in rows[0]["overrides"] if "block_kv" in x] == []
    lines = [line for line in done.output.splitlines() if line.startswith("without ")]
    assert len(lines) == 2 and all("attention.block_kv" in line for line in lines)
    assert "attention=naive" in lines[0] and OWN in lines[1]


REFUSED = {
    "option-of-none": ("attention=naive,sdpa attention.block_kv=16", "attention.block_kv=16"),
    "window": ("attention=naive,sdpa attention.window=5", "attention.window=5.*sdpa"),
    "value": ("attention.block_kv=16,0", "attention.block_kv=0 "),
    "own": ("attention=tiled,no.such:X", "attention=no.such:X"),
    "probe": ("attention=tiled,tests.user_backends:WRONG", "user_backends:WRONG says exact=True"),
    "interval": ("optim.lr=interval(0,1)", r"optim.lr=interval\(0,1\)"),
    # a regression test: an empty table, and exit code 0
    "no-value": ("seed=range(5,1)", r"seed=range\(5,1\)"),
    "data": ("data=stdlib,torch_source data.path=books", "data.path=books"),
    "long-name": ("seed=0,1 hydra.sweep.subdir=" + "a" * 300 + "${seed}", "subdir=aaa.*255"),
    "one-folder": ("hydra.sweep.subdir=x seed=0,1", "hydra.sweep.subdir=x"),
    "variant": ("hydra.sweeper.variants={window:5}", "variants=.*window.: 5"),
    "variant-key": ("hydra.sweeper.variants={a:{attention.windo:5}}", "attention.windo"),
}


@pytest.mark.parametrize("overrides, said", REFUSED.values(), ids=REFUSED)
def test_a_job_that_cannot_run_is_known_before_any_has_begun(tmp_path, overrides, said):
    done = run(*tiny_sweep(tmp_path / "sweep", *overrides.split()))
    assert done.code == 1 and re.search(said, done.complaint()), done.output
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("subdir", ["../others", "${oc.env:PLACE}/others"])
def test_no_sweeper_writes_outside_its_folder(tmp_path, subdir):
    """A regression test: Hydra's own sweeper removed the checkpoint/ of another program."""
    kept = tmp_path / "others/checkpoint/weights.pt"
    kept.parent.mkdir(parents=True)
    kept.write_text("weights")
    swept = ("hydra/sweeper=basic", "seed=0", "steps=1", f"hydra.sweep.subdir={subdir}")
    done = run(*tiny_sweep(tmp_path / "sweep", *swept), PLACE="..")
    assert "hydra.sweep.subdir=../others" in done.complaint()
    assert kept.read_text() == "weights"


def test_a_sweep_goes_on_in_the_folders_of_its_own_jobs_only(tmp_path):
    """A regression test: a folder beside the jobs was removed if a later subdir named it."""
    swept = ("seed=0", "steps=1", "eval_every=0")
    assert run(*tiny_sweep(tmp_path, *swept)).code == 0
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/today.txt").write_text("words")
    done = run(*tiny_sweep(tmp_path, *swept, "hydra.sweep.subdir=notes"))
    assert "holds" in done.complaint()
    assert (tmp_path / "notes/today.txt").read_text() == "words"


def test_settings_of_a_group_and_of_a_recipe_are_left_out_too(tmp_path):
    """A regression test: attention=naive failed on the tiles that experiment=break_it sets."""
    swept = ("attention=naive", "seed=0", "steps=1", "optim=adamw,muon")
    done = run("experiment=break_it", *tiny_sweep(tmp_path, *swept)[1:])
    assert done.code == 0, done.output
    assert [row["status"] for row in index(tmp_path)] == ["completed", "completed"]


def test_variants_differ_in_settings_of_their_own(tmp_path):
    """Each is combined with the other settings; of two that are the same, one runs."""
    variants = "{exact:{},window:{attention.window:8},other:{attention:naive},left_out:null}"
    swept = ("attention=tiled,naive", "steps=1", "eval_every=0")
    done = run(*tiny_sweep(tmp_path, *swept, f"hydra.sweeper.variants={variants}"))
    assert done.code == 0, done.output
    found = [row["variant"] for row in index(tmp_path)]
    assert found == ["tiled", "tiled window=8", "naive", "naive window=8"]


def test_a_variant_of_a_recipe_can_be_changed_and_left_out(tmp_path):
    """As docs/guide.md shows."""
    recipe = yaml.safe_load((ROOT / "conf/experiment/attentions.yaml").read_text())
    names = recipe["hydra"]["sweeper"]["variants"].keys() - {"window", "exact"}
    kept = [f"hydra.sweeper.variants.{name}=null" for name in names]
    window = "hydra.sweeper.variants.window={attention.window:8}"
    short = ("seed=0", "steps=1", "eval_every=0", "logger=none")
    asked = ("experiment=attentions", *short, window, *kept, f"hydra.sweep.dir={tmp_path}")
    assert run(*asked).code == 0
    variants = [row["variant"] for row in index(tmp_path)]
    assert variants == ["tiled block_kv=16", "tiled block_kv=16 window=8"]


def test_the_same_command_goes_on_after_ctrl_c(tmp_path, monkeypatch):
    """What is completed is left alone. Processes of a sweep get theirs in test_gpus."""
    swept = ("seed=0,1,2", "steps=12", "hydra.sweep.subdir=at/${seed}")
    asked = tiny_sweep(tmp_path / "sweep", *swept)
    with monkeypatch.context() as interrupted:
        send_at_step(interrupted, 6, signal.SIGINT, run_dir=tmp_path / "sweep/at/1")
        done = run(*asked)
    assert done.code == 130 and "Traceback" not in done.output, done.output
    statuses = [row["status"] for row in index(tmp_path / "sweep")]
    assert statuses == ["completed", "interrupted", "not started"]
    assert "go on: python train.py -m" in done.output
    before = contents(tmp_path / "sweep/at/0")
    done = run(*asked)
    assert done.code == 0 and "2 of 3 jobs" in done.output, done.output
    assert contents(tmp_path / "sweep/at/0") == before
    assert [row["status"] for row in index(tmp_path / "sweep")] == ["completed"] * 3
    assert len(summary(tmp_path / "sweep/at/1")["starts"]) == 2
    assert run(*tiny(tmp_path / "alone", "steps=12", "seed=1")).code == 0
    assert computed(tmp_path / "sweep/at/1") == computed(tmp_path / "alone")
    again = run(*asked)
    assert again.code == 0 and "0 of 3 jobs" in again.output
    # other jobs are another sweep
    other = run(*tiny_sweep(tmp_path / "sweep", *swept, "seed=0,1"))
    assert "holds" in other.complaint()


# seq_len=200000 asks for one matrix of scores: heads * N * N * 4 bytes
WALL = ("experiment=memory_wall", "attention=naive", "model.hidden_size=128", "model.num_heads=8")
WALL += ("batch_size=1", "eval_sequences=1", "steps=2", "seq_len=32,200000,48")


@linux
def test_out_of_memory_is_a_result_and_leaves_nothing_behind(tmp_path):
    """A failed job's exception would keep its frames alive, and they its tensors."""
    done = run(*tiny_sweep(tmp_path, *WALL)[1:])  # the recipe is a sweep
    assert done.code == 0 and "Traceback" not in done.output, done.output
    before, failed, after = index(tmp_path)
    assert [row["status"] for row in (before, failed, after)] == ["completed", "oom", "completed"]
    assert failed["oom"]["asked_gib"] == pytest.approx(8 * 200_000**2 * 4 / 1024**3, rel=0.01)
    assert "memory/peak_gib" not in failed  # no step was done, so none was measured
    # when it failed, the job held 0.1 GiB each of position embeddings, residual stream, q, k and v
    assert after["memory/process_gib"] - before["memory/process_gib"] < 0.1


def test_shell_completion():
    """A regression test: the completion's arguments were taken for settings."""
    done = run("-sc", "install=bash")
    assert done.code == 0 and "hydra_bash_completion" in done.output
    line = "python train.py attention=no_"
    told = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_CWORD": "2"}
    found = processes.run("train.py", "-sc", "query=bash", env=environment(**told)).stdout
    assert found.split() == ["attention=no_max", "attention=no_rescale", "attention=no_scale"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_jobs_in_processes_of_their_own(tmp_path, launcher):
    """A regression test: the callback could not be pickled."""
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    swept = (f"attention=naive,{OWN}", "steps=1", f"hydra/launcher={launcher}")
    done = finish(start(*tiny_sweep(tmp_path, *swept)))
    assert done.code == 0 and "Traceback" not in done.output, done.output
    assert [(row["job"], row["attention"], row["status"]) for row in index(tmp_path)] == [
        (0, "naive", "completed"),
        (1, OWN, "completed"),
    ]
    assert [line[0] for line in table(done.output)[1:3]] == ["naive", OWN]


@pytest.mark.slow
def test_another_sweeper_minimises_val_loss(tmp_path):
    """A regression test: main returned a dictionary, which Optuna cannot compare."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    trials = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1")
    swept = ("attention=choice(naive,tiled)", "optim.lr=choice(1e-2,1e-5)", "steps=8")
    done = finish(start(*tiny_sweep(tmp_path, *swept, *trials)))
    assert done.code == 0 and "Traceback" not in done.output, done.output
    rows = index(tmp_path)
    assert [row["status"] for row in rows] == ["completed"] * 3
    assert f"Best value: {min(row['val/loss'] for row in rows)}" in done.output


@needs_wandb
@pytest.mark.slow
def test_wandb_names_and_shows_what_a_sweep_compares(tmp_path):
    """Two variants, and one that diverges.

    A regression test: every override was in the names, and sweeps of two days were one group.
    """
    sweep = tmp_path / "2026-11-22/21-09-10"
    jobs = ("attention=naive,tiled", "optim.lr=0.01,1e18", "seed=0", "optim.warmup_steps=0")
    asked = tiny_sweep(sweep, *jobs, "logger=wandb", "sample_tokens=8", "eval_every=2")
    done = finish(start("experiment=break_it", *asked[1:], WANDB_MODE="offline"))
    assert done.code == 0 and "Traceback" not in done.output, done.output
    assert [row["status"] for row in index(sweep)] == ["completed", "diverged"] * 2
    naive, naive_diverged, tiled, _ = (records_of(offline_log(sweep / job)) for job in "0123")

    tiles = "tiled block_q=256 block_kv=16"
    variants = ["naive lr=0.01", "naive lr=1e+18", f"{tiles} lr=0.01"]
    for records, variant in zip((naive, naive_diverged, tiled), variants, strict=True):
        run, config = started(records)
        assert run["display_name"] == variant == config["variant"]
        assert run["run_group"] == "2026-11-22_21-09-10 break_it"
        assert config["curve"] == f"{variant} seq_len=32"
    assert set(variants) <= {line.split("  ")[0] for line in done.output.splitlines()}

    result = json.loads(inspect(offline_log(sweep / "2"), "--summary"))
    losses = [row["val/loss"] for row in metrics(sweep / "2") if "val/loss" in row]
    assert result["summary"]["val/loss"] == {"min": min(losses), "last": losses[-1]}
    assert (result["state"], result["summary"]["status"]) == ("finished", "completed")
    # the figures of the sweep's table, and not those of the last row
    for key in ("tokens_per_sec", "step_tokens_per_sec", "memory/peak_gib"):
        assert result["summary"].get(key) == summary(sweep / "2").get(key)
    assert summary(sweep / "2")["tokens_per_sec"] != metrics(sweep / "2")[-1]["tokens_per_sec"]

    diverged = json.loads(inspect(offline_log(sweep / "3"), "--summary"))
    assert (diverged["state"], diverged["summary"]["status"]) == ("failed", "diverged")
    assert "diverged" in diverged["tags"]


def offline_log(run_dir: Path) -> Path:
    run_id = (run_dir / "wandb_id.txt").read_text().strip()
    return max(run_dir.parent.glob(f"wandb/offline-run-*-{run_id}"))


def inspect(log: Path, *options: str) -> str:
    """What wandb's own tool tells."""
    command = ("-m", "wandb", "leet", "inspect", *options, "--json", str(log))
    return processes.run(*command, env=environment(), check=True).stdout


def records_of(log: Path) -> list[dict]:
    return [json.loads(line) for line in inspect(log).splitlines()]


def started(records: list[dict]) -> tuple[dict, dict]:
    """The record with which a run began, and its config."""
    run = next(each["run"] for each in records if each["type"] == "run")
    return run, run["config"]["update"]


@pytest.mark.slow
@needs_wandb
def test_what_an_agent_of_wandb_runs(tmp_path):
    """The command that `wandb agent` makes of sweep.yaml, in the environment that it sets.

    attention=naive comes with the option block_kv, which it lacks: an agent cannot know.
    """
    sweep = yaml.safe_load((ROOT / "sweep.yaml").read_text())
    chosen = {"attention": "naive", "attention.block_kv": 16, "seed": 2}
    assert chosen.keys() == sweep["parameters"].keys()
    *macros, folder = sweep["command"]
    assert macros == ["${env}", "${interpreter}", "${program}", "${args_no_hyphens}"]
    settings = (f"{key}={value}" for key, value in chosen.items())
    small = [each for each in TINY if not each.startswith("logger=")]
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({key: {"value": value} for key, value in chosen.items()})
    )
    agent = {
        "WANDB_SWEEP_ID": "abc123",
        "WANDB_RUN_ID": "run45678",
        "WANDB_SWEEP_PARAM_PATH": str(tmp_path / "config.yaml"),
        "WANDB_MODE": "offline",
    }
    command = (str(ROOT / sweep["program"]), *settings, folder, *small)
    processes.run(*command, cwd=tmp_path, env=environment(**agent), check=True)
    run_dir = tmp_path / "multirun/abc123/run45678"
    assert summary(run_dir)["seed"] == 2
    (log,) = (run_dir / "wandb").glob("offline-run-*-run45678")
    run, config = started(records_of(log))
    assert (run["run_id"], run["sweep_id"], config["variant"]) == ("run45678", "abc123", "naive")
