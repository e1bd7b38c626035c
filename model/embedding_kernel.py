"""The token embedding's lookup and gradient.

PyTorch looks up and adds the positions in three kernels. Its gradient is another tensor of the
weight's size, filled with zeros first, which must be added to the output layer's if they share the
weight. Here the gradient's rows are added to that one.

Dimensions: T tokens, C hidden_size, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# sorted tokens and columns of a program, which waits for a row at a time
PIECE, COLUMNS = 32, 256
NONE = tl.constexpr(-2)  # no token; those outside the vocabulary are -1 and V


@triton.jit
def lookup_kernel(
    tokens_ptr, weight_ptr, positions_ptr, position_weight_ptr, out_ptr, length, width, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program adds the rows of one token and of its position."""
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    of_columns = column < width
    row = tl.load(tokens_ptr + token) + tl.zeros_like(column)
    # an invalid token gives NaN instead of reading other memory
    mask = of_columns & (row >= 0) & (row < vocab_size)
    x = tl.load(weight_ptr + row * width + column, mask=mask, other=float("nan"))
    if position_weight_ptr is not None:
        position = tl.load(positions_ptr + token % length)
        x += tl.load(position_weight_ptr + position * width + column, mask=of_columns)
    tl.store(out_ptr + tl.cast(token, tl.int64) * width + column, x, mask=of_columns)


@triton.jit
def add_row(total_ptr, token, row, column, width, vocab_size):
    """Add to the row of a token, unless the token is invalid."""
    tokens = token + tl.zeros_like(column)
    mask = (column < width) & (tokens >= 0) & (tokens < vocab_size)
    total_ptr += tl.cast(token, tl.int64) * width + column
    total = tl.load(total_ptr, mask=mask).to(tl.float32) + row
    tl.store(total_ptr, total.to(total_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_pieces_kernel(
    sorted_ptr, order_ptr, d_x_ptr, total_ptr, first_ptr, last_ptr, tokens, width, vocab_size,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the gradients of PIECE sorted tokens. The sum for a token that goes on in the next piece
    waits in last_ptr (pieces, C), and for one that comes from the piece before in first_ptr.
    """
    piece = tl.program_id(0)
    start, stop = piece * PIECE, tl.minimum((piece + 1) * PIECE, tokens)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_columns = column < width
    token = tl.load(sorted_ptr + start)
    continued = tl.load(sorted_ptr + start - 1, mask=start > 0, other=NONE) == token
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.range(start, stop):
        place = tl.load(order_ptr + i)
        following = tl.load(sorted_ptr + i + 1, mask=i + 1 < tokens, other=NONE)
        goes_on = following == token
        d_x = tl.load(d_x_ptr + place * width + column, mask=of_columns, other=0.0)
        total += d_x.to(tl.float32)
        if continued & ((i + 1 == stop) | (not goes_on)):
            tl.store(first_ptr + piece * width + column, total, mask=of_columns)
        elif goes_on & (i + 1 == stop):
            tl.store(last_ptr + piece * width + column, total, mask=of_columns)
        elif not goes_on:
            add_row(total_ptr, token, total, column, width, vocab_size)
        if not goes_on:
            total = tl.zeros((BLOCK,), tl.float32)
            continued = False
        token = following


@triton.jit
def join_pieces_kernel(
    sorted_ptr, total_ptr, first_ptr, last_ptr, tokens, width, vocab_size,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the sum of a token that starts in this piece and goes on in the next ones."""
    piece = tl.program_id(0)
    start, stop = piece * PIECE, (piece + 1) * PIECE
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_columns = column < width
    token = tl.load(sorted_ptr + stop - 1)
    following = tl.load(sorted_ptr + stop)
    # a piece of one token that comes from the piece before adds nothing
    if tl.load(sorted_ptr + start - 1, mask=start > 0, other=NONE) == token:
        following = NONE
    if following == token:
        # counted first: Triton 3.6 cannot compile a while loop with tensors
        while following == token:
            stop += PIECE
            following = tl.load(sorted_ptr + stop, mask=stop < tokens, other=NONE)
        total = tl.load(last_ptr + piece * width + column, mask=of_columns, other=0.0)
        for continued in tl.range(piece + 1, stop // PIECE):
            total += tl.load(first_ptr + continued * width + column, mask=of_columns, other=0.0)
        add_row(total_ptr, token, total, column, width, vocab_size)


def lookup(
    tokens: Tensor, weight: Tensor, positions: Tensor | None, position_weight: Tensor | None
) -> Tensor:
    """weight[tokens] + position_weight[positions] (B, N, C), for tokens (B, N) and positions (N,).

    A token outside the vocabulary gives a row of NaN.
    """
    (vocab_size, width), length = weight.shape, tokens.shape[1]
    out, block = weight.new_empty(*tokens.shape, width), triton.next_power_of_2(width)
    lookup_kernel[tokens.numel(),](
        tokens.contiguous(), weight, positions, position_weight, out, length, width, vocab_size,
        BLOCK=block, num_warps=max(1, block // 1024),
    )  # fmt: skip
    return out


def add_gradient(total: Tensor, tokens: Tensor, d_x: Tensor) -> None:
    """total[tokens] += d_x, in the same order every time.

    total (V, C), tokens (T,) and d_x (T, C), contiguous.
    """
    (vocab_size, width), count = total.shape, tokens.numel()
    ordered, order = torch.sort(tokens.clamp(-1, vocab_size).int(), stable=True)
    pieces = triton.cdiv(count, PIECE)
    first, last = total.new_empty(2, pieces, width, dtype=torch.float32)
    blocks = triton.cdiv(width, COLUMNS)
    meta = {"PIECE": PIECE, "BLOCK": COLUMNS, "num_warps": 1}
    add_pieces_kernel[pieces, blocks](
        ordered, order, d_x, total, first, last, count, width, vocab_size, **meta
    )
    if pieces > 1:
        join_pieces_kernel[pieces - 1, blocks](
            ordered, total, first, last, count, width, vocab_size, **meta
        )
