"""Products of matrices: their dtype under autocast, and products of 16-bit matrices that leave the
GPU's registers in float32.

The gradient of a weight sums over all tokens. Autocast rounds it to 16 bits and then converts it to
the weight's float32, in a kernel of its own. Here the product writes float32 at once.

Dimensions: M, N of a result, K that a product sums over.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NARROW = (torch.float16, torch.bfloat16)


def product_dtype(x: Tensor, otherwise: torch.dtype) -> torch.dtype:
    """The dtype of a product of x under autocast, and `otherwise` without it."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else otherwise


def widens(dtype: torch.dtype, a: Tensor) -> bool:
    """Whether wide_product() and add_product() take a for a result of this dtype: CUDA's library
    has products from 16 bits to float32, the CPU's does not.
    """
    return a.is_cuda and a.dtype in NARROW and dtype == torch.float32


# operators, each one node for torch.compile
@torch.library.custom_op(
    "tilegpt::wide_product", mutates_args=(), tags=(torch.Tag.needs_exact_strides,)
)
def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b (M, N) in float32, for a (M, K) and b (K, N) in 16 bits."""
    return torch.mm(a, b, out_dtype=torch.float32)


@wide_product.register_fake
def _(a, b):
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


@torch.library.custom_op(
    "tilegpt::add_product", mutates_args=("total",), tags=(torch.Tag.needs_exact_strides,)
)
def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (M, N) float32 += a b, for a (M, K) and b (K, N) in 16 bits. The product is neither
    stored beside the sum nor rounded.
    """
    torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)


@add_product.register_fake
def _(total, a, b):
    return None


def weight_gradient(d_y: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """d_y^T x (M, N) in dtype, for d_y (..., M) and x (..., N)."""
    d_y, x = d_y.flatten(0, -2), x.flatten(0, -2)
    return wide_product(d_y.mT, x) if widens(dtype, d_y) else (d_y.mT @ x).to(dtype)


def bias_gradient(d_y: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of d_y (..., M) over all but its last dimension, (M,) in dtype."""
    return d_y.flatten(0, -2).sum(0, dtype=torch.float32).to(dtype)


def linear(layer: nn.Linear, x: Tensor, bias: Tensor | None, *, repeated: bool = False) -> Tensor:
    """layer(x) with another bias. The gradient of a float32 weight is not rounded to 16 bits.

    repeated: whether the backward pass runs this again. Then it is PyTorch's own layer, because
    checkpointing leaves out a product that comes last, and cannot leave out a part of a Function.
    """
    dtype = product_dtype(x, x.dtype)
    if not repeated and torch.is_grad_enabled() and x.is_cuda and dtype in NARROW:
        return WideGradientLinear.apply(x.to(dtype), layer.weight, bias)
    return F.linear(x, layer.weight, bias)


class WideGradientLinear(torch.autograd.Function):
    """linear() for x in 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (dtype, bias_dtype) = ctx.saved_tensors, ctx.dtypes
        d_weight = weight_gradient(d_y, x, dtype) if ctx.needs_input_grad[1] else None
        d_bias = bias_gradient(d_y, bias_dtype) if ctx.needs_input_grad[2] else None
        return d_y @ weight, d_weight, d_bias
