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

BLOCK = 4096  # logits that a program holds at a time
WARPS = 8


@triton.jit
def load_logits(logits_ptr, columns, vocab_size, width):
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
    GRADIENT: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row per program: store -log p(target), and overwrite the logits with p, less 1 at the
    target. All are zero for an ignored target. Adds Z_LOSS lse^2 and its gradient, 2 Z_LOSS lse p.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    given = tl.load(targets_ptr + row)
    target = tl.where(given == IGNORED, 0, given)
    block = tl.arange(0, BLOCK)

    row_max = float("-inf")
    row_sum = 0.0
    for start in range(0, width, BLOCK):
        logits = load_logits(logits_ptr, start + block, vocab_size, width)
        next_max = tl.maximum(row_max, tl.max(logits, 0))
        row_sum = row_sum * tl.exp(row_max - next_max) + tl.sum(tl.exp(logits - next_max), 0)
        row_max = next_max
    log_sum = tl.log(row_sum)  # kept apart from row_max: in a sum, a tiny log_sum would be lost
    # an invalid target makes the loss NaN instead of reading other memory
    score = tl.load(
        logits_ptr + target, mask=(target >= 0) & (target < vocab_size), other=float("nan")
    ).to(tl.float32)
    log_p = score - row_max - log_sum
    loss = -log_p
    if Z_LOSS != 0:  # skip it at 0, where an infinite lse would give NaN
        lse = row_max + log_sum
        slope = 2 * Z_LOSS * lse
        loss += Z_LOSS * lse * lse
    tl.store(loss_ptr + row, tl.where(given == IGNORED, 0.0, loss))

    if GRADIENT:
        at_target = expm1(log_p)
        if Z_LOSS != 0:
            at_target += slope * tl.exp(log_p)
        tl.debug_barrier()  # all threads read the target's logit before one overwrites it
        for start in range(0, width, BLOCK):
            columns = start + block
            p = tl.exp(load_logits(logits_ptr, columns, vocab_size, width) - row_max - log_sum)
            if Z_LOSS != 0:
                p += slope * p
            gradient = tl.where(given == IGNORED, 0.0, tl.where(columns == target, at_target, p))
            tl.store(
                logits_ptr + columns, gradient.to(logits_ptr.dtype.element_ty), mask=columns < width
            )


def launch(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    ignored: int,
    with_gradients: bool,
    z_loss: float,
) -> Tensor:
    """-log p(target) + z_loss lse^2 of each row, (R,) float32. with_gradients overwrites logits
    with the gradient, which is zero in the columns from vocab_size on.

    logits (R, V and padding) of float16, bfloat16 or float32, contiguous along V; targets (R,)
    int64, `ignored` for a token without a loss. Any other target outside the vocabulary makes the
    loss NaN.
    """
    rows, width = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    cross_entropy_kernel[(rows,)](
        logits, targets, loss, logits.stride(0), vocab_size, width,
        IGNORED=ignored, GRADIENT=with_gradients, Z_LOSS=z_loss,
        BLOCK=min(BLOCK, triton.next_power_of_2(width)), num_warps=WARPS,
    )  # fmt: skip
    return loss
