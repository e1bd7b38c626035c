"""`python -m lab.ring_error`: a ring beside one process."""

import json
from pathlib import Path

import pytest

from lab import ring_error


def test_a_ring_of_tiles_is_as_exact_as_one_process(tmp_path: Path, monkeypatch):
    out = tmp_path / "ring_error.json"
    sizes = ("seq_len=64", "heads=4", "kv_heads=2")
    monkeypatch.setattr(ring_error, "HEAD_DIMS", (16,))
    monkeypatch.setattr(ring_error, "RANKS", (1, 4))
    tiles = "attention=tiled:block_q=16,block_kv=16"
    ring_error.main([tiles, *sizes, "dtype=bf16", "device=cpu", f"out={out}"])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["ring"]["1"] == row["alone"]  # to the bit
    assert row["ring"]["4"] != row["alone"]
    assert 1e-3 < row["alone"]["dk"] < 1e-2  # bfloat16
    assert all(row["most"][name] <= 1.05 for name in ("out", "dq", "dk", "dv"))


def test_an_attention_without_a_ring_is_refused():
    with pytest.raises(SystemExit, match="attention=sdpa does not run on a ring"):
        ring_error.main(["attention=sdpa"])
