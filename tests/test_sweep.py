"""Several runs from one command: index, table, exit code, and no job harms another."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests import forked
from tests.command import (
    QUICK,
    ROOT,
    TINY,
    computed,
    environment,
    finish,
    index,
    metrics,
    run,
    start,
    summary,
    tiny,
    tiny_sweep,
    wait_for_rows,
)
from tests.forked import WITH_WANDB
from training.sweep import read_sweep

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed"
)
linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only there does a process have a limit of memory"
)

# the scores grow past what float16 holds
DIVERGES = ("attention=no_max", "dtype=fp16", "optim.lr=0.05", "optim.warmup_steps=1", "steps=40")

ATTENTIONS, SEEDS = ("naive", "tiled", "sdpa", "no_max", "no_rescale"), (0, 1)


@pytest.fixture(scope="session")
def sweep(tmp_path_factory):
    """Ten jobs: five attentions, two seeds."""
    folder = tmp_path_factory.mktemp("sweep")
    return folder, run(
        *tiny_sweep(folder, "attention=naive,tiled,sdpa,no_max,no_rescale", "seed=0,1")
    )


def table(output: str) -> list[list[str]]:
    """The cells of the last table, header first."""
    lines = output.splitlines()
    (rule,) = (number for number, line in enumerate(lines) if line and set(line) == {"-"})
    rows = [lines[rule - 1], *lines[rule + 1 :]]
    return [
        line.split()
        for line in rows[: rows.index(next(line for line in rows if line.startswith("/")))]
    ]


def test_every_job_is_in_the_index_and_in_the_table(sweep):
    folder, done = sweep
    assert done.code == 0 and "Traceback" not in done.output, done.output
    jobs = [(attention, seed) for attention in ATTENTIONS for seed in SEEDS]
    rows = index(folder)
    assert [(row["job"], row["attention"], row["seed"], row["status"]) for row in rows] == [
        (number, attention, seed, "completed") for number, (attention, seed) in enumerate(jobs)
    ]
    header, *lines = table(done.output)
    assert header == [
        "variant",
        "seed",
        "status",
        "val/loss",
        "val/loss_exact",
        "tokens/s",
        "steps",
        "alone",
        "peak",
        "GiB",
    ]
    assert [line[:3] for line in lines] == [
        [attention, str(seed), "completed"] for attention, seed in jobs
    ]
    for line, row in zip(lines, rows, strict=True):
        assert line[3:5] == [f"{row['val/loss']:.4f}", f"{row['val/loss_exact']:.4f}"]
        assert {key: row[key] for key in ("val/loss", "steps_done", "tokens")} == {
            key: summary(folder / row["dir"])[key] for key in ("val/loss", "steps_done", "tokens")
        }


def test_every_variant_of_a_seed_gets_the_same_batches(sweep):
    folder, _ = sweep
    losses = {
        (row["attention"], row["seed"]): [x["train/loss"] for x in metrics(folder / row["dir"])[1:]]
        for row in index(folder)
    }
    for attention in ATTENTIONS:
        for seed in SEEDS:
            # four steps do not bring out a defect yet
            assert losses[attention, seed] == pytest.approx(losses["naive", seed], abs=1e-3)
        assert losses[attention, 0][0] != pytest.approx(losses[attention, 1][0], abs=1e-3)


def test_a_job_of_a_sweep_is_the_run_it_would_be_alone(sweep, tmp_path):
    folder, _ = sweep
    assert run(*tiny(tmp_path, "attention=sdpa", "seed=1")).code == 0
    (job,) = (row["dir"] for row in index(folder) if (row["attention"], row["seed"]) == ("sdpa", 1))
    assert computed(folder / job) == computed(tmp_path)


def test_one_job_of_a_sweep_can_go_on_alone(sweep, tmp_path):
    shutil.copytree(sweep[0], tmp_path / "sweep")
    done = run(f"resume={tmp_path / 'sweep/3'}", "steps=6")
    assert done.code == 0, done.output
    result = summary(tmp_path / "sweep/3")
    assert (result["attention"], result["seed"], result["steps_done"]) == ("tiled", 1, 6)
    assert [row["step"] for row in metrics(tmp_path / "sweep/3")] == list(range(7))
    for other in (0, 1, 2, 4):
        assert summary(tmp_path / f"sweep/{other}") == summary(sweep[0] / str(other))


def test_a_failed_job_costs_the_exit_code_and_nothing_else(tmp_path):
    (tmp_path / "book.txt").write_text("words " * 1000)
    books = f"data.path={tmp_path}/book.txt,{tmp_path}/no_such.txt,{tmp_path}/*.txt"
    done = run(*tiny_sweep(tmp_path / "sweep", "data=text", books, "steps=2"))
    assert done.code == 1 and "Traceback" not in done.output
    assert [row["status"] for row in index(tmp_path / "sweep")] == [
        "completed",
        "failed",
        "completed",
    ]
    assert (
        f"path={tmp_path}/no_such.txt: failed: data.path={tmp_path}/no_such.txt does not exist"
        in done.output
    )


OWN = "tests.user_backends:RIGHT"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Attentions with and without the option block_kv, two of them a user's; two values of it."""
    folder = tmp_path_factory.mktemp("mixed")
    own = "attention.target=tests.user_backends:RIGHT_IN_FP32"
    names = f"attention=naive,tiled,{OWN},custom"
    return folder, run(*tiny_sweep(folder, names, own, "attention.block_kv=16,8", "steps=1"))


def test_an_option_that_one_attention_lacks_is_left_out_of_it(mixed):
    """A regression test: naive failed when its turn came, because it has no tiles."""
    folder, done = mixed
    assert done.code == 0 and "Traceback" not in done.output, done.output
    rows = index(folder)
    # what would be the same run twice without the option is one
    assert [(row["attention"], row["status"]) for row in rows] == [
        (name, "completed") for name in ("naive", "tiled", "tiled", OWN, f"{OWN}_IN_FP32")
    ]
    assert "5 jobs in place of 8" in done.output
    left_out = [sorted(row.get("left_out", {})) for row in rows]
    tiles, target = "attention.block_kv", "attention.target"
    assert left_out == [[tiles, target], [target], [target], [tiles, target], [tiles]]
    header, *lines = table(done.output)
    assert header[:2] == ["variant", "status"]
    variants = ["naive", "tiled block_kv=16", "tiled block_kv=8", OWN, f"{OWN}_IN_FP32"]
    assert [" ".join(line).partition(" completed ")[0] for line in lines[:5]] == variants
    (remark,) = (line for line in done.output.splitlines() if line.startswith("naive: completed: "))
    assert "without attention.block_kv: attention=naive has no option block_kv" in remark


def test_a_job_without_an_option_can_go_on(mixed, tmp_path):
    shutil.copytree(mixed[0], tmp_path / "sweep")
    done = run(f"resume={tmp_path / 'sweep/0'}", "steps=2")
    assert done.code == 0 and summary(tmp_path / "sweep/0")["steps_done"] == 2, done.output
    # as another attention, which has the option, it reads it
    done = run(
        f"resume={tmp_path / 'sweep/0'}", "attention=tiled", "attention.block_kv=8", "steps=3"
    )
    assert done.code == 0 and "block_kv" not in summary(tmp_path / "sweep/0").get("left_out", {}), (
        done.output
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["attention=naive,sdpa", "attention.block_kv=16"],
            "no job can run, so none was started: attention=naive: attention.block_kv=16",
        ),
        (
            ["attention.block_kv=16,0"],
            "1 of 2 jobs cannot run, so none was started: attention.block_kv=0: "
            "attention.block_kv=0 must be",
        ),
        (["attention=tiled,no.such:X"], "attention=no.such:X cannot be loaded"),
        (["attention=tiled,custom"], "attention=custom needs attention.target"),
        (
            ["attention=tiled,tests.user_backends:WRONG"],
            "attention=tests.user_backends:WRONG: attention=tests.user_backends:WRONG "
            "says exact=True",
        ),
        (["optim.lr=interval(0,1)"], "optim.lr=interval(0,1) has no list of values to sweep over"),
        (
            ["seed=0,1", "logger=wandb", "logger.project=a/b"],
            "no job can run, so none was started: seed=0, seed=1: logger.project=a/b: wandb takes",
        ),
        (["data=stdlib,torch_source", "data.path=books"], "data.path=books has no effect"),
        (["model.num_heads=1,3"], "model.num_heads=3: model.hidden_size=32 is not a multiple"),
        (["attention.softmax_dtype=half,input"], "softmax_dtype=half must be float32 or input"),
        (["hydra.sweep.subdir=x", "seed=0,1"], "hydra.sweep.subdir=x is one folder for 2 jobs"),
    ],
    ids=[
        "option-of-none",
        "value",
        "own",
        "custom",
        "probe",
        "interval",
        "logger",
        "data",
        "model",
        "softmax-dtype",
        "one-folder",
    ],
)
def test_a_job_that_cannot_run_is_known_before_any_has_begun(tmp_path, overrides, said):
    done = run(*tiny_sweep(tmp_path / "sweep", *overrides))
    assert done.code == 1 and said in done.complaint() and not (tmp_path / "sweep").exists()


def test_a_module_that_raises_ctrl_c_is_named(tmp_path, monkeypatch):
    """A regression test: the sweep ended without a word."""
    (tmp_path / "pressed.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = run(*tiny_sweep(tmp_path / "sweep", "attention=pressed:BACKEND,tiled")).complaint()
    assert "attention=pressed:BACKEND: KeyboardInterrupt was raised" in answer


def test_a_sweep_over_a_pattern(tmp_path):
    """A regression test: the pattern was read without the choices it stands for.

    The folder was neither made nor locked.
    """
    done = run(*tiny_sweep(tmp_path, "attention=glob(no_*,[no_scale])", "steps=1"))
    assert [row["attention"] for row in index(tmp_path)] == [
        "no_max",
        "no_rescale",
    ] and done.code == 0, done.output


def test_two_attentions_of_ones_own_that_call_themselves_alike(tmp_path, monkeypatch):
    """A regression test: a report gave the mean of both as one."""
    (tmp_path / "alike.py").write_text("from tests.user_backends import RIGHT as A, RIGHT as B")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run(*tiny_sweep(tmp_path / "sweep", "attention=alike:A,alike:B", "steps=1")).code == 0
    assert [row["attention"] for row in read_sweep(tmp_path / "sweep")] == ["alike:A", "alike:B"]


def test_a_device_that_is_not_here_is_known_before_any_job_has_begun(tmp_path):
    done = run(*tiny_sweep(tmp_path / "sweep", "attention=tiled,triton"), TRITON_INTERPRET="0")
    assert "1 of 2 jobs cannot run" in done.complaint() and "Triton needs a GPU" in done.output


def test_a_setting_of_another_group_is_left_out_too(tmp_path):
    done = run(*tiny_sweep(tmp_path, "optim=adamw,muon", "optim.momentum=0.5,0.6", "steps=1"))
    assert done.code == 0, done.output
    assert [(row["overrides"][-1], row.get("left_out")) for row in index(tmp_path)] == [
        ("left_out=[optim.momentum]", {"optim.momentum": "optim=adamw does not read it"}),
        ("optim.momentum=0.5", None),
        ("optim.momentum=0.6", None),
    ]


def test_the_options_of_a_recipe_are_left_out_of_other_attentions(tmp_path):
    """A regression test: attention=naive failed on the tiles that experiment=break_it sets."""
    done = run(
        "experiment=break_it",
        *tiny_sweep(tmp_path, "attention=naive,sdpa", "seed=0", "steps=1")[1:],
    )
    assert done.code == 0, done.output
    assert [(row["status"], sorted(row["left_out"])) for row in index(tmp_path)] == [
        ("completed", ["attention.block_kv", "attention.block_q"])
    ] * 2


def test_variants_differ_in_settings_of_their_own(tmp_path):
    """Each is combined with every seed; of two that are the same, one runs."""
    variants = (
        "{exact:{},windows:{attention.window:'8,16'},sink:{attention.sinks:true},"
        "other:{attention:naive},left_out:null}"
    )
    done = run(
        *tiny_sweep(
            tmp_path,
            "attention=tiled,naive",
            "seed=0,1",
            "steps=1",
            "eval_every=0",
            f"hydra.sweeper.variants={variants}",
        )
    )
    assert done.code == 0, done.output
    names = ["", " window=8", " window=16", " sinks=true"]
    assert [(row["variant"], row["seed"]) for row in index(tmp_path)] == [
        *((f"tiled{name}", 0) for name in names),
        ("naive", 0),
        *((f"tiled{name}", 1) for name in names),
        ("naive", 1),
        *((f"naive{name}", seed) for seed in (0, 1) for name in names[1:]),
    ]


@pytest.mark.parametrize(
    "variants, said",
    [
        ("=5", "hydra.sweeper.variants=5 must name variants, each with its settings"),
        (".window=5", "variants.window=5 must be the settings of the variant, as in {attention."),
        (".window={attention:{window:5}}", "variants.window: attention has settings of its own"),
        (".window={attention.windo:5}", "no key 'attention.windo'; did you mean attention.window"),
        (".widow=null", "no key 'hydra.sweeper.variants.widow'; python train.py --cfg hydra shows"),
    ],
)
def test_a_variant_that_is_none_is_refused(tmp_path, variants, said):
    recipe = ("experiment=attentions", "seed=0", f"hydra.sweep.dir={tmp_path}")
    assert said in run(*recipe, f"hydra.sweeper.variants{variants}").complaint()


def test_a_variant_of_a_recipe_gets_further_settings(tmp_path):
    others = [
        "wide_window",
        "pattern",
        "softcap",
        "sinks",
        "alibi",
        "no_rescale",
        "differential",
        "linear",
        "sigmoid",
    ]
    kept = [f"hydra.sweeper.variants.{name}=null" for name in others]
    window = "hydra.sweeper.variants.window={attention.window:8,attention.softcap:3}"
    short = ("seed=0", "steps=1", "eval_every=0", "logger=none")
    asked = ("experiment=attentions", *short, window, *kept, f"hydra.sweep.dir={tmp_path}")
    assert run(*asked).code == 0
    assert [row["variant"] for row in index(tmp_path)][1] == "tiled block_kv=16 window=8 softcap=3"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_jobs_in_processes_of_their_own(tmp_path, launcher):
    """A regression test: the callback could not be pickled."""
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    done = finish(
        start(
            *tiny_sweep(tmp_path, f"attention=naive,{OWN}", "steps=1", f"hydra/launcher={launcher}")
        )
    )
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
    swept = (
        "attention=choice(naive,tiled)",
        "attention.block_kv=16",
        "optim.lr=choice(1e-2,1e-5)",
        "steps=8",
    )
    done = finish(start(*tiny_sweep(tmp_path, *swept, *trials)))
    assert done.code == 0 and "Traceback" not in done.output, done.output
    rows = index(tmp_path)
    assert [row["status"] for row in rows] == ["completed"] * 3
    assert f"Best value: {min(row['val/loss'] for row in rows)}" in done.output
    # such a sweeper chooses its jobs as it goes: whether another one reads an option cannot be
    # known
    assert all(("left_out" in row) == (row["attention"] == "naive") for row in rows)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("hydra/launcher=joblib hydra.launcher.n_jobs=0", "n_jobs == 0 in Parallel has no meaning"),
        ("hydra/sweeper=optuna hydra.sweeper.n_trials=0", "No trials are completed yet"),
    ],
)
def test_a_launcher_or_sweeper_that_fails_is_named(tmp_path, arguments, reason):
    """A regression test: it ended in a traceback of the plugin."""
    kind, name = re.match(r"hydra/(\w+)=(\w+)", arguments).groups()
    pytest.importorskip(f"hydra_plugins.hydra_{name}_{kind}")
    done = run(*tiny_sweep(tmp_path, "attention=naive,tiled", *arguments.split()))
    assert done.code == 1 and "Traceback" not in done.output, done.output
    assert f"error: {arguments}: {reason}" in done.output


def test_shell_completion():
    """A regression test: the completion's arguments were taken for settings."""
    done = run("-sc", "install=bash")
    assert done.code == 0 and "hydra_bash_completion" in done.output
    line = "python train.py attention=no_"
    done = finish(
        start("-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)), COMP_CWORD="2")
    )
    assert done.output.split() == ["attention=no_max", "attention=no_rescale", "attention=no_scale"]


def test_a_mistyped_job_is_refused_before_any_runs(tmp_path):
    done = run(*tiny_sweep(tmp_path, "attention=tiled,flashy"))
    assert done.code == 1 and "no attention 'flashy'" in done.output
    assert "Traceback" not in done.output
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_diverged_and_completed_jobs_make_a_whole_sweep(tmp_path):
    done = run(*tiny_sweep(tmp_path, *DIVERGES, "attention=no_max,tiled", "log_every=10"))
    assert done.code == 0, done.output
    rows = index(tmp_path)
    assert [row["status"] for row in rows] == ["diverged", "completed"]
    assert (
        f"no_max: diverged at step {rows[0]['first_bad_step']}: "
        f"{rows[0]['diagnosis']['message']}" in done.output
    )


@linux
@needs_wandb
def test_out_of_memory_is_a_result_and_leaves_nothing_behind(tmp_path):
    """A failed job's exception would keep its frames alive, and they its tensors.

    The recipe's wandb files have the memory of each job, and the one without memory as a run.
    """
    shape = (
        "attention=naive",
        "model.hidden_size=128",
        "model.num_heads=8",
        "batch_size=1",
        "eval_sequences=1",
        "steps=2",
        "logger=wandb",
    )
    asked = tiny_sweep(tmp_path, *shape, "seq_len=32,200000,48")[1:]  # the recipe is a sweep
    done = finish(start("experiment=memory_wall", *asked, loaded=WITH_WANDB, WANDB_MODE="offline"))
    assert done.code == 0 and "Traceback" not in done.output, done.output
    before, failed, after = index(tmp_path)
    assert [row["status"] for row in (before, failed, after)] == ["completed", "oom", "completed"]
    # one matrix of scores: heads * N * N * 4 bytes
    assert failed["oom"]["asked_gib"] == pytest.approx(8 * 200_000**2 * 4 / 1024**3, rel=0.01)
    assert failed["oom"]["free_gib"] < failed["oom"]["asked_gib"] < failed["oom"]["predicted_gib"]
    assert "memory/peak_gib" not in failed  # no step was done, so none was measured
    # what the failed job held when it failed: 0.1 GiB each of position embeddings, residual stream,
    # q, k and v, and more
    assert after["memory/process_gib"] - before["memory/process_gib"] < 0.1
    assert (
        failed["memory/at_start_gib"] > 0
        and abs(after["memory/at_start_gib"] - failed["memory/at_start_gib"]) < 0.1
    )
    for job, row in (("0", before), ("2", after)):
        last = of_type(records_of(tmp_path, job), "history")[-1]["history"]["item"]
        assert last["memory/peak_gib"] == pytest.approx(row["memory/peak_gib"])
    assert not of_type(records_of(tmp_path, "1"), "history")
    seen = inspect_summary(tmp_path, "1")
    assert (seen["state"], seen["summary"]["status"]) == ("failed", "oom") and "oom" in seen["tags"]


@linux
@pytest.mark.skipif(torch.cuda.is_available(), reason="once CUDA runs there is no limit")
def test_memory_is_limited_wherever_the_model_runs(monkeypatch, tmp_path):
    """The evaluation before the first step needs as much memory as a step.

    Without a limit, the kernel would kill the sweep there.
    """
    import resource

    from model import GPT

    limits, forward = [], GPT.forward

    def watched(self, *arguments, **options):
        limits.append(resource.getrlimit(resource.RLIMIT_AS)[0])
        return forward(self, *arguments, **options)

    monkeypatch.setattr(GPT, "forward", watched)
    assert run(*tiny(tmp_path, "steps=2", "eval_every=1")).code == 0
    assert len(limits) > 6 and limits.count(resource.RLIM_INFINITY) == 0
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def test_ctrl_c_stops_the_sweep_and_the_job_can_go_on(tmp_path):
    """As a terminal sends it: to every process of the group."""
    asked = tiny_sweep(tmp_path, "seed=0,1,2", "steps=5000", "eval_every=5000")
    process = start(*asked, new_group=True, loaded=QUICK)
    wait_for_rows(process, tmp_path / "0", 20)
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    assert done.code == 130 and "Traceback" not in done.output, done.output
    assert [row["status"] for row in index(tmp_path)] == [
        "interrupted",
        "not started",
        "not started",
    ]
    assert table(done.output)[1][1:3] == ["interrupted", "-"], "it shows the loss of step 0"
    assert "2 of 3 jobs not started" in done.output
    assert f"go on: python train.py resume={tmp_path}\n" in done.output
    assert not (tmp_path / "1").exists()
    # one of them runs later, and then belongs to the sweep
    command = index(tmp_path)[1]["command"]
    assert run(*shlex.split(command)[2:], "steps=2", "eval_every=1").code == 0
    assert [row["status"] for row in read_sweep(tmp_path)] == ["interrupted", "completed"]
    steps_done = summary(tmp_path / "0")["steps_done"]
    assert steps_done >= 19
    assert run(f"resume={tmp_path / '0'}", f"steps={steps_done + 2}").code == 0
    assert [row["step"] for row in metrics(tmp_path / "0")] == list(range(steps_done + 3))


@pytest.mark.parametrize(
    "moment, overrides",
    [
        ("training.recorder.draw_loss_curve", []),
        ("training.recorder.draw_loss_curve", DIVERGES),
        ("data.build_data", []),
    ],
    ids=["completed", "diverged", "before"],
)
def test_ctrl_c_outside_the_loop_stops_the_sweep_too(monkeypatch, tmp_path, moment, overrides):
    def interrupted(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the signal was lost")

    monkeypatch.setattr(moment, interrupted)
    done = run(*tiny_sweep(tmp_path, "seed=0,1", *(overrides or ["steps=1"])))
    assert done.code == 130 and "Traceback" not in done.output, done.output
    assert not (tmp_path / "1").exists()


@needs_wandb
def test_wandb_has_the_whole_sweep_in_one_folder_and_every_row_of_it(tmp_path):
    """Read back by wandb's own tool. A server that does not answer costs only a warning."""
    account = {
        "WANDB_API_KEY": "a" * 40,
        "WANDB_BASE_URL": "https://nosuch.invalid",
        "WANDB_MODE": "online",
    }
    sweep = tmp_path / "sweep"
    asked = tiny_sweep(sweep, *DIVERGES, "attention=tiled,no_max", "logger=wandb")
    done = finish(start(*asked, loaded=WITH_WANDB, **account))
    assert done.code == 0 and "Traceback" not in done.output, done.output
    assert done.output.count("nosuch.invalid does not answer; this run is logged offline") == 2
    assert [row["status"] for row in index(sweep)] == ["completed", "diverged"]
    assert not (sweep / "0/wandb").exists() and not (sweep / "1/wandb").exists()
    logs = {path.name.rpartition("-")[2]: path for path in (sweep / "wandb").glob("offline-run-*")}
    assert len(logs) == 2
    for job in ("0", "1"):
        log = logs[(sweep / job / "wandb_id.txt").read_text().strip()]
        assert f"wandb sync {log}" in done.output
        records = inspect(log)
        history = [record["history"]["item"] for record in records if record["type"] == "history"]
        assert [metrics_of(item) for item in history] == [
            as_wandb_has_it(row) for row in metrics(sweep / job)
        ]
        started = next(record["run"] for record in records if record["type"] == "run")
        assert started["display_name"] == ["tiled", "no_max"][int(job)]
        assert started["job_type"] == "train"
        # a folder with a name of its own gets the day and time
        assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d sweep", started["run_group"])
    assert f"wandb: wandb sync {sweep}/wandb/offline-run-*\n" in done.output
    # one of them goes on alone, in a folder that has all of it
    assert finish(start(f"resume={sweep / '0'}", "steps=41", loaded=WITH_WANDB)).code == 0
    assert (
        not (sweep / "0/wandb").exists() and len(list((sweep / "wandb").glob("offline-run-*"))) == 2
    )
    (log,) = (sweep / "wandb").glob(
        f"offline-run-*-{(sweep / '0/wandb_id.txt').read_text().strip()}"
    )
    history = [record["history"]["item"] for record in inspect(log) if record["type"] == "history"]
    assert [item["_step"] for item in history] == [row["step"] for row in metrics(sweep / "0")]


@needs_wandb
@pytest.mark.slow
def test_wandb_names_and_shows_what_a_sweep_compares(tmp_path):
    """Two variants, each with a corpus and with one that is missing, which is refused.

    A regression test: every override was in the names, sweeps of two days were one group, and what
    was refused before the training was in no chart.
    """
    sweep, book = tmp_path / "2026-11-22/21-09-10", tmp_path / "book.txt"
    book.write_text("words and words " * 1000)
    jobs = ("attention=naive,tiled", f"data.path={book},gone.txt", "seed=0", "data=text")
    asked = tiny_sweep(sweep, *jobs, "logger=wandb", "sample_tokens=8", "eval_every=2")
    done = finish(start("experiment=break_it", *asked[1:], WANDB_MODE="offline"))
    assert done.code == 1 and "Traceback" not in done.output, done.output
    assert [row["status"] for row in index(sweep)] == ["completed", "failed"] * 2
    naive, naive_gone, tiled, tiled_gone = (records_of(sweep, job) for job in "0123")

    tiles = "tiled block_q=256 block_kv=16"
    variants = [f"naive path={book}", "naive path=gone.txt", f"{tiles} path={book}"]
    for records, variant in zip((naive, naive_gone, tiled), variants, strict=True):
        run, config = started(records)
        assert run["display_name"] == variant == config["variant"]
        assert run["run_group"] == "2026-11-22_21-09-10 break_it"
        assert config["curve"] == f"{variant} seq_len=32"
    assert {variants[0], variants[2]} <= {line.split("  ")[0] for line in done.output.splitlines()}
    assert "attention.block_kv: attention=naive has no option" in started(naive)[1]["left_out"]
    assert started(tiled)[1]["left_out"] == ""

    # every metric over tokens; of the evaluations the lowest too
    options = {record["metric"]["name"]: record["metric"] for record in of_type(tiled, "metric")}
    assert options.pop("tokens")["options"]["hidden"] is True
    assert {each["step_metric"] for each in options.values()} == {"tokens"}
    lowest = {name for name, each in options.items() if (each.get("summary") or {}).get("min")}
    assert lowest == {"val/loss", "val/loss_exact"}
    # sorted by name, as wandb and leet sort: losses, memory, speed
    first = ["loss", "loss_exact", "memory_gib", "tokens_per_sec"]
    assert sorted(options)[:4] == [f"Compare/{name}" for name in first]

    history = [record["history"]["item"] for record in of_type(tiled, "history")]
    rows = metrics(sweep / "2")
    assert [item["_step"] for item in history] == [row["step"] for row in rows]
    assert [metrics_of(item) for item in history] == [as_wandb_has_it(row) for row in rows]
    assert history[-1]["sample._type"] == "table-file"
    assert history[-1]["loss_curve._type"] == "image-file"
    result = inspect_summary(sweep, "2")
    losses = [row["val/loss"] for row in rows if "val/loss" in row]
    assert result["summary"]["val/loss"] == {"min": min(losses), "last": losses[-1]}
    assert (result["state"], result["summary"]["status"]) == ("finished", "completed")
    # the figures of the sweep's table, and not those of the last row
    whole = json.loads((sweep / "2/summary.json").read_text())
    for key in ("tokens_per_sec", "step_tokens_per_sec", "memory/peak_gib", "wall_seconds"):
        assert result["summary"].get(key) == whole.get(key) or key == "wall_seconds"
    assert whole["tokens_per_sec"] not in [row.get("tokens_per_sec") for row in rows]

    assert not of_type(naive_gone, "history") and not of_type(tiled_gone, "history")
    refused = inspect_summary(sweep, "3")
    assert (refused["state"], refused["summary"]["status"]) == ("failed", "failed")
    assert "gone.txt does not exist" in refused["notes"] and "failed" in refused["tags"]


@needs_wandb
@pytest.mark.slow
def test_a_switch_that_is_to_come_is_in_the_name(tmp_path):
    swept = ("attention=naive", "attention.switch_to=tiled", "attention.switch_at=null,2")
    asked = tiny_sweep(tmp_path, *swept, "logger=wandb")
    done = finish(start(*asked, loaded=WITH_WANDB, WANDB_MODE="offline"))
    assert done.code == 0, done.output
    names = [started(records_of(tmp_path, job))[1]["variant"] for job in "01"]
    assert names == ["naive", "naive, tiled after step 2"]
    assert [line[0] for line in table(done.output)[1:3]] == ["naive", "naive,"]


def of_type(records: list[dict], kind: str) -> list[dict]:
    return [record for record in records if record["type"] == kind]


def started(records: list[dict]) -> tuple[dict, dict]:
    """The record with which a run began, and its config."""
    run = of_type(records, "run")[0]["run"]
    return run, run["config"]["update"]


def offline_log(sweep: Path, job: str) -> Path:
    run_id = (sweep / job / "wandb_id.txt").read_text().strip()
    (log,) = (sweep / "wandb").glob(f"offline-run-*-{run_id}")
    return log


def records_of(sweep: Path, job: str) -> list[dict]:
    return inspect(offline_log(sweep, job))


def inspect_summary(sweep: Path, job: str) -> dict:
    return json.loads(leet("--summary", "--json", str(offline_log(sweep, job))))


def leet(*arguments: str) -> str:
    """What wandb's own tool tells."""
    command = ("-m", "wandb", "leet", "inspect", *arguments)
    return forked.run(*command, env=environment(), loaded=WITH_WANDB, check=True).stdout


@pytest.mark.slow
@needs_wandb
def test_what_an_agent_of_wandb_runs(tmp_path):
    """The command that `wandb agent` makes of sweep.yaml, in the environment that it sets.

    attention=naive comes with the option block_kv, which it lacks: an agent cannot know.
    """
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    sweep = yaml.safe_load((ROOT / "sweep.yaml").read_text())
    chosen = {"attention": "naive", "attention.block_kv": 16, "seed": 2}
    assert chosen.keys() == sweep["parameters"].keys()
    parameters = {key: {"value": value} for key, value in chosen.items()}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(parameters))
    filled = create_sweep_command_args({"args": parameters})
    filled |= {"env": ["/usr/bin/env"], "interpreter": [sys.executable]}
    filled["program"] = [str(ROOT / sweep["program"])]
    command = []
    for word in sweep["command"]:  # as the agent does it
        is_macro = word.startswith("${") and word.endswith("}")
        command += filled[word[2:-1]] if is_macro else [word]
    small = [each for each in TINY if not each.startswith("logger=")]
    agent = {
        "WANDB_SWEEP_ID": "abc123",
        "WANDB_RUN_ID": "run45678",
        "WANDB_SWEEP_PARAM_PATH": str(tmp_path / "config.yaml"),
        "WANDB_MODE": "offline",
    }
    done = subprocess.run(
        [*command, *small], cwd=tmp_path, env=environment(**agent), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "multirun/abc123/run45678"
    assert summary(run_dir)["seed"] == 2 and "attention.block_kv" in summary(run_dir)["left_out"]
    (log,) = (run_dir / "wandb").glob("offline-run-*-run45678")
    run, config = started(inspect(log))
    assert (run["run_id"], run["sweep_id"], config["variant"]) == ("run45678", "abc123", "naive")


def metrics_of(item: dict) -> dict:
    """An item of wandb's history without its own keys, the copies and the media."""
    others = ("_", "Compare/", "loss_curve.", "max_scores.", "sample.")
    return {key: value for key, value in item.items() if not key.startswith(others)}


def inspect(log: Path) -> list[dict]:
    return [json.loads(line) for line in leet("--json", str(log)).splitlines()]


def as_wandb_has_it(row: dict) -> dict:
    """A row of metrics.jsonl without what was not measured; NaN is a string there."""
    names = row.get("nonfinite", [])
    return {
        key: value
        for key, value in row.items()
        if value is not None and key not in ("nonfinite", "step", "attention/max_score_by_head")
    } | dict.fromkeys(names, "NaN")
