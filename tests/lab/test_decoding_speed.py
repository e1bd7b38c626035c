"""`python -m lab.decoding`: everything that it times on a GPU runs here, with little of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab import decoding
from lab.decoding import SHAPES, Shape, in_turns, paged, why_wrong


@pytest.mark.slow
def test_rows_of_a_tiny_machine(tmp_path: Path, monkeypatch):
    out = tmp_path / "decoding.json"
    gpt2 = {"num_layers": 2, "num_heads": 2, "hidden_size": 32, "max_seq_len": 128}
    monkeypatch.setattr(decoding, "GPT2", replace(decoding.GPT2, **gpt2))
    monkeypatch.setattr(decoding, "LAST", 100)
    monkeypatch.setattr(decoding, "REPEATS", 4)
    monkeypatch.setitem(SHAPES, "MQA-small", Shape(2, 8, 1, 64))
    few = ("device=cpu", "rounds=1", "shapes=MQA-small", "batches=2")
    decoding.main([*few, "attention=tiled", f"out={out}"])
    found = json.loads(out.read_text())
    rows = {row["variant"]: row for row in found["attention"]}
    for name in ("triton", "triton, fixed splits", "triton, pages of 16", "triton, pages of 64"):
        assert rows[name]["seconds"] > 0 and rows[name]["terabytes_per_second"] > 0
    assert rows["sdpa flash"]["seconds"] > 0 and "GPU alone" in rows["sdpa cudnn"]["refused"]
    assert rows["triton"]["kv_bytes"] == 2 * 2 * 64 * 128 * 4
    assert [row["same"] for row in found["generation"]] == [1.0, 1.0]
    assert {row["variant"] for row in found["generation"]} == {"tilegpt, tiled", "plain PyTorch"}


def test_half_of_the_shapes_are_larger_than_any_cache():
    large = [name for name, shape in SHAPES.items() if shape.bytes >= 2**30]
    assert {name.partition("-")[0] for name in large} == {"MHA", "GQA", "MQA"}
    assert all(SHAPES[name].bytes < 2**28 for name in SHAPES.keys() - set(large))


def test_a_wrong_result_is_not_timed():
    q, k, v = (torch.randn(2, 2, tokens, 16) for tokens in (1, 40, 40))
    exact = decoding.attention(q, k, v, backend="naive").out
    assert why_wrong(exact, q, k, v) is None
    assert "is more than" in why_wrong(exact * 1.001, q, k, v)


def test_pages_hold_every_key_once():
    k, v = torch.randn(2, 3, 32, 4), torch.randn(2, 3, 32, 4)
    k_pages, v_pages, table = paged(k, v, 8)
    for whole, pages in ((k, k_pages), (v, v_pages)):
        found = pages[table.long()].flatten(1, 2).transpose(1, 2)
        assert torch.equal(found, whole)


def test_variants_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    rows = in_turns(calls, lambda call: {"n": len(order), "called": call()} and {"n": 1.0}, 3)
    assert order == list("ababab")
    assert rows["a"] == {"n": 1.0, "least": 1.0, "most": 1.0, "rounds": 3}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("shapes=MLA", "shapes=MLA is not one of: none, MHA"),
        ("rounds=0", "rounds=0 must be at least 1"),
    ],
)
def test_refused_in_one_line(argument, words):
    with pytest.raises(SystemExit, match=words):
        decoding.main([argument])
