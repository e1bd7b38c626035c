"""The kernels as a PyTorch operator with its gradient: torch.compile sees one node and does not break the graph."""

import math

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels.backward import dkdv_kernel, dq_kernel
from attention.kernels.forward import forward_kernel
from attention.kernels.launch import padded_head_dim, pick_tile


def empty_heads(like: Tensor) -> Tensor:
    """Memory for (B, H, N, D) laid out as (B, N, H, D): merging the heads afterwards copies nothing."""
    batch, num_heads, length, head_dim = like.shape
    return like.new_empty(batch, length, num_heads, head_dim).transpose(1, 2)


def readable(x: Tensor) -> Tensor:
    """x as a tensor descriptor can point at it: contiguous along D, every other stride a positive multiple of 16 bytes.

    A view of a packed qkv projection is readable as it is; what is not is copied. The interpreter computes bfloat16 on raw bits, so
    there x becomes float32.
    """
    if x.device.type == "cpu" and x.dtype == torch.bfloat16:
        x = x.float()
    granule = 16 // x.element_size()
    strides = [stride for size, stride in zip(x.shape[:3], x.stride(), strict=False) if size > 1]
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride > 0 and stride % granule == 0 for stride in strides):
        return x
    head_dim = x.shape[-1]
    return x.new_empty(*x.shape[:3], head_dim + -head_dim % granule)[..., :head_dim].copy_(x)


def descriptor(x: Tensor, block: int) -> TensorDescriptor:
    """x (B, H, N, D) for loads of `block` rows of one head, zero where they pass its end."""
    # the stride of a dimension of size 1 is never used, but it is checked
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape[:3], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, block, padded_head_dim(x.shape[-1])])


def constants(kernel: str, q: Tensor, causal: bool) -> dict[str, int | bool | str]:
    head_dim = q.shape[-1]
    tile = pick_tile(kernel, head_dim, q.dtype, q.device)
    return {
        "CAUSAL": causal,
        "D": head_dim,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "BLOCK_D": padded_head_dim(head_dim),
        # Triton's default for float32 is TF32, which is not float32
        "PRECISION": "ieee",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


@torch.library.custom_op("tilegpt::flash_attention", mutates_args=())
def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, H, N, D) and lse (B, H, N) float32 for q (B, H, N, D); k, v (B, H_kv, M, D)."""
    dtype = q.dtype
    q, k, v = readable(q), readable(k), readable(v)
    (batch, num_heads, num_queries, _), (_, num_kv_heads, num_keys, _) = q.shape, k.shape
    out = empty_heads(q)
    lse = q.new_empty(batch, num_heads, num_queries, dtype=torch.float32)
    meta = constants("forward", q, causal)
    grid = (triton.cdiv(num_queries, meta["BLOCK_Q"]) * batch * num_heads,)
    forward_kernel[grid](
        descriptor(q, meta["BLOCK_Q"]), descriptor(k, meta["BLOCK_KV"]), descriptor(v, meta["BLOCK_KV"]), out, lse, *out.stride()[:3],
        num_heads, num_heads // num_kv_heads, batch * num_heads, num_queries, num_keys, scale * math.log2(math.e), **meta,
    )  # fmt: skip
    return out.to(dtype), lse


@flash_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return empty_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tilegpt::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, in the dtypes and shapes of q, k, v. delta (B, H, N) float32 is rowsum(d_out * out) - d_lse."""
    dtype = q.dtype
    d_out, q, k, v = readable(d_out), readable(q), readable(k), readable(v)
    (batch, num_heads, num_queries, _), (_, num_kv_heads, num_keys, _) = q.shape, k.shape
    dq, dk, dv = empty_heads(q), empty_heads(k), empty_heads(v)
    groups = num_heads // num_kv_heads
    sizes = (num_queries, num_keys, scale, scale * math.log2(math.e))

    def inputs(meta: dict) -> list[TensorDescriptor | Tensor]:
        tensors = ((q, "BLOCK_Q"), (k, "BLOCK_KV"), (v, "BLOCK_KV"), (d_out, "BLOCK_Q"))
        return [*(descriptor(x, meta[block]) for x, block in tensors), lse, delta]

    meta = constants("dkdv", q, causal)
    grid = (triton.cdiv(num_keys, meta["BLOCK_KV"]) * batch * num_kv_heads,)
    dkdv_kernel[grid](
        *inputs(meta), dk, dv, *dk.stride()[:3], *dv.stride()[:3], num_kv_heads, groups, batch * num_kv_heads, *sizes, **meta
    )  # fmt: skip

    meta = constants("dq", q, causal)
    grid = (triton.cdiv(num_queries, meta["BLOCK_Q"]) * batch * num_heads,)
    dq_kernel[grid](*inputs(meta), dq, *dq.stride()[:3], num_heads, groups, batch * num_heads, *sizes, **meta)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


@flash_attention_backward.register_fake
def _(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_heads(q), empty_heads(k), empty_heads(v)


def _save(ctx, inputs, output) -> None:
    q, k, v, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx, d_out: Tensor, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    delta = (d_out.float() * out.float()).sum(-1)
    if d_lse is not None:
        delta = delta - d_lse
    dq, dk, dv = flash_attention_backward(d_out, q, k, v, lse, delta.contiguous(), ctx.causal, ctx.scale)
    return dq, dk, dv, None, None


flash_attention.register_autograd(_backward, setup_context=_save)
