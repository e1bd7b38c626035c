"""Softmax attention with a learned sink per head: a query may attend to nothing (gpt-oss, 2025).

    python train.py -m attention=tiled,examples.learnable_sinks:BACKEND seed=0,1

A sink is one more logit in the softmax's denominator. The log-sum-exp of the scores is enough to
add it afterwards, whatever kernel computed them:

    out * exp(lse) / (exp(lse) + exp(sink)) = out * sigmoid(lse - sink)

attention.sinks=true does the same for any attention and belongs to the model; this file shows how
to write such a thing yourself.

Dimensions: B batch, H query heads, N queries, D head dim.
"""

from typing import Any

import torch
from torch import Tensor, nn

from attention import AttentionOutput, Backend, attention, get_backend

TILED, TRITON = get_backend("tiled"), get_backend("triton")


def softmax_for(q: Tensor) -> Backend:
    """The Triton kernels on a GPU; they take no float64."""
    return TRITON if q.is_cuda and q.dtype != torch.float64 else TILED


class LearnableSinks(nn.Module):
    """One sink per head of one layer."""

    def __init__(self, *, num_heads: int, **_: int):
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(num_heads))  # (H,)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, **mask: Any
    ) -> AttentionOutput:
        out, lse = attention(q, k, v, backend=softmax_for(q), scale=scale, **mask)
        assert lse is not None  # (B, H, N), -inf for a query without a key
        share = torch.sigmoid(lse - self.sinks[:, None])  # of the keys; the sink has the rest
        return AttentionOutput((out * share.unsqueeze(-1)).to(q.dtype))


BACKEND = Backend(
    "learnable_sinks",
    module=LearnableSinks,
    exact=False,
    features=frozenset({"gqa", "non_causal", "cross_length", "window", "document_ids"}),
)
