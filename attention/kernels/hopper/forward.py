"""The forward kernel for Hopper: the algorithm of attention/kernels/forward.py, divided among warps
so that softmax and products overlap.

A program has a producer (one warp, which requests copies of tiles to shared memory) and CONSUMERS
consumers (four warps each, which own BLOCK_Q queries each). A consumer issues the product for one
tile's scores together with the output product of the tile before. It computes the softmax of the
former while the latter runs:

    tensor cores   q k1 | q k2 , p1 v1 | q k3 , p2 v2 | ...
    softmax             | p1           | p2           | ...

A program stays on its multiprocessor and takes one piece of work (CONSUMERS * BLOCK_Q queries of a
head) after the other. It walks the keys backwards, from the diagonal of a causal mask down, so that
the first tile of keys is the masked one.

Query i sees the keys lo[i] <= j < hi[i], as in attention/mask.py. With INTERVALS the kernel loads
both ends; otherwise lo is 0 and hi follows from CAUSAL. Scores are in base 2, as in the portable
kernel.

Dimensions: H query heads, N queries, M keys, D head dim. A tile is BLOCK_Q queries by BLOCK_KV
keys; an item is the contents of a ring's slot.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attention.kernels.forward import with_sink
from attention.kernels.hopper.primitives import (
    PIECES,
    await_all,
    leave_zeros,
    load_box,
    make_ring,
    note_tensor,
    piece_of,
    place,
    rescaled,
    rounded,
    signal,
    store_box,
    store_rows,
    tell,
    told,
    where_less,
)

# the first free named barrier: Triton uses those before
FIRST_TURN = gl.constexpr(8)
# in base 2: p stays below 256, far from float16's limit of 65504
THRESHOLD = gl.constexpr(8.0)


@gluon.jit
def find_work(
    work, num_blocks, section_heads, batch_heads, num_heads, starts_ptr, N, BLOCK_Q: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """batch, head, start, stop of a piece of work: the queries start : stop of one head. A
    section's longest blocks come first, for all its heads, and its keys and values stay in the L2
    cache.

    Blocks are aligned to the end of the sequence, so the incomplete block is the first one, which
    sees the fewest keys under a causal mask. Its start is negative, and consumers whose rows lie
    before row 0 write nothing.

    With starts_ptr, block_starts() divides a block into pieces, and piece p of block b is work
    PIECES * b + p. The fifth result says whether another piece follows."""
    piece = work % PIECES
    if starts_ptr is not None:  # past the last work the result is not used
        work = gl.minimum(work // PIECES, batch_heads * num_blocks - 1)
    batch_head, block = place(work, num_blocks, batch_heads, section_heads)
    batch = batch_head // num_heads
    head = batch_head % num_heads
    block = num_blocks - 1 - block
    start = (block - num_blocks) * BLOCK_Q * CONSUMERS + gl.cdiv(N, BLOCK_Q) * BLOCK_Q
    stop = start + BLOCK_Q * CONSUMERS
    more = False
    if starts_ptr is not None:
        start, stop, more = piece_of(starts_ptr, batch * num_blocks + block, piece)
    return batch, head, start, stop, more


@gluon.jit
def tiles_seen(
    start, stop, base, lo_ptr, hi_ptr, N, M, CAUSAL: gl.constexpr, INTERVALS: gl.constexpr,
    BLOCK_KV: gl.constexpr
):  # fmt: skip
    """first, last: the tiles of keys that some row of start : stop sees; tile 0 starts at key
    `base`. There is at least one, so that rows without a key also get statistics.
    """
    first = gl.to_tensor(0)
    last = gl.cdiv(M, BLOCK_KV)
    if INTERVALS:
        # both ends are non-decreasing, so the extremes are in the first and the last row
        first = (gl.load(lo_ptr + gl.maximum(start, 0)) - base) // BLOCK_KV
        last = gl.cdiv(gl.load(hi_ptr + gl.maximum(gl.minimum(stop, N) - 1, 0)) - base, BLOCK_KV)
    elif CAUSAL:
        last = gl.minimum(last, gl.cdiv(gl.maximum(stop + M - N, 0), BLOCK_KV))
    return first, gl.maximum(last, first + 1)


@gluon.jit
def tiles_unmasked(
    start, stop, base, lo_ptr, hi_ptr, N, M, INTERVALS: gl.constexpr, BLOCK_KV: gl.constexpr
):
    """first, last: the tiles of which every row of start : stop sees all keys."""
    first = gl.to_tensor(0)
    if INTERVALS:
        first = gl.cdiv(gl.load(lo_ptr + gl.maximum(gl.minimum(stop, N) - 1, 0)) - base, BLOCK_KV)
        last = (gl.load(hi_ptr + gl.maximum(start, 0)) - base) // BLOCK_KV
    else:
        last = gl.maximum(start + 1 + M - N, 0) // BLOCK_KV
    return first, last


@gluon.jit
def first_key(start, lo_ptr, starts_ptr):
    """The key from which a block's tiles of keys are counted: 0, so that the diagonal crosses one
    tile. With starts_ptr it is the first key that the block sees.
    """
    base = 0
    if starts_ptr is not None:
        base = gl.load(lo_ptr + start)
    return base


@gluon.jit
def keys_seen(rows, lo_ptr, hi_ptr, N, M, CAUSAL: gl.constexpr, INTERVALS: gl.constexpr):
    """lo and hi of these rows."""
    lo = gl.zeros_like(rows)
    hi = lo + M
    if INTERVALS:
        inside = (rows >= 0) & (rows < N)
        lo = gl.load(lo_ptr + rows, mask=inside, other=0)
        hi = gl.load(hi_ptr + rows, mask=inside, other=0)
    elif CAUSAL:
        hi = gl.minimum(hi, rows + (1 + M - N))
    return lo, hi


@gluon.jit
def mask_scores(scores, start_kv, lo, hi, INTERVALS: gl.constexpr):
    BLOCK_KV: gl.constexpr = scores.shape[1]
    keys = gl.expand_dims(
        start_kv + gl.arange(0, BLOCK_KV, gl.SliceLayout(0, scores.type.layout)), 0
    )
    scores = where_less(scores, keys, gl.expand_dims(hi, 1), "-inf")
    if INTERVALS:
        scores = where_less(scores, gl.expand_dims(lo - 1, 1), keys, "-inf")
    return scores


@gluon.jit
def changed(product, start_kv, positions, batch, head, scale, params_ptr, SCORE_MOD: gl.constexpr):
    """The scores from q k^T, still without a score modifier's log2(e) or scale_log2."""
    if SCORE_MOD is not None:
        keys = start_kv + gl.arange(0, product.shape[1], gl.SliceLayout(0, product.type.layout))
        product, _ = SCORE_MOD(
            product * scale, batch, head, gl.expand_dims(positions, 1), gl.expand_dims(keys, 0),
            params_ptr,
        )  # fmt: skip
    return product


@gluon.jit
def sum_of_own(p):
    """Partial row sums (BLOCK_Q, 4): four threads share a row, each with two columns out of eight.
    Their sums are added when the row is done.
    """
    BLOCK_KV: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([p.shape[0], BLOCK_KV // 8, 4, 2]), 3), 1)


@gluon.jit
def online_softmax(scores, row_max, row_sum, scale_log2, MASKED: gl.constexpr):
    """LazyRescale.update of attention/exact_variants.py without the accumulator. Returns p, the new
    row_max and row_sum, alpha (1 for most tiles) and the tile's largest scores. The subtracted
    value moves only when a row's maximum exceeds it by THRESHOLD. row_sum is in parts, as from
    sum_of_own."""
    tile_max = gl.max(scores, 1) * scale_log2
    next_max = gl.where(tile_max > row_max + THRESHOLD, tile_max, row_max)
    shift = next_max
    if MASKED:  # a row that has seen no key has -inf, and -inf - -inf is NaN
        shift = gl.where(next_max == float("-inf"), 0.0, next_max)
    p = gl.exp2(scores * scale_log2 - gl.expand_dims(shift, 1))
    alpha = gl.exp2(row_max - shift)
    row_sum = row_sum * gl.expand_dims(
        gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout)), 1
    ) + sum_of_own(p)
    return p, next_max, row_sum, alpha, tile_max


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, lo_ptr, hi_ptr, starts_ptr, counter_ptr, q_ring, k_ring, v_ring,
    work_ring, stride_interval, num_heads, groups, batch_heads, section_heads, N, M,
    CAUSAL: gl.constexpr, INTERVALS: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    num_blocks = gl.cdiv(N, BLOCK_Q * CONSUMERS)
    programs = gl.num_programs(0)
    EACH: gl.constexpr = 1 if starts_ptr is None else PIECES
    work = gl.program_id(0) * EACH
    visit = gl.to_tensor(0)
    item = gl.to_tensor(0)
    while work < batch_heads * num_blocks * EACH:
        batch, head, start, stop, more = find_work(
            work, num_blocks, section_heads, batch_heads, num_heads, starts_ptr, N, BLOCK_Q,
            CONSUMERS,
        )  # fmt: skip
        kv_head = head // groups
        # claim the next piece of work now and tell the consumers
        if starts_ptr is None:
            work = programs + gl.atomic_add(counter_ptr, 1)
        elif more:
            work += 1
        else:
            work = (programs + gl.atomic_add(counter_ptr, 1)) * EACH
        work_ring.await_empty(visit)
        tell(work_ring.buffer(visit), work)
        mbarrier.arrive(work_ring.full_barrier(visit))

        lo = lo_ptr
        hi = hi_ptr
        if INTERVALS:
            lo += batch * stride_interval
            hi += batch * stride_interval
        base = first_key(start, lo, starts_ptr)
        first, last = tiles_seen(start, stop, base, lo, hi, N, M, CAUSAL, INTERVALS, BLOCK_KV)
        for step in range(0, last - first):
            start_kv = base + (last - 1 - step) * BLOCK_KV
            if step == 0:
                for consumer in gl.static_range(CONSUMERS):
                    q_item = visit * CONSUMERS + consumer
                    q_ring.await_empty(q_item)
                    mbarrier.expect(q_ring.full_barrier(q_item), q_desc.block_type.nbytes)
                    # a box must not start before the tensor; such rows are not used
                    row = gl.maximum(start + consumer * BLOCK_Q, 0)
                    load_box(
                        q_desc,
                        [batch, head, row, 0],
                        q_ring.full_barrier(q_item),
                        q_ring.buffer(q_item),
                    )
                    if consumer == 0:  # load the first product's inputs first
                        k_ring.await_empty(item)
                        mbarrier.expect(k_ring.full_barrier(item), k_desc.block_type.nbytes)
                        load_box(
                            k_desc,
                            [batch, kv_head, start_kv, 0],
                            k_ring.full_barrier(item),
                            k_ring.buffer(item),
                        )
            else:
                k_ring.await_empty(item)
                mbarrier.expect(k_ring.full_barrier(item), k_desc.block_type.nbytes)
                load_box(
                    k_desc,
                    [batch, kv_head, start_kv, 0],
                    k_ring.full_barrier(item),
                    k_ring.buffer(item),
                )
            v_ring.await_empty(item)
            mbarrier.expect(v_ring.full_barrier(item), v_desc.block_type.nbytes)
            load_box(
                v_desc,
                [batch, kv_head, start_kv, 0],
                v_ring.full_barrier(item),
                v_ring.buffer(item),
            )
            item += 1
        visit += 1
    leave_zeros(counter_ptr, programs)


@gluon.jit
def begin_turn(consumer: gl.constexpr, TURNS: gl.constexpr):
    """Wait for this consumer's turn. Consumers issue their products one after the other, so that
    the softmax of one overlaps with the products of others.
    """
    if TURNS:
        await_all(FIRST_TURN + consumer)


@gluon.jit
def end_turn(consumer: gl.constexpr, CONSUMERS: gl.constexpr, TURNS: gl.constexpr):
    if TURNS:
        signal(FIRST_TURN + (consumer + 1) % CONSUMERS)


@gluon.jit
def hand_back(
    item,
    count,
    k_ring,
    v_ring,
    consumer: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TURNS: gl.constexpr,
):
    """Release `count` tiles that only other consumers need."""
    for _ in range(0, count):
        k_ring.await_full(item)
        k_ring.release(item)
        v_ring.await_full(item)
        v_ring.release(item)
        begin_turn(consumer, TURNS)
        end_turn(consumer, CONSUMERS, TURNS)
        item += 1
    return item


@gluon.jit
def consumer(
    out_desc, out_words, lse_ptr, top_ptr, lo_ptr, hi_ptr, starts_ptr, q_ring, k_ring, v_ring,
    work_ring, out_tiles, params_ptr, sinks_ptr,
    stride_interval, num_heads, batch_heads, section_heads, N, M, scale_log2, scale,
    SELF: gl.constexpr, CAUSAL: gl.constexpr, INTERVALS: gl.constexpr, FIRST_MASKED: gl.constexpr,
    EDGES: gl.constexpr, SCORE_MOD: gl.constexpr,
    D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, CONSUMERS: gl.constexpr,
    TURNS: gl.constexpr,
    ROUND_EARLY: gl.constexpr, TOP: gl.constexpr,
):  # fmt: skip
    """SELF: the number of this consumer."""
    dtype: gl.constexpr = q_ring.buffers.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    zeros = gl.zeros([BLOCK_Q, BLOCK_KV], gl.float32, SCORES)
    num_blocks = gl.cdiv(N, BLOCK_Q * CONSUMERS)
    EACH: gl.constexpr = 1 if starts_ptr is None else PIECES
    work = gl.program_id(0) * EACH
    visit = gl.to_tensor(0)
    item = gl.to_tensor(0)
    if SELF == CONSUMERS - 1:
        end_turn(SELF, CONSUMERS, TURNS)  # the first turn belongs to consumer 0
    batch, head, block_start, block_stop, _ = find_work(
        work, num_blocks, section_heads, batch_heads, num_heads, starts_ptr, N, BLOCK_Q, CONSUMERS
    )
    while work < batch_heads * num_blocks * EACH:
        lo_base = lo_ptr
        hi_base = hi_ptr
        if INTERVALS:
            lo_base += batch * stride_interval
            hi_base += batch * stride_interval
        base = first_key(block_start, lo_base, starts_ptr)
        start = block_start + SELF * BLOCK_Q
        stop = gl.minimum(start + BLOCK_Q, block_stop)
        start_seen = start
        if starts_ptr is not None:  # a consumer without a row looks where the last row does
            start_seen = gl.minimum(start, stop - 1)
        rows = start + gl.arange(0, BLOCK_Q, ROWS)
        positions = rows + (M - N)
        lo, hi = keys_seen(rows, lo_base, hi_base, N, M, CAUSAL, INTERVALS)
        first, last = tiles_seen(
            block_start, block_stop, base, lo_base, hi_base, N, M, CAUSAL, INTERVALS, BLOCK_KV
        )
        own_first = first
        own_last = last
        if CAUSAL or INTERVALS:
            own_first, own_last = tiles_seen(
                start_seen, stop, base, lo_base, hi_base, N, M, CAUSAL, INTERVALS, BLOCK_KV
            )
            own_first = gl.minimum(own_first, last - 1)
            own_last = gl.minimum(own_last, last)
        elif start < 0:  # rows before row 0: one tile, as every consumer takes at least one
            own_first = last - 1
        full_first, full_last = tiles_unmasked(
            start_seen, stop, base, lo_base, hi_base, N, M, INTERVALS, BLOCK_KV
        )
        if start_seen < start:
            own_first = own_last - 1
        q_item = visit * CONSUMERS + SELF
        q = q_ring.buffer(q_item).reshape([BLOCK_Q, D])
        q_ring.await_full(q_item)
        item = hand_back(item, last - own_last, k_ring, v_ring, SELF, CONSUMERS, TURNS)

        # the first tile: its scores alone
        acc = gl.zeros([BLOCK_Q, D], gl.float32, OUT)
        row_max = gl.full([BLOCK_Q], float("-inf"), gl.float32, ROWS)
        row_sum = sum_of_own(zeros)
        k_ring.await_full(item)
        begin_turn(SELF, TURNS)
        k = k_ring.buffer(item).reshape([BLOCK_KV, D])
        product = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        end_turn(SELF, CONSUMERS, TURNS)
        scores = warpgroup_mma_wait(0, deps=(product,))
        k_ring.release(item)
        start_kv = base + (own_last - 1) * BLOCK_KV
        scores = changed(
            scores, start_kv, positions, batch, head, scale, params_ptr, SCORE_MOD
        )  # fmt: skip
        if FIRST_MASKED:
            scores = mask_scores(scores, start_kv, lo, hi, INTERVALS)
        # top is a row's largest score: row_max may lag behind it by up to THRESHOLD
        p, row_max, row_sum, alpha, top = online_softmax(
            scores, row_max, row_sum, scale_log2, FIRST_MASKED
        )
        p = gl.convert_layout(rounded(p, dtype), P)
        item += 1
        k_ring.await_full(item, pred=own_last - own_first > 1)

        # every further tile: its scores together with the output of the tile before
        for tile in range(own_last - 2, own_first - 1, -1):
            begin_turn(SELF, TURNS)
            k = k_ring.buffer(item).reshape([BLOCK_KV, D])
            product = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            v_ring.await_full(item - 1)
            v = v_ring.buffer(item - 1).reshape([BLOCK_KV, D])
            acc_pending = warpgroup_mma(p, v, acc, is_async=True)
            end_turn(SELF, CONSUMERS, TURNS)
            scores = warpgroup_mma_wait(1, deps=(product,))
            k_ring.release(item)
            start_kv = base + tile * BLOCK_KV
            scores = changed(
                scores, start_kv, positions, batch, head, scale, params_ptr, SCORE_MOD
            )  # fmt: skip
            if EDGES:  # noqa: SIM102, a constant around a value
                if (tile < full_first) | (tile >= full_last):
                    scores = mask_scores(scores, start_kv, lo, hi, INTERVALS)
            next_p, row_max, row_sum, alpha, tile_max = online_softmax(
                scores, row_max, row_sum, scale_log2, EDGES
            )
            if TOP:
                top = gl.maximum(top, tile_max)
            if ROUND_EARLY:
                next_p = rounded(next_p, dtype)
            item += 1
            # wait for the next tile here, not where it is used: without a branch between the two
            # product waits, ptxas moves the second up to the first, before the exponentials
            k_ring.await_full(item, pred=tile > own_first)
            acc, p = warpgroup_mma_wait(0, deps=(acc_pending, p))
            v_ring.release(item - 2)
            acc = rescaled(acc, gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, OUT)), 1))
            if not ROUND_EARLY:
                next_p = rounded(next_p, dtype)
            p = gl.convert_layout(next_p, P)

        # the output of the last tile
        q_ring.release(q_item)
        v_ring.await_full(item - 1)
        v = v_ring.buffer(item - 1).reshape([BLOCK_KV, D])
        acc_pending = warpgroup_mma(p, v, acc, is_async=True)
        # meanwhile compute the place of the next piece of work, which takes divisions
        work_ring.await_full(visit)
        work = told(work_ring.buffer(visit))
        work_ring.release(visit)
        visit += 1
        next_batch, next_head, next_start, next_stop, _ = find_work(
            work, num_blocks, section_heads, batch_heads, num_heads, starts_ptr, N, BLOCK_Q,
            CONSUMERS,
        )  # fmt: skip
        whole_sum = gl.convert_layout(gl.sum(row_sum, 1), ROWS)
        kept = 1.0  # the factor of acc
        if sinks_ptr is not None:
            sink = gl.load(sinks_ptr + head) * 1.4426950408889634
            row_max, whole_sum, kept = with_sink(row_max, whole_sum, sink)
        no_key = row_max == float("-inf")
        whole_sum = gl.where(no_key, 1.0, whole_sum)
        lse = (row_max + gl.log2(whole_sum)) * 0.6931471805599453  # back to the natural logarithm
        statistics = (batch * num_heads + head).to(gl.int64) * N + rows
        inside = (rows >= 0) & (rows < N)
        if starts_ptr is not None:
            inside = rows < stop
        gl.store(lse_ptr + statistics, lse, mask=inside)
        if TOP:
            gl.store(top_ptr + statistics, top * 0.6931471805599453, mask=inside)
        tma.store_wait(0)
        acc = warpgroup_mma_wait(0, deps=(acc_pending,))
        v_ring.release(item - 1)
        item = hand_back(item, own_first - first, k_ring, v_ring, SELF, CONSUMERS, TURNS)
        acc = acc * gl.expand_dims(gl.convert_layout(kept / whole_sum, gl.SliceLayout(1, OUT)), 1)
        whole = start >= 0 if starts_ptr is None else start + BLOCK_Q == stop
        if whole:
            out_tiles.index(SELF).reshape([BLOCK_Q, D]).store(acc.to(out_desc.dtype))
            fence_async_shared()
            store_box(out_desc, [batch, head, start, 0], out_tiles.index(SELF))
        else:  # noqa: PLR5501, a constant inside of a value
            if starts_ptr is not None:
                store_rows(acc, out_words, 0, batch, head, start, stop, out_desc.dtype)
        batch = next_batch
        head = next_head
        block_start = next_start
        block_stop = next_stop
    tma.store_wait(0)


# lengths and counts are not specialised, so another length does not recompile
@gluon.jit(
    do_not_specialize=[
        "stride_interval",
        "num_heads",
        "groups",
        "batch_heads",
        "section_heads",
        "N",
        "M",
    ]
)
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, top_ptr, lo_ptr, hi_ptr, starts_ptr,
    params_ptr, sinks_ptr, counter_ptr, stride_ob, stride_oh, stride_on,
    stride_interval, num_heads, groups, batch_heads, section_heads, N, M, scale_log2, scale,
    CAUSAL: gl.constexpr, INTERVALS: gl.constexpr, FIRST_MASKED: gl.constexpr, EDGES: gl.constexpr,
    SCORE_MOD: gl.constexpr,
    D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr,
    ROUND_EARLY: gl.constexpr, TOP: gl.constexpr,
):  # fmt: skip
    """FIRST_MASKED: the last tile of keys may contain hidden keys. EDGES: other tiles may, too.
    TOP: store each row's largest score in top_ptr. out is in the dtype of q or in float32.
    sinks_ptr (H,): a logit of each head in the denominator; may be None.
    SCORE_MOD, params_ptr: as in attention/kernels/score_mods.py. With one, scale_log2 is log2(e);
    without, scale may be None."""
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, BLOCK_Q, D], q_desc.layout)
    out_tiles = gl.allocate_shared_memory(
        out_desc.dtype, [CONSUMERS, 1, 1, BLOCK_Q, D], out_desc.layout
    )
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_KV, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_KV, D], v_desc.layout)
    next_work = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_ring = make_ring(q_tiles, CONSUMERS, 1, 1)
    k_ring = make_ring(k_tiles, STAGES, 1, CONSUMERS)
    v_ring = make_ring(v_tiles, STAGES, 1, CONSUMERS)
    work_ring = make_ring(next_work, 2, 1, CONSUMERS)
    fence_async_shared()
    out_words = next_work  # without starts it is not used
    if starts_ptr is not None:
        out_words = gl.allocate_shared_memory(
            gl.int64, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        note_tensor(out_words, 0, out_ptr, stride_ob, stride_oh, stride_on)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (out_desc, out_words, lse_ptr, top_ptr, lo_ptr, hi_ptr, starts_ptr, q_ring,
                        k_ring, v_ring, work_ring, out_tiles, params_ptr, sinks_ptr,
                        stride_interval, num_heads, batch_heads, section_heads, N, M, scale_log2,
                        scale,
                        0, CAUSAL, INTERVALS, FIRST_MASKED, EDGES, SCORE_MOD, D, BLOCK_Q, BLOCK_KV,
                        CONSUMERS, TURNS, ROUND_EARLY, TOP)),
            (consumer, (out_desc, out_words, lse_ptr, top_ptr, lo_ptr, hi_ptr, starts_ptr, q_ring,
                        k_ring, v_ring, work_ring, out_tiles, params_ptr, sinks_ptr,
                        stride_interval, num_heads, batch_heads, section_heads, N, M, scale_log2,
                        scale,
                        1, CAUSAL, INTERVALS, FIRST_MASKED, EDGES, SCORE_MOD, D, BLOCK_Q, BLOCK_KV,
                        CONSUMERS, TURNS, ROUND_EARLY, TOP)),
            (producer, (q_desc, k_desc, v_desc, lo_ptr, hi_ptr, starts_ptr, counter_ptr, q_ring,
                        k_ring, v_ring, work_ring, stride_interval, num_heads, groups, batch_heads,
                        section_heads, N, M,
                        CAUSAL, INTERVALS, BLOCK_Q, BLOCK_KV, CONSUMERS)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (out_desc, out_words, lse_ptr, top_ptr, lo_ptr, hi_ptr, starts_ptr, q_ring,
                        k_ring, v_ring, work_ring, out_tiles, params_ptr, sinks_ptr,
                        stride_interval, num_heads, batch_heads, section_heads, N, M, scale_log2,
                        scale,
                        0, CAUSAL, INTERVALS, FIRST_MASKED, EDGES, SCORE_MOD, D, BLOCK_Q, BLOCK_KV,
                        CONSUMERS, TURNS, ROUND_EARLY, TOP)),
            (consumer, (out_desc, out_words, lse_ptr, top_ptr, lo_ptr, hi_ptr, starts_ptr, q_ring,
                        k_ring, v_ring, work_ring, out_tiles, params_ptr, sinks_ptr,
                        stride_interval, num_heads, batch_heads, section_heads, N, M, scale_log2,
                        scale,
                        1, CAUSAL, INTERVALS, FIRST_MASKED, EDGES, SCORE_MOD, D, BLOCK_Q, BLOCK_KV,
                        CONSUMERS, TURNS, ROUND_EARLY, TOP)),
            (consumer, (out_desc, out_words, lse_ptr, top_ptr, lo_ptr, hi_ptr, starts_ptr, q_ring,
                        k_ring, v_ring, work_ring, out_tiles, params_ptr, sinks_ptr,
                        stride_interval, num_heads, batch_heads, section_heads, N, M, scale_log2,
                        scale,
                        2, CAUSAL, INTERVALS, FIRST_MASKED, EDGES, SCORE_MOD, D, BLOCK_Q, BLOCK_KV,
                        CONSUMERS, TURNS, ROUND_EARLY, TOP)),
            (producer, (q_desc, k_desc, v_desc, lo_ptr, hi_ptr, starts_ptr, counter_ptr, q_ring,
                        k_ring, v_ring, work_ring, stride_interval, num_heads, groups, batch_heads,
                        section_heads, N, M,
                        CAUSAL, INTERVALS, BLOCK_Q, BLOCK_KV, CONSUMERS)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
