"""Launch the kernels of forward.py and backward.py, or those for Hopper.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.interface import empty_heads
from attention.kernels import defects
from attention.kernels.backward import delta_kernel, dkdv_kernel, dq_kernel
from attention.kernels.forward import forward_kernel
from attention.kernels.intervals import query_ranges
from attention.kernels.score_mods import find_score_mod
from attention.kernels.select import choose_kernel
from attention.kernels.softmax import ONLINE
from attention.kernels.tiles import (
    batch_stride,
    bytes_of_a_head,
    padded_head_dim,
    pick_tile,
    section_of,
    tiles_of,
)
from attention.mask import is_fake

# by name, because an operator cannot take functions
SOFTMAXES = {
    "online": ONLINE,
    "no_max": defects.NO_MAX,
    "no_rescale": defects.NO_RESCALE,
}
DELTA_BLOCK_Q = 32


class Settings(NamedTuple):
    """What an attention computes and how, beside its tensors. Operators take them one by one."""

    causal: bool
    scale: float
    score_mod: str = ""  # pkg.module:NAME of a @triton.jit function
    softmax: str = "online"  # a name in SOFTMAXES
    block_q: int = 0  # a tile size, 0 for the table's
    block_kv: int = 0
    kernel: str = "portable"  # or auto, hopper: see select.py
    documents: bool = False  # whether lo and hi are those of packed documents, without a window


@cache
def runs_hopper(
    settings: Settings, device: torch.device, dtype: torch.dtype, head_dim: int
) -> bool:
    """Whether a call takes the kernels for Hopper."""
    inputs = {"device": device, "dtype": dtype, "head_dim": head_dim}
    return choose_kernel(**inputs, **settings._asdict()).kernel == "hopper"


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor | None,
    hi: Tensor | None,
    params: Tensor | None,
    sinks: Tensor | None,
    look: bool,
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """out (B, H, N, D), lse (B, H, N), the state that backward() needs beside lse, and if `look`
    each row's largest score (B, H, N), for q (B, H, N, D); k, v (B, H_kv, M, D). All but out are
    float32. The state is empty for 16 bits, and row_max in base 2 and row_sum, (2, B, H, N),
    for float32: their sum, lse, is less precise where scores are large.

    lo, hi: (B or 1, N) int32, the interval of keys that each query sees; if None, `causal` decides.
    params: the numbers of the score modifier, float32. sinks: (H,) float32, a logit of each head in
    the denominator.
    """
    dtype = q.dtype
    q, k, v = map(readable, (q, k, v))
    out = empty_heads(q.shape, q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    state = empty_state(lse, dtype)
    top = torch.empty_like(lse) if look else None
    if is_fake(q):
        pass  # memory is all that scripts.plan asks for
    elif runs_hopper(settings, q.device, q.dtype, q.shape[-1]):
        from attention.kernels.hopper import launch

        launch.forward(q, k, v, out, lse, top, lo, hi, params, sinks, settings)
    else:
        grid, shared, meta = plan("forward", settings, lo, hi, params, q, k, v)
        move_max = SOFTMAXES[settings.softmax].move_max
        forward_kernel[grid](
            *shared, out, lse, top, *statistics_of(state), sinks, MOVE_MAX=move_max, **meta
        )
    return out.to(dtype), lse, state, top


def backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    state: Tensor,
    lo: Tensor | None,
    hi: Tensor | None,
    params: Tensor | None,
    sinks: Tensor | None,
    packed: bool,
    settings: Settings,
) -> list[Tensor]:
    """dq, dk, dv in the dtype of q, or if `packed` the one tensor of empty_gradients(); then, with
    sinks, d_sinks (H,) float32.
    """
    dtype = q.dtype
    d_lse = None if d_lse is None else d_lse.contiguous()
    d_out, q, k, v, out = map(readable, (d_out, q, k, v, out))
    gradients = empty_gradients(q, k, v, packed)
    dq, dk, dv = unpacked(gradients, q.shape[1], k.shape[1])
    # the Hopper kernels sum dq in any order
    any_order = not torch.are_deterministic_algorithms_enabled()
    if is_fake(q):
        delta = torch.empty_like(lse)
    elif any_order and runs_hopper(settings, q.device, q.dtype, q.shape[-1]):
        from attention.kernels.hopper import launch

        delta = launch.backward(
            d_out, d_lse, q, k, v, out, lse, dq, dk, dv, lo, hi, params, settings
        )
    else:
        batch, num_heads, num_queries, head_dim = q.shape
        delta = torch.empty_like(lse)
        delta_kernel[(tiles_of(num_queries, DELTA_BLOCK_Q), batch * num_heads)](
            out, d_out, d_lse, delta, *out.stride()[:3], *d_out.stride()[:3], num_heads,
            num_queries, head_dim, DELTA_BLOCK_Q, padded_head_dim(head_dim),
        )  # fmt: skip
        row_max, row_sum = statistics_of(state)
        statistics = row_max, lse if row_sum is None else row_sum, delta
        _, *steps = SOFTMAXES[settings.softmax]
        own = *statistics, settings.scale, *steps

        plain = num_heads == k.shape[1] and lo is None and not settings.score_mod
        given = settings, lo, hi, params, q, k, v, d_out
        grid, shared, meta = plan("dkdv" if plain else "dkdv_general", *given)
        ranges = None if lo is None else query_ranges(lo, hi, k.shape[2], meta["BLOCK_KV"])
        dkdv_kernel[grid](*shared, *own, dk, dv, dk.stride(2), ranges, batch_stride(ranges), **meta)
        grid, shared, meta = plan("dq", *given)
        dq_kernel[grid](*shared, *own, dq, dq.stride(2), **meta)
    gradients = [x.to(dtype) for x in gradients]
    return gradients if sinks is None else [*gradients, gradient_of_sinks(sinks, lse, delta)]


def empty_state(lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for the state of a call in this dtype."""
    return lse.new_empty((2, *lse.shape) if dtype == torch.float32 else 0)


def statistics_of(state: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """row_max and row_sum, or None twice if the state is empty."""
    return state.unbind() if state.numel() else (None, None)


@cache
def constants(
    kernel: str,
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    groups: int,
) -> dict[str, Any]:
    """What a kernel is compiled with; its names in the table of tiles are forward, dkdv,
    dkdv_general and dq.
    """
    block_q, block_kv = settings.block_q, settings.block_kv
    tile = pick_tile(kernel, head_dim, dtype, device, block_q=block_q, block_kv=block_kv)
    return {
        "CAUSAL": settings.causal,
        "SCORE_MOD": find_score_mod(settings.score_mod),
        "GROUPS": groups,
        "D": head_dim,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "BLOCK_D": padded_head_dim(head_dim),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def plan(
    kernel: str,
    settings: Settings,
    lo: Tensor | None,
    hi: Tensor | None,
    params: Tensor | None,
    *tensors: Tensor,
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """The grid, the arguments that all kernels take first, and constants(). tensors: q, k, v, and
    d_out in the backward pass, each of which gets a descriptor.
    """
    q, k = tensors[:2]
    (batch, num_heads, num_queries, head_dim), (_, num_kv_heads, num_keys, _) = q.shape, k.shape
    groups = num_heads // num_kv_heads
    meta = constants(kernel, settings, q.device, q.dtype, head_dim, groups)
    of_queries, of_keys, of_row = meta["BLOCK_Q"], meta["BLOCK_KV"], meta["BLOCK_D"]
    descriptors = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, of_row])
        for x, rows in zip(tensors, (of_queries, of_keys, of_keys, of_queries), strict=False)
    ]
    equal = lo is None and not settings.causal
    if kernel.startswith("dkdv"):  # a program owns keys, and the queries of its group pass
        programs = tiles_of(num_keys, of_keys) * batch * num_kv_heads
        section = section_of(q.device, groups * 2 * bytes_of_a_head(q), equal=equal)
    else:
        programs = tiles_of(num_queries, of_queries) * batch * num_heads
        section = section_of(q.device, 2 * bytes_of_a_head(k), heads=groups, equal=equal)
    # in base 2; a score modifier takes natural scores
    score_scale = settings.scale * (1 if settings.score_mod else math.log2(math.e))
    masks = lo, hi, params, batch_stride(lo)
    sizes = num_heads, section, num_queries, num_keys, score_scale
    return (programs,), (*descriptors, *masks, *sizes), meta


def readable(x: Tensor) -> Tensor:
    """x, or a copy that a tensor descriptor can point at: contiguous along D, every other stride a
    positive multiple of 16 bytes.

    A view of a packed qkv projection needs no copy. The interpreter computes bfloat16 on raw bits,
    so there x becomes float32.
    """
    if x.is_cpu and x.dtype == torch.bfloat16 and not is_fake(x):
        x = x.float()
    granule = 16 // x.element_size()
    *outer, last = x.stride()
    aligned = all(stride > 0 and stride % granule == 0 for stride in outer)
    if last == 1 and aligned and (is_fake(x) or x.data_ptr() % 16 == 0):
        return x
    head_dim = x.shape[-1]
    return x.new_empty(*x.shape[:3], head_dim + -head_dim % granule)[..., :head_dim].copy_(x)


def is_packed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q, k, v are parts of one projection (B, N, H + 2 H_kv, D). Their gradients should
    have the same layout.
    """
    _, num_heads, length, head_dim = q.shape
    row = (num_heads + 2 * k.shape[1]) * head_dim
    # compare sizes last: comparing symbolic sizes costs a guard
    return (
        q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (head_dim, row, 1)
        and k.shape[2] == length
    )


def empty_gradients(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> list[Tensor]:
    """Memory for dq, dk, dv; if packed, one tensor (B, N, H + 2 H_kv, D) for unpacked(). An
    operator may not return views of one tensor. A compiler can see that the tensor is the gradient
    of a projection to q, k and v.
    """
    if not packed:
        return [empty_heads(x.shape, x) for x in (q, k, v)]
    batch, num_heads, length, head_dim = q.shape
    return [q.new_empty(batch, length, num_heads + 2 * k.shape[1], head_dim)]


def unpacked(gradients: Sequence[Tensor], num_heads: int, num_kv_heads: int) -> Sequence[Tensor]:
    """dq, dk, dv (B, H or H_kv, N, D) from the memory of empty_gradients()."""
    if len(gradients) == 3:
        return gradients
    # split before transposing: Inductor copies to make the gradient of a transposed tensor's parts
    parts = gradients[0].split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 2)
    return [x.transpose(1, 2) for x in parts]


def gradient_of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """d_sinks (H,) from p (dp - delta), as of any score. A sink's dp is 0, because its value is."""
    p = (sinks[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf)).exp()
    return -(p * delta).sum((0, 2))
