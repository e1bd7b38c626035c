"""The Triton flash-attention as PyTorch operators: torch.compile keeps them whole, autograd
differentiates through them.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

import importlib
import math
from functools import cache, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels import defects
from attention.kernels.backward import delta_kernel, dkdv_kernel, dq_kernel
from attention.kernels.forward import forward_kernel
from attention.kernels.intervals import query_ranges
from attention.kernels.launch import (
    batch_stride,
    bytes_of_a_head,
    descriptor_strides,
    padded_head_dim,
    pick_tile,
    section_of,
    tiles_of,
)
from attention.kernels.select import choose_kernel
from attention.kernels.softmax import ONLINE

# an operator takes names, not functions
SOFTMAXES = {
    "online": ONLINE,
    "no_max": defects.NO_MAX,
    "no_rescale": defects.NO_RESCALE,
    "no_rescale_detached": defects.NO_RESCALE_DETACHED,
}
DELTA_BLOCK_Q = 32


def empty_heads(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for (B, H, N, D) laid out as (B, N, H, D): merging the heads afterwards copies
    nothing.
    """
    batch, num_heads, length, head_dim = like.shape
    return like.new_empty(batch, length, num_heads, head_dim, dtype=dtype).transpose(1, 2)


def is_packed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q, k, v are parts of one projection (B, N, H + 2 H_kv, D). Their gradients should
    have the same layout.
    """
    _, num_heads, length, head_dim = q.shape
    row = (num_heads + 2 * k.shape[1]) * head_dim
    # compare sizes last: where they are symbols, a comparison costs a guard
    return (
        q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (head_dim, row, 1)
        and k.shape[2] == length
    )


def empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, packed: bool, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Memory for dq, dk, dv, or for the one tensor (B, N, H + 2 H_kv, D) that they are views of."""
    if not packed:
        return [empty_heads(x, dtype) for x in (q, k, v)]
    batch, num_heads, length, head_dim = q.shape
    return [q.new_empty(batch, length, num_heads + 2 * k.shape[1], head_dim)]


def unpacked(gradients: list[Tensor], num_heads: int, num_kv_heads: int) -> list[Tensor]:
    """dq, dk, dv (B, H or H_kv, N, D) from what flash_attention_backward returns."""
    if len(gradients) == 3:
        return gradients
    return [
        x.transpose(1, 2)
        for x in gradients[0].split((num_heads, num_kv_heads, num_kv_heads), dim=2)
    ]


def readable(x: Tensor) -> Tensor:
    """x as a tensor descriptor can point at it: contiguous along D, every other stride a positive
    multiple of 16 bytes.

    A view of a packed qkv projection is readable as it is; another layout is copied. The
    interpreter computes bfloat16 on raw bits, so there x becomes float32.
    """
    if x.is_cpu and x.dtype == torch.bfloat16:
        x = x.float()
    granule = 16 // x.element_size()
    *outer, last = x.stride()
    aligned = [
        size == 1 or (stride > 0 and stride % granule == 0)
        for size, stride in zip(x.shape, outer, strict=False)
    ]
    if last == 1 and all(aligned) and x.data_ptr() % 16 == 0:
        return x
    head_dim = x.shape[-1]
    return x.new_empty(*x.shape[:3], head_dim + -head_dim % granule)[..., :head_dim].copy_(x)


def descriptor(x: Tensor, block: int) -> TensorDescriptor:
    """x (B, H, N, D) for loads of `block` rows of one head, zero where they pass its end."""
    return TensorDescriptor(
        x, list(x.shape), descriptor_strides(x), [1, 1, block, padded_head_dim(x.shape[-1])]
    )


@cache
def find_score_mod(name: str) -> triton.JITFunction | None:
    """The @triton.jit function at pkg.module:NAME; "" is none."""
    if not name:
        return None
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"the score_mod's kernel={name} must read pkg.module:NAME of a @triton.jit "
            f"function: {error}"
        ) from error


def constants(
    kernel: str,
    q: Tensor,
    causal: bool,
    lo: Tensor | None,
    score_mod: str,
    block_q: int,
    block_kv: int,
) -> dict[str, Any]:
    head_dim = q.shape[-1]
    tile = pick_tile(kernel, head_dim, q.dtype, q.device, block_q=block_q, block_kv=block_kv)
    return {
        "CAUSAL": causal,
        "INTERVALS": lo is not None,
        "SCORE_MOD": find_score_mod(score_mod),
        "D": head_dim,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "BLOCK_D": padded_head_dim(head_dim),
        # Triton's default for float32 is TF32, which is not float32
        "PRECISION": "ieee",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


@lru_cache
def runs_hopper(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    scale: float,
    score_mod: str,
    softmax: str,
    tile: int,
) -> bool:
    inputs = {"device": device, "dtype": dtype, "head_dim": head_dim, "scale": scale}
    return (
        choose_kernel(kernel, **inputs, score_mod=score_mod, softmax=softmax, tile=tile).kernel
        == "hopper"
    )


@torch.library.custom_op("tilegpt::flash_attention", mutates_args=())
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor | None,
    hi: Tensor | None,
    params: Tensor | None,
    causal: bool,
    scale: float,
    score_mod: str,
    softmax: str,
    block_q: int,
    block_kv: int,
    kernel_choice: str = "portable",
    look: Tensor | None = None,
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, H, N, D), lse (B, H, N) and max_score (B, H) float32, for q (B, H, N, D); k, v (B,
    H_kv, M, D).

    lo, hi: (B or 1, N) int32, the interval of keys each query sees; without them all, or by
    `causal`. score_mod: pkg.module:NAME of a @triton.jit function or "", params (float32) its
    numbers. softmax: a name in SOFTMAXES. block_q, block_kv: the tile, or 0 for the table's.
    kernel_choice: auto, portable or hopper, see select.py (inductor uses the name `kernel`).
    max_score is computed where `look` holds True. wide: out in float32, which the portable kernels
    can.
    """
    dtype = torch.float32 if wide else q.dtype
    q, k, v = readable(q), readable(k), readable(v)
    (batch, num_heads, num_queries, head_dim), (_, num_kv_heads, num_keys, _) = q.shape, k.shape
    out = empty_heads(q, torch.float32 if wide else None)
    lse = q.new_empty(batch, num_heads, num_queries, dtype=torch.float32)
    top = torch.empty_like(lse) if look is not None and bool(look) else None  # a row's largest
    if runs_hopper(
        kernel_choice, q.device, q.dtype, head_dim, scale, score_mod, softmax, block_q or block_kv
    ):
        from attention.kernels.hopper import launch as hopper

        hopper.forward(q, k, v, out, lse, top, lo, hi, causal=causal, scale=scale)
        return out, lse, largest(lse, top)
    groups, equal = num_heads // num_kv_heads, not causal and lo is None
    meta = constants("forward", q, causal, lo, score_mod, block_q, block_kv)
    grid = (tiles_of(num_queries, meta["BLOCK_Q"]) * batch * num_heads,)
    forward_kernel[grid](
        descriptor(q, meta["BLOCK_Q"]), descriptor(k, meta["BLOCK_KV"]), descriptor(v,
        meta["BLOCK_KV"]), out, lse, top, lo, hi, params,
        *out.stride()[:3], batch_stride(lo), num_heads, groups, batch * num_heads,
        section_of(k.device, 2 * bytes_of_a_head(k), heads=groups, equal=equal),
        num_queries, num_keys, scale, scale * math.log2(math.e),
        MOVE_MAX=SOFTMAXES[softmax].move_max, **meta,
    )  # fmt: skip
    return out.to(dtype), lse, largest(lse, top)


def largest(lse: Tensor, top: Tensor | None) -> Tensor:
    """max_score (B, H) from `top` (B, H, N); of any value where nobody asked for it."""
    return lse.new_empty(lse.shape[:2]) if top is None else top.amax(-1)


@flash_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor | None, hi: Tensor | None, params: Tensor | None,
    causal: bool, scale: float, score_mod: str, softmax: str, block_q: int, block_kv: int,
    kernel_choice: str = "portable", look: Tensor | None = None, wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    lse, max_score = (q.new_empty(q.shape[:dims], dtype=torch.float32) for dims in (3, 2))
    return empty_heads(q, torch.float32 if wide else None), lse, max_score


@torch.library.custom_op("tilegpt::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lo: Tensor | None,
    hi: Tensor | None,
    params: Tensor | None,
    causal: bool,
    scale: float,
    score_mod: str,
    softmax: str,
    block_q: int,
    block_kv: int,
    kernel_choice: str = "portable",
    packed: bool = False,
    wide: bool = False,
) -> list[Tensor]:
    """dq, dk, dv, in the dtypes and shapes of q, k, v, from what flash_attention took and gave.

    packed, for N = M: the one tensor (B, N, H + 2 H_kv, D) that unpacked() sees them in. A compiler
    can then see that this is the gradient of a projection to q, k and v. An operator may not return
    views of one tensor. wide: float32, which the portable kernels can; not packed.
    """
    dtype = torch.float32 if wide else q.dtype
    d_out, q, k, v, out = readable(d_out), readable(q), readable(k), readable(v), readable(out)
    (batch, num_heads, num_queries, head_dim), (_, num_kv_heads, num_keys, _) = q.shape, k.shape
    gradients = empty_gradients(q, k, v, packed, torch.float32 if wide else None)
    dq, dk, dv = unpacked(gradients, num_heads, num_kv_heads)
    hopper_runs = runs_hopper(
        kernel_choice, q.device, q.dtype, head_dim, scale, score_mod, softmax, block_q or block_kv
    )
    if hopper_runs and not torch.are_deterministic_algorithms_enabled():
        from attention.kernels.hopper import launch as hopper

        ranges = None if lo is None else query_ranges(lo, hi, num_keys, hopper.BLOCK_KV)
        hopper.backward(
            d_out, d_lse, q, k, v, out, lse, dq, dk, dv, lo, hi, ranges, causal=causal, scale=scale
        )
        return gradients
    groups, equal = num_heads // num_kv_heads, not causal and lo is None
    sizes = (num_queries, num_keys, scale, scale * math.log2(math.e))

    delta = torch.empty_like(lse)
    delta_kernel[(tiles_of(num_queries, DELTA_BLOCK_Q), batch * num_heads)](
        out, d_out, None if d_lse is None else d_lse.contiguous(), delta, *out.stride()[:3],
        *d_out.stride()[:3], num_heads, num_queries,
        D=head_dim, BLOCK_Q=DELTA_BLOCK_Q, BLOCK_D=padded_head_dim(head_dim),
    )  # fmt: skip

    def inputs(meta: dict) -> list[TensorDescriptor | Tensor]:
        tensors = ((q, "BLOCK_Q"), (k, "BLOCK_KV"), (v, "BLOCK_KV"), (d_out, "BLOCK_Q"))
        return [*(descriptor(x, meta[block]) for x, block in tensors), lse, delta]

    choice = (q, causal, lo, score_mod, block_q, block_kv)
    steps = {
        "PROBABILITY": SOFTMAXES[softmax].probability,
        "SCORE_GRADIENT": SOFTMAXES[softmax].score_gradient,
    }
    plain = groups == 1 and lo is None and not score_mod
    meta = constants("dkdv" if plain else "dkdv_general", *choice) | steps
    ranges = None if lo is None else query_ranges(lo, hi, num_keys, meta["BLOCK_KV"])
    grid = (tiles_of(num_keys, meta["BLOCK_KV"]) * batch * num_kv_heads,)
    dkdv_kernel[grid](
        *inputs(meta), dk, dv, lo, hi, ranges, params, *dk.stride()[:3], *dv.stride()[:3],
        batch_stride(lo), batch_stride(ranges),
        num_kv_heads, batch * num_kv_heads, section_of(q.device, groups * 2 * bytes_of_a_head(q),
        equal=equal),
        *sizes, GROUPS=groups, **meta,
    )  # fmt: skip

    meta = constants("dq", *choice) | steps
    grid = (tiles_of(num_queries, meta["BLOCK_Q"]) * batch * num_heads,)
    dq_kernel[grid](
        *inputs(meta), dq, lo, hi, params, *dq.stride()[:3], batch_stride(lo), num_heads, groups,
        batch * num_heads,
        section_of(k.device, 2 * bytes_of_a_head(k), heads=groups, equal=equal), *sizes, **meta,
    )  # fmt: skip
    return [x.to(dtype) for x in gradients]


@flash_attention_backward.register_fake
def _(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    lo: Tensor | None, hi: Tensor | None,
    params: Tensor | None, causal: bool, scale: float, score_mod: str, softmax: str, block_q: int,
    block_kv: int,
    kernel_choice: str = "portable", packed: bool = False, wide: bool = False,
) -> list[Tensor]:  # fmt: skip
    return empty_gradients(q, k, v, packed, torch.float32 if wide else None)


def _save(ctx, inputs, output) -> None:
    # without look and wide, which are no settings of the backward pass
    (q, k, v, lo, hi, params, *others), ctx.count = inputs, len(inputs)
    ctx.settings = others[:7]
    ctx.packed = is_packed(q, k, v)  # here, as saved tensors may come back with other strides
    ctx.set_materialize_grads(False)  # no zeros for a gradient of lse, which few use
    ctx.save_for_backward(q, k, v, *output[:2], lo, hi, params)


def _backward(
    ctx, d_out: Tensor | None, d_lse: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, out, *others = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    gradients = flash_attention_backward(
        d_out, d_lse, q, k, v, out, *others, *ctx.settings, packed=ctx.packed
    )
    # nothing flows to what follows q, k and v
    return *unpacked(gradients, q.shape[1], k.shape[1]), *([None] * (ctx.count - 3))


flash_attention.register_autograd(_backward, setup_context=_save)


class FlashAttention(torch.autograd.Function):
    """The same gradient for eager mode: the registered one reads the schema in each call, which
    takes 50 microseconds.
    """

    @staticmethod
    def forward(ctx, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = flash_attention(*inputs)
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)
