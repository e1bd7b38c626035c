"""Block.forward in a faster form for a GPU, and with less memory under model.checkpoint.

`fused_block` runs the layers of a Block and has no parameters of its own. It gives the results and
gradients of `Block.forward`; tests/model/test_fused_block.py compares them.

    on a GPU                 one kernel computes x + branch and the norm after it, and on
                             Hopper the MLP's products compute GELU (model/kernels)
    checkpoint=elementwise   the backward pass recomputes norms and activations
    checkpoint=attention     it recomputes all but q, k, v and the attention
    checkpoint=block         it recomputes the whole block from its input
    chunk_tokens             norms, projections and MLP take that many tokens at a time
    offload                  the block's input waits in the host's memory

Dimensions: B batch, N tokens, C hidden_size, H query heads, H_kv key/value heads, D head dim.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import model.kernels
from config import ModelConfig
from model.checkpointing import elementwise_recomputed, in_chunks, kept_on_host, recomputed
from model.device import product_dtype
from model.kernels import add_norm, gelu_mlp
from model.kv_cache import LayerCache

if TYPE_CHECKING:
    from attention.ranks import Shards
    from model.gpt import Block, Rope


def is_fused(config: ModelConfig, x: Tensor) -> bool:
    """Whether fused_block does anything that Block.forward does not."""
    return config.checkpoint != "none" or model.kernels.has_norm_kernel(x, x)


def fused_block(
    block: "Block",
    x: Tensor,
    branch: Tensor | None,
    rope: "Rope | None",
    document_ids: Tensor | None,
    cache: LayerCache | None,
) -> tuple[Tensor, Tensor | None]:
    """block(x + branch), returned as two parts: one kernel adds them and computes the next norm.

    x (B, N, C); None stands for zero.
    """

    def attend(qkv: Iterable[Tensor], exchanged: bool = False) -> tuple[Tensor, Tensor | None]:
        q, k, v = (t.transpose(1, 2) for t in qkv)  # (B, H or H_kv, N, D)
        return block.attention.attend(
            q, k, v, document_ids=document_ids, cache=cache, exchanged=exchanged
        )

    if block.config.checkpoint in ("attention", "block"):
        x = x if branch is None else x + branch
        x, block.attention.max_score = recomputed_block(block, x, rope, attend)
        return x, None
    x, qkv = before_attention(block, x, branch, rope)
    out, block.attention.max_score = attend(qkv)
    return after_attention(block, x, out)


class Zeros(torch.autograd.Function):
    """Zeros of x's shape. They require a gradient as x does, and their gradient goes nowhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.new_zeros(x.shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def first_branch(block: "Block", x: Tensor) -> Tensor | None:
    """The branch before the first block under torch.compile. Where later blocks have one, it is
    zeros: then one graph serves all blocks, and another would take seconds to compile.
    """
    halves = block.config.checkpoint in ("attention", "block")
    if halves or not model.kernels.has_norm_kernel(x, x):
        return None
    return Zeros.apply(x, product_dtype(x, x.dtype))


def before_attention(
    block: "Block", x: Tensor, branch: Tensor | None, rope: "Rope | None"
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """x + branch, and q, k and v (B, N, H or H_kv, D) computed from it."""
    norm, layer = block.attention_norm, block.attention.qkv

    # tokens in dimension 1, as in_chunks needs them. The caller transposes back after the
    # recomputed part, so torch.compile keeps q and k: otherwise it would repeat QK-norm and RoPE
    def heads(qkv: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.transpose(1, 2) for t in block.attention.heads(qkv, rope))

    if recomputes_elementwise(block):
        x = x if branch is None else x + branch
        qkv = elementwise_recomputed(lambda x: layer(norm(x)))(x)
        return x, elementwise_recomputed(heads)(qkv)
    x, normed = add_norm(x, branch, norm)
    return x, heads(layer(normed))


def after_attention(
    block: "Block", x: Tensor, out: Tensor, *, repeated: bool = False
) -> tuple[Tensor, Tensor]:
    """x + proj(out) for the attention's output, and the branch of the MLP.

    repeated: whether the backward pass runs this again. Then a product of its own comes last, which
    checkpointing leaves out the second time. It could not leave out a part of gelu_mlp().
    """
    mlp, norm, proj = block.mlp, block.mlp_norm, block.attention.proj
    # proj's result is unnamed, so that it is freed after the sum
    if recomputes_elementwise(block):
        x = x + block.dropout(proj(out))
        hidden = elementwise_recomputed(lambda x: mlp.up(norm(x)))(x)
        y = elementwise_recomputed(lambda hidden: mlp.down(mlp.activate(hidden)))(hidden)
    else:
        x, normed = add_norm(x, block.dropout(proj(out)), norm)
        y = mlp(normed) if mlp.gated or repeated else gelu_mlp(normed, mlp.up, mlp.down)
    return x, block.dropout(y)


def recomputes_elementwise(block: "Block") -> bool:
    return block.config.checkpoint == "elementwise" and torch.is_grad_enabled()


def recomputed_block(
    block: "Block",
    x: Tensor,
    rope: "Rope | None",
    attend: Callable[..., tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor | None]:
    """block(x) for checkpoint=attention and block, and the largest scores from attend(). Without
    gradients, only the chunks have an effect.
    """
    config, dropout = block.config, block.dropout.p
    checkpoint = config.checkpoint if torch.is_grad_enabled() else "none"
    shards = block.attention.shards
    world = 1 if shards is None else shards.size  # ranks that exchange heads
    repeated = checkpoint != "none"

    def before(x: Tensor, *rope: Tensor) -> tuple[Tensor, ...]:
        qkv = before_attention(block, x, None, rope or None)[1]
        return to_heads(shards, qkv) if world > 1 else qkv

    def after(x: Tensor, out: Tensor) -> Tensor:
        if world > 1:
            out = to_tokens(shards, out, config.head_dim)
        x, branch = after_attention(block, x, out, repeated=repeated)
        return x + branch

    if repeated and config.recomputes_halves:
        before, after = recomputed(before, dropout=dropout), recomputed(after, dropout=dropout)

    def run(x: Tensor) -> tuple[Tensor, Tensor | None]:
        tables = (table.unsqueeze(0) for table in rope or ())
        qkv = in_chunks(before, x, *tables, size=config.chunk_tokens)
        out, max_score = attend((joined(t, world) for t in qkv), exchanged=world > 1)
        out = in_chunks(after, x, by_rank(out, world), size=config.chunk_tokens)
        return out, max_score

    with kept_on_host(x) if config.offload and repeated else nullcontext():
        return recomputed(run, dropout=dropout)(x) if checkpoint == "block" else run(x)


# W ranks exchange heads inside the parts that are recomputed. So a message is as small as a chunk,
# and attention's output is kept once, because the backward pass exchanges it again. Between the
# parts, dimension 0 has the sequences and the ranks whose tokens these are. Dimension 1 has as many
# tokens as x, so that in_chunks can divide both.


def to_heads(shards: "Shards", qkv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """From (B, N, H or H_kv, D), this rank's tokens, to (B W, N, H / W or H_kv / W, D)."""
    exchanged = shards.to_heads(*(t.transpose(1, 2) for t in qkv))
    return tuple(by_rank(t.transpose(1, 2), shards.size) for t in exchanged)


def to_tokens(shards: "Shards", out: Tensor, head_dim: int) -> Tensor:
    """From (B W, N, C / W), this rank's heads, to (B, N, C), its tokens."""
    heads = joined(out, shards.size).unflatten(-1, (-1, head_dim))
    return shards.to_tokens(heads.transpose(1, 2)).transpose(1, 2).flatten(2)


def by_rank(x: Tensor, world: int) -> Tensor:
    """From (B, W N, ...) to (B W, N, ...)."""
    return x.unflatten(1, (world, -1)).flatten(0, 1)


def joined(x: Tensor, world: int) -> Tensor:
    """The inverse of by_rank()."""
    return x.unflatten(0, (-1, world)).flatten(1, 2)
