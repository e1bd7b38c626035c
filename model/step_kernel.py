"""The kernels of a decoding step: one for a product with everything before and after it, one for
the heads of new tokens.

A token uses each weight once, so memory limits the product and tensor cores do not help. A program
loads its rows of the weights before anything else, and multiplies while other programs load. The
norm before a product is cheap, so every program computes it again instead of waiting for another
kernel.

Dimensions: B sequences, one token each; K features in, F features out; H query heads, H_kv
key/value heads, D head dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.tiles import multiprocessors

BYTES = 32768  # bytes of weights that a program loads at once: 64 registers a thread
MOST_FEATURES = 16


@triton.jit
def load_row(ptr, k, K: tl.constexpr):
    """Load a row as (1, BLOCK_K): two dimensions, so that threads hold it like the weights."""
    k = k[None, :]
    return tl.load(ptr + k, mask=k < K, other=0.0)


@triton.jit
def load_weights(weight_ptr, n, k, F, K: tl.constexpr):
    """Load rows n of the weights, (BLOCK_F, BLOCK_K)."""
    inside = (n < F)[:, None] & (k < K)[None, :]
    return tl.load(weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0)


@triton.jit
def product_kernel(
    x_ptr, norm_weight_ptr, norm_bias_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, B, F, eps,
    CENTRED: tl.constexpr, ACTIVATION: tl.constexpr, K: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = residual + activation(norm(x) W^T + bias) for one row; None leaves a term out. With
    swiglu the weights have 2 F rows: first those of the gate.
    """
    GATED: tl.constexpr = ACTIVATION == "swiglu"
    # programs with the same weights are neighbours, so all rows but the first find them in the
    # cache
    row = tl.cast(tl.program_id(0) % B, tl.int64)
    n, k = tl.program_id(0) // B * BLOCK_F + tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_K)
    inside = n < F
    w = load_weights(weight_ptr, n, k, F, K)
    if GATED:
        other = load_weights(weight_ptr + tl.cast(F, tl.int64) * K, n, k, F, K)
    if norm_weight_ptr is not None:
        gain = load_row(norm_weight_ptr, k, K)
        if norm_bias_ptr is not None:
            shift = load_row(norm_bias_ptr, k, K)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n, mask=inside, other=0.0)
        if GATED:
            other_bias = tl.load(bias_ptr + F + n, mask=inside, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * F + n, mask=inside, other=0.0)
    # start all of these loads before waiting for any: ptxas would first wait for x
    tl.debug_barrier()

    x = load_row(x_ptr + row * K, k, K).to(tl.float32)
    if norm_weight_ptr is not None:
        if CENTRED:
            x = tl.where((k < K)[None, :], x - tl.sum(x, 1)[:, None] / K, 0.0)
        x *= tl.rsqrt(tl.sum(x * x, 1) / K + eps)[:, None] * gain.to(tl.float32)
        if norm_bias_ptr is not None:
            x += shift.to(tl.float32)
    y = tl.sum(x * w.to(tl.float32), 1)
    if bias_ptr is not None:
        y += bias.to(tl.float32)
    if ACTIVATION == "gelu":  # as gelu_by_sigmoid() of model/kernels/__init__.py
        y *= tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    if GATED:
        up = tl.sum(x * other.to(tl.float32), 1)
        if bias_ptr is not None:
            up += other_bias.to(tl.float32)
        y *= tl.sigmoid(y) * up
    if residual_ptr is not None:
        y += residual.to(tl.float32)
    tl.store(y_ptr + row * F + n, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def heads_kernel(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, q_ptr, k_ptr, v_ptr, stride_b, stride_h, stride_n,
    eps, H: tl.constexpr, H_KV: tl.constexpr, QK_NORM: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program takes one head of a row of qkv (B, (H + 2 H_kv) D). q and k get QK-norm and RoPE.
    Heads of q go to q (B, H, D), those of k and v to their places in the cache.
    """
    batch, head = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    qkv_ptr += (batch * (H + 2 * H_KV) + head) * D
    x = tl.load(qkv_ptr + d, mask=inside, other=0.0).to(tl.float32)
    if head < H + H_KV:
        rstd = 1.0
        if QK_NORM:
            rstd = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        x *= rstd
        if cos_ptr is not None:
            # the other feature of its plane; see model/rope.py
            other = tl.load(qkv_ptr + (d + D // 2) % D, mask=inside, other=0.0).to(tl.float32)
            other = tl.where(d < D // 2, -other, other) * rstd
            cos = tl.load(cos_ptr + d % (D // 2), mask=inside, other=0.0)
            x = x * cos + other * tl.load(sin_ptr + d % (D // 2), mask=inside, other=0.0)
    y = x.to(q_ptr.dtype.element_ty)
    if head < H:
        tl.store(q_ptr + (batch * H + head) * D + d, y, mask=inside)
    else:
        place = batch * stride_b + tl.load(positions_ptr) * stride_n
        if head < H + H_KV:
            tl.store(k_ptr + place + (head - H) * stride_h + d, y, mask=inside)
        else:
            tl.store(v_ptr + place + (head - H - H_KV) * stride_h + d, y, mask=inside)


def features_of_a_program(bytes_of_a_feature: int, features: int, programs: int) -> int:
    """Output features per program: as many as fit into its registers, but few enough for `programs`
    programs.
    """
    most = min(MOST_FEATURES, BYTES // triton.next_power_of_2(bytes_of_a_feature))
    while most > 1 and triton.cdiv(features, most) < programs:
        most //= 2
    return max(most, 1)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: tuple[Tensor, Tensor | None, float, bool] | None = None,
    activation: str = "",
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """residual + activation(norm(x) W^T + bias), (B, F) in dtype (None: that of x), for x (B, K).

    weight (F, K), or with swiglu (2 F, K), and a bias for each of its rows; residual (B, F). norm:
    weight (K,), bias (K,) or None, eps, and whether the mean is subtracted. activation: gelu,
    swiglu or "".

    A program holds a whole row of K features in its registers; fits_kernels() refuses longer ones.
    """
    (rows, width), gates = x.shape, 2 if activation == "swiglu" else 1
    features = len(weight) // gates
    y = x.new_empty(rows, features, dtype=dtype)
    norm_weight, norm_bias, eps, centred = norm or (None, None, 0.0, False)
    bytes_of_a_feature = gates * width * weight.element_size()
    processors = multiprocessors(x.device) if x.is_cuda else 1
    block_f = features_of_a_program(bytes_of_a_feature, features, processors)
    product_kernel[(triton.cdiv(features, block_f) * rows,)](
        x, norm_weight, norm_bias, weight, bias, residual, y, rows, features, eps,
        CENTRED=centred, ACTIVATION=activation, K=width, BLOCK_F=block_f,
        BLOCK_K=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return y


def place_heads(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    positions: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    qk_norm_eps: float | None,
) -> Tensor:
    """q (B, H, 1, D) of qkv (B, (H + 2 H_kv) D); k and v go to `positions` (1,) of the cache's k, v
    (B, H_kv, M, D). rope: the cosines and sines of rope_tables(), (1, D / 2). qk_norm_eps: None
    without QK-norm.
    """
    batch, num_kv_heads, _, head_dim = k.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = qkv.new_empty(batch, num_heads, 1, head_dim)
    cos, sin = rope or (None, None)
    heads_kernel[(batch, num_heads + 2 * num_kv_heads)](
        qkv, cos, sin, positions, q, k, v, *k.stride()[:3], qk_norm_eps or 0.0,
        H=num_heads, H_KV=num_kv_heads, QK_NORM=qk_norm_eps is not None, D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
    return q
