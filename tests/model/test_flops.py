"""FLOPs of a step, against PyTorch's own count of the matrix products in it."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from attention import AttentionOutput, Backend
from training.loop.flops import flops_per_token


def prefixes(q, k, v, *, causal, scale):
    """Exactly what a causal mask allows: query i meets the i + 1 keys of its prefix."""
    assert causal
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    rows = [
        F.softmax(q[:, :, i : i + 1] @ k[:, :, : i + 1].transpose(-1, -2) * scale, dim=-1)
        @ v[:, :, : i + 1]
        for i in range(q.shape[2])
    ]
    return AttentionOutput(torch.cat(rows, dim=2))


PREFIXES = Backend("prefixes", prefixes, features=frozenset({"gqa"}))


@pytest.mark.parametrize(
    ("variant", "tied", "causal"),
    [("gpt2", True, False), ("gpt2", False, True), ("modern", False, True)],
)
def test_flops_are_those_of_the_matrix_products(build_gpt, random_tokens, variant, tied, causal):
    model = build_gpt("naive", variant=variant, tie_embeddings=tied)
    tokens = random_tokens(3, 20)
    expected = model(tokens, tokens).loss
    # a step in which attention changes hands costs the same: FLOPs are the model's, not the
    # kernel's
    model.backend = PREFIXES if causal else model.backend
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens, tokens).loss
        loss.backward()
    torch.testing.assert_close(loss, expected)
    # PaLM's N has biases and gains too, which no matrix product touches
    vectors = sum(p.numel() for p in model.parameters() if p.dim() < 2)
    per_token = flops_per_token(model, 20, causal=causal) - 6 * vectors
    assert counter.get_total_flops() == 60 * per_token
