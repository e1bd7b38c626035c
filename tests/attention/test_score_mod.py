"""A score modifier of the user's: one function with its derivative, the same in every backend that
takes one. That a modifier is right under every mask is test_conformance.py's part.

Dimensions: B batch, H query heads, N queries, M keys, D head dim.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from attention import BACKENDS, ScoreMod, attention
from attention.flex import compiled

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARAMS = torch.tensor([0.7, 0.1, 0.4, 0.2, 0.3])


def fade(
    score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, params: Tensor
) -> tuple[Tensor, Tensor]:
    """sin(score) * params[0], less with the distance at the head's own rate, and halved in the
    second sequence: it uses all it is given.
    """
    params = params.to(score.device)
    weight = params[0] / (1 + params[1 + h] * (i - j).abs()) / (1 + b)
    return weight * torch.sin(score), weight * torch.cos(score)


@triton.jit
def fade_kernel(score, b, h, i, j, params_ptr):
    distance = tl.abs((i - j).to(tl.float32))
    weight = tl.load(params_ptr) / (1 + tl.load(params_ptr + 1 + h) * distance) / (1 + b)
    return weight * tl.sin(score), weight * tl.cos(score)


FADE = ScoreMod(fade, kernel=f"{__name__}:fade_kernel", params=PARAMS)


def operands() -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 50, 16), (2, 2, 50, 16), (2, 2, 50, 16), (2, 4, 50, 16)]
    *tensors, d_out = (torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes)
    return tensors, d_out


@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_a_kernel_of_ones_own_is_the_same_function(name):
    tensors, d_out = operands()
    results = []
    for backend, dtype in ((name, torch.float32), ("naive", torch.float64)):
        q, k, v = (x.to(dtype).requires_grad_() for x in tensors)
        out = attention(q, k, v, backend=backend, score_mod=FADE).out
        results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), d_out.to(dtype))])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", ["naive", "tiled", "triton"])
def test_a_call_of_some_heads_counts_from_the_first_of_them(name):
    (q, k, v), d_out = operands()
    tensors = [x.requires_grad_() for x in (q, k, v)]
    parts = [x[:, x.shape[1] // 2 :].detach().requires_grad_() for x in tensors]
    whole = attention(*tensors, backend=name, score_mod=FADE).out
    part = attention(*parts, backend=name, score_mod=replace(FADE, first_head=2)).out
    assert torch.equal(part, whole[:, 2:])
    gradients = torch.autograd.grad(whole, tensors, d_out)
    for one, other in zip(torch.autograd.grad(part, parts, d_out[:, 2:]), gradients, strict=True):
        assert torch.equal(one, other[:, other.shape[1] // 2 :])


@pytest.mark.parametrize(
    ("score_mod", "named"),
    [
        (ScoreMod(fade, params=PARAMS), "@triton.jit"),
        (ScoreMod(fade, "nowhere:mod", PARAMS), "kernel=nowhere:mod"),
    ],
    ids=["no-kernel", "unknown-kernel"],
)
def test_a_kernel_needs_a_kernel(score_mod, named):
    tensors, _ = operands()
    with pytest.raises(ValueError, match=named):
        attention(*tensors, backend=BACKENDS["triton"], score_mod=score_mod)


@pytest.mark.slow
def test_flex_compiles_for_a_second_number():
    """Once it has seen two values of a number, torch.compile would hand it to the kernel as an
    argument, which flex cannot lower.
    """
    attend = compiled(flex_attention)
    q, k, v = (torch.randn(1, 1, 128, 16) for _ in range(3))

    def capped(softcap):
        # from the variable around it, as in flex(): torch 2.11 would keep the first default of a
        # parameter, pytorch#178365
        return lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)

    for softcap in (2.0, 5.0):
        expected = torch.softmax(softcap * torch.tanh(q @ k.mT / 4 / softcap), -1) @ v
        found = attend(q, k, v, score_mod=capped(softcap))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
