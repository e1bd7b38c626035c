"""Every defect breaks what it says it breaks, and nothing else; the exact twins, which look as
broken, break nothing.

Dimensions: B batch, H heads, N queries, M keys, D head dim; T tiles of block_kv keys.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from attention import BACKENDS, AttentionOutput, Backend, attention, get_backend
from conformance.cases import Case, expect, run

TILES = {"block_q": 16, "block_kv": 8}
ONE_TILE = {"block_q": 64, "block_kv": 64}
# with a GPU the Triton kernels are compiled, and take no CPU tensors
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# those of a ring are broken where ranks are merged; see test_ring.py
DEFECTS = [
    name
    for name, backend in BACKENDS.items()
    if backend.defect is not None and backend.ring is None
]
TWINS = ["alpha_beta", "normalized_acc", "kv_outer", "lazy_rescale"]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def with_scores(name: str, scores: Tensor, v: Tensor, **options) -> AttentionOutput:
    """One query that gives key j the score scores[j], to the bit: the rest of q and k is zero."""
    k = torch.zeros(1, 1, len(scores), 16, dtype=v.dtype)
    k[..., 0] = scores
    q = torch.zeros(1, 1, 1, 16, dtype=v.dtype)
    q[..., 0] = 1
    return attention(
        q,
        k,
        v.expand(1, 1, len(scores), -1),
        backend=get_backend(name, **TILES | options),
        scale=1.0,
    )


def is_exact(name: str, inputs: str = "normal", **tiles: int) -> bool:
    case = Case(inputs=inputs, num_queries=60, num_keys=60)
    expected = expect(case, torch.float32, "cpu")
    checks = expected.checks(case, run(get_backend(name, **tiles), *expected.inputs))
    return all(each.share <= 1 for each in checks.values())


def rows_sum_to_one(name: str) -> bool:
    q, k = random(1, 2, 60, 16), random(1, 2, 60, 16, seed=1)
    out = attention(q, k, torch.ones_like(k), backend=get_backend(name, **TILES)).out
    return torch.allclose(out, torch.ones_like(out), rtol=1e-5)


def is_causal(name: str, **tiles: int) -> bool:
    """Whether the first 20 queries are untouched, to the bit, by what the later keys hold."""
    q, k, v = (random(1, 2, 60, 16, seed=seed).to(DEVICE) for seed in range(3))
    later_k, later_v = k.clone(), v.clone()
    later_k[:, :, 20:] *= -50
    later_v[:, :, 20:] += 100
    before, after = (
        attention(q, *kv, backend=get_backend(name, **tiles)).out[:, :, :20]
        for kv in ((k, v), (later_k, later_v))
    )
    return torch.equal(before, after)


PROPERTIES = {
    "exact": lambda name: is_exact(name, **TILES),
    "exact with one tile": lambda name: is_exact(name, **ONE_TILE),
    "finite where a score is 400": lambda name: (
        with_scores(name, torch.linspace(390, 400, 24), random(24, 16)).out.isfinite().all()
    ),
    "finite where every score is -400": lambda name: (
        with_scores(name, torch.linspace(-410, -400, 24), random(24, 16)).out.isfinite().all()
    ),
    "rows sum to one": rows_sum_to_one,
    "causal": lambda name: is_causal(name, **TILES),
}
BROKEN = {
    "no_max": {"finite where a score is 400", "finite where every score is -400"},
    "no_rescale": {"exact"},
    # a single tile leaves out right, but it has forgotten its sum: lse is the tile's maximum
    "local_softmax": {"exact", "rows sum to one"},
    "zero_init_max": {"finite where every score is -400"},
    "relative_mask": {"exact", "causal"},
    "no_scale": {"exact", "exact with one tile"},
}


@pytest.mark.parametrize("name", ["tiled", *TWINS, *DEFECTS])
def test_breaks_exactly_what_it_is_documented_to_break(name):
    assert {what for what, holds in PROPERTIES.items() if not holds(name)} == BROKEN.get(
        name, set()
    )


def test_every_defect_says_what_it_does():
    assert set(BROKEN) == set(DEFECTS)
    for backend in BACKENDS.values():
        assert backend.exact == (backend.defect is None)
        assert backend.exact or len(backend.defect.split()) > 8
    assert all(get_backend(name).exact for name in TWINS)


def masked_scores(q: Tensor, k: Tensor, name: str) -> Tensor:
    """(B, H, N, M) under the causal mask, or under no_scale's and relative_mask's idea of it."""
    scores = (
        q
        @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        * (1.0 if name == "no_scale" else q.shape[-1] ** -0.5)
    )
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    if name == "relative_mask":
        i, j = i % TILES["block_q"], j % TILES["block_kv"]
    return scores.masked_fill(j > i, -torch.inf)


def plain(q: Tensor, k: Tensor, v: Tensor, *, name: str, detach_max: bool = False) -> Tensor:
    """What the defect computes, without any loop over queries: the mathematics of its sentence."""
    tiles = masked_scores(q, k, name).split(TILES["block_kv"], -1)
    if name == "local_softmax":
        p = torch.cat(
            [
                torch.where((tile == -torch.inf).all(-1, keepdim=True), 0.0, tile).softmax(-1)
                for tile in tiles
            ],
            -1,
        )
        seen = torch.cat(
            [(tile > -torch.inf).any(-1, keepdim=True).expand_as(tile) for tile in tiles], -1
        )
        p = p * seen
    elif name == "no_rescale":
        shifts = [tile.amax(-1, keepdim=True) for tile in tiles]
        shifts = [
            torch.where(shift == -torch.inf, 0.0, shift.detach() if detach_max else shift)
            for shift in shifts
        ]
        p = torch.cat(
            [torch.exp(tile - shift) for tile, shift in zip(tiles, shifts, strict=True)], -1
        )
        p = p / p.sum(-1, keepdim=True)
    else:
        p = torch.cat(tiles, -1).softmax(-1)
    return p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def output(q: Tensor, k: Tensor, v: Tensor, *, backend: Backend) -> Tensor:
    return attention(q, k, v, backend=backend).out


def gradients(function) -> tuple[Tensor, ...]:
    """out, dq, dk, dv in float64, for grouped heads and a ragged tail."""
    q, k, v = (
        random(2, 4, 45, 8, dtype=torch.float64),
        *(random(2, 2, 45, 8, seed=seed, dtype=torch.float64) for seed in (1, 2)),
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(
        out, inputs, random(*out.shape, seed=3, dtype=torch.float64)
    )


@pytest.mark.parametrize("name", DEFECTS)
def test_gradient_is_the_true_gradient_of_what_it_computes(name):
    found = gradients(partial(output, backend=get_backend(name, **TILES)))
    torch.testing.assert_close(found, gradients(partial(plain, name=name)), rtol=1e-9, atol=1e-9)


def test_detached_maximum_of_no_rescale():
    """Exact attention may treat the maximum as a constant. Here it does not cancel, and the
    gradient is another one.
    """
    detached = gradients(
        partial(output, backend=get_backend("no_rescale", **TILES, detach_max=True))
    )
    out, dq, dk, dv = gradients(partial(output, backend=get_backend("no_rescale", **TILES)))
    torch.testing.assert_close(
        detached,
        gradients(partial(plain, name="no_rescale", detach_max=True)),
        rtol=1e-9,
        atol=1e-9,
    )
    assert torch.equal(detached[0], out)
    assert (detached[1] - dq).norm() > 0.1 * dq.norm() and (
        detached[2] - dk
    ).norm() > 0.1 * dk.norm()
    torch.testing.assert_close(detached[3], dv)


@pytest.mark.parametrize("name", sorted(set(DEFECTS) - {"no_rescale"}))
def test_detached_maximum_of_the_others_changes_nothing(name):
    found = [
        gradients(partial(output, backend=get_backend(name, **TILES, detach_max=detach_max)))
        for detach_max in (True, False)
    ]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_max_past_float16s_limit_is_fine_elsewhere(dtype):
    """float16 fails at 11.09 although the sums are float32: p itself is rounded to it."""
    v = random(20, 16).to(dtype)
    scores = torch.linspace(11.1, 60, 20)
    torch.testing.assert_close(
        with_scores("no_max", scores, v).out, with_scores("tiled", scores, v).out
    )


def test_no_max_can_fail_as_silent_zeros():
    """In float16 throughout, the sum overflows before any p does: finite / inf = 0, and nothing is
    NaN.
    """
    scores, v = torch.full((1024,), 6.0), torch.full((1024, 16), 0.01, dtype=torch.float16)
    out, exact = (
        with_scores(name, scores, v, softmax_dtype="input").out for name in ("no_max", "tiled")
    )
    assert torch.equal(out, torch.zeros_like(out))
    torch.testing.assert_close(exact, v[:1].expand_as(exact), rtol=0.02, atol=0)


@pytest.mark.parametrize("block_kv", [8, 32, 128], ids=lambda size: f"T{256 // size}")
def test_no_rescale_is_plausible_and_far_off(block_kv):
    q, k, v = (random(1, 2, 256, 32, seed=seed) for seed in range(3))
    out = attention(q, k, v, backend=get_backend("no_rescale", block_kv=block_kv), causal=False).out
    exact = attention(q, k, v, backend="naive", causal=False).out
    assert 0.05 < (out - exact).norm() / exact.norm() < 1
    # still an average of the values: every output lies between the smallest and the largest
    assert (out <= v.amax(2, keepdim=True)).all() and (out >= v.amin(2, keepdim=True)).all()


def test_no_rescale_gives_no_key_more_than_an_equal_share_of_its_tile():
    """With the identity as values the output is the weights themselves. Every tile's best key
    counts 1, so the ceiling is 1/T.
    """
    q, k = 4 * random(1, 1, 64, 64), 2 * random(1, 1, 64, 64, seed=1)
    weights, exact = (
        attention(
            q, k, torch.eye(64)[None, None], backend=get_backend(x, **TILES), causal=False
        ).out
        for x in ("no_rescale", "tiled")
    )
    assert 0.1 < weights.max() <= 1 / 8 + 1e-6
    assert exact.max() > 0.99


def test_local_softmax_rows_sum_to_the_number_of_their_tiles():
    q, k = random(1, 1, 60, 16), random(1, 1, 60, 16, seed=1)
    out = attention(q, k, torch.ones_like(k), backend=get_backend("local_softmax", **TILES)).out
    tiles_seen = torch.arange(60) // TILES["block_kv"] + 1
    torch.testing.assert_close(out, tiles_seen[None, None, :, None].float().expand_as(out))


@pytest.mark.parametrize(("highest", "finite"), [(-80.0, True), (-104.5, False)])
def test_zero_init_max_where_every_score_is_negative(highest, finite):
    scores, v = highest - torch.arange(20.0), random(20, 16)
    out, exact = (with_scores(name, scores, v).out for name in ("zero_init_max", "tiled"))
    assert torch.allclose(out, exact, rtol=1e-5, atol=1e-6) if finite else out.isnan().all()


def test_zero_init_max_has_no_answer_for_a_row_without_a_key():
    q, kv = random(1, 1, 9, 16), random(1, 1, 5, 16)
    out = attention(q, kv, kv, backend=get_backend("zero_init_max", **TILES)).out
    assert out[:, :, :4].isnan().all() and out[:, :, 4:].isfinite().all()


@pytest.mark.parametrize("name", [name for name, backend in BACKENDS.items() if backend.exact])
def test_no_exact_backend_sees_the_future(name):
    tiles = {option: size for option, size in TILES.items() if option in get_backend(name).options}
    assert is_causal(name, **tiles)


def test_no_scale_ignores_the_scale():
    q, k, v = (random(1, 2, 40, 16, seed=seed, dtype=torch.float64) for seed in range(3))
    unscaled = attention(q, k, v, backend="naive", scale=1.0).out
    for scale in (None, 0.3):
        torch.testing.assert_close(
            attention(q, k, v, backend=get_backend("no_scale", **TILES), scale=scale).out, unscaled
        )
