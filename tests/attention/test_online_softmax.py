"""The streaming softmax: the laws that let tiles, splits and ranks combine in any order.

Dimensions: R query rows, T keys, D head dim.
"""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.online_softmax import OnlineSoftmax

D = 2
# a masked score, ordinary ones, ties, and ones whose exponential overflows and underflows
SCORES = st.sampled_from(
    [-math.inf, -1e4, -500.0, -104.0, -3.0, -0.5, 0.0, 0.0, 0.7, 2.0, 89.0, 800.0, 1e4]
)
FLOATS = st.floats(-3, 3, width=32)


def empty(num_rows: int) -> OnlineSoftmax:
    dtype = torch.float64
    return OnlineSoftmax.empty(torch.empty(num_rows, D, dtype=dtype), dtype=dtype)


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


@given(tiles())
def test_any_split_of_the_keys_gives_softmax(tiles):
    state = empty(len(tiles[0][0]))
    for scores, v in tiles:
        state = state.update(scores, v)
    scores, v = torch.cat([each for each, _ in tiles], 1), torch.cat([each for _, each in tiles])
    # a row of -inf alone has no softmax: its weights are 0
    expected = scores.softmax(1).nan_to_num(0.0) @ v, scores.logsumexp(1)
    torch.testing.assert_close(state.finalize(), expected, rtol=1e-12, atol=1e-12)


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
