"""Which keys a query sees: against grids drawn by hand, and tile by tile against the dense mask.

Dimensions: B batch, N queries, M keys.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.flex import block_mask_of
from attention.mask import VisibleKeys, visible_keys


def intervals(num_queries: int, num_keys: int, **arguments) -> VisibleKeys:
    return visible_keys(
        torch.empty(1, 1, num_queries, 1), torch.empty(1, 1, num_keys, 1), **arguments
    )


def drawn(grid: str) -> torch.Tensor:
    return torch.tensor(
        [[character == "1" for character in row.split()] for row in grid.strip().splitlines()]
    )


GRIDS: dict[str, tuple[tuple, str]] = {
    "full-N2-M3": (
        (2, 3, False, None, None),
        """
        1 1 1
        1 1 1
        """,
    ),
    "causal-N4-M4": (
        (4, 4, True, None, None),
        """
        1 . . .
        1 1 . .
        1 1 1 .
        1 1 1 1
        """,
    ),
    "causal-N2-M4": (
        (2, 4, True, None, None),
        """
        1 1 1 .
        1 1 1 1
        """,
    ),
    "causal-N1-M4": (
        (1, 4, True, None, None),
        """
        1 1 1 1
        """,
    ),
    "causal-N4-M2": (
        (4, 2, True, None, None),
        """
        . .
        . .
        1 .
        1 1
        """,
    ),
    "window2-N4-M4": (
        (4, 4, True, 2, None),
        """
        1 . . .
        1 1 . .
        . 1 1 .
        . . 1 1
        """,
    ),
    "window1-N3-M3": (
        (3, 3, True, 1, None),
        """
        1 . .
        . 1 .
        . . 1
        """,
    ),
    "window2-N2-M4": (
        (2, 4, True, 2, None),
        """
        . 1 1 .
        . . 1 1
        """,
    ),
    "window2-N4-M3": (
        (4, 3, True, 2, None),
        """
        . . .
        1 . .
        1 1 .
        . 1 1
        """,
    ),
    "window9-wider-than-keys": (
        (2, 2, True, 9, None),
        """
        1 .
        1 1
        """,
    ),
    "window1,2-N4-M4": (
        (4, 4, False, (1, 2), None),
        """
        1 1 1 .
        1 1 1 1
        . 1 1 1
        . . 1 1
        """,
    ),
    "window0,unlimited-N2-M4": (
        (2, 4, False, (0, -1), None),
        """
        . . 1 1
        . . . 1
        """,
    ),
    "window1,1-N4-M2-the-first-row-stands-before-all-keys": (
        (4, 2, False, (1, 1), None),
        """
        . .
        1 .
        1 1
        1 1
        """,
    ),
    "window1,2-causal-cuts-the-right-side": (
        (3, 3, True, (1, 2), None),
        """
        1 . .
        1 1 .
        . 1 1
        """,
    ),
    "documents-0011": (
        (4, 4, True, None, [0, 0, 1, 1]),
        """
        1 . . .
        1 1 . .
        . . 1 .
        . . 1 1
        """,
    ),
    "documents-0100-an-id-that-returns-is-another-document": (
        (4, 4, True, None, [0, 1, 0, 0]),
        """
        1 . . .
        . 1 . .
        . . 1 .
        . . 1 1
        """,
    ),
    "documents-full-0011": (
        (4, 4, False, None, [7, 7, 3, 3]),
        """
        1 1 . .
        1 1 . .
        . . 1 1
        . . 1 1
        """,
    ),
    "documents-one-token": (
        (1, 1, True, None, [5]),
        """
        1
        """,
    ),
    "documents-window2-000011": (
        (6, 6, True, 2, [0, 0, 0, 0, 1, 1]),
        """
        1 . . . . .
        1 1 . . . .
        . 1 1 . . .
        . . 1 1 . .
        . . . . 1 .
        . . . . 1 1
        """,
    ),
}


@pytest.mark.parametrize(("arguments", "grid"), GRIDS.values(), ids=GRIDS)
def test_grid_drawn_by_hand(arguments, grid):
    num_queries, num_keys, causal, window, ids = arguments
    document_ids = None if ids is None else torch.tensor([ids])
    visible = intervals(
        num_queries, num_keys, causal=causal, window=window, document_ids=document_ids
    )
    assert torch.equal(visible.mask()[0, 0], drawn(grid))


def test_padding_is_not_seen_and_moves_no_position():
    lengths = torch.tensor([3, 1, 0])
    arguments = {"causal": True, "window": 2, "key_lengths": lengths}
    grids = "1 . .\n1 1 .\n. 1 1", "1 . .\n1 . .\n. . .", ". . .\n. . .\n. . ."
    found = intervals(3, 3, **arguments).mask()[:, 0]
    assert torch.equal(found, torch.stack([drawn(grid) for grid in grids]))


def test_packed_sequences_are_aligned_each_by_itself():
    """Sequences of 3, 0, 1, 1 queries with 2, 1, 0, 3 keys."""
    packed = torch.tensor([[0, 3, 3, 4, 5], [0, 2, 3, 3, 6]])
    grid = """
        . . . . . .
        1 . . . . .
        1 1 . . . .
        . . . . . .
        . . . 1 1 1
        """
    assert torch.equal(intervals(5, 6, causal=True, cu_seqlens=packed).mask()[0, 0], drawn(grid))
    found = intervals(5, 6, causal=False, window=(0, 1), cu_seqlens=packed).mask()[0, 0]
    grid = """
        1 . . . . .
        1 1 . . . .
        . 1 . . . .
        . . . . . .
        . . . . . 1
        """
    assert torch.equal(found, drawn(grid))


def test_each_sequence_has_its_own_documents():
    ids = torch.tensor([[0, 0, 0], [0, 1, 1]])
    visible = visible_keys(
        torch.empty(2, 1, 3, 1), torch.empty(2, 1, 3, 1), causal=True, document_ids=ids
    )
    first, second = visible.mask()[:, 0]
    assert torch.equal(first, drawn("1 . .\n1 1 .\n1 1 1"))
    assert torch.equal(second, drawn("1 . .\n. 1 .\n. 1 1"))


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
        sequences = draw(st.integers(1, 3))
        changes = draw(
            st.lists(
                st.lists(st.booleans(), min_size=num_queries, max_size=num_queries),
                min_size=sequences,
                max_size=sequences,
            )
        )
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


def by_hand(visible: VisibleKeys) -> torch.Tensor:
    """(B, N, M), from the definition lo <= j < hi."""
    keys = range(visible.num_keys)
    rows = [
        zip(*both, strict=True)
        for both in zip(visible.lo.tolist(), visible.hi.tolist(), strict=True)
    ]
    return torch.tensor([[[lo <= j < hi for j in keys] for lo, hi in row] for row in rows])


@settings(max_examples=150, deadline=None)
@given(problems())
def test_tiles_visit_what_is_visible_and_nothing_else(problem):
    visible, block_q, block_kv = problem
    dense = by_hand(visible)
    assert torch.equal(visible.mask()[:, 0], dense)
    assert (
        (visible.lo.diff() >= 0).all()
        and (visible.hi.diff() >= 0).all()
        and (visible.lo <= visible.hi).all()
    )

    # a row without a key still has a place, and keys between two rows may have no query
    lo, hi = visible.lo, visible.hi
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


def test_a_causal_walk_skips_the_future():
    """Half of the tiles of a long causal problem, and masks on the diagonal only."""
    tiles = intervals(1024, 1024, causal=True).query_tiles(64)
    visited = [
        (tile.start, keys.start, needs_mask)
        for tile in tiles
        for keys, needs_mask in tile.key_tiles(64)
    ]
    assert len(visited) == 16 * 17 / 2
    assert [(i, j) for i, j, needs_mask in visited if needs_mask] == [
        (i, i) for i in range(0, 1024, 64)
    ]


def test_a_window_makes_the_walk_linear():
    tiles = intervals(2048, 2048, causal=True, window=64).query_tiles(64)
    assert max(len(list(tile.key_tiles(64))) for tile in tiles) == 2


@pytest.mark.parametrize(
    ("causal", "window"),
    [(False, None), (True, None), (True, 1), (True, 5), (True, 100), (False, (2, 4))],
)
@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
def test_flexattentions_mask_is_the_same(documents, causal, window):
    for num_queries, num_keys in (
        [(40, 40)] if documents else [(40, 40), (1, 40), (7, 40), (40, 7), (1, 1)]
    ):
        ids = torch.randint(0, 3, (2, num_queries)) if documents else None
        q, k = (torch.empty(2, 1, length, 0) for length in (num_queries, num_keys))
        mask = {"causal": causal, "window": window, "document_ids": ids}
        expected = visible_keys(q, k, **mask).mask().expand(2, 1, -1, -1)
        found = block_mask_of(q, k, **mask)
        if found is None:
            assert expected.all()
            continue
        positions = torch.meshgrid(*map(torch.arange, expected.shape), indexing="ij")
        assert torch.equal(found.mask_mod(*positions).expand_as(expected), expected)
