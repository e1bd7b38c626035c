"""Rotary positions: the rotation itself, and what it is for."""

import torch

from model.rope import apply_rope, rope_tables

HEAD_DIM, THETA = 8, 100.0


def rotate(x: torch.Tensor, *positions: int) -> torch.Tensor:
    return apply_rope(x, *rope_tables(torch.tensor(positions), head_dim=x.shape[-1], theta=THETA))


def test_is_a_rotation_of_feature_pairs_in_the_complex_plane():
    x = torch.randn(1, 2, 5, HEAD_DIM, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 30, 31])

    def pairs(x: torch.Tensor) -> torch.Tensor:
        return torch.complex(*x.chunk(2, -1))

    angles = positions[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    expected = pairs(x) * torch.polar(torch.ones_like(angles), angles)
    # the tables are float32, and an angle of 31 radians is held to 31 * eps
    error = (pairs(rotate(x, *positions)) - expected).abs().max()
    assert error < 4 * 31 * torch.finfo(torch.float32).eps


def test_is_computed_in_float32_for_narrow_inputs():
    x = torch.randn(1, 1, 1, HEAD_DIM).bfloat16()
    assert rotate(x, 77).dtype == torch.float32
    assert torch.equal(rotate(x, 77), rotate(x.float(), 77))


def test_a_million_tokens_away_the_angle_is_still_right():
    positions = torch.tensor([2**20 - 1, 2**20])
    cos, sin = rope_tables(positions, head_dim=64, theta=10000.0)
    exact = positions.double()[:, None] * 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    assert cos.dtype == sin.dtype == torch.float32
    assert (cos - exact.cos()).abs().max() < 1e-7 and (sin - exact.sin()).abs().max() < 1e-7
