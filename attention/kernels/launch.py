"""Launch the kernels of forward.py and backward.py, or those for Hopper.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

import math
from collections.abc import Sequence
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
    descriptor_strides,
    padded_head_dim,
    pick_tile,
    section_of,
    tiles_of,
)

# by name, because an operator cannot take functions
SOFTMAXES = {
    "online": ONLINE,
    "no_max": defects.NO_MAX,
    "no_rescale": defects.NO_RESCALE,
    "no_rescale_detached": defects.NO_RESCALE_DETACHED,
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

    def choice(self, q: Tensor) -> str:
        """portable or hopper."""
        return choose_kernel(
            self.kernel,
            device=q.device,
            dtype=q.dtype,
            head_dim=q.shape[-1],
            scale=self.scale,
            score_mod=self.score_mod,
            softmax=self.softmax,
            tile=self.block_q or self.block_kv,
        ).kernel


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
    float32. The state is empty for 16 bits, and row_max and log(row_sum), (2, B, H, N) in base 2,
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
    if settings.choice(q) == "hopper":
        from attention.kernels.hopper import launch

        launch.forward(q, k, v, out, lse, top, lo, hi, params, sinks, settings)
        return out, lse, state, top
    batch, num_heads, num_queries, _ = q.shape
    groups = num_heads // k.shape[1]
    meta = constants("forward", q, lo, settings)
    equal = lo is None and not settings.causal
    forward_kernel[(tiles_of(num_queries, meta["BLOCK_Q"]) * batch * num_heads,)](
        *descriptors(meta, q, k, v), out, lse, top, *statistics_of(state), lo, hi, params, sinks,
        *out.stride()[:3], batch_stride(lo), num_heads, groups, batch * num_heads,
        section_of(k.device, 2 * bytes_of_a_head(k), heads=groups, equal=equal),
        *sizes(q, k, settings), MOVE_MAX=SOFTMAXES[settings.softmax].move_max, **meta,
    )  # fmt: skip
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
    given = d_out, d_lse, q, k, v, out, lse
    others = dq, dk, dv, lo, hi, params, settings
    # the Hopper kernels sum dq in any order
    any_order = not torch.are_deterministic_algorithms_enabled()
    if any_order and settings.choice(q) == "hopper":
        from attention.kernels.hopper import launch

        delta = launch.backward(*given, *others)
    else:
        delta = portable_backward(*given, state, *others)
    gradients = [x.to(dtype) for x in gradients]
    return gradients if sinks is None else [*gradients, gradient_of_sinks(sinks, lse, delta)]


def portable_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    state: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    lo: Tensor | None,
    hi: Tensor | None,
    params: Tensor | None,
    settings: Settings,
) -> Tensor:
    """Fill dq, dk and dv. Returns delta (B, H, N), the sum over keys of p * dp."""
    (batch, num_heads, num_queries, head_dim), (_, num_kv_heads, num_keys, _) = q.shape, k.shape
    groups, equal = num_heads // num_kv_heads, lo is None and not settings.causal
    softmax = SOFTMAXES[settings.softmax]
    steps = {"PROBABILITY": softmax.probability, "SCORE_GRADIENT": softmax.score_gradient}

    delta = torch.empty_like(lse)
    delta_kernel[(tiles_of(num_queries, DELTA_BLOCK_Q), batch * num_heads)](
        out, d_out, d_lse, delta, *out.stride()[:3], *d_out.stride()[:3], num_heads, num_queries,
        D=head_dim, BLOCK_Q=DELTA_BLOCK_Q, BLOCK_D=padded_head_dim(head_dim),
    )  # fmt: skip

    row_max, log_sum = statistics_of(state)
    statistics = row_max, lse if log_sum is None else log_sum, delta
    plain = groups == 1 and lo is None and not settings.score_mod
    meta = constants("dkdv" if plain else "dkdv_general", q, lo, settings)
    ranges = None if lo is None else query_ranges(lo, hi, num_keys, meta["BLOCK_KV"])
    dkdv_kernel[(tiles_of(num_keys, meta["BLOCK_KV"]) * batch * num_kv_heads,)](
        *descriptors(meta, q, k, v, d_out), *statistics, dk, dv, lo, hi, ranges, params,
        *dk.stride()[:3], *dv.stride()[:3], batch_stride(lo), batch_stride(ranges),
        num_kv_heads, batch * num_kv_heads,
        section_of(q.device, groups * 2 * bytes_of_a_head(q), equal=equal),
        *sizes(q, k, settings), GROUPS=groups, **steps, **meta,
    )  # fmt: skip

    meta = constants("dq", q, lo, settings)
    dq_kernel[(tiles_of(num_queries, meta["BLOCK_Q"]) * batch * num_heads,)](
        *descriptors(meta, q, k, v, d_out), *statistics, dq, lo, hi, params,
        *dq.stride()[:3], batch_stride(lo), num_heads, groups, batch * num_heads,
        section_of(k.device, 2 * bytes_of_a_head(k), heads=groups, equal=equal),
        *sizes(q, k, settings), **steps, **meta,
    )  # fmt: skip
    return delta


def empty_state(lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for the state of a call in this dtype."""
    return lse.new_empty((2, *lse.shape) if dtype == torch.float32 else 0)


def statistics_of(state: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """row_max and log(row_sum), or None twice if the state is empty."""
    return (state[0], state[1]) if state.numel() else (None, None)


def constants(kernel: str, q: Tensor, lo: Tensor | None, settings: Settings) -> dict[str, Any]:
    """What every kernel is compiled with."""
    head_dim, own = q.shape[-1], {"block_q": settings.block_q, "block_kv": settings.block_kv}
    tile = pick_tile(kernel, head_dim, q.dtype, q.device, **own)
    return {
        "CAUSAL": settings.causal,
        "INTERVALS": lo is not None,
        "SCORE_MOD": find_score_mod(settings.score_mod),
        "D": head_dim,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "BLOCK_D": padded_head_dim(head_dim),
        # Triton's default for float32 is TF32, which has fewer bits
        "PRECISION": "ieee",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def sizes(q: Tensor, k: Tensor, settings: Settings) -> tuple[int, int, float, float]:
    """N, M, and the scale of the scores, also in base 2."""
    return q.shape[2], k.shape[2], settings.scale, settings.scale * math.log2(math.e)


def descriptors(meta: dict[str, Any], *tensors: Tensor) -> list[TensorDescriptor]:
    """Descriptors of q, k, v and d_out (B, H, N, D), which load the rows of a tile of one head, and
    zeros past the end.
    """
    of_queries, of_keys = meta["BLOCK_Q"], meta["BLOCK_KV"]
    return [
        TensorDescriptor(x, list(x.shape), descriptor_strides(x), [1, 1, rows, meta["BLOCK_D"]])
        for x, rows in zip(tensors, (of_queries, of_keys, of_keys, of_queries), strict=False)
    ]


def readable(x: Tensor) -> Tensor:
    """x, or a copy that a tensor descriptor can point at: contiguous along D, every other stride a
    positive multiple of 16 bytes.

    A view of a packed qkv projection needs no copy. The interpreter computes bfloat16 on raw bits,
    so there x becomes float32.
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
