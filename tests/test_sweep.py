"""Several runs from one command: plan, table, exit code, and no job harms another."""

import gc
import importlib.util
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensor

from tests import processes
from tests.command import (
    ROOT,
    TINY,
    at_step,
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
from training.launch.sweep import exit_code, finish_sweep
from training.record.loggers import LOGGERS, LoggedRun, Logger

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed"
)
linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only there does a process have a limit of memory"
)

# the scores grow past what float16 holds
DIVERGES = ("attention=no_max", "dtype=fp16", "optim.lr=0.05", "optim.warmup_steps=1", "steps=40")
QUICK = ("steps=1", "eval_every=0")

OWN = "tests.user_backends:RIGHT"
RECIPE = yaml.safe_load((ROOT / "conf/experiment/attentions.yaml").read_text())
TILES = "tiled block_q=256 block_kv=16"  # of experiment=break_it
OTHERS = RECIPE["hydra"]["sweeper"]["variants"].keys() - {"window", "exact"}


def open_below(folder: Path) -> list[str]:
    """The files of this folder that this process has open."""
    files = []
    for each in Path("/proc/self/fd").iterdir():
        if each.is_symlink() and str(folder) in (file := os.readlink(each)):
            files.append(file)
    return files


@linux
def test_every_job_is_in_the_plan_and_in_the_table(tmp_path):
    """A regression test: a sweep of 1,000 jobs ended at the limit of open files."""
    done = run(*tiny_sweep(tmp_path, "attention=no_rescale,tiled", "seed=0,1", "steps=2"))
    assert done.code == 0 and "Traceback" not in done.output, done.output
    rows = index(tmp_path)
    jobs = [("no_rescale", 0), ("no_rescale", 1), ("tiled", 0), ("tiled", 1)]
    assert [(row["attention"], row["seed"]) for row in rows] == jobs
    assert [row["job"] for row in rows] == [0, 1, 2, 3]
    table = (tmp_path / "table.txt").read_text()
    assert table in done.output
    for line, row in zip(table.splitlines()[2:], rows, strict=True):
        assert line.split()[:2] == [row["attention"], str(row["seed"])]
        assert f" completed {row['val/loss']:.4f}" in " ".join(line.split())
    assert len(open_below(tmp_path)) <= 1  # the log of the last job


def test_a_failed_job_costs_the_exit_code_and_a_diverged_one_nothing(tmp_path):
    (tmp_path / "book.txt").write_text("words " * 1000)
    books = f"data.path={tmp_path}/no_such.txt,{tmp_path}/book.txt"
    done = run(*tiny_sweep(tmp_path / "sweep", *DIVERGES, "data=text", books, "log_every=10"))
    assert done.code == 1 and "Traceback" not in done.output
    failed, diverged = index(tmp_path / "sweep")
    assert (failed["status"], diverged["status"]) == ("failed", "diverged")
    assert f"data.path={tmp_path}/no_such.txt" in failed["error"]
    assert failed["error"] in done.output and diverged["diagnosis"]["message"] in done.output


@pytest.mark.parametrize(
    "code, statuses",
    [
        (0, ["completed", "oom", "diverged"]),
        (1, ["interrupted", "failed"]),
        (1, ["completed", "unfinished"]),
        (130, ["completed", "interrupted"]),
    ],
)
def test_exit_code(code, statuses):
    assert exit_code([{"status": status} for status in statuses]) == code


def test_a_sweep_names_its_own_logdir_for_tensorboard(tmp_path, capsys):
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "0").mkdir()
    (tmp_path / "0/summary.json").write_text('{"status": "completed", "attention": "tiled"}')
    with pytest.raises(SystemExit):
        finish_sweep(tmp_path)
    assert f"tensorboard --logdir {tmp_path}/tensorboard\n" in capsys.readouterr().out


# what is typed, the variants that run, and the settings that are left out of some of them
PLANNED = {
    # jobs that are the same without it are one
    "option-of-some": (
        f"attention=naive,tiled,{OWN} attention.block_kv=16,8",
        ["naive", "tiled block_kv=16", "tiled block_kv=8", OWN],
        {"attention.block_kv"},
    ),
    # a regression test: attention=naive failed on the tiles that the recipe sets
    "recipe": (
        "experiment=break_it attention=naive seed=0 optim=adamw,muon",
        ["naive optim=adamw", "naive optim=muon"],
        {"attention.block_q", "attention.block_kv"},
    ),
    "switch-of-some": (
        "steps=2 attention.switch_at=null,1 attention.switch_to=naive",
        ["tiled", "tiled, naive after step 1"],
        {"attention.switch_to"},
    ),
    # each is combined with the other settings; of two that are the same, one runs
    "variants": (
        "attention=tiled,naive hydra.sweeper.variants="
        "{exact:{},window:{attention.window:8},other:{attention:naive},left_out:null}",
        ["tiled", "tiled window=8", "naive", "naive window=8"],
        set(),
    ),
    # as docs/guide.md shows
    "variants-of-a-recipe": (
        "experiment=attentions seed=0 hydra.sweeper.variants.window={attention.window:8} "
        + " ".join(f"hydra.sweeper.variants.{name}=null" for name in OTHERS),
        ["tiled block_kv=16", "tiled block_kv=16 window=8"],
        set(),
    ),
}


@pytest.mark.parametrize("typed, variants, left_out", PLANNED.values(), ids=PLANNED)
def test_which_jobs_a_sweep_has(tmp_path, typed, variants, left_out):
    done = run(*tiny_sweep(tmp_path, *QUICK, *typed.split()))
    assert done.code == 0 and "Traceback" not in done.output, done.output
    rows = index(tmp_path)
    assert [row["variant"] for row in rows] == variants
    assert {row["status"] for row in rows} == {"completed"}
    assert set(re.findall(r"^without (\S+):", done.output, re.MULTILINE)) == left_out


REFUSED = {
    "option-of-none": ("attention=naive,sdpa attention.block_kv=16", "attention.block_kv=16"),
    "window": ("attention=naive,sdpa attention.window=5", "attention.window=5.*sdpa"),
    "value": ("attention.block_kv=16,0", "attention.block_kv=0 "),
    "probe": ("attention=tiled,tests.user_backends:WRONG", "user_backends:WRONG says exact=True"),
    "interval": ("optim.lr=interval(0,1)", r"optim.lr=interval\(0,1\)"),
    # a regression test: an empty table, and exit code 0
    "no-value": ("seed=range(5,1)", r"seed=range\(5,1\)"),
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
    # a sweep of other jobs, or of the same ones in other folders, would remove files of the user's
    for other in ("seed=0,1", "hydra.sweep.subdir=notes/${seed}"):
        refused = run(*tiny_sweep(tmp_path / "sweep", *swept, other))
        assert "holds" in refused.complaint()


# seq_len=200000 asks for one matrix of scores: heads * N * N * 4 bytes
WALL = ("experiment=memory_wall", "attention=naive", "model.hidden_size=128", "model.num_heads=8")
WALL += ("batch_size=1", "eval_sequences=1", "steps=2", "seq_len=32,200000,48")


def largest_tensor() -> int:
    """The bytes of the largest one that is alive. The tests of scripts.plan leave fake ones."""
    alive = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return max(each.nbytes for each in alive if not isinstance(each, FakeTensor))


@linux
def test_out_of_memory_is_a_result_and_leaves_nothing_behind(tmp_path, monkeypatch):
    """A failed job's exception would keep its frames alive, and they its tensors."""
    sizes = []
    at_step(monkeypatch, 1, lambda: sizes.append(largest_tensor()), run_dir=tmp_path / "2")
    done = run(*tiny_sweep(tmp_path, *WALL)[1:])  # the recipe is a sweep
    assert done.code == 0 and "Traceback" not in done.output, done.output
    rows = index(tmp_path)
    assert [row["status"] for row in rows] == ["completed", "oom", "completed"]
    failed = rows[1]
    assert failed["oom"]["asked_gib"] == pytest.approx(8 * 200_000**2 * 4 / 1024**3, rel=0.01)
    assert "memory/peak_gib" not in failed  # no step was done, so none was measured
    # when it failed, the job held 0.1 GiB each of position embeddings, residual stream, q, k and v
    assert sizes[0] < 2**26


def test_shell_completion():
    """A regression test: the completion's arguments were taken for settings."""
    done = run("-sc", "install=bash")
    assert done.code == 0 and "hydra_bash_completion" in done.output
    line = "python train.py attention=no_"
    told = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_CWORD": "2"}
    found = run("-sc", "query=bash", **told).output
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
    assert (tmp_path / "table.txt").read_text() in done.output


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


def test_a_logger_is_told_what_a_sweep_compares(tmp_path, monkeypatch):
    """A regression test: every override was in the names, and sweeps of two days were one group."""
    told = []

    class Told(Logger):
        def start(self, run: LoggedRun) -> None:
            told.append(run)

    monkeypatch.setitem(LOGGERS, "none", Told)
    sweep = tmp_path / "2026-11-22/21-09-10"
    jobs = ("experiment=break_it", "attention=naive,tiled", "optim.lr=0.01,0.02", "seed=0")
    done = run(*tiny_sweep(sweep, *jobs, *QUICK))
    assert done.code == 0, done.output
    names = [f"{name} lr={lr}" for name in ("naive", TILES) for lr in (0.01, 0.02)]
    assert [each.name for each in told] == names
    assert [each.settings["variant"] for each in told] == names
    assert [each.settings["curve"] for each in told] == [f"{name} seq_len=32" for name in names]
    assert {each.group for each in told} == {"2026-11-22_21-09-10 break_it"}
    assert set(names) <= {line.split("  ")[0] for line in done.output.splitlines()}


@needs_wandb
@pytest.mark.slow
def test_what_wandb_shows_of_a_run_that_diverges(tmp_path):
    """The lowest and the last finite loss, and the speed of the whole run."""
    asked = ("logger=wandb", "sample_tokens=8", "eval_every=2")
    done = finish(start(*tiny(tmp_path, *DIVERGES, *asked), WANDB_MODE="offline"))
    assert done.code == 0 and "Traceback" not in done.output, done.output
    (log,) = tmp_path.glob("wandb/offline-run-*")
    command = ("-m", "wandb", "leet", "inspect", "--summary", "--json", str(log))
    shown = json.loads(processes.run(*command, env=environment(), check=True).stdout)
    assert (shown["state"], shown["summary"]["status"]) == ("failed", "diverged")
    assert "diverged" in shown["tags"]
    losses = [row["val/loss"] for row in metrics(tmp_path) if row.get("val/loss") is not None]
    assert shown["summary"]["val/loss"] == {"min": min(losses), "last": losses[-1]}
    speeds = [each["tokens_per_sec"] for each in (summary(tmp_path), metrics(tmp_path)[-1])]
    assert shown["summary"]["tokens_per_sec"] == speeds[0] != speeds[1]


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
    values = {key: {"value": value} for key, value in chosen.items()}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    agent = {
        "WANDB_SWEEP_ID": "abc123",
        "WANDB_RUN_ID": "run45678",
        "WANDB_SWEEP_PARAM_PATH": str(tmp_path / "config.yaml"),
        "WANDB_MODE": "offline",
    }
    command = (str(ROOT / sweep["program"]), *settings, folder, *small)
    processes.run(*command, cwd=tmp_path, env=environment(**agent), check=True)
    run_dir = tmp_path / "multirun/abc123/run45678"
    assert (summary(run_dir)["seed"], summary(run_dir)["variant"]) == (2, "naive")
    assert len([*run_dir.glob("wandb/offline-run-*-run45678")]) == 1
