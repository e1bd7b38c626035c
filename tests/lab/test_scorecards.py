"""Scorecards: a red cell has its reason, and a card that hangs or dies loses no other cell."""

import json
import os
import time

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attention.interface import Refusal
from conformance.properties import PROPERTIES
from lab import scorecards
from lab.scorecards import CARDS, EXPLAINED, TUTORIAL, Card, Options

WRONG = Card("wrong", "torch", "tests.user_attentions:no_scale", "fa")


def test_every_reason_is_of_a_card_and_a_property():
    names = {card.name for cards in CARDS.values() for card in cards} | {"JAX"}
    assert {name for name, _ in EXPLAINED} <= names
    assert {name for _, name in EXPLAINED} <= PROPERTIES.keys()


@pytest.mark.parametrize("device", CARDS)
def test_a_card_says_how_its_attention_is_called(device):
    for card in CARDS[device]:
        if card.package in ("torch", "transformers", "tilegpt"):
            scorecards.target(card.target, card.dialect, card.changes)


@pytest.mark.parametrize("kernel, takes", [("math", True), ("cudnn", False)])
def test_a_kernel_that_does_not_take_the_inputs_refuses(kernel, takes):
    q = torch.randn(1, 2, 5, 8)
    attend = getattr(scorecards, f"sdpa_{kernel}")
    if takes:
        torch.testing.assert_close(attend(q, q, q), scaled_dot_product_attention(q, q, q))
        return
    with pytest.raises(Refusal, match="CUDNN_ATTENTION does not take"):
        attend(q, q, q)


def test_without_a_gpu_it_says_so(tmp_path):
    with pytest.raises(SystemExit, match="PyTorch sees no GPU"):
        scorecards.main(["device=cuda", f"out={tmp_path / 'cards.json'}"])


def test_a_red_cell_has_a_script_that_shows_it(tmp_path):
    part = tmp_path / "part.json"
    scorecards.measure(WRONG, Options(dtype=["fp32"], cases=1), ["forward", "saved bytes"], 0, part)
    row = json.loads(part.read_text())
    cell = row["red_cells"][0]
    assert cell["property"] == "forward" and cell["why"] is None
    with pytest.raises(AssertionError):
        exec(cell["script"], {})


def hangs(*_):
    time.sleep(60)


def dies(card, options, names, number, part):
    part.write_text(json.dumps(scorecards.nothing(card) | {"green": 3}))
    os._exit(3)


@pytest.mark.parametrize("how, ended", [(hangs, "stopped after 1 s"), (dies, "exit code 3")])
def test_a_card_that_does_not_end_keeps_what_it_wrote(tmp_path, monkeypatch, how, ended):
    monkeypatch.setattr(scorecards, "measure", how)
    seconds = 1 if how is hangs else 60
    options = Options(dtype=["fp32"], seconds=seconds, out=tmp_path / "cards.json")
    names = ["forward", "gradients", "lse", "saved bytes"]
    row = scorecards.row_of(WRONG, options, names, 0, end=time.monotonic() + 60)
    assert ended in row["ended"]
    assert row["unexamined"] == len(names) - (0 if how is hangs else 3)


def test_no_card_begins_past_the_end(tmp_path):
    options = Options(out=tmp_path / "cards.json")
    row = scorecards.row_of(WRONG, options, ["forward"], 0, end=time.monotonic())
    assert row["ended"] == "not begun" and row["green"] == 0


def test_what_is_missing_is_said_and_what_is_not_explained_ends_the_command(
    tmp_path, monkeypatch, capsys
):
    absent = Card("absent", "no-such-package", "nowhere:attend", "fa")
    monkeypatch.setitem(CARDS, "cpu", (WRONG, absent, Card("file", "torch", f"{TUTORIAL}:f")))

    seen = []

    def row_of(card, options, names, number, end):
        (dtype,) = options.dtype
        seen.append((dtype, *names))
        cell = {"dtype": dtype, "property": "forward", "note": "0.5", "why": None}
        ended = "whole" if dtype == "fp32" else "stopped after 9 s"
        row = scorecards.nothing(card) | {"red_cells": [cell], "unexamined": 2, "ended": ended}
        return row | {"red": 1}

    monkeypatch.setattr(scorecards, "row_of", row_of)
    out = tmp_path / "cards.json"
    with pytest.raises(SystemExit) as stopped:
        scorecards.main([f"out={out}", "processes=6"])
    # two processes for each dtype, which share the properties
    assert sorted(name for _, *names in seen for name in names) == sorted([*PROPERTIES] * 3)
    assert len(seen) == len(set(seen)) == 6
    assert "wrong, forward, fp32: 0.5" in str(stopped.value.code)
    assert "absent is left out: no-such-package is not installed" in capsys.readouterr().out
    data = json.loads(out.read_text())
    assert data["left_out"].keys() == {"absent", "file"}
    (row,) = data["cards"]
    assert (row["name"], row["red"], row["unexamined"]) == ("wrong", 6, 12)
    assert row["ended"] == "stopped after 9 s"


def test_the_tutorial_is_a_file_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_VERSION", "none")
    file = tmp_path / "06-fused-attention.py"
    file.write_text("def _attention(q, k, v, causal, scale):\n    return q\n")
    scorecards.load_tutorial(file)
    card = next(card for card in CARDS["cuda"] if card.target.startswith(TUTORIAL))
    found = scorecards.target(card.target, card.dialect, card.changes)
    assert found.dialect.multiple == 128 and found.backend.head_dims == [64, 128]
