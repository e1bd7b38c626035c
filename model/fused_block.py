"""Block.forward in a faster form for a GPU, and with less memory under model.checkpoint.

`fused_block` runs the layers of a Block and has no parameters of its own. It gives the results and
gradients of `Block.forward`; tests/model/test_fused_block.py compares them.

    on a GPU                 one kernel computes x + branch and the norm after it (model/norm.py),
                             and the MLP's products compute GELU, or one kernel its backward pass
                             (model/gelu.py)
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
import torch.nn.functional as F
from torch import Tensor, nn

import model.norm
from config import ModelConfig
from model.checkpointing import elementwise_recomputed, in_chunks, kept_on_host, recomputed
from model.gelu import gelu_mlp
from model.kv_cache import LayerCache
from model.norm import Branch, add_norm, add_norm_linear
from model.products import linear, product_dtype

if TYPE_CHECKING:
    from attention.ranks import Shards
    from model.gpt import Block, Rope


def is_fused(config: ModelConfig, x: Tensor) -> bool:
    """Whether fused_block does anything that Block.forward does not."""
    return config.checkpoint != "none" or model.norm.has_kernel(x, x)


def fused_block(
    block: "Block",
    x: Tensor,
    branch: Branch | None,
    rope: "Rope | None",
    document_ids: Tensor | None,
    cache: LayerCache | None,
) -> tuple[Tensor, Branch | None]:
    """block(x + branch), returned as two parts: one kernel adds them and computes the next norm.

    x (B, N, C); None stands for zero.
    """

    def attend(qkv: Iterable[Tensor], exchanged: bool = False) -> tuple[Tensor, Tensor | None]:
        q, k, v = (t.transpose(1, 2) for t in qkv)  # (B, H or H_kv, N, D)
        return block.attention.attend(
            q, k, v, document_ids=document_ids, cache=cache, exchanged=exchanged
        )

    if block.config.checkpoint in ("attention", "block"):
        x = x if branch is None else x + branch.values
        x, block.attention.max_score = recomputed_block(block, x, rope, attend)
        return x, None
    x, qkv = before_attention(block, x, branch, rope)
    out, block.attention.max_score = attend(qkv)
    return after_attention(block, x, out)


class Zeros(torch.autograd.Function):
    """Zeros of x's shape and of its last dimension. They require a gradient as x does, and their
    gradient goes nowhere.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return x.new_zeros(x.shape, dtype=dtype), x.new_zeros(x.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def first_branch(block: "Block", x: Tensor) -> Branch | None:
    """The branch before the first block under torch.compile. Where later blocks have one, it is
    zeros: then one graph serves all blocks, and another would take seconds to compile.
    """
    halves = block.config.checkpoint in ("attention", "block")
    if halves or not model.norm.has_kernel(x, x):
        return None
    values, bias = Zeros.apply(x, product_dtype(x, x.dtype))
    return Branch(values, bias if norm_sums(block, x) else None)


def before_attention(
    block: "Block",
    x: Tensor,
    branch: Branch | None,
    rope: "Rope | None",
    *,
    repeated: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """x + branch, and q, k and v (B, N, H or H_kv, D) computed from it. repeated: see linear()."""
    values, bias = branch or (None, None)
    layer, recompute = block.attention.qkv, recomputes_elementwise(block)
    if repeated:
        x, normed = add_norm(x, values, block.attention_norm, bias)
        qkv = layer(normed)
    else:
        x, qkv = add_norm_linear(x, values, block.attention_norm, layer, bias, recompute=recompute)

    # tokens in dimension 1, as in_chunks needs them. The caller transposes back after the
    # recomputed part, so torch.compile keeps q and k: otherwise it would repeat QK-norm and RoPE
    def heads(qkv: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.transpose(1, 2) for t in block.attention.heads(qkv, rope))

    return x, (elementwise_recomputed(heads) if recompute else heads)(qkv)


def after_attention(
    block: "Block", x: Tensor, out: Tensor, *, repeated: bool = False
) -> tuple[Tensor, Branch]:
    """x + proj(out) for the attention's output, and the branch of the MLP. repeated: see linear().
    Then nothing is left to the next norm.
    """
    mlp, proj, recompute = block.mlp, block.attention.proj, recomputes_elementwise(block)
    added, left = ending(proj, norm_sums(block, x))
    # proj's result is unnamed, so that it is freed after the sum
    if recompute:
        x, hidden = add_norm_linear(
            x,
            block.dropout(linear(proj, out, added)),
            block.mlp_norm,
            mlp.up,
            left,
            recompute=True,
        )
    else:
        x, normed = add_norm(x, block.dropout(linear(proj, out, added)), block.mlp_norm, left)

    added, left = ending(mlp.down, norm_sums(block, x) and not repeated)
    if recompute:
        y = elementwise_recomputed(
            lambda hidden: F.linear(mlp.activate(hidden), mlp.down.weight, added)
        )(hidden)
    elif mlp.gated:
        hidden = mlp.activate(linear(mlp.up, normed, mlp.up.bias))
        y = linear(mlp.down, hidden, added, repeated=repeated)
    else:
        y = gelu_mlp(normed, mlp.up, mlp.down, added, repeated=repeated)
    return x, Branch(block.dropout(y), left)


def norm_sums(block: "Block", x: Tensor) -> bool:
    """Whether the norm after a branch computes the gradient of the bias in it: it has the gradient
    of the branch, and sums it at almost no cost. Dropout would come between.
    """
    dropout = block.dropout.p > 0 and block.training
    # as has_kernel() would say of the branch
    fits = torch.promote_types(x.dtype, product_dtype(x, x.dtype)) == x.dtype
    return block.config.bias and not dropout and fits and model.norm.has_kernel(x, x)


def ending(layer: nn.Linear, sums: bool) -> tuple[Tensor | None, Tensor | None]:
    """The bias that the last layer of a branch adds, and the one it leaves to the next norm."""
    if not sums:
        return layer.bias, None
    # not the parameter itself, so that torch.compile does not tell it from first_branch()'s
    return layer.bias.detach(), layer.bias.view_as(layer.bias)


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
        qkv = before_attention(block, x, None, rope or None, repeated=repeated)[1]
        return to_heads(shards, qkv) if world > 1 else qkv

    def after(x: Tensor, out: Tensor) -> Tensor:
        if world > 1:
            out = to_tokens(shards, out, config.head_dim)
        x, branch = after_attention(block, x, out, repeated=repeated)
        return x + branch.values

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
