"""The residual stream's next sum and its norm in one kernel, forward and backward: each tensor is
read or written once.

torch.compile alone adds an old branch again where it needs the sum of an earlier layer. In the
backward pass it also writes the gradient of the sum twice: an extra kernel makes the 16-bit copy
for the branch's product.

Dimensions: T tokens, C hidden_size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.tiles import multiprocessors

# elements of a program's rows in a warp. On an H200, with 32,768 rows of 768, more rows or warps
# were no faster forward. The backward pass holds more numbers for each element
WARP_ELEMENTS, BACKWARD_WARP_ELEMENTS = 1024, 512
# in the backward pass a program sums its rows' share of the weight's gradient, so no more programs
# start than run at once, with WARPS on each multiprocessor. Each loads its next rows before the
# current ones are done. On an H100 8, 12 and 16 warps took 153, 146 and 160 us; 8 with twice the
# elements 149
WARPS, STAGES = 12, 2
# the sum of the shares: blocks so narrow that every multiprocessor has one
SUM = {"ROWS": 128, "BLOCK": 16, "STAGES": 3}


@triton.jit
def load_row(ptr, column, of_columns):
    """Load the weights or the biases in float32, as (1, BLOCK)."""
    return tl.load(ptr + column, mask=of_columns, other=0.0).to(tl.float32)[None, :]


@triton.jit
def add_norm_kernel(
    x_ptr, branch_ptr, weight_ptr, bias_ptr, total_ptr, y_ptr, statistics_ptr, rows, width, eps,
    CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For ROWS rows per program: total = x + branch, y = norm(total)."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    of_rows, of_columns = first + row < rows, column < width
    mask = of_rows[:, None] & of_columns[None, :]
    offset = row[:, None] * width + column[None, :]
    start = first * width
    x = tl.load(x_ptr + start + offset, mask=mask, other=0.0)
    branch = tl.load(branch_ptr + start + offset, mask=mask, other=0.0)
    # round to the dtype of the residual stream, which the backward pass reads
    total = (x.to(tl.float32) + branch.to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + start + offset, total, mask=mask)

    total = total.to(tl.float32)
    if CENTRED:
        mean = tl.sum(total, 1) / width
        tl.store(statistics_ptr + rows + first + row, mean, mask=of_rows)
        total = tl.where(mask, total - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(total * total, 1) / width + eps)
    tl.store(statistics_ptr + first + row, rstd, mask=of_rows)
    y = total * rstd[:, None] * load_row(weight_ptr, column, of_columns)
    if bias_ptr is not None:
        y += load_row(bias_ptr, column, of_columns)
    tl.store(y_ptr + start + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_norm_backward_kernel(
    d_total_ptr, d_y_ptr, total_ptr, weight_ptr, statistics_ptr, d_x_ptr, d_branch_ptr, share_ptr,
    rows, width,
    CENTRED: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes every num_programs-th tile of ROWS rows. It computes the gradients of x and
    the branch, and its rows' share of the gradients of weight and bias.
    """
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    of_columns = column < width
    offset = row[:, None] * width + column[None, :]
    weight = load_row(weight_ptr, column, of_columns)
    d_weight = tl.zeros((BLOCK,), tl.float32)
    d_bias = tl.zeros((BLOCK,), tl.float32)

    for tile in tl.range(
        tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        first = tl.cast(tile, tl.int64) * ROWS
        of_rows = first + row < rows
        mask = of_rows[:, None] & of_columns[None, :]
        start = first * width
        d_y = tl.load(d_y_ptr + start + offset, mask=mask, other=0.0).to(tl.float32)
        total = tl.load(total_ptr + start + offset, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(statistics_ptr + first + row, mask=of_rows, other=0.0)
        if CENTRED:
            total -= tl.load(statistics_ptr + rows + first + row, mask=of_rows, other=0.0)[:, None]
        normalised = total * rstd[:, None]
        d_weight += tl.sum(d_y * normalised, 0)
        if BIAS:
            d_bias += tl.sum(d_y, 0)
        d_normalised = d_y * weight
        d_x = d_normalised - normalised * (tl.sum(d_normalised * normalised, 1) / width)[:, None]
        if CENTRED:
            d_x -= (tl.sum(d_normalised, 1) / width)[:, None]
        d_x *= rstd[:, None]
        if d_total_ptr is not None:
            d_x += tl.load(d_total_ptr + start + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(d_x_ptr + start + offset, d_x.to(d_x_ptr.dtype.element_ty), mask=mask)
        if d_branch_ptr is not None:
            tl.store(
                d_branch_ptr + start + offset, d_x.to(d_branch_ptr.dtype.element_ty), mask=mask
            )

    share_ptr += tl.program_id(0) * (1 + BIAS) * width + column
    tl.store(share_ptr, d_weight, mask=of_columns)
    if BIAS:
        tl.store(share_ptr + width, d_bias, mask=of_columns)


@triton.jit
def sum_shares_kernel(
    shares_ptr, sum_ptr, programs, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sum BLOCK columns of the shares of all programs."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, of_columns = tl.arange(0, ROWS), column < columns
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(0, programs, ROWS, num_stages=STAGES):
        mask = (first + row < programs)[:, None] & of_columns[None, :]
        offset = (first + row)[:, None] * columns + column[None, :]
        total += tl.load(shares_ptr + offset, mask=mask, other=0.0)
    tl.store(sum_ptr + column, tl.sum(total, 0), mask=of_columns)


def constants(width: int, warp_elements: int) -> dict[str, int]:
    """A kernel's constants for rows of this length."""
    block = triton.next_power_of_2(width)
    return {
        "ROWS": max(1, warp_elements // block),
        "BLOCK": block,
        "num_warps": max(1, block // warp_elements),
    }


# operators, each one node for torch.compile. They return new tensors, not views
@torch.library.custom_op("tilegpt::add_norm", mutates_args=())
def add_norm_forward(
    x: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    """x + branch, its norm in dtype, both (..., C), and the statistics of each row for the backward
    pass: float32 1 / deviation (1, T), or with the mean (2, T).

    x and branch (..., C), weight and bias (C,), each of float16, bfloat16 or float32. centred:
    LayerNorm, else RMSNorm.
    """
    x, branch, width = x.contiguous(), branch.contiguous(), x.shape[-1]
    rows, meta = x.numel() // width, constants(width, WARP_ELEMENTS)
    total, y = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    statistics = x.new_empty(2 if centred else 1, rows, dtype=torch.float32)
    add_norm_kernel[triton.cdiv(rows, meta["ROWS"]),](
        x, branch, weight, bias, total, y, statistics, rows, width, eps, CENTRED=centred, **meta
    )
    return [total, y, statistics]


@add_norm_forward.register_fake
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
    """The gradient of x; those of the weight and, with_bias, of the bias, float32 (1 or 2, C); and
    a copy of the first in `dtype`, the branch's, if that is not x's dtype.

    d_total, d_y: the gradients of the sum (None is zero) and of its norm. Sums over rows have the
    same order every time.
    """
    d_total, d_y = None if d_total is None else d_total.contiguous(), d_y.contiguous()
    width = total.shape[-1]
    rows, meta = total.numel() // width, constants(width, BACKWARD_WARP_ELEMENTS)
    programs = max(1, WARPS // meta["num_warps"])
    programs *= multiprocessors(total.device) if total.is_cuda else 1
    programs = min(programs, triton.cdiv(rows, meta["ROWS"]))
    d_x = torch.empty_like(total)
    d_branch = None if dtype == total.dtype else torch.empty_like(total, dtype=dtype)
    shares = total.new_empty(programs, 1 + with_bias, width, dtype=torch.float32)
    add_norm_backward_kernel[programs,](
        d_total, d_y, total, weight, statistics, d_x, d_branch, shares, rows, width,
        CENTRED=len(statistics) == 2, BIAS=with_bias, STAGES=STAGES, **meta,
    )  # fmt: skip
    d_parameters = torch.empty_like(shares[0])
    sum_shares_kernel[triton.cdiv(d_parameters.numel(), SUM["BLOCK"]),](
        shares, d_parameters, programs, d_parameters.numel(), **SUM
    )
    return [d_x, d_parameters] if d_branch is None else [d_x, d_parameters, d_branch]


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


add_norm_forward.register_autograd(_backward, setup_context=_save)
