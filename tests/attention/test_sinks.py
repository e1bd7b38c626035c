"""A sink is a key with a value of zero: the same in every backend, with its gradient."""

import pytest
import torch

from attention import BACKENDS, attention, get_backend
from attention.online_softmax import OnlineSoftmax
from attention.sinks import with_sinks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# flex has no backward pass on a CPU
EXACT = [
    name
    for name, each in BACKENDS.items()
    if each.exact and "lse" in each.features and (name != "flex" or DEVICE == "cuda")
]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def written_out(q, k, v, sinks):
    """softmax over the scores and the sink, which has no value."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(
        torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2]),
        -torch.inf,
    )
    sink = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    both = torch.cat((scores, sink), -1)
    return both.softmax(-1)[..., :-1] @ v, both.logsumexp(-1)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("queries", [40, 50], ids=["N=M", "rows-without-a-key"])
def test_a_sink_is_a_key_without_a_value(name, queries):
    sinks = torch.tensor([3.0, -2.0], dtype=torch.float64)
    given = [random(2, 2, n, 16, seed=seed) for seed, n in enumerate((queries, 40, 40))]
    weights, of_lse = random(2, 2, queries, 16, seed=5), random(2, 2, queries, seed=6)
    wide = [x.clone().requires_grad_() for x in (*given, sinks)]
    expected = written_out(*wide)
    expected = (
        *expected,
        *torch.autograd.grad((expected[0] * weights).sum() + (expected[1] * of_lse).sum(), wide),
    )
    q, k, v, sinks = (x.to(DEVICE, torch.float32).requires_grad_() for x in (*given, sinks))
    out, lse = attention(q, k, v, backend=name, sinks=sinks)
    loss = (out * weights.to(out)).sum() + (lse * of_lse.to(lse)).sum()
    found = (out, lse, *torch.autograd.grad(loss, (q, k, v, sinks)))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_a_large_sink_takes_all_and_a_small_one_nothing(name):
    # 12 queries, 8 keys: the first four rows see none
    q, k, v = (
        random(1, 2, n, 4, seed=seed).float().to(DEVICE) for seed, n in enumerate((12, 8, 8))
    )
    plain = attention(q, k, v, backend=name)
    sinks = torch.full((2,), -torch.inf, device=DEVICE, requires_grad=True)
    none = attention(q, k, v, backend=name, sinks=sinks)
    torch.testing.assert_close(none.out, plain.out)
    all_of_it = attention(q, k, v, backend=name, sinks=torch.full((2,), 1e4, device=DEVICE))
    assert all_of_it.out.abs().max() == 0 and (all_of_it.lse == 1e4).all()
    if name == "triton":
        assert torch.autograd.grad(none.out.sum(), sinks)[0].eq(0).all()


def test_a_sink_is_merged_as_any_other_key():
    out, lse = random(2, 2, 6, 4), random(2, 2, 6, seed=1)
    lse[0, 0, 0], out[0, 0, 0] = -torch.inf, 0  # a row without a key
    sinks = torch.tensor([0.5, -torch.inf], dtype=torch.float64)
    score = sinks[:, None, None].expand(2, 2, 6, 1)
    one = torch.ones_like(score)
    sink = OnlineSoftmax(score, one, torch.zeros_like(out))
    expected = OnlineSoftmax(lse.unsqueeze(-1), one, out).merge(sink).finalize()
    torch.testing.assert_close(with_sinks(out, lse, sinks), expected)


def test_a_sink_may_come_first():
    """The state of a row may as well begin with it: that is what a kernel would do."""
    scores, v = random(1, 6, 10), random(1, 10, 4, seed=1)
    sink = torch.full((1, 6, 1), 0.5, dtype=torch.float64)
    first = OnlineSoftmax(sink, torch.ones_like(sink), torch.zeros(1, 6, 4, dtype=torch.float64))
    out, lse = first.update(scores, v).finalize()
    empty = OnlineSoftmax.empty(out, dtype=torch.float64)
    state = empty.update(scores, v)
    expected = with_sinks(*(x[:, None] for x in state.finalize()), torch.tensor([0.5]))
    torch.testing.assert_close((out, lse), tuple(x[:, 0] for x in expected))


@pytest.mark.parametrize(
    "backend, sinks, said",
    [
        ("sdpa", torch.zeros(2), "it returns no lse, which sinks need"),
        ("tiled", torch.zeros(3), "sinks must have shape (H,) = (2,); got (3,)"),
        ("tiled", torch.zeros(2, dtype=torch.int64), "sinks must be floating; got int64"),
        ("tiled", [0.0, 0.0], "sinks must be a tensor, its type is list"),
    ],
)
def test_what_is_no_sink_is_refused(backend, sinks, said):
    q = torch.zeros(1, 2, 8, 16)
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")):
        attention(q, q, q, backend=get_backend(backend), sinks=sinks)
