"""The kernel of model/loss_kernel.py for Hopper GPUs, which reads every logit once.

A program keeps its row in shared memory: the sum of the exponentials and the gradient need all
logits. While it overwrites a row with the gradient, it requests its next row, block by block. A
thread reads from shared memory what it requested itself.

Dimensions: R tokens of the chunk, V vocabulary.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from attention.kernels.tiles import multiprocessors
from model.loss_kernel import LOG2_E, add_to_sums, expm1

# releases after 3.6 have a shorter name
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

RUN = gl.constexpr(8)  # consecutive logits of a thread: 16 bytes
WARPS = 8
BLOCK = 4096  # logits that a program reads at a time
# logits of a row. From the first on this was 8 to 28% faster than model/loss_kernel.py on an H200.
# The second fills the shared memory of a multiprocessor
SMALLEST, LARGEST = 8 * BLOCK, 27 * BLOCK


@gluon.jit
def request(shared, block, logits_ptr, columns, width):
    """Start to copy a block of a row to shared memory."""
    pointers = logits_ptr + columns
    async_load(shared.index(block), pointers, mask=columns < width)


@gluon.jit
def load(shared, block, columns, vocab_size, LAST: gl.constexpr):
    """The logits of a block in float32. Only the last one has columns beyond the vocabulary, which
    are -inf.
    """
    logits = shared.index(block).load(columns.type.layout).to(gl.float32)
    if LAST:
        logits = gl.where(columns < vocab_size, logits, float("-inf"))
    return logits


@gluon.jit
def sums_of_row(shared, within, vocab_size):
    """The maximum of a row, and the logarithm of the sum of exp(logit - maximum)."""
    LAST: gl.constexpr = shared.shape[0] - 1
    RUNS: gl.constexpr = shared.shape[1]
    of_runs: gl.constexpr = gl.SliceLayout(1, within.type.layout)
    # each thread keeps a maximum and a sum until the row ends. The maximum is finite, so that a run
    # of columns beyond the vocabulary gives no inf - inf
    maxima = gl.full([RUNS], -3e38, gl.float32, of_runs)
    sums = gl.zeros([RUNS], gl.float32, of_runs)
    for block in range(LAST):
        logits = load(shared, block, within, vocab_size, False)
        maxima, sums = add_to_sums(logits, maxima, sums)
    logits = load(shared, LAST, LAST * RUNS * RUN + within, vocab_size, True)
    maxima, sums = add_to_sums(logits, maxima, sums)
    row_max = gl.max(maxima, 0)
    return row_max, gl.log(gl.sum(sums * gl.exp2((maxima - row_max) * LOG2_E), 0))


@gluon.jit
def store_gradient(own_ptr, logits, columns, width, lse, slope, ignored, Z_LOSS: gl.constexpr):
    dtype: gl.constexpr = own_ptr.dtype.element_ty
    if ignored:  # the whole row, so a branch costs less than a selection for every logit
        gl.store(own_ptr + columns, gl.zeros_like(logits).to(dtype), mask=columns < width)
    else:
        p = gl.exp2(logits * LOG2_E - lse * LOG2_E)
        if Z_LOSS != 0:
            p += slope * p
        gl.store(own_ptr + columns, p.to(dtype), mask=columns < width)


@gluon.jit
def load_target(target_ptr, vocab_size, IGNORED: gl.constexpr):
    """A row's target, 0 if it is not in the vocabulary; whether it is; whether it is ignored."""
    given = gl.load(target_ptr)
    ignored = given == IGNORED
    valid = (given >= 0) & (given < vocab_size)
    return gl.where(valid, given, 0).to(gl.int32), valid, ignored


@gluon.jit
def cross_entropy_rows_kernel(
    logits_ptr, targets_ptr, loss_ptr, rows, stride, vocab_size, width, IGNORED: gl.constexpr,
    GRADIENT: gl.constexpr, Z_LOSS: gl.constexpr, BLOCKS: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Several rows per program: store -log p(target), and overwrite the logits with p, less 1 at
    the target. All are zero for an ignored target. Adds Z_LOSS lse^2 and its gradient, 2 Z_LOSS
    lse p.
    """
    RUNS: gl.constexpr = BLOCK // RUN
    LAST: gl.constexpr = BLOCKS - 1
    layout: gl.constexpr = gl.BlockedLayout([1, RUN], [32, 1], [gl.num_warps(), 1], [1, 0])
    place: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shared = gl.allocate_shared_memory(logits_ptr.dtype.element_ty, [BLOCKS, RUNS, RUN], place)
    within = gl.expand_dims(gl.arange(0, RUNS, gl.SliceLayout(1, layout)), 1) * RUN
    within += gl.expand_dims(gl.arange(0, RUN, gl.SliceLayout(0, layout)), 0)

    first_ptr = logits_ptr + gl.program_id(0).to(gl.int64) * stride
    for block in range(BLOCKS):
        request(shared, block, first_ptr, block * BLOCK + within, width)
    async_copy.commit_group()
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        own_ptr = logits_ptr + gl.to_tensor(row).to(gl.int64) * stride
        target, valid, ignored = load_target(targets_ptr + row, vocab_size, IGNORED)
        async_copy.wait_group(0)

        # kept apart: in their sum, a tiny log_sum would be lost
        row_max, log_sum = sums_of_row(shared, within, vocab_size)
        block = target // BLOCK
        at_target = block * BLOCK + within == target
        logits = load(shared, block, within, vocab_size, False)
        score = gl.sum(gl.sum(gl.where(at_target, logits, 0.0), 1), 0)
        # an invalid target makes the loss NaN
        log_p = gl.where(valid | ignored, score - row_max - log_sum, float("nan"))
        loss = -log_p
        lse = row_max + log_sum
        slope = 2 * Z_LOSS * lse
        if Z_LOSS != 0:  # skip it at 0, where an infinite lse would give NaN
            loss += Z_LOSS * lse * lse
        gl.store(loss_ptr + row, gl.where(ignored, 0.0, loss))

        following = row + gl.num_programs(0)
        width_of_following = gl.where(following < rows, width, 0)
        following_ptr = logits_ptr + following.to(gl.int64) * stride
        for block in range(LAST):
            columns = block * BLOCK + within
            if GRADIENT:
                logits = load(shared, block, columns, vocab_size, False)
                store_gradient(own_ptr, logits, columns, width, lse, slope, ignored, Z_LOSS)
            request(shared, block, following_ptr, columns, width_of_following)
        columns = LAST * BLOCK + within
        if GRADIENT:
            logits = load(shared, LAST, columns, vocab_size, True)
            store_gradient(own_ptr, logits, columns, width, lse, slope, ignored, Z_LOSS)
            # the thread that stored p there overwrites it
            gradient = (expm1(log_p) + slope * gl.exp(log_p)).to(logits_ptr.dtype.element_ty)
            target_ptr = own_ptr + target // BLOCK * BLOCK + within
            gl.store(target_ptr, gradient, mask=at_target & valid)
        request(shared, LAST, following_ptr, columns, width_of_following)
        async_copy.commit_group()


def fits(logits: Tensor, vocab_size: int) -> bool:
    """Whether launch() takes these logits, on a Hopper GPU."""
    width, stride = logits.shape[1], logits.stride(0)
    return (
        logits.dtype in (torch.bfloat16, torch.float16)
        and SMALLEST <= width <= LARGEST
        and (width - 1) // BLOCK * BLOCK <= vocab_size  # only the last block has other columns
        and width % 16 == stride % 16 == logits.data_ptr() % 16 == 0  # copies are of 16 bytes
    )


def launch(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    ignored: int,
    with_gradients: bool,
    z_loss: float,
) -> Tensor:
    """As launch() of model/loss_kernel.py."""
    rows, width = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    blocks = -(-width // BLOCK)
    resident = LARGEST // (blocks * BLOCK) * multiprocessors(logits.device)
    cross_entropy_rows_kernel[(min(rows, resident),)](
        logits, targets, loss, rows, logits.stride(0), vocab_size, width,
        IGNORED=ignored, GRADIENT=with_gradients, Z_LOSS=z_loss,
        BLOCKS=blocks, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return loss
