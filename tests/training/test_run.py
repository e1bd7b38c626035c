"""A run as an object and as a call: from any folder, with the refusals of train.py. Its held-out
loss.
"""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from attention import get_backend
from config import ModelConfig
from data.interface import IGNORED
from model import GPT
from tests import processes
from tests.command import TINY, environment, summary
from tests.weights import with_weights
from training import build_run, compose, run
from training.loop.evaluate import evaluate_under

CALLS = """
import config  # the user's own, imported first
from training import build_run, compose, run

tiny = {tiny!r}
summary = run(*tiny, "attention=tiled", "hydra.run.dir=first")
import data

assert config.OWNER == data.OWNER == "the user"
assert compose("seq_len=64").seq_len == 64
assert run(*tiny, "steps=1", "hydra.run.dir=second")["status"] == "completed"
run_object = build_run(compose(*tiny))
assert config.OWNER == data.OWNER == "the user" and run_object.device.type == "cpu"
try:
    run(*tiny, "attention=nope")
except ValueError as error:
    print("refused:", error)
print("status:", summary["status"])
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_runs_beside_a_config_and_data_of_the_user(tmp_path):
    """5 s: a process of its own, because this one has imported ours."""
    (tmp_path / "config.py").write_text("OWNER = 'the user'\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/__init__.py").write_text("OWNER = 'the user'\n")
    (tmp_path / "notebook.py").write_text(CALLS.format(tiny=TINY))
    done = processes.run("notebook.py", cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    assert "refused: " in done.stdout and "attention/nope" in done.stdout
    assert "status: completed" in done.stdout and "step     4/4" in done.stdout
    assert all(summary(tmp_path / name)["status"] == "completed" for name in ("first", "second"))


def test_the_summary_is_that_of_the_file(here, capsys):
    assert run(*TINY, "hydra.run.dir=one") == summary(here / "one")
    lines = capsys.readouterr().out
    assert lines == (here / "one/train.log").read_text()
    assert re.search(r"step +4/4 .*train/loss", lines)
    with pytest.raises(ValueError, match="one .*run"):
        run(*TINY, "hydra.run.dir=one")
    resumed = run("resume=one", "steps=6")
    assert resumed["steps_done"] == 6 and [start["step"] for start in resumed["starts"]] == [0, 4]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ("attention=naive attention.block_kv=8", "attention.block_kv=8"),
        # what only the command has
        ("--help", "run()"),
        ("experiment=break_it", "experiment=break_it"),
    ],
)
def test_what_train_refuses_is_a_value_error(here, overrides, named):
    """More refusals stand in test_bad_input."""
    with pytest.raises(ValueError, match=re.escape(named)):
        run(*TINY, "hydra.run.dir=one", *overrides.split())
    # what only a call may get wrong
    with pytest.raises(ValueError, match="attention=tiled steps=3"):
        run("attention=tiled steps=3")


def test_a_run_is_built_without_a_folder(here):
    noted = {}
    built = build_run(compose(*TINY, "attention=naive"), noted)
    assert built.tokens_per_step == 4 * 32 and built.schedule[0].name == "naive"
    assert noted["device"] == "cpu" and noted["parameters"] > 0
    row = built.evaluate()
    assert list(row) == ["val/loss", "val/bpb", "val/loss_exact", "val/bpb_exact"]
    assert row["val/bpb"] == row["val/loss"] / math.log(2)  # a token is a byte
    assert not list(here.iterdir())


def test_bits_per_byte_count_the_bytes_of_the_targets(here):
    built = build_run(compose(*TINY, "tokenizer=bpe", "attention=naive"))
    targets, tokenizer = built.held_out[1], built.data.tokenizer
    end = tokenizer.end_of_text
    text = tokenizer.decode(targets[targets != end])
    assert "\ufffd" not in text  # no window cuts a character
    count = len(text.encode()) + int((targets == end).sum())
    row = built.evaluate()
    bits = row["val/loss"] * targets.numel() / math.log(2)
    assert row["val/bpb"] == pytest.approx(bits / count, rel=1e-12)


def test_a_loss_is_the_mean_over_all_targets_that_count():
    """Of one pass none does."""
    torch.manual_seed(0)
    config = ModelConfig(num_layers=1, num_heads=2, hidden_size=16, max_seq_len=8)
    model = with_weights(GPT(config, vocab_size=11, backend=get_backend("naive")), 0.5)
    inputs, targets = torch.randint(11, (2, 4, 8))
    for row, ignored in enumerate((7, 0, 3, 8)):
        targets[row, :ignored] = IGNORED
    logits = model(inputs).logits.flatten(0, 1)
    right = (logits.argmax(-1) == targets.flatten()).sum() / (targets != IGNORED).sum()
    loss, accuracy = evaluate_under(
        model,
        get_backend("sdpa"),
        inputs,
        targets,
        batch_size=3,
        autocast=torch.autocast("cpu", enabled=False),
        accuracy=True,
    )
    expected = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED).item()
    assert loss == pytest.approx(expected, rel=1e-5) and accuracy == pytest.approx(right.item())
