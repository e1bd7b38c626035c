"""The forward kernel: one program owns BLOCK_Q queries of one head and streams the keys past them.

It is the tile loop of attention/tiled.py with the streaming softmax of attention/online_softmax.py
inlined, with the same names. Scores are in base 2 (scale * log2(e) is folded in), because the GPU's
exponential is a power of two. Dao, "FlashAttention-2" (2023), algorithm 1.

Query i sees the keys lo[i] <= j < hi[i], as in attention/mask.py. Given lo_ptr, the kernel loads
both ends; otherwise lo is 0 and hi follows from CAUSAL. A program first walks the tiles of keys
that every row sees, then the masked tiles at both edges.

Dimensions: H query heads, N queries, M keys, D head dim (padded to BLOCK_D); a tile is BLOCK_Q
queries by BLOCK_KV keys.
"""

import triton
import triton.language as tl


@triton.jit
def place(num_tiles, section):
    """tile, head: the work of this program, where each head of the whole batch has num_tiles tiles.

    Programs start in order of pid, about as many at a time as the GPU has multiprocessors. Heads
    come in sections whose other tensors fit into the L2 cache. A section takes every head's first
    tile, then every head's second. For 6 heads of 2 tiles in sections of 4 the order is

        tile  0 0 1 1  0 0 0 0 1 1 1 1
        head  0 1 0 1  2 3 4 5 2 3 4 5

    A section with fewer heads comes first. Under a causal mask its first tiles are the longest. If
    that section came last, too few short tiles would follow to keep every multiprocessor busy.
    """
    pid = tl.program_id(0)
    num_heads = tl.num_programs(0) // num_tiles
    left_over = num_heads - (tl.cdiv(num_heads, section) - 1) * section
    later = pid - left_over * num_tiles  # negative in the first section
    size = tl.where(later < 0, left_over, section)
    first = tl.where(later < 0, 0, left_over + later // (section * num_tiles) * section)
    pid = tl.where(later < 0, pid, later % (section * num_tiles))
    return pid // size, first + pid % size


@triton.jit
def load_tile(desc, batch, head, start):
    """Load a descriptor's tile of one head, from row `start` on, as (rows, BLOCK_D). Past the
    tensor's rows and columns it has zeros.
    """
    tile = desc.load([batch, head, start, 0])
    return tile.reshape(tile.shape[2], tile.shape[3])


@triton.jit
def store_tile(ptr, stride_n, batch, head, start, length, tile, D: tl.constexpr):
    """Store rows `start` and following of one head. ptr: memory (B, length, heads, D), whose rows
    are stride_n apart.
    """
    # the offset of the tile needs 64 bits, the offsets inside it do not
    ptr += (tl.cast(batch, tl.int64) * length + start) * stride_n + head * D
    row = tl.arange(0, tile.shape[0])
    column = tl.arange(0, tile.shape[1])
    mask = (start + row < length)[:, None] & (column < D)[None, :]
    tl.store(
        ptr + row[:, None] * stride_n + column[None, :], tile.to(ptr.dtype.element_ty), mask=mask
    )


@triton.jit
def load_interval(lo_ptr, hi_ptr, rows, N):
    """lo and hi of these rows; rows past the end see nothing. Without intervals, nobody reads lo
    and hi.
    """
    lo = rows
    hi = rows
    if lo_ptr is not None:
        lo = tl.load(lo_ptr + rows, mask=rows < N, other=0)
        hi = tl.load(hi_ptr + rows, mask=rows < N, other=0)
    return lo, hi


@triton.jit
def key_ranges(
    start_q, lo_ptr, hi_ptr, N, M,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """first, full_first, full_last, last: some row of the query tile sees keys first : last, and
    every row sees full_first : full_last. All but last are multiples of BLOCK_KV."""
    first = 0
    full_first = 0
    full_last = M
    last = M
    if lo_ptr is not None:
        # both ends are non-decreasing, so a tile's extremes are in its first and last row
        bottom = tl.minimum(start_q + BLOCK_Q, N) - 1
        first = tl.load(lo_ptr + start_q) // BLOCK_KV * BLOCK_KV
        last = tl.load(hi_ptr + bottom)
        full_first = (
            tl.minimum(tl.cdiv(tl.load(lo_ptr + bottom), BLOCK_KV), tl.cdiv(last, BLOCK_KV))
            * BLOCK_KV
        )
        full_first = tl.maximum(first, full_first)
        full_last = tl.load(hi_ptr + start_q)
    elif CAUSAL:
        last = tl.minimum(M, tl.maximum(0, start_q + BLOCK_Q + M - N))
        full_last = tl.minimum(M, tl.maximum(0, start_q + 1 + M - N))
    full_last = tl.maximum(full_first, full_last // BLOCK_KV * BLOCK_KV)
    return first, full_first, full_last, last


@triton.jit
def edge_tile(step, full_first, full_last, INTERVALS: tl.constexpr):
    """Where a masked tile starts: before full_first, or from full_last on. One loop walks both
    edges, because with a third copy of the loop's body the compiler serialises its products."""
    start = step + (full_last - full_first)
    if INTERVALS:  # without intervals there is no left edge
        start = tl.where(step < full_first, step, start)
    return start


@triton.jit
def scores_of(
    product, i, j, lo, hi, batch, head, M, score_scale, params_ptr,
    CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, MASKED: tl.constexpr, SCORE_MOD: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 from q k^T, -inf where masked, and the score modifier's derivative (1
    without one).

    i: positions of the queries among the keys; j: keys; lo, hi: the queries' intervals. All
    broadcast to the tile. score_scale: times log2(e) if there is no modifier. EXACT: scores are
    rounded before a maximum is subtracted. Otherwise the compiler rounds only the difference where
    no mask stands between, and the passes disagree on a large score.
    """
    derivative = 1.0
    if SCORE_MOD is None:
        scores = product
        factor = score_scale
    else:
        scores, derivative = SCORE_MOD(product * score_scale, batch, head, i, j, params_ptr)
        factor = 1.4426950408889634
    scores = tl.fma(scores, factor, 0.0) if EXACT else scores * factor
    if MASKED:
        if INTERVALS:
            visible = (j >= lo) & (j < hi)
        else:
            visible = j < M
            if CAUSAL:
                visible = visible & (j <= i)
        scores = tl.where(visible, scores, float("-inf"))
    return scores, derivative


@triton.jit
def with_sink(row_max, row_sum, sink):
    """with_sinks() of attention/sinks.py on running rows, in base 2: the new maximum and sum, and
    the factor of the accumulator."""
    both = tl.maximum(row_max, sink)
    shift = tl.where(both == float("-inf"), 0.0, both)
    kept = tl.exp2(row_max - shift)
    return both, row_sum * kept + tl.exp2(sink - shift), kept


@triton.jit(do_not_specialize=["section"])  # it depends on the lengths; do not recompile for each
def forward_kernel(
    q_desc, k_desc, v_desc, lo_ptr, hi_ptr, params_ptr, stride_interval, num_heads, section, N, M,
    score_scale, out_ptr, lse_ptr, top_ptr, max_ptr, row_sum_ptr, sinks_ptr,
    CAUSAL: tl.constexpr, SCORE_MOD: tl.constexpr, MOVE_MAX: tl.constexpr, GROUPS: tl.constexpr,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out_ptr: (B, N, H, D); top_ptr: receives each row's largest score; max_ptr,
    row_sum_ptr: its row_max in base 2 and its row_sum, for the backward pass. sinks_ptr (H,): a
    logit of each head in the denominator. All but out_ptr and lse_ptr may be None."""
    INTERVALS: tl.constexpr = lo_ptr is not None
    # the last query tiles run first: under a causal mask they are the longest, and short ones fill
    # the gaps at the end
    num_tiles = tl.cdiv(N, BLOCK_Q)
    tile, batch_head = place(num_tiles, section)
    start_q = (num_tiles - 1 - tile) * BLOCK_Q
    batch = batch_head // num_heads
    head = batch_head % num_heads
    kv_head = head // GROUPS
    rows = start_q + tl.arange(0, BLOCK_Q)
    position = rows + (M - N)
    if INTERVALS:
        lo_ptr += batch * stride_interval
        hi_ptr += batch * stride_interval
    lo, hi = load_interval(lo_ptr, hi_ptr, rows, N)
    q = load_tile(q_desc, batch, head, start_q)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    top = row_max
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    first, full_first, full_last, last = key_ranges(
        start_q, lo_ptr, hi_ptr, N, M, CAUSAL, BLOCK_Q, BLOCK_KV
    )
    for masked in tl.static_range(2):
        begin, end = full_first, full_last
        if masked:
            begin, end = first, last - (full_last - full_first)
        for step in tl.range(begin, end, BLOCK_KV):
            start = edge_tile(step, full_first, full_last, INTERVALS) if masked else step
            keys = start + tl.arange(0, BLOCK_KV)
            k = load_tile(k_desc, batch, kv_head, start)
            # Triton's default for float32 is TF32, which has fewer bits
            product = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores, _ = scores_of(
                product, position[:, None], keys[None, :], lo[:, None], hi[:, None], batch, head, M,
                score_scale, params_ptr, CAUSAL, INTERVALS, masked, SCORE_MOD,
                q.dtype == tl.float32,
            )  # fmt: skip
            tile_max = tl.max(scores, 1)
            if top_ptr is not None:
                # row_max may differ: a broken softmax keeps something else there
                top = tl.maximum(top, tile_max)
            row_max, shift, alpha = MOVE_MAX(row_max, tile_max, masked)
            p = tl.exp2(scores - shift[:, None])
            row_sum = alpha * row_sum + tl.sum(p, 1)
            v = load_tile(v_desc, batch, kv_head, start)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")

    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head) * 1.4426950408889634
        row_max, row_sum, kept = with_sink(row_max, row_sum, sink)
        acc *= kept[:, None]
    no_key = row_max == float("-inf")
    row_sum = tl.where(no_key, 1.0, row_sum)
    lse = (row_max + tl.log2(row_sum)) * 0.6931471805599453  # back to the natural logarithm
    statistics = tl.cast(batch * num_heads + head, tl.int64) * N + rows
    store_tile(out_ptr, num_heads * D, batch, head, start_q, N, acc / row_sum[:, None], D)
    tl.store(lse_ptr + statistics, lse, mask=rows < N)
    if max_ptr is not None:
        tl.store(max_ptr + statistics, row_max, mask=rows < N)
        tl.store(row_sum_ptr + statistics, row_sum, mask=rows < N)
    if top_ptr is not None:
        tl.store(top_ptr + statistics, top * 0.6931471805599453, mask=rows < N)
