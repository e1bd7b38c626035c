"""The norms of the residual stream, together with the sums before them.

On a GPU, while training, `x + branch` and its norm are one kernel (model/norm_kernel.py), and so is their backward pass: it takes the
gradients of both results, and writes those of x and of the branch.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from config import ModelConfig

NORM_EPS = 1e-5
MAX_WIDTH = 8192  # a row that a program holds in its registers
# looked up once: torch.compile cannot trace the look-up
TRITON = importlib.util.find_spec("triton") is not None


def build_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, eps=NORM_EPS, bias=config.bias)
    return nn.RMSNorm(config.hidden_size, eps=NORM_EPS)


def add_norm(x: Tensor, branch: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """x + branch and norm(x + branch), both (B, N, C); None adds nothing. norm is one of build_norm's.

    The kernel gives the norm in autocast's dtype, in which a product would take it anyway, PyTorch in x's.
    """
    if branch is None:
        return x, norm(x)
    if not has_kernel(x, branch):
        x = x + branch
        return x, norm(x)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    centred = isinstance(norm, nn.LayerNorm)
    x, normed, _ = add_norm_operator(x, branch, norm.weight, norm.bias if centred else None, norm.eps, centred, dtype)
    return x, normed


def has_kernel(x: Tensor, branch: Tensor) -> bool:
    """Not without gradients: to a decoding step, a few tokens, an operator of our own costs more than its kernel saves."""
    return TRITON and torch.is_grad_enabled() and x.is_cuda and fits_kernel(x, branch)


def fits_kernel(x: Tensor, branch: Tensor) -> bool:
    return x.dtype != torch.float64 and torch.promote_types(x.dtype, branch.dtype) == x.dtype and x.shape[-1] <= MAX_WIDTH


# operators: for torch.compile one node each. What they return are tensors of their own, no views
@torch.library.custom_op("tilegpt::add_norm", mutates_args=())
def add_norm_operator(
    x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype
) -> list[Tensor]:
    """x + branch, its norm in dtype, and statistics for the backward pass: see model/norm_kernel.py."""
    from model.norm_kernel import forward

    return forward(x.contiguous(), branch.contiguous(), weight, bias, eps, centred, dtype)


@add_norm_operator.register_fake
def _(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype) -> list[Tensor]:
    statistics = x.new_empty(2 if centred else 1, x.shape[:-1].numel(), dtype=torch.float32)
    return [x.new_empty(x.shape), x.new_empty(x.shape, dtype=dtype), statistics]


@torch.library.custom_op("tilegpt::add_norm_backward", mutates_args=())
def add_norm_backward(
    d_total: Tensor | None, d_y: Tensor, total: Tensor, weight: Tensor, statistics: Tensor, bias: bool, dtype: torch.dtype
) -> list[Tensor]:
    """The gradients of x, of weight and bias in one, and of a branch in dtype where that is not x's."""
    from model.norm_kernel import backward

    return backward(None if d_total is None else d_total.contiguous(), d_y.contiguous(), total, weight, statistics, bias, dtype)


@add_norm_backward.register_fake
def _(
    d_total: Tensor | None, d_y: Tensor, total: Tensor, weight: Tensor, statistics: Tensor, bias: bool, dtype: torch.dtype
) -> list[Tensor]:
    d_parameters = total.new_empty(2 if bias else 1, total.shape[-1], dtype=torch.float32)
    return [torch.empty_like(total), d_parameters, *([] if dtype == total.dtype else [torch.empty_like(total, dtype=dtype)])]


def _save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    _, branch, weight, bias, *_ = inputs
    total, _, statistics = output
    ctx.set_materialize_grads(False)  # no zeros for the sum behind the last norm, which nobody uses
    ctx.dtype, ctx.bias_dtype = branch.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(total, weight, statistics)


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    total, weight, statistics = ctx.saved_tensors
    d_total, d_y, _ = gradients
    d_y = torch.zeros_like(total) if d_y is None else d_y
    d_x, d_parameters, *d_branch = add_norm_backward(d_total, d_y, total, weight, statistics, ctx.bias_dtype is not None, ctx.dtype)
    d_weight, d_bias = d_parameters[0].to(weight.dtype), None if ctx.bias_dtype is None else d_parameters[1].to(ctx.bias_dtype)
    return d_x, *(d_branch or [d_x]), d_weight, d_bias, None, None, None


add_norm_operator.register_autograd(_backward, setup_context=_save)
