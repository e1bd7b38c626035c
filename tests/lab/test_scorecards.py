"""Scorecards: a red cell has its reason, and one without ends the command after its file."""

import json

import pytest

from conformance.properties import PROPERTIES
from lab import scorecards
from lab.scorecards import CARDS, EXPLAINED, Card


def test_every_reason_is_of_a_card_and_a_property():
    names = {card.name for card in CARDS} | {"JAX"}
    assert {name for name, _ in EXPLAINED} <= names
    assert {name for _, name in EXPLAINED} <= PROPERTIES.keys()


def test_a_red_cell_without_a_reason_ends_the_command(tmp_path, monkeypatch, capsys):
    card = Card("wrong", "torch", "tests.user_attentions:no_scale", "fa")
    monkeypatch.setattr(scorecards, "CARDS", (card,))
    wanted = {name: PROPERTIES[name] for name in ("forward", "saved bytes")}
    monkeypatch.setattr(scorecards, "properties_of", lambda subject: wanted)
    out = tmp_path / "cards.json"
    with pytest.raises(SystemExit) as stopped:
        scorecards.main([f"out={out}", "dtype=fp32"])
    assert "wrong, forward, fp32: out of" in str(stopped.value.code)
    (row,) = json.loads(out.read_text())["cards"]
    assert row["red"] == len(row["red_cells"]) >= 1
    assert row["red_cells"][0]["why"] is None and 0 < row["red_cells"][0]["lines_of_script"] < 40
