"""What rows of metrics cost: the turns, the arithmetic, and one real run."""

import json
import sys

from config import RunConfig
from lab import looking
from tests.command import TINY, environment


def test_rows_come_in_turns_and_at_the_end_of_each_segment(monkeypatch):
    monkeypatch.setattr(RunConfig, "due", looking.due_in_turns(20))
    config = RunConfig(log_every=5, steps=100)
    logged = [step for step in range(1, 81) if config.due(step).log]
    assert logged == [5, 10, 15, 20, 40, 45, 50, 55, 60, 80]


def test_the_speed_with_rows_is_compared_with_its_neighbour():
    # a second a segment, and half a second more for each row but the last
    rows = [{"step": 20 * i, "tokens": 200 * i, "seconds": 0.0} for i in range(1, 7)]
    for row, before, seconds in zip(rows[1:], rows[:-1], [1.0, 2.0, 1.0, 4.0, 1.0], strict=True):
        row["seconds"] = before["seconds"] + seconds
    found = looking.speeds(rows, 20)
    assert [each["tokens_per_sec"] for each in found] == [100.0, 200.0, 50.0, 200.0]
    assert looking.ratios(found) == [0.5, 0.25]


def test_a_real_run(tmp_path, monkeypatch):
    out = tmp_path / "looking.json"
    settings = [each for each in TINY if not each.startswith(("seq_len", "steps", "batch_size"))]
    own = ["seq_len=32", "tokens=128", "segment=4", "pairs=2", "log_every=2", f"out={out}"]
    monkeypatch.setattr(sys, "argv", ["looking", *settings, *own])
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    looking.main()
    (found,) = json.loads(out.read_text())["runs"]
    assert [each["rows"] for each in found["segments"]] == [2, 1, 2, 1]
    assert len(found["of_pairs"]) == 2 and 0 < found["ratio"] < 10
