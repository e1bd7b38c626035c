"""The norms of the residual stream, together with the sums before them.

When training on a GPU, one kernel computes `x + branch` and its norm (model/norm_kernel.py). The
backward pass is also one kernel: from the gradients of both results to those of x and the branch.
"""

from typing import Any

import torch
from torch import Tensor, nn

from model.device import TRITON, product_dtype

MAX_WIDTH = 8192  # the longest row that a program holds in its registers


def add_norm(
    x: Tensor, branch: Tensor | None, norm: nn.Module, branch_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + branch and norm(x + branch), both (B, N, C); None adds nothing. norm is an
    nn.LayerNorm or an nn.RMSNorm.

    branch_bias (C,): a bias that the branch contains, detached. Its gradient comes from here, which
    has_kernel() must allow.

    The kernel returns the norm in autocast's dtype, which the next product takes; PyTorch in x's.
    """
    if branch is not None and has_kernel(x, branch):
        x, normed, _ = add_norm_operator(x, branch, *arguments(x, norm), branch_bias, 0)
        return x, normed
    x = x if branch is None else x + branch
    return x, norm(x)


def arguments(x: Tensor, norm: nn.Module) -> tuple:
    """The operator's arguments between the branch and its bias."""
    return *norm_arguments(norm), product_dtype(x, x.dtype)


def norm_arguments(norm: nn.Module) -> tuple[Tensor, Tensor | None, float, bool]:
    """What a kernel needs: weight, bias or None, eps, and whether the mean is subtracted."""
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
    branch_bias: Tensor | None,
    ones: int,
) -> list[Tensor]:
    """x + branch, its norm in dtype, and statistics for the backward pass: see
    model/norm_kernel.py. branch_bias is that of add_norm(). With `ones`, autograd does not apply.
    """
    from model.norm_kernel import forward

    return forward(x.contiguous(), branch.contiguous(), weight, bias, eps, centred, dtype, ones)


@add_norm_operator.register_fake
def _(x, branch, weight, bias, eps, centred, dtype, branch_bias, ones):
    statistics = x.new_empty(2 if centred else 1, x.shape[:-1].numel(), dtype=torch.float32)
    y = x.new_empty(*x.shape[:-1], x.shape[-1] + ones, dtype=dtype)
    return [x.new_empty(x.shape), y, statistics]


@torch.library.custom_op("tilegpt::add_norm_backward", mutates_args=())
def add_norm_backward(
    d_total: Tensor | None, d_y: Tensor, total: Tensor, weight: Tensor, bias: Tensor | None,
    statistics: Tensor, dtype: torch.dtype,
    branch_bias: bool, again: bool, ones: int,
) -> list[Tensor]:  # fmt: skip
    """See model/norm_kernel.py, whose list it returns."""
    from model.norm_kernel import backward

    return backward(
        None if d_total is None else d_total.contiguous(),
        d_y.contiguous(),
        total,
        weight,
        bias,
        statistics,
        dtype,
        branch_bias=branch_bias,
        again=again,
        ones=ones,
    )


@add_norm_backward.register_fake
def _(d_total, d_y, total, weight, bias, statistics, dtype, branch_bias, again, ones):
    sums = 1 + (bias is not None) + branch_bias
    d_parameters = total.new_empty(sums, total.shape[-1], dtype=torch.float32)
    d_branch = [torch.empty_like(total, dtype=dtype)] * (dtype != total.dtype)
    y = [d_y.new_empty(*d_y.shape[:-1], d_y.shape[-1] + ones)] * again
    return [torch.empty_like(total), d_parameters, *d_branch, *y]


def _save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    _, branch, weight, bias, *_, branch_bias, _ = inputs
    total, _, statistics = output
    ctx.set_materialize_grads(False)  # no zeros for the unused sum at the last norm
    ctx.dtype, ctx.parameters = branch.dtype, dtypes_of(weight, bias, branch_bias)
    ctx.save_for_backward(total, weight, bias, statistics)


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    total, weight, bias, statistics = ctx.saved_tensors
    d_total, d_y, _ = gradients
    d_y = torch.zeros_like(total) if d_y is None else d_y
    d_x, sums, *d_branch = add_norm_backward(
        d_total, d_y, total, weight, bias, statistics, ctx.dtype, ctx.parameters[2] is not None,
        False, 0,
    )  # fmt: skip
    d_weight, d_bias, d_branch_bias = split(sums, ctx.parameters)
    return d_x, *(d_branch or [d_x]), d_weight, d_bias, None, None, None, d_branch_bias, None


def dtypes_of(*parameters: Tensor | None) -> list[torch.dtype | None]:
    return [None if each is None else each.dtype for each in parameters]


def split(sums: Tensor, dtypes: list[torch.dtype | None]) -> list[Tensor | None]:
    """The rows of `sums` in these dtypes; None where there is none."""
    rows = iter(sums)
    return [None if dtype is None else next(rows).to(dtype) for dtype in dtypes]


add_norm_operator.register_autograd(_backward, setup_context=_save)
