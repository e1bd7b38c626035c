"""tests/interpreter.py changes nothing of what Triton's interpreter computes and refuses."""

import pytest
import torch

pytest.importorskip("triton")

import triton
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


@triton.jit
def every_pair(out_ptr, x_ptr, y_ptr, N: tl.constexpr):
    """Operands of one type and of two, tensors and numbers, of one shape and of several."""
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    half = x.to(tl.float16)
    wide = x[:, None] * y[None, :] + (i[:, None] - 3) % 4 + 0.1 * half[:, None]
    wide = tl.where(i[:, None] >= i[None, :], wide, -float("inf")) / (y[None, :] + 2)
    wide += (tl.program_id(0) + 1) * 2**30 + (i // 3)[None, :] * 1.5 + (half * half)[None, :]
    tl.store(out_ptr + i[:, None] * N + i[None, :], wide)


def test_a_kernel_computes_what_it_computed(monkeypatch):
    """Triton's language has the same functions afterwards."""
    from triton.runtime import interpreter

    def results():
        out = torch.empty(16, 16)
        every_pair[(1,)](out, *(torch.randn(16, generator=draw) for _ in "xy"), N=16)
        return out

    def language():
        owners = (tl, tl.tensor, tl.math)
        return {(x, name): getattr(x, name) for x in owners for name in dir(x) if name[:2] != "__"}

    draw, before = torch.Generator().manual_seed(0), language()
    quick = results()
    assert language() == before
    semantic = interpreter.interpreter_semantic
    for owner, names in (
        (interpreter, ("_patch_lang", "_patch_builtin", "_patch_attr", "_get_np_dtype")),
        (semantic, ("cast", "broadcast_impl_value", "binary_op_type_checking_impl")),
        (tl.core, ("_unwrap_if_constexpr",)),
        (tl.block_type, ("__init__",)),
        (tl.tensor, ("__init__",)),
    ):
        for name in names:
            plain = getattr(getattr(owner, name, None), "__wrapped__", None)
            if plain is not None:  # else this version of Triton lacks it
                monkeypatch.setattr(owner, name, plain)
    draw.manual_seed(0)
    assert torch.equal(results(), quick) and quick.isfinite().any()


@triton.jit
def mistaken(x_ptr, OTHER: tl.constexpr):
    tl.store(x_ptr, tl.load(x_ptr) + OTHER)


@pytest.mark.parametrize("other", [2**65, 2**31, -(2**31) - 1])
def test_what_triton_refuses_is_refused(other):
    with pytest.raises(Exception, match="Nonrepresentable|out of range"):
        mistaken[(1,)](torch.zeros(1, dtype=torch.int32), OTHER=other)
