"""Which keys a query sees: against grids drawn by hand, and tile by tile against the dense mask.

Dimensions: B batch, N queries, M keys.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.mask import VisibleKeys, visible_keys


def intervals(num_queries: int, num_keys: int, **arguments) -> VisibleKeys:
    return visible_keys(
        torch.empty(1, 1, num_queries, 1), torch.empty(1, 1, num_keys, 1), **arguments
    )


def drawn(*rows: str) -> torch.Tensor:
    """A row of characters for each query; 1 where it sees the key."""
    return torch.tensor([[character == "1" for character in row] for row in rows])


def ids(*numbers: int) -> dict[str, torch.Tensor]:
    return {"document_ids": torch.tensor([numbers])}


FULL = {"causal": False}
CAUSAL = {"causal": True}
# the arguments, and the rows of the grid; the name says more where the arguments do not
GRIDS = {
    "full": (FULL, "111", "111"),
    "causal-N4-M4": (CAUSAL, "1...", "11..", "111.", "1111"),
    "causal-N2-M4": (CAUSAL, "111.", "1111"),
    "causal-N1-M4": (CAUSAL, "1111"),
    "causal-N4-M2": (CAUSAL, "..", "..", "1.", "11"),
    "window2": (CAUSAL | {"window": 2}, "1...", "11..", ".11.", "..11"),
    "window1": (CAUSAL | {"window": 1}, "1..", ".1.", "..1"),
    "window2-N2-M4": (CAUSAL | {"window": 2}, ".11.", "..11"),
    "window2-N4-M3": (CAUSAL | {"window": 2}, "...", "1..", "11.", ".11"),
    "window9-wider-than-the-keys": (CAUSAL | {"window": 9}, "1.", "11"),
    "window-of-33-bits": (CAUSAL | {"window": 2**32}, "1.", "11"),
    "window-of-34-bits,1": (FULL | {"window": (2**33, 1)}, "11.", "111", "111"),
    "window1,2": (FULL | {"window": (1, 2)}, "111.", "1111", ".111", "..11"),
    "window0,unlimited": (FULL | {"window": (0, -1)}, "..11", "...1"),
    "window1,1-N4-M2-a-row-before-all-keys": (FULL | {"window": (1, 1)}, "..", "1.", "11", "11"),
    "window1,2-causal-cuts-the-right": (CAUSAL | {"window": (1, 2)}, "1..", "11.", ".11"),
    "documents-0011": (CAUSAL | ids(0, 0, 1, 1), "1...", "11..", "..1.", "..11"),
    "documents-0100-returns": (CAUSAL | ids(0, 1, 0, 0), "1...", ".1..", "..1.", "..11"),
    "documents-7733-full": (FULL | ids(7, 7, 3, 3), "11..", "11..", "..11", "..11"),
    "documents-5": (CAUSAL | ids(5), "1"),
    "documents-window2": (
        CAUSAL | ids(0, 0, 0, 0, 1, 1) | {"window": 2},
        "1.....",
        "11....",
        ".11...",
        "..11..",
        "....1.",
        "....11",
    ),
    # sequences of 3, 0, 1 and 1 queries with 2, 1, 0 and 3 keys
    "varlen": (
        CAUSAL | {"cu_seqlens": torch.tensor([[0, 3, 3, 4, 5], [0, 2, 3, 3, 6]])},
        "......",
        "1.....",
        "11....",
        "......",
        "...111",
    ),
    "varlen-window0,1": (
        FULL | {"cu_seqlens": torch.tensor([[0, 3, 3, 4, 5], [0, 2, 3, 3, 6]]), "window": (0, 1)},
        "1.....",
        "11....",
        ".1....",
        "......",
        ".....1",
    ),
}


@pytest.mark.parametrize("name", GRIDS)
def test_grid_drawn_by_hand(name):
    arguments, *rows = GRIDS[name]
    expected = drawn(*rows)
    assert torch.equal(intervals(*expected.shape, **arguments).mask()[0, 0], expected)


def test_each_sequence_has_its_own_padding_and_documents():
    """Padding is not seen, and moves no position."""
    lengths = {"key_lengths": torch.tensor([3, 1, 0])}
    grids = ("1..", "11.", ".11"), ("1..", "1..", "..."), ("...", "...", "...")
    found = intervals(3, 3, causal=True, window=2, **lengths).mask()[:, 0]
    assert torch.equal(found, torch.stack([drawn(*rows) for rows in grids]))
    documents = {"document_ids": torch.tensor([[0, 0, 0], [0, 1, 1]])}
    grids = ("1..", "11.", "111"), ("1..", ".1.", ".11")
    found = intervals(3, 3, causal=True, **documents).mask()[:, 0]
    assert torch.equal(found, torch.stack([drawn(*rows) for rows in grids]))


@st.composite
def problems(draw) -> tuple[VisibleKeys, int, int]:
    """Intervals of a random problem with the sizes of its tiles."""
    num_queries = draw(st.integers(1, 40))
    causal = draw(st.booleans())
    with_documents = draw(st.booleans())
    num_keys = num_queries if with_documents else draw(st.integers(1, 40))
    side = st.integers(-1, 45)
    window = draw(st.none() | (st.integers(1, 45) if causal else st.tuples(side, side)))
    document_ids = None
    if with_documents:
        row = st.lists(st.booleans(), min_size=num_queries, max_size=num_queries)
        changes = draw(st.lists(row, min_size=1, max_size=3))
        document_ids = torch.tensor(changes).cumsum(1)
    mask = {"causal": causal, "window": window, "document_ids": document_ids}
    if with_documents or draw(st.booleans()):
        lengths = st.lists(st.integers(0, num_keys), min_size=1, max_size=1)
        mask["key_lengths"] = torch.tensor(draw(lengths))
    else:
        ends = st.lists(st.tuples(st.integers(0, num_queries), st.integers(0, num_keys)))
        inner = draw(ends)
        of_queries, of_keys = zip((0, 0), *inner, (num_queries, num_keys), strict=True)
        mask["cu_seqlens"] = torch.tensor([sorted(of_queries), sorted(of_keys)])
    visible = intervals(num_queries, num_keys, **mask)
    return visible, draw(st.integers(1, 50)), draw(st.integers(1, 50))


@settings(max_examples=150)
@given(problems())
def test_tiles_visit_what_is_visible_and_nothing_else(problem):
    visible, block_q, block_kv = problem
    lo, hi, j = visible.lo, visible.hi, torch.arange(visible.num_keys)
    dense = (lo[..., None] <= j) & (j < hi[..., None])
    assert torch.equal(visible.mask()[:, 0], dense)
    assert (lo.diff() >= 0).all() and (hi.diff() >= 0).all() and (lo <= hi).all()

    # a row without a key still has a place, and keys between two rows may have no query
    gaps = ((lo == hi) & (hi > 0)).any() or (lo[:, 1:] > hi[:, :-1]).any()
    tiles = visible.query_tiles(block_q)
    assert [row for tile in tiles for row in range(tile.start, tile.stop)] == list(
        range(dense.shape[1])
    )
    for tile in tiles:
        visited = list(tile.key_tiles(block_kv))
        # tiles stand on one grid, so that kv_outer can walk the same ones for every row of tiles
        assert all(
            keys.start % block_kv == 0 and keys.stop == keys.start + block_kv for keys, _ in visited
        )
        assert len({keys.start for keys, _ in visited}) == len(visited)
        unseen = dense[:, tile.rows].clone()
        for keys, needs_mask in visited:
            seen = dense[:, tile.rows, keys]
            assert seen.any() or gaps, "a tile that nobody sees was visited"
            # past the last key a tile is ragged, and may be masked though every key it has is seen
            assert needs_mask or seen.all()
            assert not needs_mask or not seen.all() or keys.stop > visible.num_keys
            assert torch.equal(visible.mask(tile.rows, keys)[:, 0], seen)
            unseen[:, :, keys] = False
        assert not unseen.any(), "a visible key was never visited"
