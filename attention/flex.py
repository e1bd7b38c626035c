"""PyTorch's FlexAttention as a trusted baseline: masks and score changes as small functions,
compiled into one kernel on a GPU.

Without a GPU, PyTorch runs it uncompiled and materialises the scores: correct, but no longer linear
in memory.
"""

from functools import cache, lru_cache, reduce
from operator import and_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from attention.interface import (
    FEATURES,
    AttentionOutput,
    Backend,
    ScoreMod,
    needs_gradient,
    statistics_dtype,
)
from attention.mask import VisibleKeys, Window, visible_keys


@cache
def compiled(function):
    # shapes are fixed until one changes (a cache that grows while sampling), then symbolic. Masks,
    # score changes and gradients have separate graphs. These exceed PyTorch's default limit, past
    # which it silently runs uncompiled, or with fullgraph stops
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    torch._dynamo.config.accumulated_recompile_limit = max(
        torch._dynamo.config.accumulated_recompile_limit, 1024
    )
    # keep numbers constant: a second softcap would become an argument of the graph, which a
    # kernel's score change cannot read
    return torch._dynamo.config.patch(specialize_float=True)(
        torch.compile(function, fullgraph=True)
    )


def quick(function, device: torch.device):
    """The function, compiled on a GPU unless a larger graph is being traced."""
    return (
        compiled(function)
        if device.type == "cuda" and not torch.compiler.is_compiling()
        else function
    )


def block_mask_of(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    window: Window,
    document_ids: Tensor | None = None,
    **wide: Tensor | None,
) -> BlockMask | None:
    """The mask of attention/mask.py, or None where every query sees every key. It compares
    positions, as users of FlexAttention write it. With a two-sided window, key_lengths or
    cu_seqlens it uses intervals.
    """
    if isinstance(window, tuple) or any(each is not None for each in wide.values()):
        mask = {"window": window, "document_ids": document_ids, **wide}
        return interval_mask(q, k, visible_keys(q, k, causal=causal, **mask))
    if not causal and document_ids is None:
        return None
    num_queries, num_keys, batch, documents = q.shape[2], k.shape[2], None, None
    if document_ids is not None:  # numbered, because an id may return in another document
        batch, documents = (
            q.shape[0],
            F.pad((document_ids[:, 1:] != document_ids[:, :-1]).cumsum(1), (1, 0)),
        )

    def mask_mod(b, h, i, j):
        i = i + num_keys - num_queries
        masks = []
        if causal:
            masks.append(i >= j)
        if window is not None:
            masks.append(i - j < window)
        if documents is not None:
            masks.append(documents[b, i] == documents[b, j])
        return reduce(and_, masks)

    return quick(create_block_mask, q.device)(
        mask_mod, batch, None, num_queries, num_keys, device=q.device
    )


def interval_mask(q: Tensor, k: Tensor, visible: VisibleKeys) -> BlockMask:
    lo, hi = visible.lo, visible.hi
    batch = len(lo) if len(lo) > 1 else None

    def mask_mod(b, h, i, j):
        b = 0 if batch is None else b
        return (j >= lo[b, i]) & (j < hi[b, i])

    return quick(create_block_mask, q.device)(
        mask_mod, batch, None, q.shape[2], k.shape[2], device=q.device
    )


@lru_cache(maxsize=16)
def standing_mask(
    num_queries: int, num_keys: int, device: torch.device, *, causal: bool, window: Window
) -> BlockMask | None:
    """The mask without documents, cached for all layers and steps: making it takes longer than
    attention to a few thousand tokens.
    """
    with torch.inference_mode(False), torch.no_grad():
        q, k = (torch.empty(1, 1, length, 0, device=device) for length in (num_queries, num_keys))
        return block_mask_of(q, k, causal=causal, window=window)


def within_reach(x: Tensor) -> Tensor:
    """x, copied if its offsets exceed 32 bits: FlexAttention's kernels count in 32 bits and would
    read outside its memory.
    """
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x if last < 2**31 else x.contiguous()


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    window: Window = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    **of_batch: Tensor | None,
) -> AttentionOutput:
    """q (B, H, N, D); k (B, H_kv, M, D); v (B, H_kv, M, D_v). of_batch: document_ids, key_lengths
    and cu_seqlens.
    """
    q, k, v = map(within_reach, (q, k, v))
    num_queries, num_keys = q.shape[2], k.shape[2]
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.to(statistics_dtype(q))

    def change(score, b, h, i, j):
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if alibi_slopes is not None:
            score = score - alibi_slopes[h] * (i + num_keys - num_queries - j)
        if score_mod is not None:
            score, _ = score_mod(score, b, h, i + num_keys - num_queries, j)
        return score

    if torch.compiler.is_compiling() or any(each is not None for each in of_batch.values()):
        block_mask = block_mask_of(q, k, causal=causal, window=window, **of_batch)
    else:
        block_mask = standing_mask(num_queries, num_keys, q.device, causal=causal, window=window)
    # FlexAttention's kernel for few queries does not compile for every grouping of heads
    options: Any = {"FORCE_USE_FLEX_ATTENTION": True} if q.device.type == "cuda" else None
    out, aux = quick(flex_attention, q.device)(
        q,
        k,
        v,
        score_mod=None
        if softcap is None and alibi_slopes is None and score_mod is None
        else change,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
        kernel_options=options,
    )
    return AttentionOutput(out, aux.lse)


def refusals(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> list[str]:
    if q.device.type == "cpu" and needs_gradient(q, k, v):
        return [
            "PyTorch's FlexAttention has no backward pass on the CPU; train there with "
            "attention=tiled or attention=sdpa"
        ]
    return []


FLEX = Backend(
    "flex",
    flex,
    features=FEATURES - {"max_score", "sinks"},
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    head_dims=range(16, 257),
    requirements=refusals,
)
