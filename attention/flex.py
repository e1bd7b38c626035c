"""PyTorch's FlexAttention as a trusted baseline: masks and score changes as small functions,
compiled into one kernel on a GPU.

Without a GPU, PyTorch runs it uncompiled and materialises the scores: correct, but no longer linear
in memory.
"""

from functools import cache, lru_cache
from typing import Any

import torch
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
)
from attention.mask import Window, intervals


@cache
def compiled(function):
    # shapes are fixed until one changes (a cache that grows while sampling), then symbolic. Masks,
    # score changes and gradients have separate graphs. These exceed PyTorch's default limit, past
    # which it silently runs uncompiled, or with fullgraph stops
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 256)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 1024)
    # keep numbers constant: a second softcap would become an argument of the graph, which a
    # kernel's score change cannot read
    return config.patch(specialize_float=True)(torch.compile(function, fullgraph=True))


def quick(function, device: torch.device):
    """The function, compiled on a GPU unless a larger graph is being traced."""
    on_its_own = device.type == "cuda" and not torch.compiler.is_compiling()
    return compiled(function) if on_its_own else function


def block_mask_of(
    num_queries: int, num_keys: int, device: torch.device, *, causal: bool, **mask: Any
) -> BlockMask | None:
    """The intervals of attention/mask.py, or None where every query sees every key. mask: as for
    intervals().
    """
    if not causal and all(each is None for each in mask.values()):
        return None
    visible = intervals(num_queries, num_keys, device, causal=causal, **mask)
    lo, hi = torch.broadcast_tensors(visible.lo, visible.hi)
    batch = len(lo) if len(lo) > 1 else None

    def mask_mod(b, h, i, j):
        b = 0 if batch is None else b
        return (j >= lo[b, i]) & (j < hi[b, i])

    return quick(create_block_mask, device)(
        mask_mod, batch, None, num_queries, num_keys, device=device
    )


@lru_cache(maxsize=16)
def standing_mask(*sizes: Any, **mask: Any) -> BlockMask | None:
    """block_mask_of() without tensors of the batch, cached for all layers and steps: making it
    takes longer than attention to a few thousand tokens.
    """
    with torch.inference_mode(False), torch.no_grad():
        return block_mask_of(*sizes, **mask)


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
    plain = softcap is None and alibi_slopes is None and score_mod is None

    def change(score, b, h, i, j):
        i = i + num_keys - num_queries
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if alibi_slopes is not None:
            score = score - alibi_slopes[h] * (i - j)
        if score_mod is not None:
            score, _ = score_mod(score, b, h, i, j)
        return score

    own = torch.compiler.is_compiling() or any(each is not None for each in of_batch.values())
    make_mask = block_mask_of if own else standing_mask
    block_mask = make_mask(
        num_queries, num_keys, q.device, causal=causal, window=window, **of_batch
    )
    # FlexAttention's kernel for few queries does not compile for every grouping of heads
    options: Any = {"FORCE_USE_FLEX_ATTENTION": True} if q.device.type == "cuda" else None
    out, aux = quick(flex_attention, q.device)(
        q,
        k,
        v,
        score_mod=None if plain else change,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
        kernel_options=options,
    )
    return AttentionOutput(out, aux.lse)


def refusals(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> list[str]:
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
