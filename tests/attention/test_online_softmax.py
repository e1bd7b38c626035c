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
    """Scores 1, 3 | 4 with values 10, 20 | 30: the maximum moves to 4 in the second tile, and what
    the first one summed up to is worth e^-1 of it.
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
    out, lse = second.finalize()
    weighed = 10 * e(1) + 20 * e(3) + 30 * e(4)
    assert out[0].tolist() == pytest.approx([weighed / (e(1) + e(3) + e(4)), 1.0])
    assert lse.item() == pytest.approx(math.log(e(1) + e(3) + e(4)))


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
@given(tiles(count=2))
def test_update_is_merge_with_the_tiles_own_state(tiles):
    (scores, v), (next_scores, next_v) = tiles
    state = state_of(scores, v)
    assert_same(state.update(next_scores, next_v), state.merge(state_of(next_scores, next_v)))


@law
@given(tiles(count=3))
def test_merge_is_associative(tiles):
    a, b, c = (state_of(*tile) for tile in tiles)
    assert_same(a.merge(b).merge(c), a.merge(b.merge(c)))


@law
@given(tiles(count=2))
def test_merge_is_commutative(tiles):
    a, b = (state_of(*tile) for tile in tiles)
    assert_same(a.merge(b), b.merge(a))


@law
@given(tiles(count=1))
def test_the_empty_state_is_the_identity(tiles):
    state = state_of(*tiles[0])
    identity = empty(len(state.row_max))
    assert (identity.row_max == -torch.inf).all()
    assert not identity.row_sum.any() and not identity.acc.any()
    assert_same(state.merge(identity), state)
    assert_same(identity.merge(state), state)


def test_first_tile_fully_masked():
    """exp(-inf - -inf) is NaN: without a guard every later key of the row is lost."""
    state = state_of(tensor([[-torch.inf, -torch.inf]]), tensor([[1.0, 1.0], [1.0, 1.0]]))
    assert state.row_max.item() == -torch.inf
    assert state.row_sum.item() == 0.0 and not state.acc.any()
    later = tensor([[0.3, -1.2]]), tensor([[1.0, 2.0], [3.0, 4.0]])
    assert_same(state.update(*later), state_of(*later))


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


def test_the_subtracted_maximum_has_no_influence_on_the_gradient():
    """It cancels, so whether it is a constant for autograd changes nothing."""
    scores, v = tensor([[0.5, -1.0, 2.0, 0.1]]), tensor([[1.0, 2.0], [3.0, 4.0]])
    grads = []
    for detach_max in (False, True):
        x = scores.clone().requires_grad_()
        state = empty(1, detach_max=detach_max).update(x[:, :2], v).update(x[:, 2:], v)
        grads.append(torch.autograd.grad(state.finalize()[0].square().sum(), x)[0])
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
