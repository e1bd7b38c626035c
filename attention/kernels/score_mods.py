"""Changes of a score before the mask, with their derivatives.

mod(score, b, h, i, j, params_ptr) -> (changed score, d changed / d score), elementwise on a tile in
float32; score is already scaled. b, h: batch and query head. i, j: position of the query among the
keys, and of the key. Both broadcast to the tile, and either may run along the rows. params_ptr: the
modifier's own float32 numbers.
"""

import importlib
from functools import cache
from types import FunctionType

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh(x) and its derivative in float32, both accurate to a few roundings, on every device and
    in the interpreter.

    A quotient of two polynomials, fitted to tanh on |x| <= 8.2 (relative error 8e-9). Two branches,
    one for small x, would cost the Hopper kernels a predicate for every score. The derivative is
    4 e / (1 + e)^2 with e = exp(-2 |x|): 1 - tanh(x)^2 would cancel far from 0.
    """
    near = tl.clamp(x, -8.2, 8.2)  # beyond, tanh rounds to 1
    s = near * near
    above = 1.4840498887649e-08 * s + 2.1637232090388e-05
    above = above * s + 3.5566837196641e-03
    above = above * s + 1.3432120744936e-01
    above = above * s + 1
    below = 8.3705798097480e-07 * s + 3.3864368547916e-04
    below = below * s + 2.6108288622239e-02
    below = below * s + 4.6765446484692e-01
    root = tl.rsqrt(below * s + 1)  # two instructions with its square, where a division has nine
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    r = tl.rsqrt(1 + e)
    r = r * r
    return near * above * (root * root), 4 * e * r * r


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


@cache
def find_score_mod(name: str) -> triton.JITFunction | None:
    """The @triton.jit function at pkg.module:NAME; "" is none. pkg.module:NAME+8 is the function
    for a call whose first head is head 8.
    """
    if not name:
        return None
    name, _, first_head = name.partition("+")
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
        return from_head(found, int(first_head)) if first_head else found
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"the score_mod's kernel={name} must read pkg.module:NAME of a @triton.jit "
            f"function: {error}"
        ) from error


def from_head(score_mod: triton.JITFunction, first_head: int) -> triton.JITFunction:
    """score_mod for a call whose first head is head `first_head`."""
    constants = {"SCORE_MOD": score_mod, "FIRST_HEAD": tl.constexpr(first_head)}
    # not a closure: Triton's interpreter sees only the globals of a function
    return triton.jit(FunctionType(moved_score_mod.__code__, globals() | constants))


def moved_score_mod(score, b, h, i, j, params_ptr):
    """from_head() gives it the globals SCORE_MOD and FIRST_HEAD."""
    return SCORE_MOD(score, b, h + FIRST_HEAD, i, j, params_ptr)  # noqa: F821
