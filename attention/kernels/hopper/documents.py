"""Blocks of rows that start where packed documents do: a plain Triton kernel before the others.

Dimensions: B batch, N tokens.
"""

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.tiles import batch_stride, tiles_of

ALIGNED = 128  # rows of a block of block_starts()


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
    block_starts_kernel[(tiles_of(blocks, 4), batch)](
        lo, starts, batch_stride(lo), length, blocks, ALIGNED=ALIGNED, BLOCKS=4, num_warps=4
    )
    return starts
