"""What is written down of a ring: the blocks, their merges and their weights are those of the call
that runs.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import BACKENDS, attention, get_backend
from attention.online_softmax import OnlineSoftmax
from attention.played_ring import RING, PlayedRing
from attention.ring import Ring, zigzag
from attention.ring_trace import RingTrace, trace_ring
from attention.tiled import TileBlocks

RINGS = [name for name, backend in BACKENDS.items() if isinstance(backend.fn, PlayedRing)]


def inputs(length=24, dtype=torch.float32, size=1.0):
    draw = torch.Generator().manual_seed(0)
    shape = (1, 1, length, 8)
    q, k, v = (torch.randn(shape, generator=draw).to(dtype) for _ in range(3))
    return q * size, k, v


def look(name, tensors, ranks, **arguments) -> RingTrace:
    arguments = {"causal": True, "scale": 0.3} | arguments
    backend = get_backend(name, ranks=ranks)
    return trace_ring(
        *tensors, backend=backend, exact=get_backend("ring", ranks=ranks), **arguments
    )


def weights_of_ranks(name, tensors, ranks, **arguments):
    """(N, W) what the keys of each rank weigh in the backend's own output: the values tell."""
    q, k, v = tensors
    parts = zigzag(k.shape[2], ranks)
    v = torch.zeros_like(v)
    for rank, keys in enumerate(parts):
        v[:, :, keys, rank] = 1
    arguments = {"causal": True, "scale": 0.3} | arguments
    return attention(q, k, v, backend=get_backend(name, ranks=ranks), **arguments).out[0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "ranks"), [(24, 1), (24, 5), (6, 8)])
@pytest.mark.parametrize("name", RINGS)
def test_the_last_merge_is_the_output(name, length, ranks, dtype):
    tensors = inputs(length, dtype)
    found = look(name, tensors, ranks)
    out = attention(*tensors, backend=get_backend(name, ranks=ranks), scale=0.3).out[0, 0]
    assert torch.equal(found.found[-1].out, out)
    assert len(found.found) == len(found.cells) == ranks


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", RINGS)
def test_weights_are_those_in_the_output(name, ranks, causal):
    tensors = inputs()
    found = look(name, tensors, ranks, causal=causal)
    expected = weights_of_ranks(name, tensors, ranks, causal=causal)
    for hop, step in enumerate(found.found):
        sources = [found.cells[rank][hop].source for rank in found.ranks]
        torch.testing.assert_close(step.weight, expected[range(24), sources])


@settings(deadline=None, max_examples=15)
@given(length=st.integers(1, 20), ranks=st.integers(1, 6), causal=st.booleans())
def test_weights_of_the_exact_ring_sum_to_one(length, ranks, causal):
    found = look("ring", inputs(length), ranks, causal=causal)
    total = torch.stack([step.weight for step in found.found]).sum(0)
    torch.testing.assert_close(total, torch.ones(length))
    assert set(found.fates) == {"right"} and found.first is None
    assert found.breaks == [None] * length


@pytest.mark.parametrize("name", RINGS)
def test_factors_rebuild_each_state(name):
    found = look(name, inputs(), 4)
    assert found.found[0].alpha is None
    for past, step in zip(found.found, found.found[1:], strict=False):
        alpha, beta = step.alpha[:, None], step.beta[:, None]
        acc = alpha * past.state.acc + beta * step.block.acc
        torch.testing.assert_close(acc, step.state.acc)


def test_who_holds_and_sends_what():
    """The drawing of attention.ring; two tensors of six keys with eight entries go on."""
    cells = look("ring", inputs(), 4).cells
    assert [[cell.source for cell in hops] for hops in cells] == [
        [0, 3, 2, 1],
        [1, 0, 3, 2],
        [2, 1, 0, 3],
        [3, 2, 1, 0],
    ]
    assert cells[0][0].keys == [0, 1, 2, 21, 22, 23] and cells[1][1].keys == cells[0][0].keys
    assert {(x.elements, x.bytes) for hops in cells for x in hops[:-1]} == {(96, 384)}
    assert {x.elements for hops in cells for x in hops[-1:]} == {0}
    # half of the square with its diagonal, and all ranks alike
    assert [sum(x.pairs for x in hops) for hops in cells] == [24 * 25 / 2 / 4] * 4


def test_the_merge_that_overflows_is_named():
    found = look("ring_no_max", inputs(size=200.0), 3)
    query, hop, cause, score = found.first
    assert cause in ("alpha", "beta") and hop == 1 and score > 88.72
    assert found.row == query and found.breaks[query] == hop
    assert found.found[hop].broken()[query] and not found.found[0].broken().any()
    assert found.fates[query] == "NaN" and found.found[0].weight[query].isnan()


def test_a_merge_of_ones_own():
    """It forgets the past: only the last block counts."""

    def forget(state: OnlineSoftmax, block: OnlineSoftmax) -> OnlineSoftmax:
        return block

    own = replace(RING, name="own", fn=PlayedRing(Ring(TileBlocks(), forget, exact=False)))
    own = own.configured(ranks=2)
    exact = get_backend("ring", ranks=2)
    found = trace_ring(*inputs(), backend=own, exact=exact, causal=False, scale=0.3)
    assert not found.found[0].weight.any() and not found.found[1].alpha.any()
    torch.testing.assert_close(found.found[1].weight, torch.ones(24))
    assert set(found.breaks) == {1}
