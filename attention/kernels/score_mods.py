"""Changes of a score before the mask, with their derivatives.

mod(score, b, h, i, j, params_ptr) -> (changed score, d changed / d score), elementwise on a tile in
float32; score is already scaled. b, h: batch and query head. i, j: position of the query among the
keys, and of the key. Both broadcast to the tile, and either may run along the rows. params_ptr: the
modifier's own float32 numbers.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh(x) and its derivative in float32, both accurate to a few roundings, on every device and
    in the interpreter.

    Far from 0 they are (1 - e) / (1 + e) and 4 e / (1 + e)^2 with e = exp(-2 |x|). Near 0 the
    difference would cancel: there tanh is the polynomial of the Cephes library (tanhf, 1.3e-7).
    """
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    r = 1 / (1 + e)
    far = (1 - e) * r
    square = x * x
    polynomial = -5.70498872745e-3 * square + 2.06390887954e-2
    polynomial = polynomial * square - 5.37397155531e-2
    polynomial = polynomial * square + 1.33314422036e-1
    polynomial = polynomial * square - 3.33332819422e-1
    near = x + x * (square * polynomial)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far)), 4 * e * r * r


@triton.jit
def softcap(score, b, h, i, j, params_ptr):
    """cap * tanh(score / cap); params: cap."""
    cap = tl.load(params_ptr)
    capped, derivative = tanh(score * (1 / cap))  # one division for the tile
    return cap * capped, derivative


@triton.jit
def alibi(score, b, h, i, j, params_ptr):
    """score - slope * (i - j); params: one slope a head."""
    return score - tl.load(params_ptr + h) * (i - j), 1.0


@triton.jit
def softcap_alibi(score, b, h, i, j, params_ptr):
    """params: cap, then one slope a head."""
    capped, derivative = softcap(score, b, h, i, j, params_ptr)
    biased, _ = alibi(capped, b, h, i, j, params_ptr + 1)
    return biased, derivative


@triton.jit
def every_index(score, b, h, i, j, params_ptr):
    """The kernel of every_index() in conformance/cases.py. That case tests that a backend passes
    every argument. params: one slope a head.
    """
    gain = 1.0 / (1 + b)
    return gain * (score + score * score / 8) - tl.load(params_ptr + h) * (i - j), gain * (
        1 + score / 4
    )
