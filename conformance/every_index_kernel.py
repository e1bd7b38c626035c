"""The kernel of every_index() in conformance/cases.py, which uses every argument of a score_mod."""

import triton
import triton.language as tl


@triton.jit
def every_index(score, b, h, i, j, params_ptr):
    """params: one slope a head."""
    gain = 1.0 / (1 + b)
    return gain * (score + score * score / 8) - tl.load(params_ptr + h) * (i - j), gain * (
        1 + score / 4
    )
