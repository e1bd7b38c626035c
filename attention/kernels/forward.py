"""The forward kernel: one program owns BLOCK_Q queries of one head and streams the keys past them.

It is the tile loop of attention/tiled.py with the streaming softmax of attention/online_softmax.py written into it, names included.
Scores live in the base-2 domain (scale * log2(e) is folded in), because the GPU's exponential is a power of two.
Dao, "FlashAttention-2" (2023), algorithm 1.

Dimensions: H query heads, N queries, M keys, D head dim (padded to BLOCK_D); a tile is BLOCK_Q queries by BLOCK_KV keys.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(desc, batch, head, start, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows start : start + BLOCK_N of one head as (BLOCK_N, BLOCK_D), zero past the tensor's rows and columns."""
    return desc.load([batch, head, start, 0]).reshape(BLOCK_N, BLOCK_D)


@triton.jit
def store_tile(ptr, stride_n, start, limit, tile, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    # the offset of the tile needs 64 bits, those inside it do not
    ptr += tl.cast(start, tl.int64) * stride_n
    row = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    mask = (start + row < limit)[:, None] & (column < D)[None, :]
    tl.store(ptr + row[:, None] * stride_n + column[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def absorb_tile(
    row_max, row_sum, acc, q, k_desc, v_desc, batch, kv_head, start, rows, N, M, scale_log2,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """OnlineSoftmax.update for the keys start : start + BLOCK_KV."""
    k = load_tile(k_desc, batch, kv_head, start, BLOCK_KV, BLOCK_D)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    if MASKED:
        keys = start + tl.arange(0, BLOCK_KV)
        visible = keys[None, :] < M
        if CAUSAL:
            visible = visible & (keys[None, :] <= rows[:, None] + (M - N))
        scores = tl.where(visible, scores, float("-inf"))
    next_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = next_max
    if MASKED:
        # a row that has seen no key subtracts 0: -inf - -inf is NaN
        shift = tl.where(next_max == float("-inf"), 0.0, next_max)
    alpha = tl.exp2(row_max - shift)
    p = tl.exp2(scores - shift[:, None])
    row_sum = alpha * row_sum + tl.sum(p, 1)
    v = load_tile(v_desc, batch, kv_head, start, BLOCK_KV, BLOCK_D)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return next_max, row_sum, acc


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, stride_ob, stride_oh, stride_on,
    num_heads, groups, batch_heads, N, M, scale_log2,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # all heads' last query tiles first: under a causal mask they are the longest, and short ones fill the gaps at the end
    pid = tl.program_id(0)
    start_q = (tl.cdiv(N, BLOCK_Q) - 1 - pid // batch_heads) * BLOCK_Q
    batch = pid % batch_heads // num_heads
    head = pid % num_heads
    kv_head = head // groups
    rows = start_q + tl.arange(0, BLOCK_Q)
    q = load_tile(q_desc, batch, head, start_q, BLOCK_Q, BLOCK_D)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    # keys 0 : full_last are seen by every row of this tile, full_last : last by some
    last = M
    full_last = M
    if CAUSAL:
        last = tl.minimum(M, tl.maximum(0, start_q + BLOCK_Q + M - N))
        full_last = tl.minimum(M, tl.maximum(0, start_q + 1 + M - N))
    full_last = full_last // BLOCK_KV * BLOCK_KV
    for start in tl.range(0, full_last, BLOCK_KV):
        row_max, row_sum, acc = absorb_tile(
            row_max, row_sum, acc, q, k_desc, v_desc, batch, kv_head, start, rows, N, M, scale_log2,
            CAUSAL, False, BLOCK_KV, BLOCK_D, PRECISION,
        )  # fmt: skip
    for start in tl.range(full_last, last, BLOCK_KV):
        row_max, row_sum, acc = absorb_tile(
            row_max, row_sum, acc, q, k_desc, v_desc, batch, kv_head, start, rows, N, M, scale_log2,
            CAUSAL, True, BLOCK_KV, BLOCK_D, PRECISION,
        )  # fmt: skip

    no_key = row_max == float("-inf")
    row_sum = tl.where(no_key, 1.0, row_sum)
    lse = (row_max + tl.log2(row_sum)) * 0.6931471805599453  # back to the natural logarithm
    out_ptr += tl.cast(batch, tl.int64) * stride_ob + tl.cast(head, tl.int64) * stride_oh
    store_tile(out_ptr, stride_on, start_q, N, acc / row_sum[:, None], D, BLOCK_Q, BLOCK_D)
    tl.store(lse_ptr + tl.cast(batch * num_heads + head, tl.int64) * N + rows, lse, mask=rows < N)
