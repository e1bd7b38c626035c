"""Launch the portable kernels: tile shapes, descriptors, order of work.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

import importlib
import math
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels import defects
from attention.kernels.backward import delta_kernel, dkdv_kernel, dq_kernel
from attention.kernels.forward import forward_kernel
from attention.kernels.intervals import QueryRanges
from attention.kernels.launch import (
    Launch,
    batch_stride,
    bytes_of_a_head,
    descriptor_strides,
    padded_head_dim,
    pick_tile,
    section_of,
    tiles_of,
)
from attention.kernels.softmax import ONLINE

# by name, because an operator cannot take functions
SOFTMAXES = {
    "online": ONLINE,
    "no_max": defects.NO_MAX,
    "no_rescale": defects.NO_RESCALE,
    "no_rescale_detached": defects.NO_RESCALE_DETACHED,
}
DELTA_BLOCK_Q = 32


def descriptor(x: Tensor, block: int) -> TensorDescriptor:
    """A descriptor of x (B, H, N, D) that loads `block` rows of one head, zero past its end."""
    return TensorDescriptor(
        x, list(x.shape), descriptor_strides(x), [1, 1, block, padded_head_dim(x.shape[-1])]
    )


@cache
def find_score_mod(name: str) -> triton.JITFunction | None:
    """The @triton.jit function at pkg.module:NAME; "" is none. pkg.module:NAME+8 is the function
    for a call whose first head is head 8.
    """
    if not name:
        return None
    name, _, first_head = name.partition("+")
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
        return from_head(found, int(first_head)) if first_head else found
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"the score_mod's kernel={name} must read pkg.module:NAME of a @triton.jit "
            f"function: {error}"
        ) from error


def from_head(score_mod: triton.JITFunction, first_head: int) -> triton.JITFunction:
    """score_mod for a call whose first head is head `first_head`."""
    constants = {"SCORE_MOD": score_mod, "FIRST_HEAD": tl.constexpr(first_head)}
    # not a closure: Triton's interpreter sees only the globals of a function
    return triton.jit(FunctionType(moved_score_mod.__code__, globals() | constants))


def moved_score_mod(score, b, h, i, j, params_ptr):
    """from_head() gives it the globals SCORE_MOD and FIRST_HEAD."""
    return SCORE_MOD(score, b, h + FIRST_HEAD, i, j, params_ptr)  # noqa: F821


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
        # Triton's default for float32 is TF32, which has fewer bits
        "PRECISION": "ieee",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def descriptors(meta: dict[str, Any]) -> tuple[Callable[[Tensor], TensorDescriptor], ...]:
    """Functions that make the descriptors of q, k, v and d_out."""
    of_queries, of_keys = (
        partial(descriptor, block=meta[name]) for name in ("BLOCK_Q", "BLOCK_KV")
    )
    return of_queries, of_keys, of_keys, of_queries


class Forward:
    """The forward pass for one kind of call."""

    def __init__(
        self, q: Tensor, k: Tensor, out: Tensor, top: Tensor | None, lo: Tensor | None,
        _: Tensor | None, causal: bool, scale: float, score_mod: str, softmax: str, block_q: int,
        block_kv: int,
    ):  # fmt: skip
        """_: starts, which only the Hopper kernels use."""
        (batch, num_heads, num_queries, _), (_, num_kv_heads, num_keys, _) = q.shape, k.shape
        groups, equal = num_heads // num_kv_heads, not causal and lo is None
        meta = constants("forward", q, causal, lo, score_mod, block_q, block_kv)
        self.launch = Launch(
            forward_kernel,
            (tiles_of(num_queries, meta["BLOCK_Q"]) * batch * num_heads,),
            (
                *out.stride()[:3], batch_stride(lo), num_heads, groups, batch * num_heads,
                section_of(k.device, 2 * bytes_of_a_head(k), heads=groups, equal=equal),
                num_queries, num_keys, scale, scale * math.log2(math.e),
            ),
            describe=descriptors(meta)[:3], MOVE_MAX=SOFTMAXES[softmax].move_max, **meta,
        )  # fmt: skip

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, top: Tensor | None,
        lo: Tensor | None, hi: Tensor | None, _: Tensor | None, params: Tensor | None,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Fill out (B, H, N, D) and lse (B, H, N); fill top (B, H, N), if given, with each row's
        largest score. sinks: (H,) float32.
        """
        self.launch(q, k, v, out, lse, top, lo, hi, params, sinks)


class Backward:
    """The backward pass for one kind of call."""

    def __init__(
        self, d_out: Tensor, q: Tensor, k: Tensor, out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
        lo: Tensor | None, _: Tensor | None, causal: bool, scale: float, score_mod: str,
        softmax: str, block_q: int, block_kv: int,
    ):  # fmt: skip
        batch, num_heads, num_queries, head_dim = q.shape
        num_kv_heads, num_keys = k.shape[1:3]
        groups, equal = num_heads // num_kv_heads, not causal and lo is None
        sizes = (num_queries, num_keys, scale, scale * math.log2(math.e))
        self.delta = Launch(
            delta_kernel, (tiles_of(num_queries, DELTA_BLOCK_Q), batch * num_heads),
            (*out.stride()[:3], *d_out.stride()[:3], num_heads, num_queries),
            D=head_dim, BLOCK_Q=DELTA_BLOCK_Q, BLOCK_D=padded_head_dim(head_dim),
        )  # fmt: skip

        choice = (q, causal, lo, score_mod, block_q, block_kv)
        steps = {
            "PROBABILITY": SOFTMAXES[softmax].probability,
            "SCORE_GRADIENT": SOFTMAXES[softmax].score_gradient,
        }
        plain = groups == 1 and lo is None and not score_mod
        meta = constants("dkdv" if plain else "dkdv_general", *choice) | steps
        self.ranges = None if lo is None else QueryRanges(lo, num_keys, meta["BLOCK_KV"])
        self.dkdv = Launch(
            dkdv_kernel, (tiles_of(num_keys, meta["BLOCK_KV"]) * batch * num_kv_heads,),
            (
                *dk.stride()[:3], *dv.stride()[:3], batch_stride(lo),
                0 if self.ranges is None else self.ranges.batch_stride,
                num_kv_heads, batch * num_kv_heads,
                section_of(q.device, groups * 2 * bytes_of_a_head(q), equal=equal), *sizes,
            ),
            describe=descriptors(meta), GROUPS=groups, **meta,
        )  # fmt: skip

        meta = constants("dq", *choice) | steps
        self.dq = Launch(
            dq_kernel, (tiles_of(num_queries, meta["BLOCK_Q"]) * batch * num_heads,),
            (
                *dq.stride()[:3], batch_stride(lo), num_heads, groups, batch * num_heads,
                section_of(k.device, 2 * bytes_of_a_head(k), heads=groups, equal=equal), *sizes,
            ),
            describe=descriptors(meta), **meta,
        )  # fmt: skip

    def __call__(
        self, d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, lo: Tensor | None, hi: Tensor | None,
        _: Tensor | None, params: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Fill dq, dk and dv. Returns delta (B, H, N)."""
        delta = torch.empty_like(lse)
        self.delta(out, d_out, d_lse, delta)
        ranges = None if self.ranges is None else self.ranges(lo, hi)
        self.dkdv(q, k, v, d_out, lse, delta, dk, dv, lo, hi, ranges, params)
        self.dq(q, k, v, d_out, lse, delta, dq, lo, hi, params)
        return delta
