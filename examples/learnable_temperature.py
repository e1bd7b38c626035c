"""Softmax attention with a learned temperature per head: the shortest attention with parameters.

    python train.py attention=examples.learnable_temperature:BACKEND

Henry et al. 2020 (arXiv:2010.04245) learn such a factor for the scores.

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


class LearnableTemperature(nn.Module):
    """softmax(temperature * q k^T * scale) v, with one temperature per head."""

    def __init__(self, *, num_heads: int, **_: int):
        super().__init__()
        self.log_temperature = nn.Parameter(torch.zeros(num_heads))  # (H,)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, **mask: Any
    ) -> AttentionOutput:
        temperature = self.log_temperature.exp()[:, None, None]
        # parameters are float32; q, k and v must share one dtype, such as bfloat16
        q = (q * temperature).to(q.dtype)
        return attention(q, k, v, backend=softmax_for(q), scale=scale, **mask)


BACKEND = Backend(
    "learnable_temperature",
    module=LearnableTemperature,
    exact=False,
    features=frozenset({"gqa", "non_causal", "cross_length", "window", "document_ids"}),
)
