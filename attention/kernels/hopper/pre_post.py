"""Plain Triton kernels around the backward kernel for Hopper: one prepares the numbers that it
reads for each row, others convert the sums that it leaves.

prepare_kernel and convert_dq_kernel walk from the end, because what was written last is still in
the L2 cache.
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
    """Store delta as in attention/kernels/backward.py and lse in base 2. Clear the float32 sum of
    dq, which has whole blocks of 128 queries.
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
    sum_ptr, dq_ptr, stride_dqb, stride_dqh, stride_dqn, num_heads, head_groups, N, scale,
    D: tl.constexpr,
):  # fmt: skip
    """dq (B, H, N, D) in its own dtype from the float32 sum. The sum holds groups of 16 queries,
    head_groups for each head, in the order of the tensor cores, as (D / 8, 8, 4, 2, 2): element j,
    g, t, i, e of a group belongs to its query 8 i + g and column 8 j + 2 t + e."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch_head = tl.num_programs(1) - 1 - tl.program_id(1)
    batch = tl.cast(batch_head // num_heads, tl.int64)
    head = tl.cast(batch_head % num_heads, tl.int64)
    first = tl.cast(batch_head * head_groups + block * 4, tl.int64) * (16 * D)
    dq = tl.load(sum_ptr + first + tl.arange(0, 64 * D)) * scale
    dq = (
        dq.to(dq_ptr.dtype.element_ty)
        .reshape(4, D // 8, 8, 4, 2, 2)
        .permute(0, 4, 2, 1, 3, 5)
        .reshape(64, D)
    )
    rows = block * 64 + tl.arange(0, 64)
    row = tl.cast(rows, tl.int64)[:, None]
    column = tl.arange(0, D)
    dq_ptr += batch * stride_dqb + head * stride_dqh
    tl.store(dq_ptr + row * stride_dqn + column[None, :], dq, mask=(rows < N)[:, None])


@triton.jit
def join_shares_kernel(
    shares_ptr, dk_ptr, dv_ptr,
    stride_dkb, stride_dkh, stride_dkm, stride_dvb, stride_dvh, stride_dvm, num_kv_heads, M, SHARES,
    D: tl.constexpr, BLOCK_KV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dk and dv (B, H_kv, M, D) in their own dtype: the sums over the shares of each key/value
    head, in the order of the shares. shares_ptr is (B H_kv SHARES, blocks, 2, BLOCK_KV, D) float32,
    dv before dk.
    """
    start = tl.program_id(0) * ROWS
    batch_head = tl.program_id(1)
    batch = tl.cast(batch_head // num_kv_heads, tl.int64)
    head = tl.cast(batch_head % num_kv_heads, tl.int64)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, D)
    blocks = tl.cdiv(M, BLOCK_KV)
    block = tl.cast(batch_head * SHARES * blocks + start // BLOCK_KV, tl.int64)
    dv_part = shares_ptr + block * (2 * BLOCK_KV * D) + start % BLOCK_KV * D
    dv_part += rows[:, None] * D + columns[None, :]
    dk_part = dv_part + BLOCK_KV * D
    dv = tl.zeros([ROWS, D], tl.float32)
    dk = tl.zeros([ROWS, D], tl.float32)
    next_share = tl.cast(blocks, tl.int64) * (2 * BLOCK_KV * D)
    for _ in range(SHARES):
        dv += tl.load(dv_part)
        dk += tl.load(dk_part)
        dv_part += next_share
        dk_part += next_share
    keys = tl.cast(start + rows, tl.int64)[:, None]
    inside = (start + rows < M)[:, None]
    dk_ptr += batch * stride_dkb + head * stride_dkh
    dv_ptr += batch * stride_dvb + head * stride_dvh
    tl.store(dk_ptr + keys * stride_dkm + columns[None, :], dk, mask=inside)
    tl.store(dv_ptr + keys * stride_dvm + columns[None, :], dv, mask=inside)
