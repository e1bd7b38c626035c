"""attention(return_max_score=True): what the largest score of each head costs and where it comes
from. That it is right is a part of test_conformance.py.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention import Backend, attention, get_backend

pytestmark = pytest.mark.anywhere
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILES = {"block_q": 32, "block_kv": 16}


def inputs() -> tuple[Tensor, ...]:
    """Scores grow along the sequence: the largest is far from the first tile, and past the last
    visible key of most queries.
    """
    q, k, v = (torch.randn(2, heads, 50, 16, device=DEVICE) for heads in (2, 1, 1))
    return q, k * torch.linspace(0.5, 3, 50, device=DEVICE)[:, None], v


def largest(backend: Backend) -> Tensor:
    torch.manual_seed(0)
    return attention(*inputs(), backend=backend, return_max_score=True).max_score


def test_worked_by_hand():
    """Two heads of two queries and keys. The 5 stands in the future of its query."""
    q = torch.eye(2).expand(1, 2, 2, 2)
    k = torch.tensor([[[[1.0, 3.0], [5.0, 2.0]], [[-4.0, -6.0], [5.0, -7.0]]]])
    found = attention(q, k, k, backend="naive", scale=1.0, return_max_score=True).max_score
    assert found.tolist() == [[3.0, -4.0]]


def test_a_defect_shows_the_scores_that_it_uses():
    """no_scale's are four times as large; relative_mask sees some of the future. A broken softmax
    keeps no maximum and tells it: the loops see every score, and the kernels keep it beside.
    """
    exact = largest(get_backend("naive"))
    torch.testing.assert_close(largest(get_backend("no_scale", **TILES)), 4 * exact)
    assert (largest(get_backend("relative_mask", **TILES)) > exact + 1e-4).any()
    for loop in map(get_backend, ("no_max", "no_rescale")):
        for backend in (loop, loop.on_gpu):
            torch.testing.assert_close(largest(backend.configured(**TILES)), exact)


@pytest.mark.parametrize("name", ["tiled", "triton", "no_rescale"])
def test_it_changes_no_gradient_and_carries_none(name):
    results = []
    tensors = [x.requires_grad_() for x in inputs()]
    for asked in (True, False):
        found = attention(*tensors, backend=name, return_max_score=asked)
        results.append(torch.autograd.grad(found.out.square().sum(), tensors))
        assert not asked or not found.max_score.requires_grad
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["naive", "tiled", "sdpa"])
def test_it_is_in_the_statistics_dtype(name):
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        tensors = [x.to(dtype) for x in inputs()]
        found = attention(*tensors, backend=name, return_max_score=True)
        assert found.max_score.dtype == expected


def test_a_flag_is_read_when_the_call_runs():
    flag = torch.zeros((), dtype=torch.bool)
    assert attention(*inputs(), backend="tiled", return_max_score=flag).max_score is None
    flag.fill_(True)
    assert attention(*inputs(), backend="tiled", return_max_score=flag).max_score is not None


def test_a_compiled_graph_has_it_for_a_backend_that_declares_nothing():
    """One graph serves both values of the flag."""
    features = get_backend("naive").features - {"max_score"}
    mine = replace(get_backend("naive"), name="mine", features=features)
    tensors = inputs()
    asked = {
        "window": 20,
        "document_ids": torch.arange(50, device=DEVICE).expand(2, -1) // 30,
        "key_lengths": torch.tensor([50, 33], device=DEVICE),
        "alibi_slopes": torch.tensor([0.5, 0.25], device=DEVICE),
        "softcap": 2.0,
    }

    def call(flag: Tensor) -> Tensor | None:
        return attention(*tensors, backend=mine, return_max_score=flag, **asked).max_score

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    compiled(torch.tensor(False))
    exact = attention(*tensors, backend="naive", return_max_score=True, **asked).max_score
    torch.testing.assert_close(compiled(torch.tensor(True)), exact)
