"""Each command of lab/ starts: its help has a line to type, and the smallest run ends."""

import importlib
import json
import re
from dataclasses import replace

import pytest

from lab import condense_runs, decoding, headline
from tests.command import ROOT, run, tiny

COMMANDS = sorted(file.stem for file in (ROOT / "lab").glob("*.py"))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_a_line_to_type(name, capsys):
    importlib.import_module(f"lab.{name}").main(["--help"])
    assert re.search(rf"^    (python|torchrun .*) -m lab\.{name}\b", capsys.readouterr().out, re.M)


def test_runs_are_condensed_to_their_curves(tmp_path):
    assert run(*tiny(tmp_path / "run")).code == 0
    condense_runs.main([str(tmp_path), f"out={tmp_path}/runs.json"])
    (found,) = json.loads((tmp_path / "runs.json").read_text())["runs"]
    curves = found["curves"]
    assert found["status"] == "completed" and "train/loss" in curves
    assert {len(curve) for curve in curves.values()} == {len(curves["step"])}


def test_tokens_per_second_of_two_models_that_agree(tmp_path, monkeypatch):
    gpt2 = {"num_layers": 2, "num_heads": 2, "hidden_size": 32, "max_seq_len": 64}
    monkeypatch.setattr(decoding, "GPT2", replace(decoding.GPT2, **gpt2))
    monkeypatch.setattr(decoding, "FIRST", 4)
    monkeypatch.setattr(decoding, "LAST", 32)
    arguments = ["device=cpu", "dtype=fp32", "rounds=3", "batches=2", "attention=tiled"]
    decoding.main([*arguments, f"out={tmp_path}/found.json"])
    rows = json.loads((tmp_path / "found.json").read_text())["generation"]
    assert [row["variant"] for row in rows] == ["tilegpt, tiled", "plain PyTorch"]
    for row in rows:
        assert row["least"] <= row["tokens_per_second"] <= row["most"]
        assert row["rounds"] == 3 and row["same"] == 1.0


def test_the_headline_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(headline, "FOLDER", tmp_path)
    headline.main([])
    assert all((tmp_path / f"headline{x}.png").stat().st_size > 2e4 for x in ("", "_dark"))
