"""The streaming softmax: numbers worked out by hand, and the laws that let tiles, splits and ranks
combine in any order.

Dimensions: R query rows, T keys, D head dim.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.online_softmax import OnlineSoftmax

D = 2
# on a busy machine the first example may take long
law = settings(deadline=None)
# a masked score, ordinary ones, ties, and ones whose exponential overflows and underflows
SCORES = st.sampled_from(
    [-math.inf, -1e4, -500.0, -104.0, -3.0, -0.5, 0.0, 0.0, 0.7, 2.0, 89.0, 800.0, 1e4]
)
FLOATS = st.floats(-3, 3, width=32)


def empty(num_rows: int, **options) -> OnlineSoftmax:
    return OnlineSoftmax.empty(
        torch.empty(num_rows, D, dtype=torch.float64), dtype=torch.float64, **options
    )


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@st.composite
def tiles(draw, count: int | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tiles of scores (R, T) with their values (T, D), each tile as wide as it likes."""
    num_rows, found = draw(st.integers(1, 3)), []
    for _ in range(count or draw(st.integers(1, 4))):
        width = draw(st.integers(1, 4))
        row = st.lists(SCORES, min_size=width, max_size=width)
        scores = draw(st.lists(row, min_size=num_rows, max_size=num_rows))
        value = st.lists(FLOATS, min_size=D, max_size=D)
        v = draw(st.lists(value, min_size=width, max_size=width))
        found.append((tensor(scores), tensor(v)))
    return found


def state_of(scores: torch.Tensor, v: torch.Tensor) -> OnlineSoftmax:
    return empty(len(scores)).update(scores, v)


def assert_same(state: OnlineSoftmax, other: OnlineSoftmax) -> None:
    assert torch.equal(state.row_max, other.row_max)
    torch.testing.assert_close(
        (state.row_sum, state.acc), (other.row_sum, other.acc), rtol=1e-12, atol=1e-12
    )


def test_worked_by_hand():
    """Scores 1, 3 | 4 with values 10, 20 | 30. The second tile moves the maximum from 3 to 4,
    so the first tile's sums shrink to e^-1 of what they were.
    """
    e = math.exp
    first = state_of(tensor([[1.0, 3.0]]), tensor([[10.0, 1.0], [20.0, 1.0]]))
    assert first.row_max.item() == 3.0
    assert first.row_sum.item() == pytest.approx(e(-2) + 1)
    assert first.acc.tolist() == [pytest.approx([10 * e(-2) + 20, e(-2) + 1])]
    second = first.update(tensor([[4.0]]), tensor([[30.0, 1.0]]))
    assert second.row_max.item() == 4.0
    assert second.row_sum.item() == pytest.approx(e(-3) + e(-1) + 1)
    assert second.acc[0].tolist() == pytest.approx(
        [10 * e(-3) + 20 * e(-1) + 30, e(-3) + e(-1) + 1]
    )


@law
@given(tiles())
def test_any_split_of_the_keys_gives_softmax(tiles):
    state = empty(len(tiles[0][0]))
    for scores, v in tiles:
        state = state.update(scores, v)
    scores, v = torch.cat([each for each, _ in tiles], 1), torch.cat([each for _, each in tiles])
    # a row of -inf alone has no softmax: its weights are 0
    expected = scores.softmax(1).nan_to_num(0.0) @ v, scores.logsumexp(1)
    torch.testing.assert_close(state.finalize(), expected, rtol=1e-12, atol=1e-12)


@law
@given(tiles(count=3))
def test_states_combine_in_any_order(tiles):
    """update() is a merge with the tile's own state; the empty state changes nothing."""
    a, b, c = (state_of(*tile) for tile in tiles)
    identity = empty(len(a.row_max))
    assert (identity.row_max == -torch.inf).all()
    assert not identity.row_sum.any() and not identity.acc.any()
    state = a.update(*tiles[1]).update(*tiles[2])
    assert_same(a.merge(b).merge(c), state)
    assert_same(a.merge(b.merge(c)), state)
    assert_same(c.merge(a).merge(b), state)
    assert_same(state.merge(identity), state)
    assert_same(identity.merge(state), state)


def test_no_key_at_all_gives_zero_and_no_gradient():
    scores = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    v = torch.ones(3, D, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * 3, [False] * 3])  # the second row is masked out
    out, lse = empty(2).update(scores.masked_fill(~mask, -torch.inf), v).finalize()
    assert out.tolist() == [[1.0] * D, [0.0] * D]
    assert lse.tolist() == [pytest.approx(math.log(3)), -math.inf]
    d_scores, d_v = torch.autograd.grad(
        (out * tensor([[1.0, 2.0], [3.0, 4.0]])).sum() + lse[0], (scores, v)
    )
    assert d_scores[1].tolist() == [0.0] * 3
    assert d_scores[0].tolist() == pytest.approx([1 / 3] * 3)
    assert d_v.tolist() == [pytest.approx([1 / 3, 2 / 3])] * 3
