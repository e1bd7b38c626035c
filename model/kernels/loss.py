"""Softmax and cross-entropy of a chunk of logits in one kernel, which overwrites the logits with
their gradient.

torch.compile's code for the same takes two exponentials per logit for the sum, where one is enough,
and a second tensor of the chunk's size.

Dimensions: R tokens of the chunk, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# logits that a program holds at a time, 32 in each thread. On an H100 with GPT-2's vocabulary, half
# as many, twice as many, or twice the warps took 9 to 25% longer
BLOCK = 8192
# consecutive logits of which a thread keeps the maximum and the sum until the row ends. Otherwise
# all warps would wait for each other at every block
RUN = 8
LOG2_E = tl.constexpr(1.4426950408889634)  # exp2 is one instruction


@triton.jit
def add_to_sums(logits, maxima, sums):
    """Maxima and sums of exponentials of each run, with these logits added."""
    new = tl.maximum(maxima, tl.max(logits, 1))
    terms = tl.sum(tl.exp2((logits - new[:, None]) * LOG2_E), 1)
    return new, sums * tl.exp2((maxima - new) * LOG2_E) + terms


@triton.jit
def load_last(logits_ptr, columns, vocab_size, width):
    # mask by the padded row: its length lets a thread load several logits at once
    logits = tl.load(logits_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    return tl.where(columns < vocab_size, logits, float("-inf"))


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0, without the cancellation near 0."""
    near = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5))))
    return tl.where(x > -0.1, near, tl.exp(x) - 1)


@triton.jit
def cross_entropy_kernel(
    logits_ptr, targets_ptr, loss_ptr, stride, vocab_size, width, IGNORED: tl.constexpr,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    """One row per program: store -log p(target), and overwrite the logits with p, less 1 at the
    target. All are zero for an ignored target.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    given = tl.load(targets_ptr + row)
    ignored = given == IGNORED
    target = tl.where(ignored, 0, given)
    valid = (target >= 0) & (target < vocab_size)
    block = tl.arange(0, BLOCK // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    last = vocab_size // BLOCK * BLOCK  # the blocks before it need no masks

    # finite, so that a run of columns beyond the vocabulary gives no inf - inf
    maxima = tl.full((BLOCK // RUN,), -3e38, tl.float32)
    sums = tl.zeros((BLOCK // RUN,), tl.float32)
    for start in range(0, last, BLOCK):
        logits = tl.load(logits_ptr + start + block).to(tl.float32)
        maxima, sums = add_to_sums(logits, maxima, sums)
    logits = load_last(logits_ptr, last + block, vocab_size, width)
    maxima, sums = add_to_sums(logits, maxima, sums)
    row_max = tl.max(maxima, 0)
    # kept apart from row_max: in a sum, a tiny log_sum would be lost
    log_sum = tl.log(tl.sum(sums * tl.exp2((maxima - row_max) * LOG2_E), 0))

    # an invalid target makes the loss NaN instead of reading other memory
    score = tl.load(logits_ptr + target, mask=valid, other=float("nan")).to(tl.float32)
    log_p = score - row_max - log_sum
    tl.store(loss_ptr + row, tl.where(ignored, 0.0, -log_p))

    if GRADIENT:
        tl.debug_barrier()  # all threads read the target's logit before one overwrites it
        for start in range(0, width, BLOCK):
            columns = start + block
            if start < last:
                logits = tl.load(logits_ptr + columns).to(tl.float32)
            else:
                logits = load_last(logits_ptr, columns, vocab_size, width)
            p = tl.exp2((logits - row_max) * LOG2_E - log_sum * LOG2_E)
            gradient = tl.where(ignored, 0.0, p).to(logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + columns, gradient, mask=columns < width)
        tl.debug_barrier()  # and write p there before the gradient of the target
        at_target = expm1(log_p).to(logits_ptr.dtype.element_ty)
        tl.store(logits_ptr + target, at_target, mask=valid & ~ignored)


# one node for torch.compile
@torch.library.custom_op(
    "tilegpt::cross_entropy_in_place",
    mutates_args=("logits",),
    tags=(torch.Tag.needs_exact_strides,),
)
def cross_entropy_in_place(
    logits: Tensor, targets: Tensor, vocab_size: int, ignored: int, with_gradients: bool
) -> Tensor:
    """-log p(target) of each row, (R,) float32. with_gradients overwrites logits with the gradient,
    which is zero in the columns from vocab_size on.

    logits (R, V and padding) of float16, bfloat16 or float32, contiguous along V; targets (R,)
    int64, `ignored` for a token without a loss. Any other target outside the vocabulary makes the
    loss NaN.
    """
    rows, width = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    cross_entropy_kernel[(rows,)](
        logits, targets, loss, logits.stride(0), vocab_size, width,
        IGNORED=ignored, GRADIENT=with_gradients,
        BLOCK=block, RUN=min(RUN, block), num_warps=max(1, block // 1024),
    )  # fmt: skip
    return loss


@cross_entropy_in_place.register_fake
def _(logits, targets, vocab_size, ignored, with_gradients):
    return logits.new_empty(logits.shape[0], dtype=torch.float32)
