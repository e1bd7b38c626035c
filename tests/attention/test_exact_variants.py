"""The exact twins do what their names say, seen through the observer. That their results are exact
is the conformance suite's part.

Dimensions: N queries, M keys, D head dim; a tile is block_q queries by block_kv keys.
"""

import torch
from torch import Tensor

from attention import attention, get_backend
from attention.exact_variants import LazyRescale

TILES = {"block_q": 16, "block_kv": 8}


def walk(name: str, k: Tensor, *, causal: bool = False) -> list[tuple[int, int, Tensor, Tensor]]:
    """(first query, first key, scores, row_max) of every tile, in the order in which it was
    absorbed.
    """
    seen = []

    def observe(tile, keys, scores, state) -> None:
        seen.append((tile.start, keys.start, scores, state.row_max))

    backend, q = get_backend(name, **TILES), torch.ones(1, 1, 40, 4)
    backend.fn(q, k, k, causal=causal, scale=0.25, **backend.options, observer=observe)
    return seen


def keys_scoring(scores: Tensor) -> Tensor:
    """Keys (1, 1, M, 4) that walk()'s queries give these scores."""
    return scores[None, None, :, None].expand(1, 1, -1, 4)


def test_kv_outer_takes_one_tile_of_keys_to_every_query_before_the_next():
    k = torch.randn(1, 1, 40, 4)
    outer, inner = (
        [(i, j) for i, j, *_ in walk(name, k, causal=True)] for name in ("kv_outer", "tiled")
    )
    assert outer == sorted(inner, key=lambda tile: (tile[1], tile[0]))
    assert inner == sorted(inner)
    assert outer != inner and len(set(outer)) == len(outer)


def test_lazy_rescale_moves_its_maximum_only_for_a_jump():
    """Scores creep up by 3 a tile: the exact loop rescales at every tile, this one once the lead
    passes the threshold, which no exponent exceeds.
    """
    k = keys_scoring(torch.arange(40.0) // TILES["block_kv"] * 3)
    lazy, eager = (
        [row_max.max().item() for i, _, _, row_max in walk(name, k) if i == 0]
        for name in ("lazy_rescale", "tiled")
    )
    assert eager == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert lazy == [0.0, 0.0, 0.0, 9.0, 9.0]
    for _, _, scores, row_max in walk("lazy_rescale", keys_scoring(20 * torch.randn(40))):
        assert (scores - row_max).max() <= LazyRescale.THRESHOLD


def test_normalized_acc_holds_the_output_of_the_keys_seen_so_far():
    q, k, v = torch.randn(3, 1, 2, 24, 4, dtype=torch.float64).unbind()
    seen = []

    def observe(tile, keys, scores, state) -> None:
        seen.append((tile.rows, keys.stop, state.acc))

    backend = get_backend("normalized_acc", **TILES)
    backend.fn(q, k, v, causal=False, scale=0.5, **backend.options, observer=observe)
    assert len(seen) == 6
    for rows, stop, acc in seen:
        given = q[:, :, rows], k[:, :, :stop], v[:, :, :stop]
        so_far = attention(*given, backend="naive", causal=False).out
        torch.testing.assert_close(acc[:, :, 0], so_far)
