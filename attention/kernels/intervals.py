"""Compute the intervals of attention/mask.py in one launch, where PyTorch takes about twenty. A
second launch inverts them for the backward pass.

Dimensions: B batch, N queries, M keys.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from attention.interface import Plans, operator
from attention.kernels.launch import (
    Launch,
    batch_stride,
    layout,
    place_of,
    tiles_of,
)
from attention.mask import intervals as intervals_of_mask


class Blocks(NamedTuple):
    """How much of a sequence a program of intervals_kernel processes."""

    rows: int  # rows that a program computes
    search: int  # positions searched at a time for the edge of a document
    num_warps: int


# the interpreter scans rows one by one
GPU, INTERPRETER = (
    Blocks(rows=1024, search=4096, num_warps=8),
    Blocks(rows=64, search=512, num_warps=1),
)
BOUNDS = 128  # per program of query_ranges_kernel
ALIGNED = 128  # rows of a block of block_starts()

plans: Plans[Launch] = Plans()


class Windows(Plans[tuple[Tensor, Tensor]]):
    """A cache of lo and hi for windows. Tensors take memory (8 bytes a query), so it keeps only a
    few.
    """

    LIMIT = 16


kept = Windows()


def blocks_for(device: torch.device) -> Blocks:
    return INTERPRETER if device.type == "cpu" else GPU


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b)


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
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK rows of one sequence. A document may begin before or end after
    them, so the program searches there, SEARCH positions at a time, until it finds the edge.
    Backwards it stops at the first key that row `begin` sees without documents."""
    begin = tl.program_id(0) * BLOCK
    batch = tl.cast(tl.program_id(1), tl.int64)
    rows = begin + tl.arange(0, BLOCK)
    hi = tl.maximum(rows + 1 + M - N, 0) if CAUSAL else tl.zeros_like(rows) + M
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
        if not CAUSAL:  # if causal, no row sees past itself, as N = M
            end = tl.associative_scan(
                tl.where(is_edge(ids_ptr, stride_ids_n, rows + 1, N), rows + 1, N),
                0,
                smaller,
                reverse=True,
            )
            searched, found = begin + BLOCK, N
            while (found == N) & (searched < N):
                at = searched + 1 + tl.arange(0, SEARCH)
                found = tl.min(tl.where(is_edge(ids_ptr, stride_ids_n, at, N), at, N))
                searched += SEARCH
            hi = tl.minimum(end, found)
    offset = batch * N + rows
    tl.store(lo_ptr + offset, lo, mask=rows < N)
    tl.store(hi_ptr + offset, hi, mask=rows < N)


@operator("intervals")
def intervals(
    document_ids: Tensor | None,
    num_queries: int,
    num_keys: int,
    causal: bool,
    window: int | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """lo and hi (B or 1, N) int32, as visible_keys() of attention/mask.py defines them.
    document_ids (B, N) need N = M.

    It takes neither q nor k, so a compiler sees that all layers need the same intervals and
    computes them once.
    """
    lo, hi = empty_intervals(document_ids, num_queries, device)
    blocks = blocks_for(device)
    kind = place_of(device), layout(document_ids), num_queries, num_keys, causal, window, blocks
    launch = plans.get(kind)
    if launch is None:
        ids_strides = (0, 0) if document_ids is None else document_ids.stride()
        launch = plans[kind] = Launch(
            intervals_kernel,
            (tiles_of(num_queries, blocks.rows), len(lo)),
            (*ids_strides, num_queries, num_keys, num_keys if window is None else window),
            CAUSAL=causal, BLOCK=blocks.rows, SEARCH=blocks.search, num_warps=blocks.num_warps,
        )  # fmt: skip
    launch(document_ids, lo, hi)
    return lo, hi


def empty_intervals(
    document_ids: Tensor | None, num_queries: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    shape = (1 if document_ids is None else document_ids.shape[0], num_queries)
    return torch.empty(shape, dtype=torch.int32, device=device), torch.empty(
        shape, dtype=torch.int32, device=device
    )


@torch.library.register_fake("tilegpt::intervals")
def _(
    document_ids: Tensor | None,
    num_queries: int,
    num_keys: int,
    causal: bool,
    window: int | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    return empty_intervals(document_ids, num_queries, device)


@operator("kept_intervals")
def kept_intervals(
    num_queries: int, num_keys: int, causal: bool, window: list[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The cached intervals of a window without documents, for eager mode. `window` is one number,
    or left and right.

    Intervals of document_ids are not cached, because some changes in place cannot be detected:
    torch.distributed.broadcast() does not change _version.
    """
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return intervals_of_window(num_queries, num_keys, causal, window, device)
    # the key has the stream, because another stream would have to wait for this one, and the mode,
    # because a backward pass cannot save a tensor of inference mode
    stream = driver.active.get_current_stream(device.index) if on_gpu else None
    mode = torch.is_inference_mode_enabled()
    kind = device, stream, mode, num_queries, num_keys, causal, *window
    found = kept.get(kind)
    if found is None:
        found = intervals_of_window(num_queries, num_keys, causal, window, device)
        kept[kind] = found
    return found


def intervals_of_window(
    num_queries: int, num_keys: int, causal: bool, window: list[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    if len(window) == 1:
        return intervals(None, num_queries, num_keys, causal, window[0], device)
    sides = window[0], window[1]
    visible = intervals_of_mask(num_queries, num_keys, device, causal=causal, window=sides)
    return visible.lo.int(), visible.hi.int()


@torch.library.register_fake("tilegpt::kept_intervals")
def _(
    num_queries: int, num_keys: int, causal: bool, window: list[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    return empty_intervals(None, num_queries, device)


@triton.jit
def is_long(lo_ptr, first, row, N, ALIGNED: tl.constexpr):
    """Whether rows first : first + ALIGNED see the keys from `first` on, and `row` too."""
    last = first + (ALIGNED - 1)
    known = (first >= 0) & (first <= row) & (last < N)
    return (
        known
        & (tl.load(lo_ptr + first, mask=known, other=-1) == first)
        & (tl.load(lo_ptr + last, mask=known, other=-1) == first)
    )


@triton.jit
def starts_block(lo_ptr, row, N, ALIGNED: tl.constexpr):
    """Whether a block starts at each row; see block_starts()."""
    inside = row < N
    first = tl.load(lo_ptr + row, mask=inside, other=-1)
    before = tl.load(lo_ptr + row - 1, mask=inside & (row > 0), other=-1)
    counted_from = tl.where(is_long(lo_ptr, first, row, N, ALIGNED), first, 0)
    ended = (before != first) & is_long(lo_ptr, before, row - 1, N, ALIGNED)
    return inside & (((row - counted_from) % ALIGNED == 0) | ended)


@triton.jit(do_not_specialize=["N", "blocks"])
def block_starts_kernel(
    lo_ptr, starts_ptr, stride_interval, N, blocks, ALIGNED: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """One program finds the starts among the rows of BLOCKS blocks of one sequence."""
    batch = tl.cast(tl.program_id(1), tl.int64)
    lo_ptr += batch * stride_interval
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row = block[:, None] * ALIGNED + tl.arange(0, 2 * ALIGNED)[None, :]
    row = tl.where(starts_block(lo_ptr, row, N, ALIGNED), row, N)
    # a start for the last block too, if the one before it has all its rows
    last = (blocks - 1) * ALIGNED
    own_end = (block + 1) * ALIGNED
    end = tl.min(tl.where(row >= own_end[:, None], row, N), 1)
    end = tl.where((end == N) & (own_end == last), last, end)
    starts_ptr += (batch * blocks + block) * 4
    before = own_end - (ALIGNED + 1)
    for piece in tl.static_range(3):
        start = tl.minimum(tl.min(tl.where(row > before[:, None], row, N), 1), end)
        if piece == 0:
            start = tl.where(start == N, last, start)
        tl.store(starts_ptr + piece, start, mask=block < blocks)
        before = start
    tl.store(starts_ptr + 3, end, mask=block < blocks)


@operator("block_starts")
def block_starts(lo: Tensor) -> Tensor:
    """Divide sequences of packed documents into blocks of up to ALIGNED rows. Those of a long
    document are counted from its start, so that they see no other document, and no part of a tile
    of keys.

    lo: (B, N) int32, as in intervals(), for as many keys as queries; without a window it is where a
    row's document starts. A block starts every ALIGNED rows of a document that has at least as
    many, and where it ends; everywhere else at multiples of ALIGNED. One more may start at the last
    multiple, so that one starts at or after each.

    Returns (B, blocks, 4) int32, for every ALIGNED rows of a sequence: the rows at which blocks
    start among them, of which there are one to three, and behind these, up to the end, the first
    start after them, or N.
    """
    batch, length = lo.shape
    blocks = tiles_of(length, ALIGNED)
    starts = lo.new_empty(batch, blocks, 4)
    kind = place_of(lo.device), layout(lo)
    launch = plans.get(kind)
    if launch is None:
        launch = plans[kind] = Launch(
            block_starts_kernel, (tiles_of(blocks, 4), batch),
            (batch_stride(lo), length, blocks), ALIGNED=ALIGNED, BLOCKS=4, num_warps=4,
        )  # fmt: skip
    launch(lo, starts)
    return starts


@torch.library.register_fake("tilegpt::block_starts")
def _(lo: Tensor) -> Tensor:
    return lo.new_empty(lo.shape[0], tiles_of(lo.shape[1], ALIGNED), 4)


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


class QueryRanges:
    """For each tile of keys, the queries that see some of it, and all of it; for one kind of call.

    The call returns (B or 1, tiles, 4) int32: first, full_first, full_last, last. Queries first :
    last see some of a tile's keys, and full_first : full_last see all. lo, hi (B or 1, N) are
    non-decreasing, so each bound is a binary search. first is the first query with hi > the tile's
    start; full_first is the first with hi >= its stop. full_last is the number of queries with lo
    <= start, last the number with lo < stop.

    starts: of block_starts(), if the tiles start there; then each of its numbers counts as a tile.
    No query sees all of a tile that stops before block_kv keys.
    """

    def __init__(self, lo: Tensor, num_keys: int, block_kv: int, starts: Tensor | None = None):
        (batch, num_queries), tiles = lo.shape, tiles_of(num_keys, block_kv)
        if starts is not None:
            tiles *= 4
        self.shape = (batch, tiles, 4)
        self.batch_stride = 0 if batch == 1 else 4 * tiles
        self.launch = Launch(
            query_ranges_kernel,
            (tiles_of(4 * tiles, BOUNDS), batch),
            (
                batch_stride(lo),
                num_queries,
                4 * tiles,
                1 << (num_queries.bit_length() - 1),
                block_kv,
            ),
            BLOCK=BOUNDS,
        )

    def __call__(self, lo: Tensor, hi: Tensor, starts: Tensor | None = None) -> Tensor:
        ranges = lo.new_empty(self.shape)
        self.launch(lo, hi, starts, ranges)
        return ranges
