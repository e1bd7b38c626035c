"""Activation checkpointing: the backward pass of a block computes again what it did not keep.

    model.checkpoint=block      a block keeps its input (Chen et al. 2016, arXiv:1604.06174)
    model.checkpoint=attention  also q, k, v and the results of attention, which then runs once. A
                                compiled graph keeps the results alone, and projects q, k, v again

PyTorch does the recomputation (torch.utils.checkpoint, not reentrant). It restores random numbers
and autocast, and works inside torch.compile's graph.
"""

from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.gpt import Block, Rope


def recomputing_block(
    block: Block,
    x: Tensor,
    branch: None,
    rope: Rope | None,
    document_ids: Tensor | None,
    *,
    keep: str,
) -> tuple[Tensor, None]:
    """block(x), from (B, N, C) to (B, N, C), in the place of fast_block(): no sum is left to the
    next norm. keep: "block" or "attention", as model.checkpoint.
    """
    attention = block.attention

    def before(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return attention.heads(attention.qkv(block.attention_norm(x)), rope)

    def after(x: Tensor, out: Tensor) -> Tensor:
        x = x + block.dropout(attention.proj(out))
        return x + block.dropout(block.mlp(block.mlp_norm(x)))

    def whole(x: Tensor) -> tuple[Tensor, Tensor | None]:
        out, max_score = attention.attend(*before(x), document_ids, None)
        return after(x, out), max_score

    def recomputed(function: Any, *tensors: Tensor) -> Any:
        # saving and restoring random states costs time, and only dropout draws random numbers
        how = {"use_reentrant": False, "preserve_rng_state": block.dropout.p > 0}
        return checkpoint(function, *tensors, **how)

    # the largest scores are results: a compiled region cannot set an attribute
    if keep == "block":
        x, attention.max_score = recomputed(whole, x)
        return x, None
    out, attention.max_score = attention.attend(*recomputed(before, x), document_ids, None)
    return recomputed(after, x, out), None
