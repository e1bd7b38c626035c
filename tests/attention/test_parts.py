"""Several parts in one pass over memory: the same as one after the other, by PyTorch."""

import pytest
import torch

from attention.interface import empty_heads
from attention.kernels import parts as fused
from attention.online_softmax import OnlineSoftmax
from attention.ring import Merged, Ring, Total

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = [
    [slice(0, 37)],
    [slice(5, 20)],
    [slice(0, 18), slice(0, 37)],
    [slice(0, 18), slice(18, 37), slice(9, 30)],
    [slice(3, 4), slice(0, 0), slice(30, 37), slice(0, 37), slice(1, 36)],
]
SHAPES = [(1, 2, 37, 16), (2, 3, 37, 20)]


def part(shape, rows):
    batch, heads, _, dim = shape
    x = empty_heads((batch, heads, rows.stop - rows.start, dim), torch.empty(0, device=DEVICE))
    return x.normal_()


# not bfloat16: the interpreter truncates instead of rounding
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sum_to_the_bit(shape, rows, dtype):
    torch.manual_seed(0)
    like, results = torch.empty(shape, device=DEVICE), []
    given = [(each, part(shape, each)) for each in rows]
    for how in (None, fused):
        total = Total(like, how)
        for where, x in given:
            total.add(where, x.clone(memory_format=torch.preserve_format))
        results.append(total.result(dtype))
    assert results[1].dtype == dtype and torch.equal(*results)


@pytest.mark.parametrize("scale", [1.0, 200.0])
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_merge(shape, rows, scale):
    """Rows of no part, and rows that saw no key of a part or of all."""
    torch.manual_seed(0)
    like, found = torch.empty(shape, device=DEVICE), []
    states = []
    for each in rows:
        acc = part(shape, each)
        lse = scale * torch.randn(*acc.shape[:3], 1, device=DEVICE)
        lse[:, 0, ::3] = -torch.inf
        acc.masked_fill_(lse == -torch.inf, 0.0)
        states.append((each, OnlineSoftmax(lse, torch.ones_like(lse), acc)))
    for ring in (Ring(None), Ring(None, fused=lambda: fused)):
        merged = Merged(ring, like)
        for where, state in states:
            fields = (state.row_max, state.row_sum, state.acc)
            merged.add(where, OnlineSoftmax(*(x.clone() for x in fields)))
        found.append(merged.result(torch.float32))
    (out, lse), (fused_out, fused_lse) = found
    assert torch.equal(lse == -torch.inf, fused_lse == -torch.inf)
    torch.testing.assert_close(fused_lse, lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fused_out, out, rtol=1e-5, atol=1e-6)
