"""Before and after the backward kernel for Hopper, in plain Triton: what it reads of each row, and the sum that it leaves.

Both walk from the end, because what was written last is still in the L2 cache.
"""

import triton
import triton.language as tl

from attention.kernels.backward import delta_of, in_base_2


@triton.jit
def prepare_kernel(
    out_ptr, do_ptr, lse_ptr, d_lse_ptr, delta_ptr, lse_log2_ptr, dq_ptr,
    stride_ob, stride_oh, stride_on, stride_dob, stride_doh, stride_don, num_heads, N,
    D: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """delta as in attention/kernels/backward.py, lse in base 2, and zeros into dq (B * H, N, D) float32, to which the programs add."""
    start_q = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    batch_head = tl.num_programs(1) - 1 - tl.program_id(1)
    rows = start_q + tl.arange(0, BLOCK_Q)
    inside = rows < N
    delta = delta_of(
        rows, out_ptr, do_ptr, d_lse_ptr, stride_ob, stride_oh, stride_on, stride_dob, stride_doh, stride_don, batch_head, num_heads, N,
        D, D,
    )  # fmt: skip
    offset = tl.cast(batch_head, tl.int64) * N
    lse = tl.load(lse_ptr + offset + rows, mask=inside, other=0.0)
    tl.store(delta_ptr + offset + rows, delta, mask=inside)
    tl.store(lse_log2_ptr + offset + rows, in_base_2(lse), mask=inside)
    row = tl.cast(rows, tl.int64)[:, None]
    column = tl.arange(0, D)
    tl.store(dq_ptr + (offset + row) * D + column[None, :], tl.zeros([BLOCK_Q, D], tl.float32), mask=inside[:, None])


@triton.jit
def convert_dq_kernel(
    sum_ptr, dq_ptr, stride_dqb, stride_dqh, stride_dqn, num_heads, N, scale, D: tl.constexpr, BLOCK_Q: tl.constexpr
):  # fmt: skip
    """dq (B, H, N, D) in its own dtype from the sum (B * H, N, D) in float32."""
    start_q = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    batch_head = tl.num_programs(1) - 1 - tl.program_id(1)
    batch = tl.cast(batch_head // num_heads, tl.int64)
    head = tl.cast(batch_head % num_heads, tl.int64)
    rows = start_q + tl.arange(0, BLOCK_Q)
    column = tl.arange(0, D)
    inside = (rows < N)[:, None]
    row = tl.cast(rows, tl.int64)[:, None]
    dq = tl.load(sum_ptr + (tl.cast(batch_head, tl.int64) * N + row) * D + column[None, :], mask=inside, other=0.0) * scale
    dq_ptr += batch * stride_dqb + head * stride_dqh
    tl.store(dq_ptr + row * stride_dqn + column[None, :], dq.to(dq_ptr.dtype.element_ty), mask=inside)
