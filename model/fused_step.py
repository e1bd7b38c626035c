"""GPT.forward for one new token in each of a few sequences, in few kernels.

Such a step reads every weight once and computes very little, so its time depends on how many
kernels wait for one another. A block takes six, where PyTorch's operators take twelve:

    norm, W_qkv, bias                 product()
    QK-norm, RoPE, the cache's write  place_heads()
    attention                         the backend's; triton merges splits in one more kernel
    W_proj, bias, x +                 product()
    norm, W_up, bias, activation      product()
    W_down, bias, x +                 product()

GPT.forward is the specification: tests/model/test_fused_step.py compares them.

Dimensions: B sequences, C hidden_size, H query heads, H_kv key/value heads, D head dim.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attention import attention_with_cache
from config import ModelConfig
from model.kv_cache import KVCache, LayerCache
from model.loss import TRITON
from model.norm import norm_arguments

if TYPE_CHECKING:
    from model.gpt import GPT, Block, Rope

MOST_SEQUENCES = 4  # tensor cores are better for more
MOST_BYTES = 32768  # bytes in a row of the weights, which a program holds in registers


def has_kernels(model: "GPT", tokens: Tensor) -> bool:
    """Whether next_logits() takes these tokens (B, 1)."""
    return TRITON and tokens.is_cuda and fits_kernels(model, tokens)


def fits_kernels(model: "GPT", tokens: Tensor) -> bool:
    """has_kernels() for any device: tests run the kernels in Triton's interpreter."""
    config, bytes_each = model.config, model.output_weight.element_size()
    # autocast's copies of the weights are not parameters
    plain = not (torch.is_grad_enabled() or torch.is_autocast_enabled(tokens.device.type))
    return (
        plain
        and tokens.shape[0] <= MOST_SEQUENCES
        and tokens.shape[1] == 1
        and not (model.training and config.dropout)
        and all(map(is_plain, model.blocks))
        and bytes_each * model.blocks[0].mlp.down.in_features <= MOST_BYTES
        # the norm takes as many registers as the weights
        and 2 * bytes_each * config.hidden_size <= MOST_BYTES
        and model.output_weight.dtype != torch.float64
        and model.output_weight.is_contiguous()
    )


def is_plain(block: "Block") -> bool:
    """Whether the block's layers and weights are plain. An adapter may replace a layer, and a
    quantised tensor a weight.
    """
    linears = (block.attention.qkv, block.attention.proj, block.mlp.up, block.mlp.down)
    return all(
        type(x) is nn.Linear and type(x.weight) is nn.Parameter and x.weight.is_contiguous()
        for x in linears
    )


def next_logits(model: "GPT", tokens: Tensor, cache: KVCache) -> Tensor:
    """The logits (B, vocab_size) float32 after tokens (B, 1), which are stored at the cache's
    `places`.

    The cache must be allocated already.
    """
    from model.step_kernel import product

    x, rope = model.embed(tokens, cache=cache)
    x = x[:, 0]  # (B, C)
    for block, layer in zip(model.blocks, cache.layers, strict=True):
        x = block_step(block, x, rope, layer, model.config)
    norm = norm_arguments(model.final_norm)
    return product(x, model.output_weight, None, norm=norm, dtype=torch.float32)


def block_step(
    block: "Block", x: Tensor, rope: "Rope | None", cache: LayerCache, config: ModelConfig
) -> Tensor:
    """block(x), from (B, C) to (B, C)."""
    from model.step_kernel import place_heads, product

    attention, mlp = block.attention, block.mlp
    places, k, v = cache.places, cache.k, cache.v
    assert places is not None and k is not None and v is not None, "the cache has no room yet"
    qkv = product(x, *parts(attention.qkv), norm=norm_arguments(block.attention_norm))
    eps = 1e-5 if config.qk_norm else None
    q = place_heads(qkv, rope, places.positions, k, v, qk_norm_eps=eps)
    given = {"backend": attention.seam.backend, **attention.function}
    out, _ = attention_with_cache(q, k, v, places.lengths, **given)
    out = out.transpose(1, 2).flatten(2)[:, 0]
    x = product(out, *parts(attention.proj), residual=x)
    hidden = product(
        x, *parts(mlp.up), norm=norm_arguments(block.mlp_norm), activation=config.activation
    )
    return product(hidden, *parts(mlp.down), residual=x)


def parts(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return linear.weight, linear.bias
