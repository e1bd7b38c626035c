"""The steps of the streaming softmax, as arguments of the kernels.

A broken softmax shares every other line with the exact one. The steps are the methods of
attention/online_softmax.py in the base-2 domain: row_max and the scores are multiplied by log2(e),
because the GPU's exponential is a power of two. A softmax is three functions:

    move_max(row_max, tile_max, MASKED) -> next_max, shift, alpha
        shift is subtracted from this tile; alpha is the factor of the past sums
    probability(scores, lse, AXIS) -> p
        the weights, rebuilt in the backward pass; keys lie along AXIS
    score_gradient(p, dp, delta, scores, AXIS) -> ds
        the gradient of the scores, from that of the weights
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Softmax(NamedTuple):
    """The constants a kernel is compiled with."""

    move_max: triton.JITFunction
    probability: triton.JITFunction
    score_gradient: triton.JITFunction


@triton.jit
def finite(row_max, MASKED: tl.constexpr):
    """The maximum to subtract. A row that has seen no key has -inf, and -inf - -inf is NaN:
    subtract 0 there instead.
    """
    if MASKED:
        row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    return row_max


@triton.jit
def move_max(row_max, tile_max, MASKED: tl.constexpr):
    next_max = tl.maximum(row_max, tile_max)
    shift = finite(next_max, MASKED)
    return next_max, shift, tl.exp2(row_max - shift)


@triton.jit
def probability(scores, lse, AXIS: tl.constexpr):
    return tl.exp2(scores - lse)


@triton.jit
def score_gradient(p, dp, delta, scores, AXIS: tl.constexpr):
    return p * (dp - delta)


ONLINE = Softmax(move_max, probability, score_gradient)
