"""Ring attention (Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889),
played in one process.

    python train.py -m attention=tiled,examples.ring_attention:BACKEND seq_len=256
    python -m scripts.verify attention=examples.ring_attention:BACKEND

Each rank holds one chunk of the sequence. It keeps its queries, and the keys and values go round:

    hop          0            1            2
    rank 0    q0 k0 v0     q0 k2 v2     q0 k1 v1
    rank 1    q1 k1 v1     q1 k0 v0     q1 k2 v2
    rank 2    q2 k2 v2     q2 k1 v1     q2 k0 v0

In each hop a rank attends to the keys it holds. The result is a state of the streaming softmax, and
OnlineSoftmax.merge joins it to that of the hops before, as it joins two tiles.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention import AttentionOutput, Backend
from attention.mask import visible_keys
from attention.online_softmax import OnlineSoftmax


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, chunk: int, **mask: Any
) -> AttentionOutput:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)  # (B, H, M, D)
    wide = torch.promote_types(q.dtype, torch.float32)
    visible = visible_keys(q, k, causal=causal, **mask)
    chunks = [slice(start, start + chunk) for start in range(0, k.shape[2], chunk)]

    def attend(q: Tensor, k: Tensor, v: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """out and lse of this rank's queries, after all hops."""
        rows = slice(rank * chunk, rank * chunk + q.shape[2])
        empty = state = OnlineSoftmax.empty(q, dtype=wide)
        for hop in range(len(chunks)):
            keys = chunks[(rank - hop) % len(chunks)]  # of the rank whose keys are here now
            scores = q.to(wide) @ k[:, :, keys].to(wide).mT * scale
            scores = scores.masked_fill(~visible.mask(rows, keys), -torch.inf)
            state = state.merge(empty.update(scores, v[:, :, keys]))
        return state.finalize()

    ranks = enumerate(q.split(chunk, 2))
    # the keys go round again for the backward pass, so a rank keeps no scores
    results = [checkpoint(attend, own, k, v, rank, use_reentrant=False) for rank, own in ranks]
    out, lse = (torch.cat(parts, 2) for parts in zip(*results, strict=True))
    return AttentionOutput(out.to(q.dtype), lse)


BACKEND = Backend(
    "ring_attention",
    ring_attention,
    traceable=False,  # torch.compile would unroll the loops over ranks and hops
    features=frozenset(
        {"gqa", "non_causal", "cross_length", "window", "two_sided_window", "document_ids", "lse"}
    ),
    options={"chunk": 64},
)
