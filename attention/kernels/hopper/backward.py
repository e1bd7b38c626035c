"""The backward kernel for Hopper: one pass over the keys gives dk, dv and dq, with five products a
tile where the portable pair has seven.

With STAY, a program stays on its multiprocessor and takes one block of BLOCK_KV = 128 keys after
the other; without, it computes one block. For each block it walks the queries that see it, for
every query head of the group. If there are too few blocks for all multiprocessors, the heads of a
group are divided into shares. Each share has its own dk and dv, and one more kernel sums them.

The producer (one warp) requests copies of k, v, q and d_out tiles to shared memory, and puts each
query's lse and delta beside them. The two consumers (four warps each) own 64 keys of a block each.
While they finish a block, tiles of the next one arrive. Scores are transposed (keys, queries), as
in attention/kernels/backward.py, so p and ds enter the products for dv and dk from registers. ds
also goes to shared memory, where both consumers read it for dq. A step of 64 queries issues

    scores = k q^T, dp = v do^T | dv += p do | (both have written ds) dq = ds^T k, dk += ds q

and adds dq to global memory, in float32, while the product for dk runs. At head_dim 64 the
registers have room for more. They hold k and v as operands, and a step takes 128 queries in two
parts, a and b, so that the exponentials of one part overlap with products of the other:

    scores a, dp a, scores b | dp b, dv += p do of a,
    dk += ds q of a | dv += p do of b | (both have written ds) dq, dk += ds q of b

Programs add to the same dq in any order, so its rounding differs from run to run:
torch.use_deterministic_algorithms(True) takes the portable pair.

Dimensions: H query heads, N queries, M keys, D head dim. A step is BLOCK_Q queries, in one or two
parts of 64. A tile is a consumer's 64 keys by one part. An item is the contents of a ring's slot,
the queries of a step. A visit is a program's work on one block of keys.
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

from attention.kernels.hopper.primitives import (
    PIECES,
    add_box,
    await_all,
    await_own_stores,
    computed_here,
    exp2_by_two_units,
    leave_zeros,
    load_box,
    make_ring,
    note_tensor,
    piece_of,
    place,
    reinterpret,
    store_box,
    store_rows,
    tell,
    told,
    where_less,
)

OWN = gl.constexpr(64)  # keys of a consumer
PART = gl.constexpr(64)  # queries of a part
BLOCK_KV = gl.constexpr(128)
# named barriers; Triton uses the first ones
BOTH = gl.constexpr(8)  # where the consumers meet
Q_FREE = gl.constexpr(9)  # to 10: where they release q's slots
DO_FREE = gl.constexpr(11)
# The producer tells the consumers these numbers about a block. After the last block, the batch is
# negative. STOP_KV is told only with block_starts(). FIRST to LAST are from queries_seeing, EDGE is
# for mask_probabilities. The sum of the first query head begins at DQ_GROUP. PLACE numbers the
# blocks of all shares
BATCH, KV_HEAD, START_KV, STOP_KV, FIRST, FULL_FIRST, FULL_LAST, LAST, EDGE, DQ_GROUP, PLACE = (
    gl.constexpr(i) for i in range(11)
)
WORDS = gl.constexpr(11)
GROUP = gl.constexpr(16)  # queries of a group of the sum, which a warp adds


@gluon.jit
def queries_seeing(
    start_kv, tile, ranges_ptr, N, M, CAUSAL: gl.constexpr, INTERVALS: gl.constexpr,
    FIRST_OF: gl.constexpr
):  # fmt: skip
    """first, full_first, full_last, last: queries first : last see some of these keys, full_first :
    full_last see all. first is a multiple of FIRST_OF."""
    first = gl.to_tensor(0)
    full_first = first
    full_last = first + N
    last = first + N
    if INTERVALS:
        first = gl.load(ranges_ptr + tile * 4) // FIRST_OF * FIRST_OF
        full_first = gl.load(ranges_ptr + tile * 4 + 1)
        full_last = gl.load(ranges_ptr + tile * 4 + 2)
        last = gl.load(ranges_ptr + tile * 4 + 3)
        # rows past the last query need no mask: their p is 0
        full_last = gl.where(full_last == N, N + BLOCK_KV, full_last)
    elif CAUSAL:
        first = gl.maximum(start_kv + N - M, 0) // FIRST_OF * FIRST_OF
        full_first = gl.maximum(start_kv + (BLOCK_KV - 1) + N - M, 0)
    return first, full_first, full_last, last


@gluon.jit
def load_rows(ptr, start, N, OTHER: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Load one number for each query, by one warp."""
    rows = start + gl.arange(0, BLOCK_Q, gl.BlockedLayout([BLOCK_Q // 32], [32], [1], [0]))
    return gl.load(ptr + rows, mask=rows < N, other=OTHER)


@gluon.jit
def about(block_ring, visit, word):
    """The word of shared memory that holds this number about the block."""
    return block_ring.buffers.index(visit % block_ring.depth * WORDS + word)


@gluon.jit
def load_keys(desc, batch, kv_head, start_kv, ring, visit):
    """Request a block's keys or values. Its halves are separate tiles."""
    ring.await_empty(visit)
    mbarrier.expect(ring.full_barrier(visit), 2 * desc.block_type.nbytes)
    for half in gl.static_range(2):
        tile = ring.buffers.index(visit % ring.depth * 2 + half)
        load_box(desc, [batch, kv_head, start_kv + half * OWN, 0], ring.full_barrier(visit), tile)


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, do_desc, lse_log2_ptr, delta_ptr, lo_ptr, hi_ptr, ranges_ptr,
    starts_ptr, counter_ptr,
    k_ring, v_ring, q_ring, do_ring, block_ring, lse_rows, delta_rows, lo_rows, hi_rows,
    stride_interval, stride_ranges, num_kv_heads, shares, groups, batch_shares, section_shares, N,
    M, head_groups,
    CAUSAL: gl.constexpr, INTERVALS: gl.constexpr, STAY: gl.constexpr, D: gl.constexpr,
    BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    num_blocks = gl.cdiv(M, BLOCK_KV)
    FIRST_OF: gl.constexpr = BLOCK_Q if starts_ptr is None else GROUP
    piece = gl.to_tensor(0)  # of a block that block_starts() divides
    programs = gl.num_programs(0)
    work = gl.program_id(0)
    visit = gl.to_tensor(0)
    item = gl.to_tensor(0)
    while work < batch_shares * num_blocks:
        # longest first: the most queries see the first keys
        share, block = place(work, num_blocks, batch_shares, section_shares)
        start_kv = block * BLOCK_KV
        batch_head = share // shares
        batch = batch_head // num_kv_heads
        kv_head = batch_head % num_kv_heads
        lo = lo_ptr
        hi = hi_ptr
        ranges = ranges_ptr
        if INTERVALS:
            lo += batch * stride_interval
            hi += batch * stride_interval
            ranges += batch * stride_ranges
        tile = block
        if starts_ptr is not None:
            tile = block * PIECES + piece
            start_kv, stop_kv, more = piece_of(starts_ptr, batch * num_blocks + block, piece)
            piece = gl.where(more, piece + 1, 0)  # the next one of this block, or of another
        first, full_first, full_last, last = queries_seeing(
            start_kv, tile, ranges, N, M, CAUSAL, INTERVALS, FIRST_OF
        )
        limit = N
        if starts_ptr is not None:
            # later queries see no key before the stop, but keys past it: their p is 0, as past N
            limit = last
            full_last = gl.where(full_last == last, last + BLOCK_KV, full_last)
            if stop_kv < start_kv + BLOCK_KV:  # no query sees all of an incomplete block
                full_first = last
        edge = start_kv
        if not INTERVALS:
            if CAUSAL:
                edge += N - M
            else:
                edge -= M
        # only the producer computes this: consumers lack the registers for it
        block_ring.await_empty(visit)
        tell(about(block_ring, visit, BATCH), batch)
        tell(about(block_ring, visit, KV_HEAD), kv_head)
        tell(about(block_ring, visit, START_KV), start_kv)
        if starts_ptr is not None:
            tell(about(block_ring, visit, STOP_KV), stop_kv)
        tell(about(block_ring, visit, FIRST), first)
        tell(about(block_ring, visit, FULL_FIRST), full_first)
        tell(about(block_ring, visit, FULL_LAST), full_last)
        tell(about(block_ring, visit, LAST), last)
        tell(about(block_ring, visit, EDGE), edge)
        tell(about(block_ring, visit, DQ_GROUP), share * groups * head_groups)
        tell(about(block_ring, visit, PLACE), share * num_blocks + block)
        mbarrier.arrive(block_ring.full_barrier(visit))
        load_keys(k_desc, batch, kv_head, start_kv, k_ring, visit)
        load_keys(v_desc, batch, kv_head, start_kv, v_ring, visit)
        for group in range(0, groups):
            head = (share - batch * num_kv_heads * shares) * groups + group
            offset = (share * groups + group).to(gl.int64) * N
            # load one step ahead, so that they have arrived when needed
            lse = load_rows(lse_log2_ptr + offset, first, limit, float("inf"), BLOCK_Q)
            delta = load_rows(delta_ptr + offset, first, limit, 0.0, BLOCK_Q)
            for start_q in range(first, last, BLOCK_Q):
                q_ring.await_empty(item)
                mbarrier.expect(q_ring.full_barrier(item), q_desc.block_type.nbytes)
                load_box(
                    q_desc,
                    [batch, head, start_q, 0],
                    q_ring.full_barrier(item),
                    q_ring.buffer(item),
                )
                lse_rows.index(item % STAGES).store(lse)
                if INTERVALS:
                    lo_rows.index(item % STAGES).store(load_rows(lo, start_q, limit, 0, BLOCK_Q))
                    seen = load_rows(hi, start_q, limit, 0, BLOCK_Q)
                    if starts_ptr is not None:
                        seen = gl.minimum(seen, stop_kv)
                    hi_rows.index(item % STAGES).store(seen)
                mbarrier.arrive(q_ring.full_barrier(item))
                do_ring.await_empty(item)
                mbarrier.expect(do_ring.full_barrier(item), do_desc.block_type.nbytes)
                load_box(
                    do_desc,
                    [batch, head, start_q, 0],
                    do_ring.full_barrier(item),
                    do_ring.buffer(item),
                )
                delta_rows.index(item % STAGES).store(delta)
                mbarrier.arrive(do_ring.full_barrier(item))
                after = start_q + BLOCK_Q
                lse = load_rows(lse_log2_ptr + offset, after, limit, float("inf"), BLOCK_Q)
                delta = load_rows(delta_ptr + offset, after, limit, 0.0, BLOCK_Q)
                item += 1
        # claim the next block as late as possible: the consumers still have two steps to do
        if piece == 0:
            work = programs + gl.atomic_add(counter_ptr, 1) if STAY else batch_shares * num_blocks
        visit += 1
    if STAY:
        block_ring.await_empty(visit)
        tell(about(block_ring, visit, BATCH), -1)
        mbarrier.arrive(block_ring.full_barrier(visit))
    q_ring.await_last(item)
    do_ring.await_last(item)
    if STAY:
        leave_zeros(counter_ptr, programs)


@gluon.jit
def mask_probabilities(
    p, start_q, edge, lo_row, hi_row, CAUSAL: gl.constexpr, INTERVALS: gl.constexpr
):
    """p (keys, queries), set to 0 where the query does not see the key. edge is the only number
    kept through the loop. With intervals it is the first key; if causal, the query whose last key
    that is; otherwise the first key less M."""
    LAYOUT: gl.constexpr = p.type.layout
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    keys = gl.expand_dims(computed_here(edge) + gl.arange(0, OWN, gl.SliceLayout(1, LAYOUT)), 1)
    if INTERVALS:
        p = where_less(p, keys, gl.expand_dims(hi_row.load(COLUMNS), 0), "0")
        p = where_less(p, gl.expand_dims(lo_row.load(COLUMNS), 0), keys + 1, "0")
    elif CAUSAL:
        p = where_less(p, keys - 1, gl.expand_dims(start_q + gl.arange(0, PART, COLUMNS), 0), "0")
    else:
        p = where_less(p, keys, 0, "0")
    return p


@gluon.jit
def changed(product, start_q, modifier, SELF: gl.constexpr, SCORE_MOD: gl.constexpr):
    """Scores (keys, queries) from k q^T and their derivatives. modifier: the batch, the head, the
    block's first key, M - N, the scale and the modifier's numbers. All queries of a head share it.
    """
    LAYOUT: gl.constexpr = product.type.layout
    batch, head, start_kv, past, scale, params_ptr = modifier
    queries = start_q + past + gl.arange(0, PART, gl.SliceLayout(0, LAYOUT))
    keys = start_kv + SELF * OWN + gl.arange(0, OWN, gl.SliceLayout(1, LAYOUT))
    return SCORE_MOD(
        product * scale, batch, head, gl.expand_dims(queries, 0), gl.expand_dims(keys, 1),
        params_ptr,
    )  # fmt: skip


@gluon.jit
def multiply_ds(
    ds_tiles, pair, k_tiles, k_first, SELF: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr
):
    """Start this consumer's half of dq = ds^T k. ds_tiles: the tiles of the only part, or of this
    consumer's part of two. k_first: index of the k tile with the first half of the keys."""
    COLUMNS: gl.constexpr = D * BLOCK_Q // BLOCK_KV
    dq = gl.zeros(
        [PART, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    )
    for half in gl.static_range(2):
        k_half = k_tiles.index(k_first + half).reshape([OWN, D])
        if BLOCK_Q == PART:
            k_half = k_half.slice(SELF * COLUMNS, COLUMNS, 1)
        dq = warpgroup_mma(
            ds_tiles.index(pair + half).permute((1, 0)), k_half, dq, use_acc=half > 0, is_async=True
        )
    return dq


@gluon.jit
def add_dq(dq, group, dq_desc, dq_tile, SELF: gl.constexpr, D: gl.constexpr, FREE: gl.constexpr):
    """Add this consumer's half of a step's dq (64, columns) to the sum (groups, D / 2, 32). The
    step's queries begin at `group`. The half is one of two parts, or half of the columns of the
    only part.

    The sum has the order in which the threads hold dq (see convert_dq_kernel). So a thread has four
    neighbouring numbers and eight threads have a row: no bank conflicts in shared memory, no
    scattered writes in global memory. FREE: the caller has waited for the tile's last addition."""
    COLUMNS: gl.constexpr = dq.shape[1]
    dq = (
        dq.reshape([4, 2, 8, COLUMNS // 8, 4, 2])
        .permute((0, 3, 2, 4, 1, 5))
        .reshape([4, COLUMNS // 2, 32])
    )
    if not FREE:
        tma.store_wait(0)
    dq_tile.store(dq)
    fence_async_shared()
    if COLUMNS == D:
        add_box(dq_desc, [group + SELF * (PART // GROUP), 0, 0], dq_tile)
    else:
        add_box(dq_desc, [group, SELF * (COLUMNS // 2), 0], dq_tile)


@gluon.jit
def add_queries(
    dk, dv, item, start_q, edge, dq_group, must_mask, k, v, dq_desc, k_tiles, k_first, q_ring,
    do_ring,
    lse_rows, delta_rows, lo_rows, hi_rows, ds_tiles, last_ds_tiles, dq_tiles, modifier, scale_log2,
    SELF: gl.constexpr, CAUSAL: gl.constexpr, INTERVALS: gl.constexpr, MASKED: gl.constexpr,
    SCORE_MOD: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Add what queries start_q : start_q + BLOCK_Q contribute to dk and dv of this consumer's keys.

    Also add what the block's 128 keys contribute to dq; the head's groups of the sum begin at
    dq_group.
    """
    PARTS: gl.constexpr = BLOCK_Q // PART
    dtype: gl.constexpr = k_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    GRADIENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRADIENT, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    zeros = gl.zeros([OWN, PART], gl.float32, SCORES)
    q = q_ring.buffer(item).reshape([BLOCK_Q, D])
    do = do_ring.buffer(item).reshape([BLOCK_Q, D])
    slot = item % STAGES
    dq_group += start_q // GROUP
    # two pairs of ds tiles: the other consumer may still be reading the previous pair
    pair = (item & 1) * 2

    q_ring.await_full(item)
    product = warpgroup_mma(
        k, q.slice(0, PART).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    do_ring.await_full(item)
    dp_pending = warpgroup_mma(
        v, do.slice(0, PART).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    next_product = product
    if PARTS == 2:
        next_product = warpgroup_mma(
            k, q.slice(PART, PART).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
    for part in gl.static_range(PARTS):
        # running: this part's scores and dp, and the next part's scores, or dv and dk of the
        # previous part
        scores = warpgroup_mma_wait(PARTS + part, deps=(product,))
        derivative = 1.0
        if SCORE_MOD is not None:
            scores, derivative = changed(scores, start_q + part * PART, modifier, SELF, SCORE_MOD)
        # lse and delta are read at their use: keeping them through the step takes 32 registers more
        x = scores * scale_log2 - gl.expand_dims(
            lse_rows.index(slot).slice(part * PART, PART).load(COLUMNS), 0
        )
        p = exp2_by_two_units(x)
        if MASKED:  # noqa: SIM102, a constant around a value
            if must_mask:
                p = mask_probabilities(
                    p, start_q + part * PART, edge + SELF * OWN,
                    lo_rows.index(slot).slice(part * PART, PART),
                    hi_rows.index(slot).slice(part * PART, PART), CAUSAL, INTERVALS,
                )  # fmt: skip
        p_operand = gl.convert_layout(p.to(dtype), OPERAND)
        if SCORE_MOD is not None:
            p *= derivative  # while the product for dp runs
        dp = warpgroup_mma_wait(PARTS + part - 1, deps=(dp_pending,))
        ds = (
            p
            * (
                dp
                - gl.expand_dims(delta_rows.index(slot).slice(part * PART, PART).load(COLUMNS), 0)
            )
        ).to(dtype)
        q_part = q.slice(part * PART, PART)
        do_part = do.slice(part * PART, PART)
        if part + 1 < PARTS:
            dp_pending = warpgroup_mma(
                v, do.slice(PART, PART).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            dv = warpgroup_mma(p_operand, do_part, dv, is_async=True)
            dk = warpgroup_mma(gl.convert_layout(ds, OPERAND), q_part, dk, is_async=True)
            ds_tiles.index(pair + SELF).store(ds)
            product = next_product
        else:
            last_ds_tiles.index(pair + SELF).store(ds)
            fence_async_shared()
            dv_pending = warpgroup_mma(p_operand, do_part, dv, is_async=True)
            if PARTS == 2:  # with one part add_dq waits: 2% faster at head_dim 128
                await_own_stores()
            await_all(BOTH)
            dq_pending = multiply_ds(
                ds_tiles if SELF == 0 else last_ds_tiles, pair, k_tiles, k_first, SELF, D, BLOCK_Q
            )
            dk_pending = warpgroup_mma(gl.convert_layout(ds, OPERAND), q_part, dk, is_async=True)
            dv, dq = warpgroup_mma_wait(1, deps=(dv_pending, dq_pending))
            do_ring.release(item)
            add_dq(dq, dq_group, dq_desc, dq_tiles.index(SELF), SELF, D, PARTS == 2)
            dk = warpgroup_mma_wait(0, deps=(dk_pending,))
            q_ring.release(item)
    return dk, dv


@gluon.jit
def walk_queries(
    dk, dv, item, first, full_first, full_last, last, edge, dq_group, k, v, dq_desc, k_tiles,
    k_first,
    q_ring, do_ring, lse_rows, delta_rows, lo_rows, hi_rows, ds_tiles, last_ds_tiles, dq_tiles,
    modifier, scale_log2,
    SELF: gl.constexpr, CAUSAL: gl.constexpr, INTERVALS: gl.constexpr, MASKED: gl.constexpr,
    SCORE_MOD: gl.constexpr, FRESH: gl.constexpr,
    D: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add all that one query head contributes: queries first : last see some of these keys,
    full_first : full_last see all.
    """
    # at head_dim 64, masked copies of the loop before and after it spill fewer registers; at 128, a
    # branch inside the one loop does
    BRANCH: gl.constexpr = MASKED and BLOCK_Q == 64
    COPIES: gl.constexpr = MASKED and BLOCK_Q == 128
    middle = first
    middle_last = last
    if COPIES:
        if CAUSAL or INTERVALS:
            middle = gl.minimum(
                first + gl.cdiv(gl.maximum(full_first - first, 0), BLOCK_Q) * BLOCK_Q, last
            )
        elif edge + BLOCK_KV > 0:
            middle = last
    for part in gl.static_range(
        0 if COPIES else 1, 3 if COPIES and INTERVALS else 2
    ):  # before, middle, after
        if COPIES and INTERVALS and part == 1:
            middle_last = gl.minimum(
                first + gl.maximum(full_last - first, 0) // BLOCK_Q * BLOCK_Q, last
            )
        start = first if part == 0 else middle if part == 1 else gl.maximum(middle, middle_last)
        stop = middle if part == 0 else middle_last if part == 1 else last
        for start_q in range(start, stop, BLOCK_Q):
            # otherwise values derived from them stay in registers across steps or heads
            if FRESH:
                item = computed_here(item)
                k_first = computed_here(k_first)
            if FRESH and D == 128:
                k = k_tiles.index(k_first + SELF).reshape([OWN, D])
            must_mask = True
            if part == 1:
                if INTERVALS:
                    must_mask = (start_q < full_first) | (start_q + BLOCK_Q > full_last)
                elif CAUSAL:
                    must_mask = start_q < edge + (BLOCK_KV - 1)
                else:
                    must_mask = edge + BLOCK_KV > 0
            dk, dv = add_queries(
                dk, dv, item, start_q, edge, dq_group, must_mask, k, v, dq_desc, k_tiles, k_first,
                q_ring, do_ring,
                lse_rows, delta_rows, lo_rows, hi_rows, ds_tiles, last_ds_tiles, dq_tiles,
                modifier, scale_log2,
                SELF, CAUSAL, INTERVALS, BRANCH if part == 1 else True, SCORE_MOD, D, BLOCK_Q,
                STAGES,
            )  # fmt: skip
            item += 1
    return dk, dv, item


@gluon.jit
def store_gradient(x, desc, batch, kv_head, start_kv, tile):
    """Start to store x (64, D) from key start_kv on, through a free tile. In float32 the tile has
    room for 64 columns, so 128 columns go in two halves."""
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    LAST: gl.constexpr = x.shape[1] - COLUMNS  # the first column of the last part
    if LAST > 0:
        first, x = x.reshape([OWN, 2, COLUMNS]).permute((0, 2, 1)).split()
        tile.reshape([OWN, COLUMNS]).store(first)
        fence_async_shared()
        store_box(desc, [batch, kv_head, start_kv, 0], tile)
        tma.store_wait(0)
    tile.reshape([OWN, COLUMNS]).store(x.to(desc.dtype))
    fence_async_shared()
    store_box(desc, [batch, kv_head, start_kv, LAST], tile)


@gluon.jit
def store_gradients(dk, dv, dk_desc, dv_desc, batch, kv_head, start_kv, tiles):
    """Start to store dk and dv (64, D) from key start_kv on, through one tile or two."""
    LAST: gl.constexpr = tiles.shape[0] - 1
    tma.store_wait(0)
    store_gradient(dv, dv_desc, batch, kv_head, start_kv, tiles.index(0))
    if LAST == 0:
        tma.store_wait(0)
    store_gradient(dk, dk_desc, batch, kv_head, start_kv, tiles.index(LAST))


@gluon.jit
def add_block(
    visit, item, dq_desc, dk_desc, dv_desc, k_ring, v_ring, q_ring, do_ring, block_ring,
    lse_rows, delta_rows, lo_rows, hi_rows, ds_tiles, last_ds_tiles, dq_tiles, shares_ptr,
    params_ptr, words, groups, head_groups, scale, scale_log2, past, num_heads,
    SELF: gl.constexpr, CAUSAL: gl.constexpr, INTERVALS: gl.constexpr, MASKED: gl.constexpr,
    SCORE_MOD: gl.constexpr, GROUPED: gl.constexpr, SHARED: gl.constexpr, BY_START: gl.constexpr,
    STAY: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv for this consumer's half of a block of keys, and add the block's part of
    dq. Returns the next item.
    """
    GRADIENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    # dv and dk leave through the tile of dq, which no other consumer and no load uses. With two
    # parts of a step it has room for both in 16 bits
    TILES: gl.constexpr = 2 if BLOCK_Q == 128 and dk_desc.dtype != gl.float32 else 1
    out_tiles = reinterpret(
        dq_tiles.index(SELF), dk_desc.dtype, [TILES, 1, 1, OWN, dk_desc.block_type.shape[3]],
        dk_desc.layout,
    )  # fmt: skip
    first, full_first = (
        told(about(block_ring, visit, FIRST)),
        told(about(block_ring, visit, FULL_FIRST)),
    )
    full_last, last = (
        told(about(block_ring, visit, FULL_LAST)),
        told(about(block_ring, visit, LAST)),
    )
    edge, dq_group = told(about(block_ring, visit, EDGE)), told(about(block_ring, visit, DQ_GROUP))
    dk = gl.zeros([OWN, D], gl.float32, GRADIENT)
    dv = gl.zeros([OWN, D], gl.float32, GRADIENT)
    k_first = visit % k_ring.depth * 2
    k_ring.await_full(visit)
    k = k_ring.buffers.index(k_first + SELF).reshape([OWN, D])
    v_ring.await_full(visit)
    v = v_ring.buffers.index(SELF).reshape([OWN, D])
    if BLOCK_Q == 128:  # read once and keep in registers
        FIXED: gl.constexpr = gl.DotOperandLayout(
            0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16]), 2
        )
        k = k.load(FIXED)
        v = v.load(FIXED)
        v_ring.release(visit)
    modifier = None
    if SCORE_MOD is not None:
        batch, start_kv = (
            told(about(block_ring, visit, BATCH)),
            told(about(block_ring, visit, START_KV)),
        )
        head = dq_group // head_groups - batch * num_heads
        modifier = (batch, head, start_kv, past, scale, params_ptr)
    if GROUPED:
        for group in range(0, groups):
            if SCORE_MOD is not None:
                modifier = (batch, head + group, start_kv, past, scale, params_ptr)
            dk, dv, item = walk_queries(
                dk, dv, item, first, full_first, full_last, last, edge,
                dq_group + group * head_groups,
                k, v, dq_desc,
                k_ring.buffers, k_first, q_ring, do_ring, lse_rows, delta_rows, lo_rows, hi_rows,
                ds_tiles, last_ds_tiles, dq_tiles, modifier,
                scale_log2, SELF, CAUSAL, INTERVALS, MASKED, SCORE_MOD, True, D, BLOCK_Q, STAGES,
            )  # fmt: skip
    else:
        # no loop for one head: it would take registers
        dk, dv, item = walk_queries(
            dk, dv, item, first, full_first, full_last, last, edge, dq_group, k, v, dq_desc,
            k_ring.buffers, k_first,
            q_ring, do_ring, lse_rows, delta_rows, lo_rows, hi_rows, ds_tiles, last_ds_tiles,
            dq_tiles, modifier, scale_log2,
            SELF, CAUSAL, INTERVALS, MASKED, SCORE_MOD, STAY, D, BLOCK_Q, STAGES,
        )  # fmt: skip
    k_ring.release(visit)
    if BLOCK_Q == 64:
        v_ring.release(visit)
    batch, kv_head = told(about(block_ring, visit, BATCH)), told(about(block_ring, visit, KV_HEAD))
    start_kv = told(about(block_ring, visit, START_KV)) + SELF * OWN
    part = told(about(block_ring, visit, PLACE))
    if BY_START:
        stop_kv = told(about(block_ring, visit, STOP_KV))
    block_ring.release(visit)

    if SHARED:
        # float32, 128 rows of dv and of dk: join_shares_kernel adds those of the other shares
        rows = gl.arange(0, OWN, gl.SliceLayout(1, GRADIENT)) + SELF * OWN
        columns = gl.arange(0, D, gl.SliceLayout(0, GRADIENT))
        places = gl.expand_dims(rows * D, 1) + gl.expand_dims(columns, 0)
        shares_ptr += part.to(gl.int64) * (2 * BLOCK_KV * D)
        gl.store(shares_ptr + places, dv)
        gl.store(shares_ptr + BLOCK_KV * D + places, dk * scale)
    elif not BY_START or start_kv + OWN <= stop_kv:
        store_gradients(dk * scale, dv, dk_desc, dv_desc, batch, kv_head, start_kv, out_tiles)
    else:
        store_rows(dv, words, 4, batch, kv_head, start_kv, stop_kv, dv_desc.dtype)
        store_rows(dk * scale, words, 0, batch, kv_head, start_kv, stop_kv, dk_desc.dtype)
    return item


@gluon.jit
def consumer(
    dq_desc, dk_desc, dv_desc, k_ring, v_ring, q_ring, do_ring, block_ring,
    lse_rows, delta_rows, lo_rows, hi_rows, ds_tiles, last_ds_tiles, dq_tiles, shares_ptr,
    params_ptr, words, groups, head_groups, scale, scale_log2, past, num_heads,
    SELF: gl.constexpr, CAUSAL: gl.constexpr, INTERVALS: gl.constexpr, MASKED: gl.constexpr,
    SCORE_MOD: gl.constexpr, GROUPED: gl.constexpr, SHARED: gl.constexpr, BY_START: gl.constexpr,
    STAY: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """SELF: the number of this consumer, 0 or 1."""
    visit = gl.to_tensor(0)
    item = gl.to_tensor(0)
    block_ring.await_full(visit)
    if STAY:
        while told(about(block_ring, visit, BATCH)) >= 0:
            item = add_block(
                visit, item, dq_desc, dk_desc, dv_desc, k_ring, v_ring, q_ring, do_ring, block_ring,
                lse_rows, delta_rows, lo_rows, hi_rows, ds_tiles, last_ds_tiles, dq_tiles,
                shares_ptr, params_ptr, words, groups, head_groups, scale, scale_log2, past,
                num_heads,
                SELF, CAUSAL, INTERVALS, MASKED, SCORE_MOD, GROUPED, SHARED, BY_START, STAY, D,
                BLOCK_Q, STAGES,
            )  # fmt: skip
            visit += 1
            block_ring.await_full(visit)
    else:
        add_block(
            visit, item, dq_desc, dk_desc, dv_desc, k_ring, v_ring, q_ring, do_ring, block_ring,
            lse_rows, delta_rows, lo_rows, hi_rows, ds_tiles, last_ds_tiles, dq_tiles, shares_ptr,
            params_ptr, words, groups, head_groups, scale, scale_log2, past, num_heads,
            SELF, CAUSAL, INTERVALS, MASKED, SCORE_MOD, GROUPED, SHARED, BY_START, STAY, D,
            BLOCK_Q, STAGES,
        )  # fmt: skip
    tma.store_wait(0)


# lengths and counts are not specialised, so another length does not recompile
@gluon.jit(
    do_not_specialize=[
        "stride_interval",
        "stride_ranges",
        "num_kv_heads",
        "shares",
        "groups",
        "batch_shares",
        "section_shares",
        "N",
        "M",
        "head_groups",
        "past",
        "num_heads",
    ]
)
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, lse_log2_ptr,
    delta_ptr, lo_ptr, hi_ptr, ranges_ptr, starts_ptr, shares_ptr, params_ptr, counter_ptr,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    stride_interval, stride_ranges, num_kv_heads, shares, groups, batch_shares, section_shares, N,
    M, head_groups, scale, scale_log2, past, num_heads,
    CAUSAL: gl.constexpr, INTERVALS: gl.constexpr, MASKED: gl.constexpr, SCORE_MOD: gl.constexpr,
    GROUPED: gl.constexpr, SHARED: gl.constexpr, STAY: gl.constexpr,
    D: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A key/value head has `shares` shares of `groups` query heads each; batch_shares is their
    number in the batch. SHARED: a head has several shares, and shares_ptr (batch_shares, blocks, 2,
    BLOCK_KV, D) float32 takes dv and dk of each. MASKED: some tile may contain hidden keys.
    SCORE_MOD, params_ptr: as in attention/kernels/score_mods.py; it needs past = M - N and
    num_heads. With one, scale_log2 is log2(e).
    """
    dtype: gl.constexpr = q_desc.dtype
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # room for k of two blocks, because dq needs k to the end. For v of two blocks there is no room
    # at head_dim 128, and no need at 64
    K_DEPTH: gl.constexpr = 2 if STAY else 1
    k_tiles = gl.allocate_shared_memory(dtype, [K_DEPTH * 2, 1, 1, OWN, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, OWN, D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, D], do_desc.layout)
    k_ring = make_ring(k_tiles, K_DEPTH, 1, 2)
    v_ring = make_ring(v_tiles, 1, 1, 2)
    q_ring = make_ring(q_tiles, STAGES, 2, 2, Q_FREE)
    do_ring = make_ring(do_tiles, STAGES, 2, 2, DO_FREE)
    lse_rows = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], LINE)
    delta_rows = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], LINE)
    lo_rows = lse_rows
    hi_rows = lse_rows
    if INTERVALS:
        lo_rows = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_Q], LINE)
        hi_rows = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_Q], LINE)
    ds_tiles = gl.allocate_shared_memory(
        dtype, [4, OWN, PART], gl.NVMMASharedLayout.get_default_for([OWN, PART], dtype)
    )
    last_ds_tiles = ds_tiles
    if BLOCK_Q == 128:  # separate, so that Triton sees no conflict between the two
        last_ds_tiles = gl.allocate_shared_memory(
            dtype, [4, OWN, PART], gl.NVMMASharedLayout.get_default_for([OWN, PART], dtype)
        )
    dq_tiles = gl.allocate_shared_memory(
        gl.float32,
        [2, dq_desc.block_type.shape[0], dq_desc.block_type.shape[1], dq_desc.block_type.shape[2]],
        dq_desc.layout,
    )
    blocks = gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], LINE)
    # make this ring last, because the first wait is for it: otherwise Triton makes a consumer's
    # warps meet in every step, after the last barrier
    block_ring = make_ring(blocks, 2, 1, 2)
    BY_START: gl.constexpr = starts_ptr is not None
    words = blocks  # where blocks do not start by a list, they are not used
    if BY_START:
        words = gl.allocate_shared_memory(gl.int64, [8, 1], LINE)
        note_tensor(words, 0, dk_ptr, stride_dkb, stride_dkh, stride_dkn)
        note_tensor(words, 4, dv_ptr, stride_dvb, stride_dvh, stride_dvn)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (dq_desc, dk_desc, dv_desc, k_ring, v_ring, q_ring, do_ring, block_ring,
                    lse_rows, delta_rows, lo_rows, hi_rows, ds_tiles, last_ds_tiles, dq_tiles,
                    shares_ptr, params_ptr, words, groups, head_groups, scale, scale_log2, past,
                    num_heads,
                    0, CAUSAL, INTERVALS, MASKED, SCORE_MOD, GROUPED, SHARED, BY_START, STAY, D,
                    BLOCK_Q, STAGES)),
        (consumer, (dq_desc, dk_desc, dv_desc, k_ring, v_ring, q_ring, do_ring, block_ring,
                    lse_rows, delta_rows, lo_rows, hi_rows, ds_tiles, last_ds_tiles, dq_tiles,
                    shares_ptr, params_ptr, words, groups, head_groups, scale, scale_log2, past,
                    num_heads,
                    1, CAUSAL, INTERVALS, MASKED, SCORE_MOD, GROUPED, SHARED, BY_START, STAY, D,
                    BLOCK_Q, STAGES)),
        (producer, (q_desc, k_desc, v_desc, do_desc, lse_log2_ptr, delta_ptr, lo_ptr, hi_ptr,
                    ranges_ptr, starts_ptr, counter_ptr,
                    k_ring, v_ring, q_ring, do_ring, block_ring, lse_rows, delta_rows, lo_rows,
                    hi_rows,
                    stride_interval, stride_ranges, num_kv_heads, shares, groups, batch_shares,
                    section_shares, N, M, head_groups,
                    CAUSAL, INTERVALS, STAY, D, BLOCK_Q, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip
