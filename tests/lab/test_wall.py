"""Speed by the wall clock: the arithmetic, and two real runs."""

import json
import sys
from types import SimpleNamespace

import pytest

from lab import wall
from tests import forked
from tests.command import TINY, environment


def run(steps: int, seconds: float) -> dict:
    return {"steps": steps, "tokens": 100 * steps, "seconds": seconds}


def test_start_up_is_no_part_of_the_slope():
    found = wall.slope([run(20, 50.0), run(120, 60.0), run(220, 70.0)])
    assert found["tokens_per_sec"] == pytest.approx(1000.0) and found["of_two"] == pytest.approx(
        [1000.0, 1000.0]
    )
    found = wall.slope([run(20, 50.0), run(120, 58.0), run(220, 70.0)])
    assert found["of_two"] == pytest.approx([10_000 / 12, 10_000 / 8])


def test_rows_are_timed_from_the_second_after_the_start():
    arrivals = {0: 1.0, 10: 30.0, 20: 31.0, 30: 33.0, 40: 35.0}
    assert wall.by_arrival(run(40, 50.0) | {"arrivals": arrivals}) == pytest.approx(500.0)


@pytest.mark.slow
def test_two_lengths_of_a_real_run(tmp_path, monkeypatch):
    out = tmp_path / "wall.json"
    settings = [each for each in TINY if not each.startswith(("seq_len", "steps", "batch_size"))]
    own = ["seq_len=32", "tokens=128", "steps=4,8", f"out={out}"]
    monkeypatch.setattr(sys, "argv", ["wall", *settings, *own])
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(wall, "subprocess", SimpleNamespace(Popen=forked.popen))
    wall.main()
    (found,) = json.loads(out.read_text())["runs"]
    assert [each["steps"] for each in found["each"]] == [4, 8] and found["seq_len"] == 32
    assert list(found["each"][1]["arrivals"]) == [str(step) for step in range(9)]
    assert found["by_arrival"] > 0 and found["each"][0]["seconds"] > max(
        found["each"][0]["arrivals"].values()
    )


def test_one_length_has_no_slope(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["wall", "steps=20"])
    with pytest.raises(SystemExit, match="wall: steps=20 must be two different lengths"):
        wall.main()
