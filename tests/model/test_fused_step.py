"""A decoding step in few kernels gives what GPT.forward gives, which is its specification.

On a CPU the kernels run in Triton's interpreter.
"""

import pytest
import torch
from torch import Tensor

import model.decoding
import model.fused_step
from attention import get_backend
from config import AttentionConfig
from model import GPT, KVCache, generate
from model.decoding import DecodingStep
from model.fused_step import MOST_SEQUENCES, fits_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARED = {"hidden_size": 48, "num_layers": 2, "max_seq_len": 32}
VARIANTS = {
    "gpt2": {},
    "gpt2-no-bias": {"bias": False, "tie_embeddings": False},
    "modern": {"modern": True},
    "rope-layernorm-grouped": {"positions": "rope", "num_kv_heads": 1},
    "qk-norm-rmsnorm": {"qk_norm": True, "norm": "rmsnorm", "num_heads": 3},
    "swiglu-bias": {"activation": "swiglu"},
}


@pytest.fixture
def fused(monkeypatch):
    """Steps take the kernels wherever these can run, and note it."""
    calls = []

    def has_kernels(*arguments) -> bool:
        calls.append(fits_kernels(*arguments))
        return calls[-1]

    monkeypatch.setattr(model.decoding, "has_kernels", has_kernels)
    return calls


def perturbed(gpt: GPT) -> GPT:
    """With gains and biases that nobody could leave out unnoticed."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in gpt.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return gpt.to(DEVICE).eval()


def step_after(gpt: GPT, tokens: Tensor) -> Tensor:
    """The logits (B, 2, vocab_size) after the last two tokens, each read in a step."""
    cache = KVCache(gpt.config.num_layers, max_len=tokens.shape[1] + 3)
    gpt(tokens[:, :-2], cache=cache)
    step = DecodingStep(gpt, cache, len(tokens))
    return torch.stack([step(tokens[:, i : i + 1]).logits.clone() for i in (-2, tokens.shape[1] - 1)], 1)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_equals_one_pass(build_gpt, modern, random_tokens, fused, variant, batch_size):
    fields = dict(VARIANTS[variant])
    fields = SHARED | (modern if fields.pop("modern", False) else {}) | fields
    gpt, tokens = perturbed(build_gpt("tiled", **fields)), random_tokens(batch_size, 9).to(DEVICE)
    with torch.no_grad():
        expected = gpt(tokens).logits[:, -2:]
        torch.testing.assert_close(step_after(gpt, tokens), expected, rtol=1e-4, atol=1e-4)
    assert all(fused) and fused
