"""`python -m scripts.recall`: what it counts, and what it prints."""

import json

from scripts import recall
from tests.command import run, summary, tiny


def test_a_run_is_asked_at_its_own_length_and_at_others(tmp_path, capsys):
    task = ("data=needle", "model.positions=rope", "eval_sequences=40", "seed=3")
    assert run(*tiny(tmp_path / "run", *task, "attention.window=4")).code == 0
    recall.main([str(tmp_path / "run"), "lengths=64,32,8", "device=cpu"])
    found = json.loads((tmp_path / "run/recall.json").read_text())
    assert [row["length"] for row in found["rows"]] == [8, 32, 64]
    assert found["rows"][1]["accuracy"] == summary(tmp_path / "run")["val/accuracy"]
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
