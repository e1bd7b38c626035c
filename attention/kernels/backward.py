"""The backward kernels: they rebuild p = exp(score - lse) tile by tile, so the forward saves only
out and lse. In float32 it saves row_max and row_sum instead, because the rounding of lse shows
where scores are large: the p of a row that sees one key is then exactly 1.

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
def load_statistics(max_ptr, sum_ptr, offset, start, limit, BLOCK: tl.constexpr):
    """shift, log_sum and factor of these rows: p = factor * exp2(score - shift - log_sum). They are
    0, lse and 1, or with max_ptr row_max, 0 and 1 / row_sum. A row past the end counts as one
    without a key.
    """
    shift = tl.zeros([BLOCK], tl.float32)
    factor = tl.full([BLOCK], 1.0, tl.float32)
    if max_ptr is not None:
        shift = load_rows(max_ptr + offset, start, limit, float("-inf"), BLOCK)
        factor = 1 / load_rows(sum_ptr + offset, start, limit, 1.0, BLOCK)
        log_sum = tl.where(shift == float("-inf"), float("inf"), 0.0)
        shift = tl.where(shift == float("-inf"), 0.0, shift)
    else:
        log_sum = in_base_2(load_rows(sum_ptr + offset, start, limit, float("-inf"), BLOCK))
    return shift, log_sum, factor


@triton.jit
def load_ranges(
    start_kv, ranges_ptr, N, M,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """first, full_first, full_last, last: queries first : last see some keys of the tile at
    start_kv, full_first : full_last see all of them. All but last are multiples of BLOCK_Q."""
    first = 0
    full_first = 0
    full_last = N
    last = N
    if ranges_ptr is not None:
        ranges_ptr += start_kv // BLOCK_KV * 4
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
    return first, full_first, full_last, last


@triton.jit
def walk_queries(
    dk, dv, k, v, q_desc, do_desc, max_ptr, sum_ptr, delta_ptr, lo_ptr, hi_ptr, params_ptr,
    batch, head, num_heads, keys, first, full_first, full_last, last, N, M, score_scale,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, SCORE_MOD: tl.constexpr,
    PROBABILITY: tl.constexpr, SCORE_GRADIENT: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Add all that one query head contributes to dk and dv. Scores are transposed (keys, queries),
    so p and ds enter the next product without a transposition.
    """
    offset = tl.cast(batch * num_heads + head, tl.int64) * N
    for masked in tl.static_range(1, -1, -1):
        begin, end = full_first, full_last
        if masked:
            begin, end = first, last - (full_last - full_first)
        for step in tl.range(begin, end, BLOCK_Q):
            # without INTERVALS there is no right edge: masked are only queries before full_first
            edge: tl.constexpr = masked and INTERVALS
            start_q = edge_tile(step, full_first, full_last, True) if edge else step
            q = load_tile(q_desc, batch, head, start_q)
            shift, log_sum, factor = load_statistics(max_ptr, sum_ptr, offset, start_q, N, BLOCK_Q)
            rows = start_q + tl.arange(0, BLOCK_Q)
            lo, hi = load_interval(lo_ptr, hi_ptr, rows, N)
            product = tl.dot(k, tl.trans(q), input_precision="ieee")  # (BLOCK_KV, BLOCK_Q)
            scores, derivative = scores_of(
                product, (rows + (M - N))[None, :], keys[:, None], lo[None, :], hi[None, :], batch,
                head, M, score_scale, params_ptr, CAUSAL, INTERVALS, masked, SCORE_MOD,
                q.dtype == tl.float32,
            )  # fmt: skip
            scores -= shift[None, :]
            p = PROBABILITY(scores, log_sum[None, :], 0) * factor[None, :]
            do = load_tile(do_desc, batch, head, start_q)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            delta = load_rows(delta_ptr + offset, start_q, N, 0.0, BLOCK_Q)
            ds = SCORE_GRADIENT(p, dp, delta[None, :], scores, 0)
            if SCORE_MOD is not None:
                ds = ds * derivative
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["section"])  # it depends on the lengths; do not recompile for each
def dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, lo_ptr, hi_ptr, params_ptr, stride_interval, num_heads,
    section, N, M, score_scale, max_ptr, sum_ptr, delta_ptr, scale,
    PROBABILITY: tl.constexpr, SCORE_GRADIENT: tl.constexpr,
    dk_ptr, dv_ptr, stride_n, ranges_ptr, stride_ranges,
    CAUSAL: tl.constexpr, SCORE_MOD: tl.constexpr, GROUPS: tl.constexpr,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    INTERVALS: tl.constexpr = lo_ptr is not None
    # longest first: the most queries see the first keys
    tile, batch_head = place(tl.cdiv(M, BLOCK_KV), section)
    start_kv = tile * BLOCK_KV
    num_kv_heads = num_heads // GROUPS
    batch = batch_head // num_kv_heads
    kv_head = batch_head % num_kv_heads
    keys = start_kv + tl.arange(0, BLOCK_KV)
    k = load_tile(k_desc, batch, kv_head, start_kv)
    v = load_tile(v_desc, batch, kv_head, start_kv)
    dk = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
    if INTERVALS:
        lo_ptr += batch * stride_interval
        hi_ptr += batch * stride_interval
        ranges_ptr += batch * stride_ranges
    first, full_first, full_last, last = load_ranges(
        start_kv, ranges_ptr, N, M, CAUSAL, BLOCK_Q, BLOCK_KV
    )
    # one head needs no loop, which would take registers from the tile
    for group in (tl.static_range if GROUPS == 1 else tl.range)(0, GROUPS):
        dk, dv = walk_queries(
            dk, dv, k, v, q_desc, do_desc, max_ptr, sum_ptr, delta_ptr, lo_ptr, hi_ptr, params_ptr,
            batch, kv_head * GROUPS + group, num_heads, keys, first, full_first, full_last, last,
            N, M, score_scale, CAUSAL, INTERVALS, SCORE_MOD, PROBABILITY, SCORE_GRADIENT, BLOCK_Q,
        )  # fmt: skip
    store_tile(dk_ptr, stride_n, batch, kv_head, start_kv, M, dk * scale, D)
    store_tile(dv_ptr, stride_n, batch, kv_head, start_kv, M, dv, D)


@triton.jit(do_not_specialize=["section"])  # it depends on the lengths; do not recompile for each
def dq_kernel(
    q_desc, k_desc, v_desc, do_desc, lo_ptr, hi_ptr, params_ptr, stride_interval, num_heads,
    section, N, M, score_scale, max_ptr, sum_ptr, delta_ptr, scale,
    PROBABILITY: tl.constexpr, SCORE_GRADIENT: tl.constexpr, dq_ptr, stride_n,
    CAUSAL: tl.constexpr, SCORE_MOD: tl.constexpr, GROUPS: tl.constexpr,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    INTERVALS: tl.constexpr = lo_ptr is not None
    num_tiles = tl.cdiv(N, BLOCK_Q)
    tile, batch_head = place(num_tiles, section)
    start_q = (num_tiles - 1 - tile) * BLOCK_Q
    batch = batch_head // num_heads
    head = batch_head % num_heads
    kv_head = head // GROUPS
    offset = tl.cast(batch * num_heads + head, tl.int64) * N
    rows = start_q + tl.arange(0, BLOCK_Q)
    position = rows + (M - N)
    if INTERVALS:
        lo_ptr += batch * stride_interval
        hi_ptr += batch * stride_interval
    lo, hi = load_interval(lo_ptr, hi_ptr, rows, N)
    q = load_tile(q_desc, batch, head, start_q)
    do = load_tile(do_desc, batch, head, start_q)
    shift, log_sum, factor = load_statistics(max_ptr, sum_ptr, offset, start_q, N, BLOCK_Q)
    delta = load_rows(delta_ptr + offset, start_q, N, 0.0, BLOCK_Q)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    first, full_first, full_last, last = key_ranges(
        start_q, lo_ptr, hi_ptr, N, M, CAUSAL, BLOCK_Q, BLOCK_KV
    )
    for masked in tl.static_range(2):
        begin, end = full_first, full_last
        if masked:
            begin, end = first, last - (full_last - full_first)
        for step in tl.range(begin, end, BLOCK_KV):
            start = edge_tile(step, full_first, full_last, INTERVALS) if masked else step
            k = load_tile(k_desc, batch, kv_head, start)
            keys = start + tl.arange(0, BLOCK_KV)
            product = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores, derivative = scores_of(
                product, position[:, None], keys[None, :], lo[:, None], hi[:, None], batch, head, M,
                score_scale, params_ptr, CAUSAL, INTERVALS, masked, SCORE_MOD,
                q.dtype == tl.float32,
            )  # fmt: skip
            scores -= shift[:, None]
            p = PROBABILITY(scores, log_sum[:, None], 1) * factor[:, None]
            v = load_tile(v_desc, batch, kv_head, start)
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            ds = SCORE_GRADIENT(p, dp, delta[:, None], scores, 1)
            if SCORE_MOD is not None:
                ds = ds * derivative
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    store_tile(dq_ptr, stride_n, batch, head, start_q, N, dq * scale, D)
