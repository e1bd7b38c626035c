"""The broken softmaxes of attention/defects.py as steps for the kernels: see
attention/kernels/softmax.py.

Their state has row_max = 0 for a row that has seen a key, so the lse that a kernel saves is
log(row_sum).
"""

import triton
import triton.language as tl

from attention.kernels.softmax import Softmax, finite, probability, score_gradient


@triton.jit
def no_max_move(row_max, tile_max, MASKED: tl.constexpr):
    next_max = tl.where(tile_max == float("-inf"), row_max, 0.0)
    # nothing is subtracted, and nothing is rescaled
    return next_max, tl.zeros_like(row_max), tl.full(row_max.shape, 1.0, tl.float32)


@triton.jit
def no_rescale_move(row_max, tile_max, MASKED: tl.constexpr):
    next_max = tl.where(tile_max == float("-inf"), row_max, 0.0)
    # subtract the tile's own maximum; forget what earlier tiles subtracted
    return next_max, finite(tile_max, MASKED), tl.full(row_max.shape, 1.0, tl.float32)


@triton.jit
def tile_local_probability(scores, lse, AXIS: tl.constexpr):
    return tl.exp2(scores - tl.expand_dims(finite(tl.max(scores, AXIS), True), AXIS) - lse)


@triton.jit
def through_max_gradient(p, dp, delta, scores, AXIS: tl.constexpr):
    """The subtracted maximum does not cancel here. Its gradient is minus the sum of its tile's ds,
    and the keys that attain the maximum share it.
    """
    ds = p * (dp - delta)
    attains = (scores == tl.expand_dims(tl.max(scores, AXIS), AXIS)).to(tl.float32)
    share = tl.sum(ds, AXIS) / tl.sum(attains, AXIS)
    return ds - attains * tl.expand_dims(share, AXIS)


# no_max: the exact backward rebuilds p = exp(score) / row_sum from lse = log(row_sum)
NO_MAX = Softmax(no_max_move, probability, score_gradient)
NO_RESCALE = Softmax(no_rescale_move, tile_local_probability, through_max_gradient)
