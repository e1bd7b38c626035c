"""Looking inside: the largest score, the first tile that leaves the finite range, the recorder that watches a model's calls.

Dimensions: N queries, M keys.
"""

import math

import pytest
import torch

from attention import BACKENDS, LIMITS, Recorder, attention, find_breakdown, get_backend, max_score

TILES = {"block_q": 16, "block_kv": 8}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_one_score(score: float, query: int, key: int, *, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v of 64 tokens whose scores are 0, but for one query and key; at scale 1."""
    q, k = torch.zeros(1, 2, 64, 16, dtype=dtype), torch.zeros(1, 2, 64, 16, dtype=dtype)
    q[:, 1, query, 0] = 1
    k[:, 1, key, 0] = score
    return [q, k, random(1, 2, 64, 16, dtype=dtype).abs()]


def breakdown(tensors, name: str, **arguments):
    return find_breakdown(*tensors, backend=get_backend(name, **TILES), causal=True, scale=1.0, **arguments)


def test_limits_are_where_exp_overflows():
    assert {dtype: round(limit, 2) for dtype, limit in LIMITS.items()} == {
        torch.float16: 11.09,
        torch.bfloat16: 88.72,
        torch.float32: 88.72,
    }
    for dtype, limit in LIMITS.items():
        below, above = torch.tensor([limit * 0.995, limit * 1.005], dtype=torch.float64).exp().to(dtype)
        assert below.isfinite() and above.isinf()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(300, 300), (20, 1200), (40, 15), (1, 1)], ids=lambda n: str(n))
def test_max_score_is_the_dense_maximum(causal, num_queries, num_keys):
    """Also where the largest score of all stands in the future, and must not count."""
    q, k = random(2, 4, num_queries, 16), random(2, 2, num_keys, 16, seed=1)
    k[:, :, -1] *= 30
    scores = q @ k.repeat_interleave(2, 1).mT * 0.5
    if causal:
        scores = scores.tril(num_keys - num_queries).masked_fill(~torch.ones_like(scores).tril(num_keys - num_queries).bool(), -math.inf)
    torch.testing.assert_close(max_score(q, k, causal=causal, scale=0.5), scores.max())


def test_max_score_has_attentions_default_scale():
    q, k = random(1, 2, 50, 16), random(1, 2, 50, 16, seed=1)
    torch.testing.assert_close(max_score(q, k), max_score(q, k, scale=0.25))


@pytest.mark.parametrize("name", ["naive", "tiled", "sdpa", "no_max", "no_rescale", "lazy_rescale"])
def test_healthy(name):
    tiles = TILES if BACKENDS[name].observable else {}
    arguments = {"backend": get_backend(name, **tiles), "causal": True, "scale": 1.0}
    assert find_breakdown(*with_one_score(80.0, 40, 21), **arguments) is None


@pytest.mark.parametrize(
    ("dtype", "score", "tensor"),
    [(torch.float32, 90.0, "row_sum"), (torch.bfloat16, 90.0, "row_sum"), (torch.float16, 12.0, "acc")],
    ids=["fp32", "bf16", "fp16"],
)
def test_no_max_past_its_limit(dtype, score, tensor):
    """In float16 the sums stay finite: it is p, rounded for the product with v, that overflows."""
    found = breakdown(with_one_score(score, 40, 21, dtype=dtype), "no_max")
    assert (found.tensor, found.queries, found.keys, found.max_score) == (tensor, (32, 48), (16, 24), score)
    assert str(found) == f"{tensor} leaves the finite range in the tile of queries 32:48 and keys 16:24, whose largest score is {score:.2f}"
    assert breakdown(with_one_score(score, 40, 21, dtype=dtype), "tiled") is None


def test_the_first_of_several_tiles_is_named():
    q, k, v = with_one_score(90.0, 40, 21)
    q[:, :, 60, 0] = 2
    assert breakdown([q, k, v], "no_max").queries == (32, 48)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_inputs_that_are_bad_already(name, bad):
    tensors = dict(zip("qkv", with_one_score(1.0, 3, 2), strict=True))
    tensors[name][0, 0, 7, 3] = bad
    found = breakdown(tensors.values(), "tiled")
    assert (found.tensor, found.queries, found.keys, found.max_score) == (name, None, None, None)
    assert str(found) == f"{name} is not finite"


def test_scores_that_overflow_themselves():
    found = breakdown([1e25 * x for x in with_one_score(1.0, 40, 21)], "tiled")
    assert (found.tensor, found.queries, found.keys) == ("scores", (32, 48), (16, 24))


def test_a_ragged_last_tile_ends_at_the_last_key():
    q, k, v = (x[:, :, :61] for x in with_one_score(90.0, 60, 59))
    found = breakdown([q, k, v], "no_max")
    assert (found.queries, found.keys) == ((48, 61), (56, 61))


def test_an_output_that_no_tile_explains():
    """zero_init_max divides 0 by 0 at the very end; naive has no tiles to look into."""
    q, k, v = (torch.full((1, 1, 4, 16), x) for x in (1.0, -30.0, 1.0))
    found = breakdown([q, k, v], "zero_init_max")
    assert (found.tensor, found.queries) == ("out", None)
    q, k, v = with_one_score(1.0, 3, 2)
    assert find_breakdown(1e25 * q, 1e25 * k, v, backend=get_backend("naive"), causal=True, scale=1.0).tensor == "out"


def test_recorder_keeps_one_entry_a_call_and_changes_nothing():
    recorder = Recorder(get_backend("tiled", **TILES), look_for_breakdowns=True)
    calls = [[random(1, 2, 40, 16, seed=3 * call + i).requires_grad_() for i in range(3)] for call in range(3)]
    for q, k, v in calls:
        out, lse = attention(q, k, v, backend=recorder.backend, scale=0.1, window=7)
        expected = attention(q, k, v, backend=get_backend("tiled", **TILES), scale=0.1, window=7)
        assert torch.equal(out, expected.out) and torch.equal(lse, expected.lse)
        assert torch.autograd.grad(out.sum(), q)[0].any()
    # tiles of another size round differently
    expected = [max_score(q, k, scale=0.1, window=7) for q, k, _ in calls]
    torch.testing.assert_close(recorder.max_scores, expected)
    assert recorder.breakdowns == [None, None, None]


def test_recorder_looks_for_breakdowns_only_when_asked():
    bad = with_one_score(90.0, 40, 21)
    quiet, curious = (Recorder(get_backend("no_max", **TILES), look_for_breakdowns=look) for look in (False, True))
    for recorder in (quiet, curious):
        for tensors in (bad, with_one_score(1.0, 40, 21)):
            attention(*tensors, backend=recorder.backend, scale=1.0)
        assert [score.item() for score in recorder.max_scores] == [90.0, 1.0]
    assert quiet.breakdowns == []
    assert [found and found.tensor for found in curious.breakdowns] == ["row_sum", None]


def test_recorder_refuses_what_its_backend_refuses():
    recorder = Recorder(get_backend("sdpa"))
    q, k, v = with_one_score(1.0, 3, 2)
    with pytest.raises(ValueError, match="attention=sdpa cannot take .* does not support window"):
        attention(q, k, v, backend=recorder.backend, window=3)
    assert recorder.max_scores == []


def test_recorder_sees_the_scores_a_defect_really_works_with():
    """no_scale leaves out the 1 / sqrt(D) that it was asked for."""
    q, k, v = (random(1, 2, 40, 64, seed=i) for i in range(3))
    recorder = Recorder(get_backend("no_scale", **TILES))
    attention(q, k, v, backend=recorder.backend)
    torch.testing.assert_close(recorder.max_scores[0], max_score(q, k, scale=1.0))
