"""attention(return_max_score=True): the largest score of each head, from every backend."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention import BACKENDS, Backend, attention, get_backend
from attention.interface import ScoredOutput
from attention.kernels import TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, LENGTH, HEAD_DIM = 2, 1, 80, 16  # several tiles, and ragged
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 50 + [0] * 21, [3] * 80])
# what is asked of attention(), by its name in a test's id
ASKED = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 7},
    "documents": {"document_ids": DOCUMENTS},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.01])},
}
NEEDS = {"full": "non_causal", "alibi": "alibi_slopes", "documents": "document_ids"}


def inputs() -> tuple[Tensor, ...]:
    """Scores grow along the sequence: the largest is far from the first tile, and past the last
    visible key of most queries.
    """
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, LENGTH, HEAD_DIM, device=DEVICE)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return q, k * torch.linspace(0.5, 3, LENGTH, device=DEVICE)[:, None], v


def expected_scores(q: Tensor, k: Tensor, **asked) -> Tensor:
    q, k = q.double().cpu(), k.double().cpu().repeat_interleave(HEADS // KV_HEADS, 1)
    scores = q @ k.mT * HEAD_DIM**-0.5
    if (cap := asked.get("softcap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    if (slopes := asked.get("alibi_slopes")) is not None:
        scores = scores - slopes.double()[:, None, None] * distance
    visible = torch.ones(1, LENGTH, LENGTH, dtype=torch.bool)
    if asked.get("causal", True):
        visible = visible & (distance >= 0)
    if (window := asked.get("window")) is not None:
        visible = visible & (distance < window)
    if (ids := asked.get("document_ids")) is not None:
        document = (ids.diff(dim=1, prepend=ids[:, :1]) != 0).cumsum(1)
        visible = visible & (document[:, :, None] == document[:, None])
    return scores.masked_fill(~visible[:, None], -math.inf).amax((-1, -2))


def configured(name: str, impl: str | None) -> Backend:
    backend = get_backend(name) if impl is None else get_backend(name, impl=impl)
    tiles = {"block_q": 32, "block_kv": 16}
    return backend.configured(**tiles) if "block_q" in backend.options else backend


def takes(backend: Backend, asked: str) -> bool:
    """Whether it takes these arguments, on this device."""
    feature = NEEDS.get(asked, asked)
    on_device = DEVICE == "cpu" or "cuda" in backend.devices
    return on_device and feature in (*backend.features, "causal")


CASES = [
    (name, impl, asked)
    for name in BACKENDS
    for impl in (None, *BACKENDS[name].implementations)
    for asked in ASKED
    if takes(configured(name, impl), asked)
]


@pytest.mark.parametrize(("name", "impl", "asked"), CASES, ids=lambda part: part or "")
def test_it_is_the_largest_score_of_each_head(name, impl, asked):
    backend = configured(name, impl)
    q, k, v = inputs()
    arguments = {
        key: value.to(DEVICE) if isinstance(value, Tensor) else value
        for key, value in ASKED[asked].items()
    }
    with torch.no_grad():
        found = attention(q, k, v, backend=backend, return_max_score=True, **arguments)
        plain = attention(q, k, v, backend=backend, **arguments)
    assert len(plain) == 2 and found.out.equal(plain.out)
    scores = expected_scores(q, k, **ASKED[asked])
    if name == "no_scale":  # the scores that it uses, which are wrong
        assert (found.max_score.cpu() > 1.1 * scores).all() or asked == "softcap"
    elif name == "relative_mask" and asked != "full":
        assert (found.max_score.cpu() >= scores - 1e-4).all()
        assert (found.max_score.cpu() > scores + 1e-4).any()
    else:
        torch.testing.assert_close(found.max_score.cpu().double(), scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["naive", "tiled", "sdpa", "triton", "no_rescale"])
def test_it_changes_no_gradient_and_carries_none(name):
    results = []
    for asked in (True, False):
        q, k, v = (x.requires_grad_() for x in inputs())
        found = attention(q, k, v, backend=configured(name, None), return_max_score=asked)
        results.append(torch.autograd.grad(found.out.square().sum(), (q, k, v)))
        assert not asked or not found.max_score.requires_grad
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["naive", "tiled", "sdpa", "triton"])
def test_rows_without_a_key_do_not_count(name):
    """With more queries than keys the first rows see none: with one key, all but the last."""
    q, k, v = inputs()
    found = attention(q[:, :, :1], k, v, backend=name, causal=False, return_max_score=True)
    torch.testing.assert_close(
        found.max_score, (q[:, :, :1] @ k.repeat_interleave(2, 1).mT / 4).amax((-1, -2))
    )
    rows = attention(q, k[:, :, :1], v[:, :, :1], backend=name, return_max_score=True)
    last = (q[:, :, -1:] @ k[:, :, :1].repeat_interleave(2, 1).mT / 4).amax((-1, -2))
    torch.testing.assert_close(rows.max_score, last)


def test_it_is_in_the_statistics_dtype():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        q, k, v = (x.to(dtype) for x in inputs())
        for name in ("naive", "tiled", "sdpa"):
            assert (
                attention(q, k, v, backend=name, return_max_score=True).max_score.dtype == expected
            )


def test_a_kernel_says_what_a_broken_softmax_used():
    """no_max keeps no maximum, and no_rescale forgets it: the kernels keep it beside them."""
    q, k, v = inputs()
    for name in ("no_max", "no_rescale"):
        tiled, kernel = (
            attention(q, k, v, backend=configured(name, impl), return_max_score=True).max_score
            for impl in (None, "triton")
        )
        torch.testing.assert_close(tiled, kernel)


def test_a_flag_is_read_when_the_call_runs():
    q, k, v = inputs()
    flag = torch.zeros((), dtype=torch.bool)
    assert attention(q, k, v, backend="tiled", return_max_score=flag).max_score is None
    flag.fill_(True)
    assert attention(q, k, v, backend="tiled", return_max_score=flag).max_score is not None


def test_a_backend_that_returns_a_wrong_shape_is_refused():
    def function(q, k, v, *, causal, scale, return_max_score=False):
        return ScoredOutput(q, None, torch.zeros(q.shape[0]))

    mine = Backend("mine", function, features=frozenset({"max_score"}))
    q, _, _ = inputs()
    with pytest.raises(ValueError, match=r"max_score of shape \(2, 2\) and float32, it returned"):
        attention(q, q, q, backend=mine, return_max_score=True)


def test_a_backend_that_declares_nothing_gets_a_companion():
    naive = get_backend("naive")
    features = frozenset({"gqa", "non_causal"})
    mine = replace(naive, name="mine", features=features)
    q, k, v = inputs()
    found = attention(q, k, v, backend=mine, return_max_score=True).max_score
    torch.testing.assert_close(found.double().cpu(), expected_scores(q, k), rtol=1e-5, atol=1e-5)


def test_the_kernels_keep_it_only_where_they_are_asked():
    """`look` is read inside the operator; otherwise max_score may hold anything, at no cost."""
    from attention.kernels import op

    assert "max_score" in TRITON.features
    assert op.largest(torch.zeros(2, 3, 5), None).shape == (2, 3)
    top = torch.arange(30.0).view(2, 3, 5)
    assert op.largest(torch.zeros(2, 3, 5), top).equal(top.amax(-1))
