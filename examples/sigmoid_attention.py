"""Sigmoid attention (Ramapuram et al. 2024, "Theory, Analysis, and Best Practices for Sigmoid
Self-Attention", arXiv:2409.04431).

    python train.py -m attention=tiled,examples.sigmoid_attention:BACKEND seed=0,1

Each weight is a sigmoid of its own score, so a row's weights need not sum to one:

    out = sigmoid(q k^T * scale + bias) v        with bias = -log(max_seq_len)

The bias makes a row's weights sum to about one at the start. It depends on max_seq_len, not on the
call, so a token has the same weights in a prompt and after it.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attention import AttentionOutput, Backend


class SigmoidAttention(nn.Module):
    """No parameters: the module exists to receive max_seq_len."""

    def __init__(self, *, max_seq_len: int, **_: int):
        super().__init__()
        self.bias = -math.log(max_seq_len)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, chunk: int
    ) -> AttentionOutput:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        past = k.shape[2] - q.shape[2]  # the last query sees the last key

        def block(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
            wide = torch.promote_types(q.dtype, torch.float32)
            scores = q.to(wide) @ k.to(wide).mT * scale + self.bias  # (B, H, block, M)
            if causal:
                rows = torch.arange(start, start + q.shape[2], device=q.device) + past
                hidden = torch.arange(k.shape[2], device=q.device) > rows[:, None]
                scores = scores.masked_fill(hidden, -torch.inf)
            return scores.sigmoid().to(v.dtype) @ v

        blocks, start = [], 0
        # `chunk` queries at a time, so that only their scores are in memory
        for each in q.split(chunk, 2):
            # keys after the last query of a block have no weight
            seen = max(0, start + each.shape[2] + past) if causal else k.shape[2]
            inputs = each, k[:, :, :seen], v[:, :, :seen], start
            # the backward pass recomputes each block's scores, so memory is linear in N
            blocks.append(checkpoint(block, *inputs, use_reentrant=False))
            start += each.shape[2]
        return AttentionOutput(torch.cat(blocks, 2))


def sigmoid_attention(
    q: Tensor, k: Tensor, v: Tensor, *, module: SigmoidAttention, causal: bool, scale: float,
    chunk: int,
) -> AttentionOutput:  # fmt: skip
    """The same written directly: the float64 reference of `scripts.verify`."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    weights = (q @ k.mT * scale + module.bias).sigmoid()
    if causal:
        weights = weights.tril(k.shape[2] - q.shape[2])
    return AttentionOutput(weights @ v)


BACKEND = Backend(
    "sigmoid_attention",
    module=SigmoidAttention,
    reference=sigmoid_attention,
    exact=False,
    traceable=False,  # torch.compile would unroll the loop over blocks
    features=frozenset({"gqa", "non_causal", "cross_length"}),
    options={"chunk": 128},
)
