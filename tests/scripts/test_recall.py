"""`python -m scripts.recall`: what it counts, and one line for what cannot be asked."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from config import DataConfig, TokenizerConfig
from data import build_data
from model.gpt import ModelOutput
from scripts import recall
from tests.command import run, summary, tiny
from training.loop.trained import Trained


class Within(nn.Module):
    """Answers a needle's question where the needle is among the last `window` tokens."""

    def __init__(self, window: int, num_keys: int = 8, num_values: int = 8):
        super().__init__()
        self.window, self.num_values = window, num_values
        self.num_writes = num_keys * num_values
        self.vocab_size = self.num_writes + num_keys + num_values
        self.unused = nn.Parameter(torch.zeros(1))  # says which device it is on

    def forward(self, x: torch.Tensor, targets: None) -> ModelOutput:
        logits = torch.zeros(*x.shape, self.vocab_size)
        for row, logit in zip(x, logits, strict=True):
            for token in row[-self.window : -1].tolist():
                if token // self.num_values == row[-1] - self.num_writes:
                    logit[-1, self.vocab_size - self.num_values + token % self.num_values] = 1
        return ModelOutput(logits, None)


def test_a_window_finds_what_is_nearer_than_it():
    trained = Trained(Within(8), torch.float32, nullcontext(), 0)
    data = build_data(DataConfig("needle"), TokenizerConfig(), seq_len=20, seed=0)
    row = recall.ask(trained, data, sequences=300, batch_size=64)
    near = np.mean(19 - data.held_out(300).sources[:, -1] < 8)
    assert row["by_distance"] == {"1": 1, "2": 1, "4": 1, "8": 0, "16": 0}
    assert row["questions"] == 300 and row["accuracy"] == near


def test_a_run_is_asked_at_its_own_length_and_at_others(tmp_path, capsys):
    task = ("data=needle", "model.positions=rope", "eval_sequences=40", "seed=3")
    assert run(*tiny(tmp_path / "run", *task, "attention.window=4")).code == 0
    recall.main([str(tmp_path / "run"), "lengths=64,32,8", "device=cpu"])
    found = json.loads((tmp_path / "run/recall.json").read_text())
    assert [row["length"] for row in found["rows"]] == [8, 32, 64]
    assert found["rows"][1]["accuracy"] == summary(tmp_path / "run")["val/accuracy"]
    assert {row["questions"] for row in found["rows"]} == {40}
    assert {row["seq_len"] for row in found["rows"]} == {32}
    assert {"commit", "hardware"} <= found["environment"].keys()
    assert {(row["data"], row["seed"]) for row in found["rows"]} == {("needle-8x8", 3)}
    assert "tiled window=4" in capsys.readouterr().out


def test_the_length_at_which_less_than_half_is_right():
    rows = [
        {"variant": name, "length": length, "accuracy": accuracy}
        for name, at_lengths in {"good": (1.0, 0.5), "bad": (0.9, 0.4)}.items()
        for length, accuracy in zip((32, 64), at_lengths, strict=True)
    ]
    rows += [rows[3] | {"accuracy": 0.5}]  # another seed
    head, good, bad = recall.in_text(rows).splitlines()
    assert {"32", "64"} <= {*head.split()}
    assert "64" not in good and bad.split()[-1] == "64" and "45.0% ± 7.1%" in bad


def test_the_accuracy_by_distance_is_that_of_the_longest_length():
    first = {"variant": "<b>" * 40, "length": 64, "by_distance": {"4": 1.0, "1": 0.5}}
    other = first | {"by_distance": {"2": 0.0}}
    head, line = recall.distances_in_text([first, first | {"length": 32}, other]).splitlines()
    assert "at 64" in head and head.split()[-3:] == ["1", "2", "4"]
    assert line.split() == ["<b>" * 40, "50.0%", "0.0%", "100.0%"]


@pytest.mark.parametrize(
    ("settings", "lengths", "named"),
    [
        (["data=last_write"], "32,33", "33 tokens"),
        (["data=stdlib"], "32", "data=stdlib"),
        (["data=recall", "model.positions=rope", "data.num_pairs=8"], "32,16", "seq_len=16"),
    ],
    ids=["learned", "text", "short"],
)
def test_refused_in_one_line(tmp_path, settings, lengths, named):
    assert run(*tiny(tmp_path / "run", *settings, "steps=1", "eval_every=0")).code == 0
    with pytest.raises(SystemExit, match=f"^recall: .*{named}"):
        recall.main([str(tmp_path / "run"), f"lengths={lengths}", "device=cpu"])
    assert not (tmp_path / "run/recall.json").exists()
