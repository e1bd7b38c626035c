"""The norms of the residual stream, together with the sums before them.

When training on a GPU, one kernel computes `x + branch` and its norm (model/norm_kernel.py). The
backward pass is also one kernel: from the gradients of both results to those of x and the branch.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import ModelConfig
from model.checkpointing import elementwise_recomputed
from model.loss import TRITON
from model.products import NARROW, bias_gradient, product_dtype, weight_gradient

NORM_EPS = 1e-5
ONES = 16  # columns after the norm: see AddNormLinear
MAX_WIDTH = 8192  # the longest row that a program holds in its registers


class Branch(NamedTuple):
    """What a block leaves to the next norm to add."""

    values: Tensor  # (B, N, C)
    # (C,), the bias in values whose gradient the norm computes. None if its layer does
    bias: Tensor | None


def build_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, eps=NORM_EPS, bias=config.bias)
    return nn.RMSNorm(config.hidden_size, eps=NORM_EPS)


def add_norm(
    x: Tensor, branch: Tensor | None, norm: nn.Module, branch_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + branch and norm(x + branch), both (B, N, C); None adds nothing. norm comes from
    build_norm().

    branch_bias (C,): a bias that the branch contains, detached. Its gradient comes from here, which
    has_kernel() must allow.

    The kernel returns the norm in autocast's dtype, which the next product takes; PyTorch in x's.
    """
    if branch is not None and has_kernel(x, branch):
        x, normed, _ = add_norm_operator(x, branch, *arguments(x, norm), branch_bias, 0)
        return x, normed
    x = x if branch is None else x + branch
    return x, norm(x)


def add_norm_linear(
    x: Tensor,
    branch: Tensor | None,
    norm: nn.Module,
    linear: nn.Linear,
    branch_bias: Tensor | None = None,
    *,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """x + branch and linear(norm(x + branch)); see add_norm(). With recompute, autograd keeps only
    the sum, and the backward pass computes the norm again.
    """
    if branch is not None and has_kernel(x, branch):
        given = *arguments(x, norm), branch_bias, linear.weight, linear.bias, recompute
        return AddNormLinear.apply(x, branch, *given)

    def run(x: Tensor) -> Tensor:
        return linear(norm(x))

    x = x if branch is None else x + branch
    return x, (elementwise_recomputed(run) if recompute else run)(x)


def arguments(x: Tensor, norm: nn.Module) -> tuple:
    """The operator's arguments between the branch and its bias."""
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


class AddNormLinear(torch.autograd.Function):
    """add_norm_linear(), using the kernels.

    In 16 bits a one follows each row of the norm. So the matrix's gradient, a product with these
    rows, has one more column: the sum of d_out, which is the offset's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, eps: float,
        centred: bool, dtype: torch.dtype, branch_bias: Tensor | None,
        matrix: Tensor, offset: Tensor | None, recompute: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.ones = ONES if dtype in NARROW and offset is not None else 0
        total, y, statistics = add_norm_operator(
            x, branch, weight, bias, eps, centred, dtype, branch_bias, ctx.ones
        )
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.parameters = branch.dtype, dtypes_of(weight, bias, branch_bias)
        ctx.matrix_dtype, ctx.offset_dtype = dtypes_of(matrix, offset)
        narrow, offset = matrix.to(dtype), None if offset is None else offset.to(dtype)
        kept = (matrix, None) if recompute else (narrow, y)
        ctx.save_for_backward(total, weight, bias, statistics, *kept)
        # as a matrix: F.linear adds the offset to a larger strided tensor in a kernel of its own
        rows = y.flatten(0, -2)[:, : x.shape[-1]]
        return total, F.linear(rows, narrow, offset).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, d_total: Tensor | None, d_out: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, bias, statistics, matrix, y = ctx.saved_tensors
        d_y, width = d_out @ matrix.to(d_out.dtype), total.shape[-1]
        d_x, sums, *more = add_norm_backward(
            d_total, d_y, total, weight, bias, statistics, ctx.dtype,
            ctx.parameters[2] is not None, y is None, ctx.ones,
        )  # fmt: skip
        if y is None:
            *more, y = more
        d_weight, d_bias, d_branch_bias = split(sums, ctx.parameters)
        d_matrix = weight_gradient(d_out, y, torch.promote_types(ctx.matrix_dtype, torch.float32))
        d_offset = None
        if ctx.ones:
            d_offset = d_matrix[:, width].to(ctx.offset_dtype)
        elif ctx.offset_dtype is not None:
            d_offset = bias_gradient(d_out, ctx.offset_dtype)
        d_matrix = d_matrix[:, :width].to(ctx.matrix_dtype)
        d_norm = d_weight, d_bias, None, None, None, d_branch_bias
        return d_x, *(more or [d_x]), *d_norm, d_matrix, d_offset, None
