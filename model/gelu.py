"""The MLP with GELU, and faster forms of it for training on a GPU.

In 16 bits on a Hopper GPU, the products before and after GELU compute it (model/mlp_kernel.py), for
the sizes of fits_product_kernel(). Elsewhere one kernel computes its backward pass
(model/gelu_kernel.py). torch.compile would compute the gradient of a linear layer's output twice:
once to write it, once to sum it over the tokens for the bias.

Dimensions: C features of x, F of the hidden layer.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.loss import TRITON
from model.products import bias_gradient, linear, product_dtype, weight_gradient


def gelu(x: Tensor) -> Tensor:
    """GELU in the tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    if torch.compiler.is_compiling() and x.device.type == "cuda":
        return gelu_by_sigmoid(x)
    return F.gelu(x, approximate="tanh")


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    """gelu(x) as x (1 + tanh(u)) / 2 = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3).

    For torch.compile: on a GPU its tanh takes more time than the memory traffic, forward and
    backward.
    """
    twice = 2 * math.sqrt(2 / math.pi)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    out = wide * torch.sigmoid(wide * (twice + twice * 0.044715 * wide.square()))
    # in torch 2.11 a compiled autograd.Function has zero gradients if its output went through a
    # conversion that changes nothing
    return out if out.dtype == x.dtype else out.to(x.dtype)


def gelu_mlp(x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    """down(gelu(up(x))), from x (..., C) to (..., C). Kernels take its place where they can: see
    has_product_kernel() and has_kernel().
    """
    if has_product_kernel(x, up, down):
        return GeluMLP.apply(x, up.weight, up.bias, down.weight, down.bias)
    if has_kernel(x, up):
        # GeluWithBias has the gradient of the bias
        activated = GeluWithBias.apply(linear(up, x, up.bias.detach()), up.bias)
    else:
        activated = gelu(linear(up, x, up.bias))
    return linear(down, activated, down.bias)


def has_kernel(x: Tensor, up: nn.Linear) -> bool:
    return TRITON and torch.is_grad_enabled() and x.is_cuda and fits_kernel(x, up)


def fits_kernel(x: Tensor, up: nn.Linear) -> bool:
    return up.bias is not None and x.dtype != torch.float64


def has_product_kernel(x: Tensor, up: nn.Linear, down: nn.Linear) -> bool:
    return has_kernel(x, up) and fits_product_kernel(x, up, down, hopper_multiprocessors(x.device))


def hopper_multiprocessors(device: torch.device) -> int:
    """0 where the kernels for Hopper cannot run."""
    from attention.kernels.select import obstacle_of_the_place
    from attention.kernels.tiles import multiprocessors

    return 0 if obstacle_of_the_place(device) else multiprocessors(device)


# for torch.compile. Its assume_constant_result() does the same, and loads all of its modules
hopper_multiprocessors._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def fits_product_kernel(x: Tensor, up: nn.Linear, down: nn.Linear, multiprocessors: int) -> bool:
    """Whether the kernel for Hopper takes these dtypes and sizes, and keeps the GPU busy. Under
    autocast, x must have the dtype of the products, as the norm before an MLP returns it.
    """
    if (
        up.bias is None
        or down.bias is None
        or x.dtype != product_dtype(x, up.weight.dtype)
        or x.dtype not in (torch.bfloat16, torch.float16)
        # whole tiles; each quarter of a tile needs a product
        or up.in_features % 64
        or up.in_features < 256
        or up.out_features % 256
    ):
        return False
    tokens, columns = x.numel() // up.in_features, up.out_features // 256
    # a program keeps its columns, so some multiprocessors may stay without one
    programs = multiprocessors // columns * columns
    return tokens // 128 * columns >= programs >= 0.85 * multiprocessors > 0


class GeluMLP(torch.autograd.Function):
    """gelu_mlp() with GELU in the products around it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor
    ) -> Tensor:
        ctx.dtypes = [parameter.dtype for parameter in (up, up_bias, down, down_bias)]
        up, down = up.to(x.dtype), down.to(x.dtype)
        hidden, activated = linear_gelu(x, up, up_bias)
        ctx.save_for_backward(x, hidden, activated, up, down)
        return F.linear(activated, down, down_bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, activated, up, down = ctx.saved_tensors
        d_hidden, d_up_bias = product_gelu_backward(d_y, down, hidden)
        d_x = d_hidden @ up
        up_dtype, up_bias_dtype, down_dtype, down_bias_dtype = ctx.dtypes
        return (
            d_x,
            weight_gradient(d_hidden, x, up_dtype),
            d_up_bias.to(up_bias_dtype),
            weight_gradient(d_y, activated, down_dtype),
            bias_gradient(d_y, down_bias_dtype) if ctx.needs_input_grad[4] else None,
        )


# operators, each one node for torch.compile. They return new tensors, not views
@torch.library.custom_op("tilegpt::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """x weight^T + bias, and GELU of it, both (..., F). weight (F, C) has the dtype of x."""
    if x.is_cuda:
        from model.mlp_kernel import forward

        return forward(x, weight, bias)
    hidden = F.linear(x, weight, bias.to(x.dtype))
    return [hidden, F.gelu(hidden, approximate="tanh")]


@linear_gelu.register_fake
def _(x, weight, bias):
    shape = *x.shape[:-1], weight.shape[0]
    return [x.new_empty(shape), x.new_empty(shape)]


@torch.library.custom_op("tilegpt::product_gelu_backward", mutates_args=())
def product_gelu_backward(d_y: Tensor, weight: Tensor, hidden: Tensor) -> list[Tensor]:
    """The gradient of hidden (..., F), and its sum over all tokens, (F,) in float32.

    d_y (..., C), weight (C, F). d_y weight is the gradient of gelu(hidden).
    """
    if d_y.is_cuda:
        from model.mlp_kernel import backward

        return backward(d_y, weight, hidden)
    d_hidden = torch.ops.aten.gelu_backward(d_y @ weight, hidden, approximate="tanh")
    return [d_hidden, d_hidden.flatten(0, -2).sum(0, dtype=torch.float32)]


@product_gelu_backward.register_fake
def _(d_y, weight, hidden):
    return [hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape[-1], dtype=torch.float32)]


class GeluWithBias(torch.autograd.Function):
    """gelu(hidden), where hidden is a product to which bias (F,) was added. The gradient of the
    bias comes from here, so it must not come from that sum too.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        ctx.save_for_backward(hidden)
        return gelu(hidden)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        d_hidden, d_bias = gelu_backward(d_out, *ctx.saved_tensors)
        return d_hidden, d_bias.to(ctx.dtype)


@torch.library.custom_op("tilegpt::gelu_backward", mutates_args=())
def gelu_backward(d_out: Tensor, hidden: Tensor) -> list[Tensor]:
    """The gradient of hidden (..., F), and its sum over all tokens, (F,) in float32."""
    from model.gelu_kernel import backward

    return backward(d_out.contiguous(), hidden.contiguous())


@gelu_backward.register_fake
def _(d_out, hidden):
    return [hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape[-1], dtype=torch.float32)]
