"""The norms of the residual stream, together with the sums before them.

When training on a GPU, one kernel computes `x + branch` and its norm (model/norm_kernel.py). The
backward pass is also one kernel: from the gradients of both results to those of x and the branch.
"""

from typing import Any

import torch
from torch import Tensor, nn

from config import ModelConfig
from model.device import TRITON, product_dtype

NORM_EPS = 1e-5
MAX_WIDTH = 8192  # the longest row that a program holds in its registers


def build_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, eps=NORM_EPS, bias=config.bias)
    return nn.RMSNorm(config.hidden_size, eps=NORM_EPS)


def add_norm(x: Tensor, branch: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """x + branch and norm(x + branch), both (B, N, C); None adds nothing. norm comes from
    build_norm().

    The kernel returns the norm in autocast's dtype, which the next product takes; PyTorch in x's.
    """
    if branch is not None and has_kernel(x, branch):
        x, normed, _ = add_norm_operator(x, branch, *arguments(x, norm))
        return x, normed
    x = x if branch is None else x + branch
    return x, norm(x)


def arguments(x: Tensor, norm: nn.Module) -> tuple:
    """The operator's arguments after the branch."""
    return *norm_arguments(norm), product_dtype(x, x.dtype)


def norm_arguments(norm: nn.Module) -> tuple[Tensor, Tensor | None, float, bool]:
    """What a kernel needs of a module from build_norm(): weight, bias or None, eps, and whether the
    mean is subtracted.
    """
    centred = isinstance(norm, nn.LayerNorm)
    return norm.weight, norm.bias if centred else None, norm.eps, centred


def has_kernel(x: Tensor, branch: Tensor) -> bool:
    """Whether to use the kernel. Only with gradients: in a decoding step of a few tokens, calling
    our operator costs more than its kernel saves.
    """
    return TRITON and torch.is_grad_enabled() and x.is_cuda and fits_kernel(x, branch)


def fits_kernel(x: Tensor, branch: Tensor) -> bool:
    return (
        x.dtype != torch.float64
        and torch.promote_types(x.dtype, branch.dtype) == x.dtype
        and x.shape[-1] <= MAX_WIDTH
    )


# operators, each one node for torch.compile. They return new tensors, not views
@torch.library.custom_op("tilegpt::add_norm", mutates_args=())
def add_norm_operator(
    x: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    """x + branch, its norm in dtype, and statistics for the backward pass: see
    model/norm_kernel.py.
    """
    from model.norm_kernel import forward

    return forward(x.contiguous(), branch.contiguous(), weight, bias, eps, centred, dtype)


@add_norm_operator.register_fake
def _(x, branch, weight, bias, eps, centred, dtype):
    statistics = x.new_empty(2 if centred else 1, x.shape[:-1].numel(), dtype=torch.float32)
    return [x.new_empty(x.shape), x.new_empty(x.shape, dtype=dtype), statistics]


@torch.library.custom_op("tilegpt::add_norm_backward", mutates_args=())
def add_norm_backward(
    d_total: Tensor | None,
    d_y: Tensor,
    total: Tensor,
    weight: Tensor,
    statistics: Tensor,
    dtype: torch.dtype,
    with_bias: bool,
) -> list[Tensor]:
    """See model/norm_kernel.py, whose list it returns."""
    from model.norm_kernel import backward

    d_total = None if d_total is None else d_total.contiguous()
    return backward(d_total, d_y.contiguous(), total, weight, statistics, dtype, with_bias)


@add_norm_backward.register_fake
def _(d_total, d_y, total, weight, statistics, dtype, with_bias):
    d_parameters = total.new_empty(1 + with_bias, total.shape[-1], dtype=torch.float32)
    d_branch = [torch.empty_like(total, dtype=dtype)] * (dtype != total.dtype)
    return [torch.empty_like(total), d_parameters, *d_branch]


def _save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    _, branch, weight, bias, *_ = inputs
    total, _, statistics = output
    ctx.set_materialize_grads(False)  # no zeros for the unused sum at the last norm
    ctx.dtype, ctx.bias_dtype = branch.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(total, weight, statistics)


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    total, weight, statistics = ctx.saved_tensors
    d_total, d_y, _ = gradients
    d_y = torch.zeros_like(total) if d_y is None else d_y
    d_x, sums, *d_branch = add_norm_backward(
        d_total, d_y, total, weight, statistics, ctx.dtype, ctx.bias_dtype is not None
    )
    d_bias = None if ctx.bias_dtype is None else sums[1].to(ctx.bias_dtype)
    return d_x, *(d_branch or [d_x]), sums[0].to(weight.dtype), d_bias, None, None, None


add_norm_operator.register_autograd(_backward, setup_context=_save)
