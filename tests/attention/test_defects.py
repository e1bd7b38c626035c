"""What each defect computes, its gradient, and where it breaks. That it breaks exactly what it
names, and an exact twin nothing, is the part of tests/conformance/test_properties.py.

Dimensions: B batch, H heads, N queries, M keys, D head dim; T tiles of block_kv keys.
"""

import pytest
import torch
from torch import Tensor

from attention import BACKENDS, AttentionOutput, attention, get_backend

TILES = {"block_q": 16, "block_kv": 8}
DEFECTS = [name for name, backend in BACKENDS.items() if backend.defect is not None]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def with_scores(name: str, scores: Tensor, v: Tensor, **options) -> AttentionOutput:
    """One query that gives key j the score scores[j], to the bit: the rest of q and k is zero."""
    k = torch.zeros(1, 1, len(scores), 16, dtype=v.dtype)
    k[..., 0] = scores
    q = torch.zeros(1, 1, 1, 16, dtype=v.dtype)
    q[..., 0] = 1
    backend = get_backend(name, **TILES | options)
    return attention(q, k, v.expand(1, 1, len(scores), -1), backend=backend, scale=1.0)


# by name and block_kv: the weights of five keys that score ln 1, ln 2, ln 8, ln 4, ln 2
EXACT = [1 / 17, 2 / 17, 8 / 17, 4 / 17, 2 / 17]
WEIGHTS = {
    ("tiled", 2): EXACT,
    ("no_max", 2): EXACT,
    ("zero_init_max", 2): EXACT,
    ("no_rescale", 2): [0.5 / 4, 1 / 4, 1 / 4, 0.5 / 4, 1 / 4],
    ("no_rescale", 8): EXACT,
    ("local_softmax", 2): [1 / 3, 2 / 3, 2 / 3, 1 / 3, 1],
    ("local_softmax", 8): EXACT,
}


@pytest.mark.parametrize(("name", "block_kv"), WEIGHTS)
def test_weights_worked_by_hand(name, block_kv):
    """In three tiles, or in one."""
    scores = torch.tensor([1.0, 2.0, 8.0, 4.0, 2.0]).log()
    found = with_scores(name, scores, torch.eye(5, 16), block_kv=block_kv).out[0, 0, 0, :5]
    assert found.tolist() == pytest.approx(WEIGHTS[name, block_kv])


def test_relative_mask_shows_each_tile_as_the_first():
    """A query alone in its tile sees the first key of each tile of two, past or future."""
    q = torch.zeros(1, 1, 4, 16)
    backend = get_backend("relative_mask", block_q=1, block_kv=2)
    found = attention(q, q, torch.eye(4, 16)[None, None], backend=backend).out[..., :4]
    assert (found == torch.tensor([0.5, 0.0, 0.5, 0.0])).all()


@pytest.mark.parametrize("name", DEFECTS)
def test_gradient_is_the_true_gradient_of_what_it_computes(name):
    """By finite differences; grouped heads, ragged tiles."""
    q, k, v = (
        random(1, heads, 8, 4, seed=seed, dtype=torch.float64).requires_grad_()
        for seed, heads in enumerate((4, 2, 2))
    )
    backend = get_backend(name, block_q=3, block_kv=3)
    assert torch.autograd.gradcheck(
        lambda *tensors: attention(*tensors, backend=backend).out, (q, k, v), fast_mode=True
    )


@pytest.mark.parametrize(
    ("dtype", "survives", "dies"),
    [
        (torch.float32, 88.72, 88.73),
        (torch.bfloat16, 88.5, 89.0),
        (torch.float16, 11.0859375, 11.09375),
    ],
    ids=["fp32", "bf16", "fp16"],
)
def test_no_max_lives_until_one_score_passes_the_logarithm_of_the_largest_number(
    dtype, survives, dies
):
    """float16 fails although the sums are float32: p itself is rounded to it."""
    v = random(20, 16).clamp(-1, 1).to(dtype)
    for score in (survives, dies):
        scores = torch.zeros(20)
        scores[13] = score
        out, exact = (with_scores(name, scores, v).out for name in ("no_max", "tiled"))
        if score == survives:
            torch.testing.assert_close(out, exact)
        else:
            assert not out.isfinite().all()
            assert exact.isfinite().all()


@pytest.mark.parametrize(("highest", "finite"), [(-80.0, True), (-104.5, False)])
def test_zero_init_max_where_every_score_is_negative(highest, finite):
    scores, v = highest - torch.arange(20.0), random(20, 16)
    out, exact = (with_scores(name, scores, v).out for name in ("zero_init_max", "tiled"))
    assert torch.allclose(out, exact, rtol=1e-5, atol=1e-6) if finite else out.isnan().all()
