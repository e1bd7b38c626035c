"""The specification: softmax(Q K^T * scale + mask) V, as in the papers.

It materialises every score and takes any device and dtype. In float64 it is the oracle for every
other backend.
"""

from typing import Any

import torch
from torch import Tensor

from attention.interface import (
    FEATURES,
    AttentionOutput,
    Backend,
    Output,
    ScoredOutput,
    ScoreMod,
    statistics_dtype,
)
from attention.mask import visible_keys


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    return_max_score: bool | Tensor = False,
    **mask: Any,
) -> Output:
    """Order of the steps: scale, softcap, bias or score_mod, mask, softmax. A row with only -inf
    gives out = 0 and lse = -inf. `mask` is what attention.mask.intervals() takes.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)  # (B, H, M, D)
    dtype = statistics_dtype(q)
    scores = q.to(dtype) @ k.to(dtype).mT * scale  # (B, H, N, M)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2], device=q.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(dtype)[:, None, None] * (i - j)
    if score_mod is not None:
        b, h = (torch.arange(size, device=q.device) for size in q.shape[:2])
        scores = score_mod(scores, b[:, None, None, None], h[:, None, None], i, j)[0].to(dtype)
    visible = visible_keys(q, k, causal=causal, **mask).mask()
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)  # (B, H, N)
    # softmax of a row of -inf is NaN, and so is its gradient: such a row attends to nothing
    no_key = (scores == -torch.inf).all(-1, keepdim=True)
    p = scores.masked_fill(no_key, 0.0).softmax(-1).masked_fill(no_key, 0.0)
    out = p.to(v.dtype) @ v
    # a tensor comes from graphs of torch.compile, which always compute max_score
    if return_max_score is not False:
        return ScoredOutput(out, lse, scores.detach().amax((-1, -2)))
    return AttentionOutput(out, lse)


NAIVE = Backend(
    "naive",
    naive_attention,
    features=FEATURES - {"sinks"},
    breaks=frozenset({"saved bytes", "largest tensor"}),
)
