"""`python -m scripts.profile`: a table with the ranges of a step, and a trace."""

import gzip
import json
import re

import pytest

from scripts import profile
from tests.command import cache_folder

SHORT = ("model.num_layers=2", "model.num_heads=2", "model.hidden_size=32", "steps=2", "warmup=1")
RANGES = {"step", "data", "forward", "backward", "optimizer"}


def rows_of(output: str) -> list[list[str]]:
    """The cells of the table's rows, in order."""
    _, _, rows, *_ = re.split(r"^-[- ]+\n", output, flags=re.MULTILINE)
    return [re.split(r" {2,}", line.strip()) for line in rows.splitlines()]


def test_the_table_and_the_trace_have_the_ranges_of_a_step(typed, tmp_path):
    settings = (*SHORT, "device=cpu", "seq_len=32", "batch_size=4", "tokens_per_step=256")
    output = typed("profile", *settings, "attention=naive", f"out={tmp_path / 'out'}").out
    names = [row[0] for row in rows_of(output)]
    assert names[0] == "step" and len(names) == profile.ROWS
    assert {"forward", "backward"} <= {*names}
    shares = [float(row[3].rstrip("%")) for row in rows_of(output)]
    assert shares[0] == 100 and shares == sorted(shares, reverse=True)
    assert str(tmp_path / "out/trace.json.gz") in output
    trace = json.loads(gzip.decompress((tmp_path / "out/trace.json.gz").read_bytes()))
    calls = [event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"]
    assert set(calls) >= RANGES and calls.count("step") == 2
    # two steps of two passes
    assert calls.count("forward") == 4


@pytest.mark.gpu
def test_a_gpu_s_rows_are_sorted_by_its_own_time(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TILEGPT_CACHE", cache_folder())
    size = ("device=cuda", "seq_len=1024", "batch_size=8")
    profile.main([*SHORT, *size, "attention=triton", f"out={tmp_path / 'out'}"])
    output = capsys.readouterr().out
    names = [row[0] for row in rows_of(output)]
    assert "Self CUDA" in output and len(names) == profile.ROWS
    assert {"step", "forward"} <= {*names}
