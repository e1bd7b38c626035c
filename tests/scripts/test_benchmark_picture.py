"""The picture of scripts.benchmark: it holds what was measured and nothing else."""

import json
import re
from html import unescape

import pytest

from scripts import benchmark

TITLES = [title for _, title in benchmark.PANELS.values()]
HARDWARE = {"cpu": "some CPU", "torch_threads": 1, "gpu": "NVIDIA H200", "gpu_memory_gib": 139.8}
ENVIRONMENT = {"hardware": HARDWARE, "versions": {"torch": "2.11"}, "commit": "c0ffee0"}
SHAPE = {"head_dim": 64, "batch": 1, "heads": 16, "causal": True, "dtype": "bfloat16"}


def row(attention: str, seq_len: int, *, exponent: int = 1, **fields) -> dict:
    found = {"attention": attention, "seq_len": seq_len} | SHAPE
    for name, factor in (("forward", 1), ("training", 4)):
        found[f"{name}_bytes"] = factor * seq_len**exponent
        found[f"{name}_seconds"] = factor * 1e-9 * seq_len**2
    return found | fields


def oom(attention: str, seq_len: int, asked_gib: float | None) -> dict:
    ended = {"asked_gib": asked_gib, "message": "no more"}
    return {"attention": attention, "seq_len": seq_len, "oom": ended} | SHAPE


def test_the_picture_holds_what_was_measured(tmp_path):
    """A cross at what an attention asked for, and a curve for each attention."""
    rows = [row("mine:b$_{$<b>", n, exponent=2) for n in (1024, 2048)]
    rows += [oom("mine:b$_{$<b>", 4096, 256.0), row("triton", 1024)]
    data = {"environment": ENVIRONMENT, "rows": rows}
    before = json.dumps(data)
    benchmark.draw(data, tmp_path / "picture.svg")
    assert json.dumps(data) == before
    shown = unescape((tmp_path / "picture.svg").read_text())
    marks = re.findall(r'aria-label="([^"]*attention: [^"]*)"', shown)
    assert len({re.search("attention: (.*)", mark)[1] for mark in marks}) == 2
    assert sum("4,096" in mark and "asked_gib: 256" in mark for mark in marks) == 1
    for value in ("0.00390625", "0.015625", "4.194304", "16.777216"):  # both passes and forward
        assert any(f"2,048; {unit}: {value};" in mark for mark in marks for unit in TITLES), value
    assert all(words in shown for words in ("GiB", "milliseconds", "NVIDIA H200", "c0ffee0"))


@pytest.mark.parametrize("rows", [[oom("naive", 4096, None)], [{"max_seq_len": 64}]])
def test_nothing_measured_nothing_drawn(rows, tmp_path):
    benchmark.draw({"environment": ENVIRONMENT, "rows": rows}, tmp_path / "x.png")
    assert not list(tmp_path.iterdir())
