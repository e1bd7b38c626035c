"""A Triton kernel of a user who never met strides."""

import triton
import triton.language as tl


@triton.jit
def copy_elements(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < count), mask=i < count)
