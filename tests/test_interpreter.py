"""tests/interpreter.py changes nothing of what Triton's interpreter computes and refuses."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


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
    for name in ("_patch_lang", "_patch_builtin"):
        plain = getattr(getattr(interpreter, name, None), "__wrapped__", None)
        if plain is not None:  # else this version of Triton lacks it
            monkeypatch.setattr(interpreter, name, plain)
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    draw.manual_seed(0)
    assert torch.equal(results(), quick) and quick.isfinite().any()
