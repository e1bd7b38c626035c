"""tests/interpreter.py changes nothing of what Triton's interpreter computes and refuses."""

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@pytest.mark.parametrize("shape", [(), (2,), (4, 8)], ids=str)
@pytest.mark.parametrize(
    "dtype", [tl.float32, tl.bfloat16, tl.int1, tl.pointer_type(tl.int8)], ids=str
)
def test_what_is_kept_is_what_triton_would_compute(dtype, shape):
    from triton.runtime import interpreter

    def attributes(thing):
        return {name: str(value) for name, value in vars(thing).items()}

    block = block_type = dtype
    if shape:
        block, block_type = (object.__new__(tl.block_type) for _ in range(2))
        tl.block_type.__init__.__wrapped__(block, dtype, list(shape))
        for _ in range(2):  # computed, then kept
            tl.block_type.__init__(block_type, dtype, list(shape))
        assert attributes(block_type) == attributes(block) and block_type == block
    tensor, quick = (object.__new__(tl.tensor) for _ in range(2))
    tl.tensor.__init__.__wrapped__(tensor, None, block)
    for _ in range(2):
        tl.tensor.__init__(quick, None, block_type)
    assert attributes(quick) == attributes(tensor)
    for _ in range(2):
        numpy_dtype = interpreter._get_np_dtype(block_type)
        assert numpy_dtype == interpreter._get_np_dtype.__wrapped__(block)
