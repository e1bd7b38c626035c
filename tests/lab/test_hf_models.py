"""`python -m lab.hf_models`: a whole model of transformers beside eager attention."""

import json

import pytest
import torch

from lab import hf_models

pytest.importorskip("transformers")

import attention.hf  # noqa: E402, F401 - it imports transformers

TILED, BROKEN = (f"{name}:block_q=8,block_kv=8" for name in ("tiled", "no_rescale"))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(hf_models, "HIDDEN", 32)
    monkeypatch.setattr(hf_models, "VOCAB_SIZE", 61)


@pytest.fixture
def data(tmp_path):
    out = tmp_path / "hf_models.json"
    sizes = ("dtype=fp32", "seeds=1", "length=24", "new_tokens=4", "device=cpu")
    hf_models.main([f"attention={TILED},{BROKEN},sdpa", *sizes, f"out={out}"])
    return json.loads(out.read_text())


def test_tiles_are_as_exact_as_eager_and_a_defect_is_not(data):
    kinds = list(data["models"])
    names = ["eager", TILED, BROKEN, "sdpa"]
    rows = {(row["model"], row["attention"]): row for row in data["errors"]}
    assert list(rows) == [(kind, name) for kind in kinds for name in names]
    refused = [key for key, row in rows.items() if "refused" in row]
    assert refused == [("gpt_oss", "sdpa")]
    for kind in kinds:
        for figure in ("logits", "gradients"):
            eager, tiled, broken = (rows[kind, name] for name in names[:3])
            assert 0 < eager[figure] < 1e-4
            assert tiled[f"{figure}_ratio"] == tiled[figure] / eager[figure] < 3
            assert broken[f"{figure}_ratio"] > 100

    tokens = {(row["model"], row["cache"], row["attention"]): row for row in data["tokens"]}
    assert len(tokens) == len(data["tokens"]) == len(kinds) * 2 * 3
    assert all(row["equal"] == row["tokens"] == 12 for key, row in tokens.items() if TILED in key)
    differing = [row for key, row in tokens.items() if BROKEN in key and row["differences"]]
    assert differing
    for row in differing:
        (first, *_) = row["differences"]
        assert row["equal"] < 12 and first["step"] < 4 and first["gap"] >= row["least_gap"] > 0


def test_the_reference_is_float64_throughout():
    """transformers computes norms and softmax of a float64 model in float32."""
    options = hf_models.Options(length=24)
    model = hf_models.build("llama", hf_models.models(options)["llama"], seed=0)
    tokens = torch.randint(61, (1, 24))
    eager = hf_models.exact(model, tokens)
    model.set_attn_implementation("tilegpt_naive")
    for ours, theirs in zip(hf_models.exact(model, tokens), eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
