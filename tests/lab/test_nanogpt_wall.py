"""Whole runs beside those of another program, which takes nanoGPT's arguments, prints its lines and
reads its files. nanoGPT itself is not here: the stand-in is ours.
"""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from lab import nanogpt_wall, wall
from lab.nanogpt_wall import Options, compared, their_arguments
from lab.results import runs
from scripts.arguments import read_settings
from tests import forked
from tests.command import environment
from training.command_line import compose
from training.optimizer import learning_rate

TRAIN = """
import os, sys, time
import numpy as np

max_iters = eval_interval = eval_iters = log_interval = batch_size = block_size = 0
dataset = out_dir = device = dtype = ""
exec(open("configurator.py").read())
assert (device, dtype, compile) == ("cpu", "float32", False) and gradient_accumulation_steps == 1
tokens = np.memmap(f"data/{dataset}/train.bin", dtype=np.uint16, mode="r")
os.makedirs(out_dir)
names = "TRITON_CACHE_DIR", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"
caches = [os.environ[name] for name in names]
open(os.environ["SEEN"], "a").write(" ".join([str(len(tokens)), *caches]) + "|\\n")
for step in range(max_iters + 1):
    if step % eval_interval == 0:
        print(f"step {step}: train loss 5.0000, val loss {5 - step / 100:.4f}", flush=True)
    time.sleep(0.02)
    if step % log_interval == 0:
        print(f"iter {step}: loss 5.0000, time 2.00ms, mfu -100.00%", flush=True)
"""
CONFIGURATOR = """
from ast import literal_eval
for argument in sys.argv[1:]:
    key, value = argument[2:].split("=")
    try:
        globals()[key] = literal_eval(value)
    except (SyntaxError, ValueError):
        globals()[key] = value
"""
FILES = {"train.py": TRAIN, "configurator.py": CONFIGURATOR, "model.py": ""}
SMALL = (
    "model=tiny",
    "model.num_layers=1",
    "model.hidden_size=32",
    "seq_len=16",
    "tokens=512",
    "steps=40",
    "rounds=2",
    "eval_iters=2",
    "data=text",
    "tokenizer=byte",
    "vocab_size=257",
    "attention=sdpa",
    "device=cpu",
)


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """The command with a stand-in for nanoGPT and a small text; returns the content of its file."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 100)
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setattr(wall, "subprocess", SimpleNamespace(Popen=forked.popen))
    for name, value in environment().items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> dict:
        folders = [f"folder={tmp_path}", f"data.path={tmp_path / 'text.txt'}"]
        own = [*folders, f"out={tmp_path / 'found.json'}"]
        monkeypatch.setattr(sys, "argv", ["nanogpt_wall", *own, *SMALL, *arguments])
        nanogpt_wall.main()
        return json.loads((tmp_path / "found.json").read_text())

    return run


def test_whole_runs_of_both_programs_in_turns(tmp_path, measure, capsys):
    found = measure()
    rounds = [(run["who"], run["round"], run["cold"]) for run in found["runs"]]
    assert rounds == [(who, i, i == 0) for i in range(2) for who in ("nanogpt", "sdpa")]
    for run in found["runs"]:
        # ours has a last row with the evaluation at the end, which is none of the steps alone
        rows = ["0", "10", "20", "30", "40"][: 4 if run["who"] == "nanogpt" else 5]
        assert list(run["arrivals"]) == rows
        third, fourth = (run["arrivals"][row] for row in ("20", "30"))
        assert run["tokens_per_sec"] == pytest.approx(10 * 512 / (fourth - third))
        assert run["seconds"] > fourth
    theirs, ours = found["runs"][:2]
    assert theirs["val/loss"] == pytest.approx(5 - 0.39) and 0 < ours["val/loss"] < 6
    (ratio,) = found["ratios"]
    assert ratio["seconds"]["rounds"][0] == pytest.approx(theirs["seconds"] / ours["seconds"])
    assert "sdpa, 16 tokens, whole runs: " in capsys.readouterr().out

    # both rounds read our training half, and share their caches
    first, second = (tmp_path / "seen").read_text().splitlines()
    assert first == second and 3000 < int(first.split()[0]) < 4200
    assert first.endswith("PYTHONPYCACHEPREFIX |")  # Python may write bytecode

    # another length joins the file; the runs of this one stay
    found = measure("seq_len=8", "rounds=1")
    assert [run["seq_len"] for run in found["runs"]] == [16, 16, 16, 16, 8, 8]
    (_, alone) = found["ratios"]
    assert alone["seq_len"] == 8 and list(alone["seconds"]) == ["rounds"]
    commit = (found["runs"][-1]["commit"] or "-")[:7]
    assert f"| 8 | sdpa | {commit} | 40 | 1 |" in runs.nanogpt_wall_table(found)


@pytest.mark.parametrize(
    "train, complaint",
    [
        ("raise SystemExit('no such card')", "ended with code 1 after 0 rows: no such card"),
        ("print('step 0: val loss 5.0')", "ended with code 0 after 0 rows: step 0: val loss 5.0"),
    ],
)
def test_a_run_of_theirs_that_fails_is_one_line(tmp_path, measure, train, complaint):
    (tmp_path / "train.py").write_text(train)
    with pytest.raises(SystemExit) as end:
        measure()
    assert end.value.code.startswith("nanogpt_wall: nanoGPT's train.py --n_layer=1 ")
    assert end.value.code.endswith(complaint) and "\n" not in end.value.code


def test_a_run_of_ours_that_fails_is_one_line_and_loses_nothing(tmp_path, measure):
    with pytest.raises(SystemExit) as end:
        measure("model.init_std=1e30")
    assert end.value.code.startswith("nanogpt_wall: train.py model=tiny ")
    assert " ended diverged: " in end.value.code and "\n" not in end.value.code
    (run,) = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert run["who"] == "nanogpt"


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["folder=nowhere"], "folder=nowhere has no train.py, model.py, configurator.py"),
        (["steps=30"], "steps=30 must be at least 40"),
        (["seq_len=16,32,8", "steps=40,50"], "steps= has 2 numbers for 3 lengths"),
        (["data=needle"], "data=needle is not text"),
        (["tokens=0"], "tokens=0 must be at least 1"),
        (["device=tpu"], "device=tpu is not one of: auto, cpu, cuda"),
        (["seq_len=16,16"], "seq_len=16,16 names one of them twice"),
        (["attention=tiled,tiled"], "attention=tiled,tiled names one of them twice"),
        (["fodler=x"], "there is no key 'fodler'; did you mean folder?"),
    ],
)
def test_bad_input_is_one_line(measure, arguments, complaint):
    with pytest.raises(SystemExit) as end:
        measure(*arguments)
    assert complaint in end.value.code and "\n" not in end.value.code


def test_another_device_has_its_own_file(tmp_path, measure):
    environment = {"hardware": {"gpu": "NVIDIA H200"}}
    (tmp_path / "found.json").write_text(json.dumps({"environment": environment, "runs": []}))
    with pytest.raises(SystemExit, match="found.json was measured on another device"):
        measure()


@pytest.mark.parametrize("text", ['{"runs": [{"seq_len": 8192', '{"a": 1}', '{"runs": [1]}', "[]"])
def test_a_file_of_something_else_stays(tmp_path, measure, text):
    (tmp_path / "found.json").write_text(text)
    with pytest.raises(SystemExit, match=r"found.json is not a file of this command; name another"):
        measure()
    assert (tmp_path / "found.json").read_text() == text


@pytest.mark.parametrize("warmup", [0, 1, 7, 100])
def test_both_programs_have_the_same_work(tmp_path, warmup):
    """As many steps, the same learning rate in each, and as many tokens in an evaluation."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    given = [f"folder={tmp_path}", *SMALL[:-1], "data=stdlib", f"optim.warmup_steps={warmup}"]
    options = read_settings(Options, [*given, "steps=100", "device=cpu"])
    config = compose(*options.settings("sdpa", 16, 100))
    told = dict(argument[2:].split("=") for argument in their_arguments(config, 2))
    optim, last = config.optimizer(), int(told["max_iters"])
    first, end = int(told["warmup_iters"]), int(told["lr_decay_iters"])
    assert last + 1 == config.steps == 100 and told["eval_interval"] == told["max_iters"]

    def their_rate(step: int) -> float:  # as nanoGPT's documentation describes it
        if step < first:
            return optim.lr * (step + 1) / (first + 1)
        cosine = np.cos(np.pi * (step - first) / (end - first))
        return optim.min_lr + (1 + cosine) / 2 * (optim.lr - optim.min_lr)

    theirs = [their_rate(step) for step in range(last + 1)]
    ours = [learning_rate(step, 100, config.optimizer()) for step in range(100)]
    assert theirs == pytest.approx(ours, abs=3e-5 if warmup == 0 else 1e-12)

    # nanoGPT evaluates two splits, and we evaluate one under two attentions
    passes = int(told["eval_iters"]) * int(told["batch_size"])
    assert config.eval_sequences == passes == 64


def test_the_table_has_medians_of_the_rounds_with_filled_caches():
    found = [
        {"who": who, "seq_len": 1024, "steps": 600, "seconds": seconds, "tokens_per_sec": speed}
        | {"val/loss": 3.25, "memory/peak_gib": 12.5, "commit": "0123456789"}
        for who, timed in {
            "nanogpt": [(120.0, 400e3), (80.0, 480e3), (82.0, 500e3), (90.0, 490e3)],
            "sdpa:backend=cudnn": [(100.0, 500e3), (50.0, 600e3), (41.0, 500e3), (60.0, 490e3)],
        }.items()
        for seconds, speed in timed
    ]
    data = {
        "environment": {"hardware": {"gpu": "a card"}, "versions": {"torch": "2"}},
        "settings": {"overrides": [], "model": "gpt2", "vocab_size": 50304, "tokens": 32768},
        "ratios": compared(found),
        "runs": found,
    }
    text = runs.nanogpt_wall_table(data)
    assert text.splitlines()[-1] == (
        "| 1,024 | sdpa cudnn | 0123456 | 600 | 4 | 82.0 | 50.0 | 1.60 (1.50 to 2.00) | 120.0 "
        "| 100.0 | 1.20 | 490,000 | 500,000 | 1.00 (1.00 to 1.25) | 3.250, 3.250 | 12.50 |"
    )
    assert "Measured on a card; torch 2; commit 0123456." in text


def test_help_shows_a_line_to_type():
    shown = forked.run("-m", "lab.nanogpt_wall", "--help", env=environment(), check=True).stdout
    assert "python -m lab.nanogpt_wall folder=../nanoGPT" in shown
