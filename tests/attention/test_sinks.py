"""A sink is a key with a value of zero. That every backend has it right, with its gradient, is
test_conformance.py's part; here are its own numbers and its limits.
"""

import math

import pytest
import torch

from attention import attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("name", ["naive", "tiled", "triton"])
def test_worked_by_hand(name):
    """One key of score 0 and value 4 beside a sink of ln 3: the key keeps a quarter of the weight.
    d out / d sink is minus its own share, 3/4, of out. d lse / d sink is that share.
    """
    q, v = torch.zeros(1, 1, 1, 16, device=DEVICE), torch.full((1, 1, 1, 16), 4.0, device=DEVICE)
    sinks = torch.tensor([math.log(3)], device=DEVICE, requires_grad=True)
    out, lse = attention(q, q, v, backend=name, sinks=sinks)
    assert out[0, 0, 0, 5].item() == pytest.approx(1.0)
    assert lse.item() == pytest.approx(math.log(4))
    (of_out,) = torch.autograd.grad(out[0, 0, 0, 5], sinks, retain_graph=True)
    (of_lse,) = torch.autograd.grad(lse.sum(), sinks)
    assert of_out.item() == pytest.approx(-0.75) and of_lse.item() == pytest.approx(0.75)


@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_a_large_sink_takes_all_and_a_small_one_nothing(name):
    # 12 queries, 8 keys: the first four rows see none
    lengths = enumerate((12, 8, 8))
    q, k, v = (random(1, 2, n, 4, seed=seed).float().to(DEVICE) for seed, n in lengths)
    plain = attention(q, k, v, backend=name)
    sinks = torch.full((2,), -torch.inf, device=DEVICE, requires_grad=True)
    none = attention(q, k, v, backend=name, sinks=sinks)
    torch.testing.assert_close(none.out, plain.out)
    all_of_it = attention(q, k, v, backend=name, sinks=torch.full((2,), 1e4, device=DEVICE))
    assert all_of_it.out.abs().max() == 0 and (all_of_it.lse == 1e4).all()
    if name == "triton":
        assert torch.autograd.grad(none.out.sum(), sinks)[0].eq(0).all()
