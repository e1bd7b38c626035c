"""Before and after the backward kernel for Hopper, in plain Triton: what it reads of each row, and
the sum that it leaves.

Both walk from the end, because what was written last is still in the L2 cache.
"""

import triton
import triton.language as tl

from attention.kernels.backward import delta_of, in_base_2


@triton.jit
def prepare_kernel(
    out_ptr, do_ptr, lse_ptr, d_lse_ptr, delta_ptr, lse_log2_ptr, sum_ptr,
    stride_ob, stride_oh, stride_on, stride_dob, stride_doh, stride_don, num_heads, N,
    D: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """delta as in attention/kernels/backward.py, lse in base 2, and zeros into the sum of dq,
    float32, of whole blocks of 128 queries.
    """
    start_q = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    batch_head = tl.num_programs(1) - 1 - tl.program_id(1)
    rows = start_q + tl.arange(0, BLOCK_Q)
    inside = rows < N
    delta = delta_of(
        rows, out_ptr, do_ptr, d_lse_ptr, stride_ob, stride_oh, stride_on, stride_dob, stride_doh,
        stride_don, batch_head, num_heads, N,
        D, D,
    )  # fmt: skip
    offset = tl.cast(batch_head, tl.int64) * N
    lse = tl.load(lse_ptr + offset + rows, mask=inside, other=0.0)
    tl.store(delta_ptr + offset + rows, delta, mask=inside)
    tl.store(lse_log2_ptr + offset + rows, in_base_2(lse), mask=inside)
    cleared = (tl.cast(batch_head, tl.int64) * (tl.num_programs(0) * BLOCK_Q) + start_q) * D
    tl.store(sum_ptr + cleared + tl.arange(0, BLOCK_Q * D), tl.zeros([BLOCK_Q * D], tl.float32))


@triton.jit
def convert_dq_kernel(
    sum_ptr, dq_ptr, stride_dqb, stride_dqh, stride_dqn, num_heads, N, scale, D: tl.constexpr
):
    """dq (B, H, N, D) in its own dtype from the sum, of which 64 queries lie as the tensor cores
    leave them: (D / 8, 4, 8, 4, 2, 2) for (16 w + 8 i + g, 8 j + 2 t + e) at j, w, g, t, i, e."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch_head = tl.num_programs(1) - 1 - tl.program_id(1)
    batch = tl.cast(batch_head // num_heads, tl.int64)
    head = tl.cast(batch_head % num_heads, tl.int64)
    first = tl.cast(batch_head * (tl.cdiv(N, 128) * 2) + block, tl.int64) * (64 * D)
    dq = tl.load(sum_ptr + first + tl.arange(0, 64 * D)) * scale
    dq = (
        dq.to(dq_ptr.dtype.element_ty)
        .reshape(D // 8, 4, 8, 4, 2, 2)
        .permute(1, 4, 2, 0, 3, 5)
        .reshape(64, D)
    )
    rows = block * 64 + tl.arange(0, 64)
    row = tl.cast(rows, tl.int64)[:, None]
    column = tl.arange(0, D)
    dq_ptr += batch * stride_dqb + head * stride_dqh
    tl.store(dq_ptr + row * stride_dqn + column[None, :], dq, mask=(rows < N)[:, None])
