"""Looking inside: the largest score, the first tile that leaves the finite range, the recorder that
watches a model's calls.

Dimensions: N queries, M keys.
"""

import math
import weakref

import pytest
import torch

from attention import (
    BACKENDS,
    LIMITS,
    AttentionOutput,
    Backend,
    Breakdown,
    Recorder,
    attention,
    compare_with_exact,
    get_backend,
    max_score,
)
from attention.look import diagnose

TILES = {"block_q": 16, "block_kv": 8}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_one_score(
    score: float, query: int, key: int, *, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """q, k, v of 64 tokens whose scores are 0, but for one query and key; at scale 1."""
    q, k = torch.zeros(1, 2, 64, 16, dtype=dtype), torch.zeros(1, 2, 64, 16, dtype=dtype)
    q[:, 1, query, 0] = 1
    k[:, 1, key, 0] = score
    return [q, k, random(1, 2, 64, 16, dtype=dtype).abs()]


def breakdown(tensors, name: str, **arguments):
    """What a recorder finds in one call at scale 1."""
    backend = get_backend(name, **(TILES if BACKENDS[name].observable else {}))
    recorder = Recorder(backend)
    recorder.backend.fn(*tensors, causal=True, scale=1.0, **arguments, **backend.options)
    return recorder.breakdowns[0]


def test_limits_are_where_exp_overflows():
    assert LIMITS.keys() == {torch.float16, torch.bfloat16, torch.float32}
    for dtype, limit in LIMITS.items():
        below, above = torch.tensor([0.995 * limit, 1.005 * limit]).double().exp().to(dtype)
        assert below.isfinite() and above.isinf()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_max_score_is_not_finite_where_a_score_that_counts_is_not(bad):
    q, k = random(1, 2, 20, 16).abs(), random(1, 2, 50, 16, seed=1).abs()
    expected = max_score(q, k, window=5)
    k[:, :, 3] = bad
    assert not max_score(q, k).isfinite().any()
    assert max_score(q, k, window=5).equal(expected)  # which no query sees


@pytest.mark.parametrize("name", ["naive", "sdpa", "no_max", "lazy_rescale"])
def test_healthy(name):
    assert breakdown(with_one_score(80.0, 40, 21), name) is None


@pytest.mark.parametrize(
    ("dtype", "score", "tensor"),
    [
        (torch.float32, 90.0, "row_sum"),
        (torch.bfloat16, 90.0, "row_sum"),
        (torch.float16, 12.0, "acc"),
    ],
    ids=["fp32", "bf16", "fp16"],
)
def test_no_max_past_its_limit(dtype, score, tensor):
    """In float16 the sums stay finite: it is p, rounded for the product with v, that overflows."""
    found = breakdown(with_one_score(score, 40, 21, dtype=dtype), "no_max")
    assert found == Breakdown(
        tensor,
        queries=(32, 48),
        keys=(16, 24),
        max_score=score,
        sequence=0,
        head=1,
        row=40,
        fate="NaN" if tensor == "row_sum" else "inf",
    )
    assert all(name in str(found) for name in (tensor, "32:48", "16:24", f"{score:.2f}"))
    assert breakdown(with_one_score(score, 40, 21, dtype=dtype), "tiled") is None


def spoiled(which: int, bad: float) -> list[torch.Tensor]:
    """q, k and v, of which one is bad already."""
    tensors = with_one_score(1.0, 3, 2)
    tensors[which][0, 0, 7, 3] = bad
    return tensors


Q, K, V = with_one_score(90.0, 40, 21)
BEFORE = {"sequence": 0, "head": 0, "row": 7, "queries": None, "fate": None}
# backend, tensors and what is found of them
BROKEN = {
    # every score is 86, far from overflow, and so is acc: only the sum of 64 exponentials is not
    "sum-alone-leaves-zeros": (
        "no_max",
        [torch.full((2, 4, 64, 16), x) for x in (1.0, 86 / 16, 1e-3)],
        {"tensor": "row_sum", "fate": "zero", "sequence": 0, "head": 0},
    ),
    # head 3 of the two that share key/value head 1, in the second sequence
    "shared-keys": (
        "no_max",
        [
            torch.cat((torch.zeros(2, 2, 64, 16), torch.cat((0 * Q, Q))), 1),
            K.repeat(2, 1, 1, 1),
            V.repeat(2, 1, 1, 1),
        ],
        {"sequence": 1, "head": 3, "row": 40, "max_score": 90.0},
    ),
    "first-of-several-tiles": ("no_max", [Q + Q.roll(20, 2), K, V], {"queries": (32, 48)}),
    "scores-overflow": (
        "tiled",
        [1e25 * x for x in with_one_score(1.0, 40, 21)],
        {"tensor": "scores", "queries": (32, 48), "keys": (16, 24)},
    ),
    "ragged-last-tile": (
        "no_max",
        [x[:, :, :61] for x in with_one_score(90.0, 60, 59)],
        {"queries": (48, 61), "keys": (56, 61)},
    ),
    "bad-q": ("tiled", spoiled(0, math.nan), BEFORE | {"tensor": "q"}),
    "bad-k": ("tiled", spoiled(1, math.inf), BEFORE | {"tensor": "k"}),
    "bad-v": ("naive", spoiled(2, -math.inf), BEFORE | {"tensor": "v"}),
    # no tile explains it: 0 is divided by 0 at the very end, or there are no tiles to look into
    "at-the-end": (
        "zero_init_max",
        [torch.full((1, 1, 4, 16), x) for x in (1.0, -30.0, 1.0)],
        {"tensor": "out", "sequence": 0, "head": 0, "row": 0, "queries": None, "fate": "NaN"},
    ),
    "no-tiles": ("naive", [1e25 * Q, 1e25 * K, V], {"tensor": "out", "queries": None}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_where_it_breaks(name):
    backend, tensors, expected = BROKEN[name]
    found = breakdown(tensors, backend)
    assert {field: getattr(found, field) for field in expected} == expected
    assert str(found).startswith(found.tensor)


def test_recorder_keeps_one_entry_a_call_and_changes_nothing():
    backend = get_backend("no_max", **TILES)
    recorder = Recorder(backend)
    calls = with_one_score(90.0, 40, 21), [random(1, 2, 40, 16, seed=i) for i in range(3)]
    for tensors in calls:
        found, expected = (
            attention(*tensors, backend=each, scale=1.0, window=30, return_max_score=True)[:2]
            for each in (recorder.backend, backend)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    q, k, _ = calls[1]
    expected = torch.stack((torch.tensor(90.0), max_score(q, k, scale=1.0, window=30).amax()))
    torch.testing.assert_close(torch.stack([*recorder.max_scores]), expected)
    assert [found and found.tensor for found in recorder.breakdowns] == ["row_sum", None]


def test_recorder_refuses_what_its_backend_refuses():
    recorder = Recorder(get_backend("sdpa"))
    q, k, v = with_one_score(1.0, 3, 2)
    with pytest.raises(ValueError, match="attention=sdpa .*window"):
        attention(q, k, v, backend=recorder.backend, window=3)
    assert recorder.max_scores == []


def for_comparison(
    num_heads: int, num_kv_heads: int, length: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """q, k, v, d_out with head dim 16."""
    return [
        random(1, h, length, 16, seed=i, dtype=dtype)
        for i, h in enumerate((num_heads, num_kv_heads, num_kv_heads, num_heads))
    ]


@pytest.mark.parametrize(
    ("name", "heads", "dtype", "bound"),
    [
        ("naive", (2, 2), torch.float32, 2e-6),
        ("tiled", (4, 2), torch.float32, 2e-6),
        ("sdpa", (4, 1), torch.bfloat16, 1e-2),
    ],
)
def test_exact_backends_are_near_exact(name, heads, dtype, bound):
    """An error of 0 would mean that something was compared with itself."""
    row = compare_with_exact(*for_comparison(*heads, 150, dtype), backend=get_backend(name))
    for tensor in ("out", "dq", "dk", "dv"):
        assert 0 < row[f"{tensor}_error"] < bound and row[f"{tensor}_cosine"] > 1 - bound


@pytest.mark.parametrize(("factor", "error", "cosine"), [(2, 1, 1), (-1, 2, -1)])
def test_the_figures_of_a_multiple(factor, error, cosine):
    def multiplied(q, k, v, **arguments) -> AttentionOutput:
        return AttentionOutput(factor * attention(q, k, v, backend="naive", **arguments).out)

    tensors = [x.double() for x in for_comparison(2, 2, 60)]
    row = compare_with_exact(*tensors, backend=Backend("multiple", multiplied), scale=0.3)
    for name in ("out", "dq", "dk", "dv"):
        assert row[f"{name}_error"] == pytest.approx(error, rel=1e-9)
        assert row[f"{name}_cosine"] == pytest.approx(cosine, rel=1e-9)


def test_a_long_sequence_is_compared_in_its_last_queries():
    """As if only they had been asked for: with the other queries' gradients at 0, nothing else can
    be seen.
    """
    num_keys, rows = 12000, diagnose.REFERENCE_SCORES // (8 * 12000)
    q, d_out = random(1, 8, 60, 16), random(1, 8, 60, 16, seed=1)
    k, v = random(1, 1, num_keys, 16, seed=2), random(1, 1, num_keys, 16, seed=3)
    assert rows < 60
    tiles = {"block_q": 64, "block_kv": 1024}
    row = compare_with_exact(q, k, v, d_out, backend=get_backend("tiled", **tiles))
    assert max(value for name, value in row.items() if name.endswith("_error")) < 2e-6
    broken = get_backend("no_rescale", **tiles)
    row = compare_with_exact(q, k, v, d_out, backend=broken)
    last = compare_with_exact(q[:, :, -rows:], k, v, d_out[:, :, -rows:], backend=broken)
    assert row == pytest.approx(last, rel=1e-4) and row["out_error"] > 0.05


def test_what_is_not_finite_is_not_compared_away():
    q, k, v, d_out = for_comparison(1, 1, 40)
    row = compare_with_exact(100 * q, k, v, d_out, backend=get_backend("no_max", **TILES))
    assert math.isnan(row["out_error"]) and math.isnan(row["dq_cosine"])


def test_recorder_keeps_the_tensors_of_a_call_in_the_graph_until_it_is_dropped():
    """A regression test: the checks remembered its backend. So each comparison of a run kept the
    activations of a sequence, and no later step could become a CUDA graph.
    """
    recorder = Recorder(get_backend("no_rescale", **TILES), keep_calls=True)
    q, k, v = (random(1, 2, 40, 16, seed=i).requires_grad_() for i in range(3))
    out = attention(q, k, v, backend=recorder.backend).out
    (call,) = recorder.calls
    assert call.q is q and call.k is k and call.v is v
    assert {"causal": True, "scale": 0.25}.items() <= call.arguments.items()
    # what a later layer makes of it
    (d_out,) = torch.autograd.grad((out**2).sum(), call.out)
    assert torch.equal(d_out, 2 * out)
    assert recorder.max_scores == []
    kept = weakref.ref(call.out)
    del out, call
    assert kept() is not None
    del recorder
    assert kept() is None
