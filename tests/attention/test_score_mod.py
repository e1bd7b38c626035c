"""A score modifier of the user's. That a modifier and its kernel are right in every backend that
takes one, under every mask, is test_conformance.py's part.
"""

from dataclasses import replace

import pytest
import torch

from attention import ScoreMod, attention
from conformance.cases import every_index

pytestmark = pytest.mark.anywhere
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOPES = torch.tensor([0.1, 0.4, 0.2, 0.3], device=DEVICE)
MOD = ScoreMod(every_index, "conformance.every_index_kernel:every_index", SLOPES)


@pytest.mark.parametrize("name", ["naive", "tiled", "triton"])
def test_a_call_of_some_heads_counts_from_the_first_of_them(name):
    tensors = [torch.randn(1, heads, 40, 16, device=DEVICE) for heads in (4, 2, 2)]
    parts = [x[:, x.shape[1] // 2 :].clone().requires_grad_() for x in tensors]
    tensors = [x.requires_grad_() for x in tensors]
    whole = attention(*tensors, backend=name, score_mod=MOD).out
    part = attention(*parts, backend=name, score_mod=replace(MOD, first_head=2)).out
    assert torch.equal(part, whole[:, 2:])
    gradients = torch.autograd.grad(whole.square().sum(), tensors)
    of_part = torch.autograd.grad(part.square().sum(), parts)
    for one, other in zip(of_part, gradients, strict=True):
        assert torch.equal(one, other[:, other.shape[1] // 2 :])


@pytest.mark.parametrize(
    ("kernel", "named"), [(None, "@triton.jit"), ("nowhere:mod", "kernel=nowhere:mod")]
)
def test_a_kernel_needs_a_kernel(kernel, named):
    q = torch.zeros(1, 4, 6, 16, device=DEVICE)
    with pytest.raises(ValueError, match=named):
        attention(q, q, q, backend="triton", score_mod=replace(MOD, kernel=kernel))
