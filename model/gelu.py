"""GELU, and a faster form of its backward pass for training on a GPU.

torch.compile computes the gradient of a linear layer's output twice: once to write it, once to sum
it over the tokens for the bias. One kernel does both (model/gelu_kernel.py).

Dimensions: C features.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.loss import TRITON


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


def linear_gelu(x: Tensor, linear: nn.Linear) -> Tensor:
    """gelu(linear(x)). The kernel takes its place if it can; see has_kernel()."""
    if not has_kernel(x, linear):
        return gelu(linear(x))
    # GeluWithBias has the gradient of the bias
    hidden = F.linear(x, linear.weight, linear.bias.detach())
    return GeluWithBias.apply(hidden, linear.bias)


def has_kernel(x: Tensor, linear: nn.Linear) -> bool:
    return TRITON and torch.is_grad_enabled() and x.is_cuda and fits_kernel(x, linear)


def fits_kernel(x: Tensor, linear: nn.Linear) -> bool:
    return linear.bias is not None and x.dtype != torch.float64


class GeluWithBias(torch.autograd.Function):
    """gelu(hidden), where hidden is a product to which bias (C,) was added. The gradient of the
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


# an operator, one node for torch.compile. It returns new tensors, not views
@torch.library.custom_op("tilegpt::gelu_backward", mutates_args=())
def gelu_backward(d_out: Tensor, hidden: Tensor) -> list[Tensor]:
    """The gradient of hidden (..., C), and its sum over all tokens, (C,) in float32."""
    from model.gelu_kernel import backward

    return backward(d_out.contiguous(), hidden.contiguous())


@gelu_backward.register_fake
def _(d_out, hidden):
    return [hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape[-1], dtype=torch.float32)]
