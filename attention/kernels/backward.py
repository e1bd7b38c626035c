"""The backward kernels: they rebuild p = exp(score - lse) tile by tile, so the forward saves only
out and lse. In float32 it saves row_max and log(row_sum) instead of lse, their sum, whose rounding
shows where scores are large: the p of a row that sees one key is then exactly 1.

The first kernel computes delta = rowsum(d_out * out). Two more compute the gradients, without
atomics, so the result does not depend on the order in which programs run. For dk and dv, a program
owns BLOCK_KV keys and walks the queries that see them, for every query head of its group. For dq, a
program owns BLOCK_Q queries and walks the keys that they see. Dao, "FlashAttention-2" (2023),
algorithm 2.

Dimensions: H query heads, N queries, M keys, D head dim (padded to BLOCK_D); a tile is BLOCK_Q
queries by BLOCK_KV keys.
"""

import triton
import triton.language as tl

from attention.kernels.forward import (
    edge_tile,
    key_ranges,
    load_interval,
    load_tile,
    place,
    scores_of,
    store_tile,
)


@triton.jit
def delta_of(
    rows, out_ptr, do_ptr, d_lse_ptr, stride_ob, stride_oh, stride_on, stride_dob, stride_doh,
    stride_don, batch_head, num_heads, N,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """rowsum(d_out * out) = sum_j p_j dp_j, less the gradient of lse."""
    batch = tl.cast(batch_head // num_heads, tl.int64)
    head = tl.cast(batch_head % num_heads, tl.int64)
    column = tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (column < D)[None, :]
    row = tl.cast(rows, tl.int64)[:, None]
    out = tl.load(
        out_ptr + batch * stride_ob + head * stride_oh + row * stride_on + column[None, :],
        mask=mask,
        other=0.0,
    )
    do = tl.load(
        do_ptr + batch * stride_dob + head * stride_doh + row * stride_don + column[None, :],
        mask=mask,
        other=0.0,
    )
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if d_lse_ptr is not None:
        delta -= tl.load(
            d_lse_ptr + tl.cast(batch_head, tl.int64) * N + rows, mask=rows < N, other=0.0
        )
    return delta


@triton.jit
def delta_kernel(
    out_ptr, do_ptr, d_lse_ptr, delta_ptr,
    stride_ob, stride_oh, stride_on, stride_dob, stride_doh, stride_don, num_heads, N,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    batch_head = tl.program_id(1)
    delta = delta_of(
        rows, out_ptr, do_ptr, d_lse_ptr, stride_ob, stride_oh, stride_on, stride_dob, stride_doh,
        stride_don, batch_head, num_heads, N,
        D, BLOCK_D,
    )  # fmt: skip
    tl.store(delta_ptr + tl.cast(batch_head, tl.int64) * N + rows, delta, mask=rows < N)


@triton.jit
def load_rows(ptr, start, limit, other, BLOCK: tl.constexpr):
    """Load one float for each query: lse or delta."""
    rows = start + tl.arange(0, BLOCK)
    return tl.load(ptr + rows, mask=rows < limit, other=other)


@triton.jit
def in_base_2(lse):
    """+inf for a row without a key, so that its p = exp2(score - lse) is 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def load_shift(max_ptr, lse_ptr, start, limit, BLOCK: tl.constexpr):
    """shift and log_sum of these rows, in base 2: p = exp2(score - shift - log_sum). Without
    max_ptr, shift is 0 and log_sum is lse. A row past the end counts as one without a key.
    """
    shift = tl.zeros([BLOCK], tl.float32)
    log_sum = load_rows(lse_ptr, start, limit, float("-inf"), BLOCK)
    if max_ptr is not None:
        shift = load_rows(max_ptr, start, limit, float("-inf"), BLOCK)
        log_sum = tl.where(shift == float("-inf"), float("inf"), log_sum)
        shift = tl.where(shift == float("-inf"), 0.0, shift)
    else:
        log_sum = in_base_2(log_sum)
    return shift, log_sum


@triton.jit
def add_query_tile(
    dk, dv, k, v, q_desc, do_desc, max_ptr, lse_ptr, delta_ptr, lo_ptr, hi_ptr, params_ptr, batch,
    head,
    start_q, keys, N, M, scale, scale_log2,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, MASKED: tl.constexpr, SCORE_MOD: tl.constexpr,
    PROBABILITY: tl.constexpr, SCORE_GRADIENT: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries start_q : start_q + BLOCK_Q contribute to dk and dv. Scores are
    transposed (keys, queries), so p and ds enter the next product without a transposition."""
    q = load_tile(q_desc, batch, head, start_q, BLOCK_Q, BLOCK_D)
    shift, log_sum = load_shift(max_ptr, lse_ptr, start_q, N, BLOCK_Q)
    rows = start_q + tl.arange(0, BLOCK_Q)
    lo, hi = load_interval(lo_ptr, hi_ptr, rows, N, INTERVALS and MASKED)
    product = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # (BLOCK_KV, BLOCK_Q)
    scores, derivative = scores_of(
        product, (rows + (M - N))[None, :], keys[:, None], lo[None, :], hi[None, :],
        batch, head, M, scale, scale_log2, params_ptr, CAUSAL, INTERVALS, MASKED, SCORE_MOD,
    )  # fmt: skip
    scores -= shift[None, :]
    p = PROBABILITY(scores, log_sum[None, :], 0)
    do = load_tile(do_desc, batch, head, start_q, BLOCK_Q, BLOCK_D)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    delta = load_rows(delta_ptr, start_q, N, 0.0, BLOCK_Q)
    ds = SCORE_GRADIENT(p, dp, delta[None, :], scores, 0)
    if SCORE_MOD is not None:
        ds = ds * derivative
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def walk_queries(
    dk, dv, k, v, q_desc, do_desc, max_ptr, lse_ptr, delta_ptr, lo_ptr, hi_ptr, params_ptr, batch,
    head,
    num_heads, keys,
    first, full_first, full_last, last, N, M, scale, scale_log2,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, SCORE_MOD: tl.constexpr,
    PROBABILITY: tl.constexpr, SCORE_GRADIENT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add all that one query head contributes to dk and dv. Queries first : last see some of these
    keys, full_first : full_last see all of them.
    """
    row_offset = tl.cast(batch * num_heads + head, tl.int64) * N
    if max_ptr is not None:
        max_ptr += row_offset
    lse_ptr += row_offset
    delta_ptr += row_offset
    for step in tl.range(first, last - (full_last - full_first), BLOCK_Q):
        # without INTERVALS there is no right edge: masked are only the queries before full_first
        start_q = edge_tile(step, full_first, full_last, True) if INTERVALS else step
        dk, dv = add_query_tile(
            dk, dv, k, v, q_desc, do_desc, max_ptr, lse_ptr, delta_ptr, lo_ptr, hi_ptr, params_ptr,
            batch, head, start_q, keys, N, M, scale,
            scale_log2, CAUSAL, INTERVALS, True, SCORE_MOD, PROBABILITY, SCORE_GRADIENT, BLOCK_Q,
            BLOCK_D, PRECISION,
        )  # fmt: skip
    for start_q in tl.range(full_first, full_last, BLOCK_Q):
        dk, dv = add_query_tile(
            dk, dv, k, v, q_desc, do_desc, max_ptr, lse_ptr, delta_ptr, lo_ptr, hi_ptr, params_ptr,
            batch, head, start_q, keys, N, M, scale,
            scale_log2, CAUSAL, INTERVALS, False, SCORE_MOD, PROBABILITY, SCORE_GRADIENT, BLOCK_Q,
            BLOCK_D, PRECISION,
        )  # fmt: skip
    return dk, dv


@triton.jit(do_not_specialize=["section"])  # it depends on the lengths; do not recompile for each
def dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, max_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, lo_ptr, hi_ptr,
    ranges_ptr, params_ptr,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn, stride_interval,
    stride_ranges,
    num_kv_heads, batch_kv_heads, section, N, M, scale, scale_log2, GROUPS: tl.constexpr,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, SCORE_MOD: tl.constexpr,
    PROBABILITY: tl.constexpr, SCORE_GRADIENT: tl.constexpr,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # longest first: the most queries see the first keys
    tile, batch_head = place(tl.program_id(0), tl.cdiv(M, BLOCK_KV), batch_kv_heads, section)
    start_kv = tile * BLOCK_KV
    batch = batch_head // num_kv_heads
    kv_head = batch_head % num_kv_heads
    keys = start_kv + tl.arange(0, BLOCK_KV)
    k = load_tile(k_desc, batch, kv_head, start_kv, BLOCK_KV, BLOCK_D)
    v = load_tile(v_desc, batch, kv_head, start_kv, BLOCK_KV, BLOCK_D)
    dk = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)

    # queries first : last see some of these keys, full_first : full_last see all of them
    first = 0
    full_first = 0
    full_last = N
    last = N
    if INTERVALS:
        lo_ptr += batch * stride_interval
        hi_ptr += batch * stride_interval
        ranges_ptr += batch * stride_ranges + tile * 4
        first = tl.load(ranges_ptr) // BLOCK_Q * BLOCK_Q
        last = tl.load(ranges_ptr + 3)
        full_first = (
            tl.minimum(tl.cdiv(tl.load(ranges_ptr + 1), BLOCK_Q), tl.cdiv(last, BLOCK_Q)) * BLOCK_Q
        )
        full_last = tl.load(ranges_ptr + 2)
        # rows past the last query need no mask: their p is 0
        full_last = tl.where(full_last == N, N + BLOCK_Q - 1, full_last) // BLOCK_Q * BLOCK_Q
        full_first = tl.maximum(first, full_first)
        full_last = tl.maximum(full_first, full_last)
    else:
        if CAUSAL:
            first = tl.maximum(0, start_kv + N - M) // BLOCK_Q * BLOCK_Q
            full_first = tl.cdiv(tl.maximum(0, start_kv + BLOCK_KV - 1 + N - M), BLOCK_Q) * BLOCK_Q
        if start_kv + BLOCK_KV > M:
            full_first = tl.cdiv(N, BLOCK_Q) * BLOCK_Q  # a ragged tail of keys is always masked
        full_first = tl.minimum(full_first, tl.cdiv(N, BLOCK_Q) * BLOCK_Q)
    if GROUPS == 1:
        # one head needs no loop, which would take registers from the tile
        dk, dv = walk_queries(
            dk, dv, k, v, q_desc, do_desc, max_ptr, lse_ptr, delta_ptr, lo_ptr, hi_ptr, params_ptr,
            batch,
            kv_head, num_kv_heads, keys,
            first, full_first, full_last, last, N, M, scale, scale_log2,
            CAUSAL, INTERVALS, SCORE_MOD, PROBABILITY, SCORE_GRADIENT, BLOCK_Q, BLOCK_D, PRECISION,
        )  # fmt: skip
    else:
        for group in tl.range(0, GROUPS):
            dk, dv = walk_queries(
                dk, dv, k, v, q_desc, do_desc, max_ptr, lse_ptr, delta_ptr, lo_ptr, hi_ptr,
                params_ptr, batch, kv_head * GROUPS + group,
                num_kv_heads * GROUPS, keys, first, full_first, full_last, last, N, M, scale,
                scale_log2,
                CAUSAL, INTERVALS, SCORE_MOD, PROBABILITY, SCORE_GRADIENT, BLOCK_Q, BLOCK_D,
                PRECISION,
            )  # fmt: skip
    dk_ptr += tl.cast(batch, tl.int64) * stride_dkb + tl.cast(kv_head, tl.int64) * stride_dkh
    dv_ptr += tl.cast(batch, tl.int64) * stride_dvb + tl.cast(kv_head, tl.int64) * stride_dvh
    store_tile(dk_ptr, stride_dkn, start_kv, M, dk * scale, D, BLOCK_KV, BLOCK_D)
    store_tile(dv_ptr, stride_dvn, start_kv, M, dv, D, BLOCK_KV, BLOCK_D)


@triton.jit
def add_key_tile(
    dq, q, do, shift, log_sum, delta, k_desc, v_desc, batch, head, kv_head, start, position, lo,
    hi, M, scale,
    scale_log2, params_ptr,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, MASKED: tl.constexpr, SCORE_MOD: tl.constexpr,
    PROBABILITY: tl.constexpr, SCORE_GRADIENT: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys start : start + BLOCK_KV contribute to dq."""
    k = load_tile(k_desc, batch, kv_head, start, BLOCK_KV, BLOCK_D)
    keys = start + tl.arange(0, BLOCK_KV)
    scores, derivative = scores_of(
        tl.dot(q, tl.trans(k), input_precision=PRECISION), position[:, None], keys[None, :], lo[:,
        None], hi[:, None],
        batch, head, M, scale, scale_log2, params_ptr, CAUSAL, INTERVALS, MASKED, SCORE_MOD,
    )  # fmt: skip
    scores -= shift[:, None]
    p = PROBABILITY(scores, log_sum[:, None], 1)
    v = load_tile(v_desc, batch, kv_head, start, BLOCK_KV, BLOCK_D)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    ds = SCORE_GRADIENT(p, dp, delta[:, None], scores, 1)
    if SCORE_MOD is not None:
        ds = ds * derivative
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["section"])  # it depends on the lengths; do not recompile for each
def dq_kernel(
    q_desc, k_desc, v_desc, do_desc, max_ptr, lse_ptr, delta_ptr, dq_ptr, lo_ptr, hi_ptr,
    params_ptr, stride_dqb, stride_dqh, stride_dqn, stride_interval,
    num_heads, groups, batch_heads, section, N, M, scale, scale_log2,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, SCORE_MOD: tl.constexpr,
    PROBABILITY: tl.constexpr, SCORE_GRADIENT: tl.constexpr,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(N, BLOCK_Q)
    tile, batch_head = place(tl.program_id(0), num_tiles, batch_heads, section)
    start_q = (num_tiles - 1 - tile) * BLOCK_Q
    batch = batch_head // num_heads
    head = batch_head % num_heads
    kv_head = head // groups
    row_offset = tl.cast(batch * num_heads + head, tl.int64) * N
    rows = start_q + tl.arange(0, BLOCK_Q)
    position = rows + (M - N)
    if INTERVALS:
        lo_ptr += batch * stride_interval
        hi_ptr += batch * stride_interval
    lo, hi = load_interval(lo_ptr, hi_ptr, rows, N, INTERVALS)
    q = load_tile(q_desc, batch, head, start_q, BLOCK_Q, BLOCK_D)
    do = load_tile(do_desc, batch, head, start_q, BLOCK_Q, BLOCK_D)
    if max_ptr is not None:
        max_ptr += row_offset
    shift, log_sum = load_shift(max_ptr, lse_ptr + row_offset, start_q, N, BLOCK_Q)
    delta = load_rows(delta_ptr + row_offset, start_q, N, 0.0, BLOCK_Q)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    first, full_first, full_last, last = key_ranges(
        start_q, lo_ptr, hi_ptr, N, M, CAUSAL, INTERVALS, BLOCK_Q, BLOCK_KV
    )
    for start in tl.range(full_first, full_last, BLOCK_KV):
        dq = add_key_tile(
            dq, q, do, shift, log_sum, delta, k_desc, v_desc, batch, head, kv_head, start, position,
            lo, hi,
            M, scale, scale_log2, params_ptr,
            CAUSAL, INTERVALS, False, SCORE_MOD, PROBABILITY, SCORE_GRADIENT, BLOCK_KV, BLOCK_D,
            PRECISION,
        )  # fmt: skip
    for step in tl.range(first, last - (full_last - full_first), BLOCK_KV):
        start = edge_tile(step, full_first, full_last, INTERVALS)
        dq = add_key_tile(
            dq, q, do, shift, log_sum, delta, k_desc, v_desc, batch, head, kv_head, start, position,
            lo, hi,
            M, scale, scale_log2, params_ptr,
            CAUSAL, INTERVALS, True, SCORE_MOD, PROBABILITY, SCORE_GRADIENT, BLOCK_KV, BLOCK_D,
            PRECISION,
        )  # fmt: skip
    dq_ptr += tl.cast(batch, tl.int64) * stride_dqb + tl.cast(head, tl.int64) * stride_dqh
    store_tile(dq_ptr, stride_dqn, start_q, N, dq * scale, D, BLOCK_Q, BLOCK_D)
