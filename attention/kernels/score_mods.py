"""Changes of a score before the mask: what is done to it, and the derivative of that.

mod(score, b, h, i, j, params_ptr) -> (changed score, d changed / d score), elementwise on a tile in float32; score is already scaled.
b, h: batch and query head. i, j: position of the query among the keys, and of the key; broadcastable to the tile, either may run along
the rows. params_ptr: float32 numbers of the modifier's own.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    # the same on every device and in the interpreter; right at both ends, where the exponential is 0 or inf
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def softcap(score, b, h, i, j, params_ptr):
    """cap * tanh(score / cap); params: cap."""
    cap = tl.load(params_ptr)
    capped = tanh(score / cap)
    return cap * capped, 1 - capped * capped


@triton.jit
def alibi(score, b, h, i, j, params_ptr):
    """score - slope * (i - j); params: one slope a head."""
    return score - tl.load(params_ptr + h) * (i - j), tl.full(score.shape, 1.0, tl.float32)


@triton.jit
def softcap_alibi(score, b, h, i, j, params_ptr):
    """params: cap, then one slope a head."""
    capped, derivative = softcap(score, b, h, i, j, params_ptr)
    biased, _ = alibi(capped, b, h, i, j, params_ptr + 1)
    return biased, derivative
