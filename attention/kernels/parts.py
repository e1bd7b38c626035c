"""One pass over memory that adds up parts of a tensor, or merges states of the streaming softmax.

A ring's results come in parts: those of a hop, for some of the rows. PyTorch would read and write
the total once for each part, and again to round it.

Dimensions: B batch, H heads, N rows, D head dim; a program takes ROWS rows of all heads.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.interface import empty_heads
from attention.kernels.launch import padded_head_dim, tiles_of
from attention.online_softmax import OnlineSoftmax

MOST = 3  # parts in one pass
ELEMENTS = 4096  # that a program holds of each part

Parts = Sequence[tuple[slice, Tensor]]


@triton.jit
def load_part(
    ptr, lse_ptr, stride_b, stride_h, stride_n, start, stop, H, b, h, n, WEIGHTED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows n of heads h, (ROWS, BLOCK_D) float32, and their lse (ROWS,); 0 and -inf outside of the
    part, which begins at `start`.
    """
    inside, column = (n >= start) & (n < stop), tl.arange(0, BLOCK_D)
    row = tl.cast(n - start, tl.int64)
    offset = b * stride_b + h * stride_h + row * stride_n
    mask = inside[:, None] & (column < D)[None, :]
    x = tl.load(ptr + offset[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    lse = tl.full(n.shape, float("-inf"), tl.float32)
    if WEIGHTED:
        lse_row = (b * H + h) * (stop - start) + row
        lse = tl.load(lse_ptr + lse_row, mask=inside, other=float("-inf"))
    return x, lse


@triton.jit(do_not_specialize=["N", "start_a", "stop_a", "start_b", "stop_b", "start_c", "stop_c"])
def total_kernel(
    out_ptr, lse_ptr, a_ptr, b_ptr, c_ptr, lse_a_ptr, lse_b_ptr, lse_c_ptr,
    stride_ob, stride_oh, stride_on, H, N,
    stride_ab, stride_ah, stride_an, start_a, stop_a,
    stride_bb, stride_bh, stride_bn, start_b, stop_b,
    stride_cb, stride_ch, stride_cn, start_c, stop_c,
    COUNT: tl.constexpr, WEIGHTED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The sum of COUNT parts. WEIGHTED: OnlineSoftmax.merge of them, each the state (lse, 1, x)."""
    # a token's heads lie side by side
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n, h, b = row // H, tl.cast(row % H, tl.int64), tl.cast(tl.program_id(1), tl.int64)
    x, lse_x = load_part(
        a_ptr, lse_a_ptr, stride_ab, stride_ah, stride_an, start_a, stop_a, H, b, h, n,
        WEIGHTED, D, BLOCK_D,
    )  # fmt: skip
    y, lse_y = tl.zeros_like(x), tl.full(n.shape, float("-inf"), tl.float32)
    z, lse_z = tl.zeros_like(x), tl.full(n.shape, float("-inf"), tl.float32)
    if COUNT > 1:
        y, lse_y = load_part(
            b_ptr, lse_b_ptr, stride_bb, stride_bh, stride_bn, start_b, stop_b, H, b, h, n,
            WEIGHTED, D, BLOCK_D,
        )  # fmt: skip
    if COUNT > 2:
        z, lse_z = load_part(
            c_ptr, lse_c_ptr, stride_cb, stride_ch, stride_cn, start_c, stop_c, H, b, h, n,
            WEIGHTED, D, BLOCK_D,
        )  # fmt: skip
    if WEIGHTED:
        row_max = tl.maximum(tl.maximum(lse_x, lse_y), lse_z)
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)  # -inf - -inf is NaN
        p_x, p_y, p_z = tl.exp(lse_x - shift), tl.exp(lse_y - shift), tl.exp(lse_z - shift)
        row_sum = p_x + p_y + p_z
        row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # no key: row_max is -inf
        tl.store(lse_ptr + (b * H + h) * N + n, row_max + tl.log(row_sum), mask=n < N)
        total = (p_x[:, None] * x + p_y[:, None] * y + p_z[:, None] * z) / row_sum[:, None]
    else:
        total = x + y + z
    column = tl.arange(0, BLOCK_D)
    offset = b * stride_ob + h * stride_oh + tl.cast(n, tl.int64) * stride_on
    tl.store(
        out_ptr + offset[:, None] + column[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=(n < N)[:, None] & (column < D)[None, :],
    )


def total(
    parts: Parts, states: Sequence[Tensor | None], like: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The sum of 1 to MOST parts, or with their `states` (lse) the merge and its lse (B, H, N).

    A part is (rows, tensor (B, H, rows, D)); like (B, H, N, D) has the shape of the result, of
    dtype `dtype`. A row in no part is 0.
    """
    batch, heads, length, head_dim = like.shape
    out = empty_heads(like.shape, like, dtype)
    weighted = states[0] is not None
    lse = out.new_empty(like.shape[:3], dtype=torch.float32) if weighted else None
    numbers, tensors = [], []
    for where, x in parts:
        x = x if x.stride(-1) == 1 else x.contiguous()
        tensors.append(x)
        numbers += [*x.stride()[:3], where.start, where.stop]
    missing = MOST - len(parts)
    tensors += [None] * missing
    numbers += [0] * 5 * missing
    of_states = [None if each is None else each.contiguous() for each in states]
    block_d = padded_head_dim(head_dim)
    rows = max(1, ELEMENTS // block_d)
    total_kernel[tiles_of(heads * length, rows), batch](
        out, lse, *tensors, *of_states, *[None] * missing, *out.stride()[:3], heads, length,
        *numbers, COUNT=len(parts), WEIGHTED=weighted, D=head_dim, BLOCK_D=block_d, ROWS=rows,
        num_warps=4,
    )  # fmt: skip
    return out, lse


def summed(parts: Parts, like: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of up to MOST parts of a tensor like `like`."""
    return total(parts, [None] * len(parts), like, dtype)[0]


def merged(
    parts: Sequence[tuple[slice, OnlineSoftmax]], like: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """out and lse of up to MOST states, as by OnlineSoftmax.merge and finalize. Each state is
    normalised: row_max is its lse, row_sum 1.
    """
    accs = [(rows, state.acc) for rows, state in parts]
    out, lse = total(accs, [state.row_max.squeeze(-1) for _, state in parts], like, dtype)
    assert lse is not None
    return out, lse
