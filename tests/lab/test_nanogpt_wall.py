"""Whole runs beside those of another program, which takes nanoGPT's arguments and prints its lines.
nanoGPT itself is not here: the stand-in is ours.
"""

import json

import pytest

from lab import nanogpt_wall
from scripts.arguments import read_settings
from tests.command import environment
from training.launch.command_line import compose
from training.loop.optimizer import learning_rate

TRAIN = """
import sys, time
told = dict(argument[2:].split("=") for argument in sys.argv[1:])
last, tokens = int(told["max_iters"]), open("data/tokens/train.bin", "rb").read()
assert told["device"] == "cpu" and 6000 < len(tokens) < 8400
print(f"step {last}: val loss 4.5", flush=True)
for step in range(0, last, 10):
    time.sleep(0.2)
    print(f"iter {step}: loss 5.0000", flush=True)
"""
SMALL = (
    "model=tiny", "model.num_layers=1", "model.hidden_size=32", "seq_len=16", "tokens=512",
    "steps=40", "rounds=1", "eval_iters=2", "data=text", "tokenizer=byte", "vocab_size=257",
    "attention=sdpa", "device=cpu",
)  # fmt: skip


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    for name in nanogpt_wall.THEIR_FILES:
        (tmp_path / name).write_text(TRAIN)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 100)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    files = [f"folder={tmp_path}", f"data.path={tmp_path}/text.txt", f"out={tmp_path}/out.json"]
    return [*SMALL, *files]


@pytest.mark.slow
def test_whole_runs_of_both_programs(tmp_path, arguments):
    nanogpt_wall.main(arguments)
    found = json.loads((tmp_path / "out.json").read_text())
    theirs, ours = found["runs"]
    assert (theirs["who"], ours["who"], theirs["val/loss"]) == ("nanogpt", "sdpa", 4.5)
    third, fourth = (theirs["arrivals"][row] for row in ("20", "30"))
    assert theirs["tokens_per_sec"] == pytest.approx(10 * 512 / (fourth - third))
    (ratio,) = found["ratios"]
    assert ratio["seconds"]["rounds"] == [pytest.approx(theirs["seconds"] / ours["seconds"])]


def test_both_programs_have_the_same_work(arguments):
    options = read_settings(nanogpt_wall.Options, arguments)
    config = compose(*options.settings("sdpa", 16, 100))
    told = dict(x[2:].split("=") for x in nanogpt_wall.their_arguments(config, 2))
    assert config.eval_sequences == int(told["eval_iters"]) * int(told["batch_size"])
    assert int(told["max_iters"]) + 1 == config.steps == 100
    # nanoGPT warms up by (step + 1) / (warmup_iters + 1)
    optim, first = config.optimizer(), int(told["warmup_iters"])
    assert learning_rate(first // 2, 100, optim) == pytest.approx(
        optim.lr * (first // 2 + 1) / (first + 1)
    )


def test_a_folder_without_nanogpt_is_refused():
    with pytest.raises(SystemExit) as end:
        nanogpt_wall.main(["folder=nowhere"])
    assert "folder=nowhere" in end.value.code and "train.py, model.py" in end.value.code
