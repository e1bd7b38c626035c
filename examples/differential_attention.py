"""Differential attention (Ye et al. 2024, "Differential Transformer", arXiv:2410.05258).

    python train.py -m attention=tiled,examples.differential_attention:BACKEND seed=0,1

Each head computes two softmax maps, from the two halves of its q and k, and subtracts them, so that
weight in both cancels:

    out = (1 - lambda_init) * RMSNorm((softmax(q1 k1^T) - lambda * softmax(q2 k2^T)) v)
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init

The paper doubles the width of the heads and halves their number; here model.num_heads sets both.

Dimensions: B batch, H query heads, N queries, D head dim.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import AttentionOutput, Backend, attention, get_backend

TILED, TRITON = get_backend("tiled"), get_backend("triton")


def softmax_for(q: Tensor) -> Backend:
    """The Triton kernels on a GPU; they take no float64."""
    return TRITON if q.is_cuda and q.dtype != torch.float64 else TILED


class DifferentialAttention(nn.Module):
    """The lambdas and the gain of the norm of one layer, shared by its heads."""

    def __init__(self, *, head_dim: int, layer: int, **_: int):
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"differential attention halves the head dim, and {head_dim=} is odd")
        # deeper layers subtract more; the paper counts layers from 1
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, nn.Parameter(0.1 * torch.randn(head_dim // 2)))  # (D/2,)
        self.gain = nn.Parameter(torch.ones(head_dim))  # (D,)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, **mask: Any
    ) -> AttentionOutput:
        half, wide = q.shape[-1] // 2, torch.promote_types(q.dtype, torch.float32)
        softmax = softmax_for(q)
        first, second = (
            # zeros in one half of q leave only the products of the other half
            attention(x, k, v, backend=softmax, scale=scale * math.sqrt(2), **mask).out.to(wide)
            for x in (F.pad(q[..., :half], (0, half)), F.pad(q[..., half:], (half, 0)))
        )
        weight = (
            (self.lambda_q1 @ self.lambda_k1).exp()
            - (self.lambda_q2 @ self.lambda_k2).exp()
            + self.lambda_init
        )
        out = F.rms_norm(first - weight * second, (2 * half,), self.gain, eps=1e-5)
        return AttentionOutput(((1 - self.lambda_init) * out).to(q.dtype))


BACKEND = Backend(
    "differential_attention",
    module=DifferentialAttention,
    exact=False,
    features=frozenset({"gqa", "non_causal", "cross_length", "window", "document_ids"}),
)
