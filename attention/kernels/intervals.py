"""Compute the intervals of attention/mask.py in one launch, where PyTorch takes up to fifteen, and
invert them in another for the backward pass. A compiler fuses PyTorch's by itself.

Dimensions: B batch, N queries, M keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.tiles import batch_stride, tiles_of

ROWS = 1024  # that a program of intervals_kernel computes
SEARCH = 4096  # positions that it searches at a time for the edge of a document
BOUNDS = 128  # of a program of query_ranges_kernel


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def is_edge(ids_ptr, stride_n, at, N):
    """Whether a document or the sequence ends before position `at`. True for 0, N and beyond."""
    inside = (at > 0) & (at < N)
    ids_ptr += tl.cast(at, tl.int64) * stride_n
    return (inside == 0) | (
        tl.load(ids_ptr, mask=inside, other=0) != tl.load(ids_ptr - stride_n, mask=inside, other=0)
    )


@triton.jit(do_not_specialize=["N", "M", "window"])  # do not recompile for each length
def intervals_kernel(
    ids_ptr, lo_ptr, hi_ptr, stride_ids_b, stride_ids_n, N, M, window,
    BLOCK: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK rows of one sequence, under a causal mask. A document may begin
    before them. So the program searches backwards, SEARCH positions at a time. It stops at the
    document's edge, or at the first key that row `begin` sees without documents."""
    begin = tl.program_id(0) * BLOCK
    batch = tl.cast(tl.program_id(1), tl.int64)
    rows = begin + tl.arange(0, BLOCK)
    hi = tl.maximum(rows + 1 + M - N, 0)
    lo = tl.maximum(hi - window, 0)
    if ids_ptr is not None:
        ids_ptr += batch * stride_ids_b
        start = tl.associative_scan(
            tl.where(is_edge(ids_ptr, stride_ids_n, rows, N), rows, -1), 0, larger
        )
        searched, least, found = begin, tl.min(lo), -1
        while (found < 0) & (searched > least):
            searched -= SEARCH
            at = searched + tl.arange(0, SEARCH)
            found = tl.max(tl.where(is_edge(ids_ptr, stride_ids_n, at, N), at, -1))
        lo = tl.maximum(lo, tl.maximum(start, found))
    offset = batch * N + rows
    tl.store(lo_ptr + offset, lo, mask=rows < N)
    tl.store(hi_ptr + offset, hi, mask=rows < N)


def causal_intervals(
    q: Tensor, k: Tensor, *, window: int | None = None, document_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """lo and hi (B or 1, N) int32, as visible_keys() of attention/mask.py defines them."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    shape = (1 if document_ids is None else len(document_ids), num_queries)
    lo = q.new_empty(shape, dtype=torch.int32)
    hi = torch.empty_like(lo)
    strides = (0, 0) if document_ids is None else document_ids.stride()
    intervals_kernel[(tiles_of(num_queries, ROWS), shape[0])](
        document_ids, lo, hi, *strides, num_queries, num_keys,
        num_keys if window is None else window, BLOCK=ROWS, SEARCH=SEARCH, num_warps=8,
    )  # fmt: skip
    return lo, hi


@triton.jit(do_not_specialize=["N", "bounds", "step"])
def query_ranges_kernel(
    lo_ptr, hi_ptr, starts_ptr, ranges_ptr, stride_interval, N, bounds, step, BLOCK_KV,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program finds BLOCK of a sequence's bounds by binary search; a tile of keys has four.
    step: the largest power of two up to N.
    """
    batch = tl.cast(tl.program_id(1), tl.int64)
    bound = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = bound // 4 * BLOCK_KV
    stop = start + BLOCK_KV
    if starts_ptr is not None:
        # the last of four numbers is not a tile's start
        listed = (bound < bounds) & (bound // 4 % 4 < 3)
        starts_ptr += batch * (bounds // 4) + bound // 4
        start = tl.load(starts_ptr, mask=listed, other=0)
        # keys past its stop belong to another tile, but are in this one
        stop = tl.load(starts_ptr + 1, mask=listed, other=0)
        stop = tl.where(bound % 4 == 3, stop, start + BLOCK_KV)
    # for integers, value > start means value >= start + 1
    target = tl.where(bound % 2 == 0, start + 1, stop)
    values_ptr = tl.where(bound % 4 < 2, hi_ptr, lo_ptr) + batch * stride_interval
    below = tl.zeros([BLOCK], tl.int32)  # at least this many values are below the target
    while step > 0:
        further = below + step
        value = tl.load(values_ptr + (further - 1), mask=further <= N, other=0)
        below = tl.where((further <= N) & (value < target), further, below)
        step //= 2
    tl.store(ranges_ptr + batch * bounds + bound, below, mask=bound < bounds)


def query_ranges(
    lo: Tensor, hi: Tensor, num_keys: int, block_kv: int, starts: Tensor | None = None
) -> Tensor:
    """For each tile of keys, the queries that see some of it and all of it: first, full_first,
    full_last, last, (B or 1, tiles, 4) int32. Queries first : last see some of a tile's keys, and
    full_first : full_last see all.

    lo, hi (B or 1, N) are non-decreasing, so each bound is a binary search. first is the first
    query with hi > the tile's start; full_first is the first with hi >= its stop. full_last is the
    number of queries with lo <= start, last the number with lo < stop.

    starts: of block_starts(), if the tiles start there; then each of its numbers counts as a tile.
    No query sees all of a tile that stops before block_kv keys.
    """
    batch, num_queries = lo.shape
    tiles = tiles_of(num_keys, block_kv) * (1 if starts is None else 4)
    ranges = lo.new_empty(batch, tiles, 4)
    query_ranges_kernel[(tiles_of(4 * tiles, BOUNDS), batch)](
        lo, hi, starts, ranges, batch_stride(lo), num_queries, 4 * tiles,
        1 << (num_queries.bit_length() - 1), block_kv, BLOCK=BOUNDS,
    )  # fmt: skip
    return ranges
