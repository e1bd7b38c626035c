"""The picture of scripts.benchmark: it holds what was measured and nothing else."""

import json
from pathlib import Path

import pytest

from scripts import benchmark

RESULTS = Path(__file__).resolve().parents[2] / "results"
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


ROWS = [row("naive", n, exponent=2) for n in (1024, 2048)] + [oom("naive", 4096, 256.0)]
ROWS += [row("triton", n) for n in (1024, 2048, 4096)]


@pytest.fixture
def panels(monkeypatch, tmp_path):
    """panels(rows): the axes of memory and of time, and the labels of the legend."""
    saved = []
    monkeypatch.setattr(benchmark, "save_figure", lambda figure, path, dpi: saved.append(figure))

    def draw(rows: list[dict], environment: dict = ENVIRONMENT) -> tuple:
        benchmark.draw({"environment": environment, "rows": rows}, tmp_path / "picture.png")
        (figure,) = saved
        return *figure.axes, [text.get_text() for text in figure.legends[0].get_texts()]

    return draw


def points(axes) -> list[list[tuple[float, float]]]:
    return [list(zip(*line.get_data(), strict=True)) for line in axes.lines]


def test_the_panels_hold_what_was_measured(panels):
    memory, time, labels = panels(ROWS)
    for factor in (1, 4):  # forward alone, and both passes
        assert [(n, factor * n**2 / 2**30) for n in (1024, 2048)] in points(memory)
        assert [(n, factor * n / 2**30) for n in (1024, 2048, 4096)] in points(memory)
        expected = [(n, pytest.approx(factor * 1e-6 * n**2)) for n in (1024, 2048, 4096)]
        assert expected in points(time)
    assert [(4096, 256.0)] in points(memory)  # where naive ran out, at what it asked for
    assert labels == ["naive", "triton", "this GPU"]
    for axes, unit in ((memory, "GiB"), (time, "milliseconds")):
        assert unit in axes.get_ylabel() and "sequence length" in axes.get_xlabel()
        assert axes.get_xscale() == axes.get_yscale() == "log"


def test_curves_of_one_attention_are_told_apart(panels):
    rows = [row("naive", 1024, dtype=dtype) for dtype in ("float32", "bfloat16")]
    rows += [row("naive", 1024, head_dim=128)]
    *_, labels = panels(rows, ENVIRONMENT | {"hardware": HARDWARE | {"gpu_memory_gib": None}})
    assert len(labels) == len(set(labels)) == 3


@pytest.mark.parametrize("rows", [[oom("naive", 4096, None)], [{"max_seq_len": 64}]])
def test_nothing_measured_nothing_drawn(rows, tmp_path):
    assert benchmark.draw({"environment": ENVIRONMENT, "rows": rows}, tmp_path / "x.png") is None
    assert not list(tmp_path.iterdir())


def test_the_committed_measurements_can_be_drawn(tmp_path):
    path = benchmark.draw(
        json.loads((RESULTS / "memory_h200.json").read_text()), tmp_path / "x.png"
    )
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_name_is_no_formula(tmp_path):
    """A regression test: matplotlib read mathematics in the name of a user's backend, and drew
    nothing.
    """
    data = {"rows": [row("mine:b$_{$", 1024)], "environment": ENVIRONMENT | {"commit": "$\\frac{$"}}
    assert benchmark.draw(data, tmp_path / "x.png").exists()
