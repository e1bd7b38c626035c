"""Exact variants of the tile loop that look like mistakes but are not.

A shift that is the same in a row's numerator and denominator cancels, and the order of the tiles
does not matter. Each variant changes something of this kind. Comparing them with
`attention.defects` shows which steps the result depends on.
"""

from dataclasses import replace

import torch
from torch import Tensor

from attention.online_softmax import OnlineSoftmax, finite, weighted_sum
from attention.tiled import TileLoop, tile_loop_backend


class AlphaBeta(OnlineSoftmax):
    """Each tile subtracts its own maximum; beta = exp(tile_max - next_max) then brings it to the
    common scale.
    """

    def update(self, scores: Tensor, v: Tensor) -> "AlphaBeta":
        tile_max = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - finite(tile_max))
        return self.merge(
            replace(self, row_max=tile_max, row_sum=p.sum(-1, keepdim=True), acc=weighted_sum(p, v))
        )


class NormalizedAcc(OnlineSoftmax):
    """acc holds the normalised output over the keys so far, at the cost of a division per tile."""

    def update(self, scores: Tensor, v: Tensor) -> "NormalizedAcc":
        next_max = torch.maximum(self.row_max, scores.amax(-1, keepdim=True))
        past = torch.exp(self.row_max - finite(next_max)) * self.row_sum
        p = torch.exp(scores - finite(next_max))
        row_sum = past + p.sum(-1, keepdim=True)
        divisor = torch.where(row_sum == 0, 1.0, row_sum)
        return replace(
            self,
            row_max=next_max,
            row_sum=row_sum,
            acc=(past * self.acc + weighted_sum(p, v)) / divisor,
        )

    def finalize(self) -> tuple[Tensor, Tensor]:
        _, lse = super().finalize()
        return self.acc, lse


class LazyRescale(OnlineSoftmax):
    """The subtracted value moves only when the maximum exceeds it by THRESHOLD, so most tiles
    rescale nothing.

    exp(8) = 2981 leaves p far from float16's limit of 65504.
    """

    THRESHOLD = 8.0

    def next_max(self, tile_max: Tensor) -> Tensor:
        # with float16 statistics, a few hundred keys at exp(8) would overflow row_sum, so rescale
        # at once
        threshold = 0.0 if tile_max.dtype == torch.float16 else self.THRESHOLD
        return torch.where(tile_max > self.row_max + threshold, tile_max, self.row_max)


class KvOuter(TileLoop):
    """Keys in the outer loop, as in the first FlashAttention: every query tile's state stays in
    memory to the end.
    """

    def output_tiles(self, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        tiles = self.scores.visible.query_tiles(self.block_q)
        rows = [q[..., tile.rows, :] for tile in tiles]
        states = [self.empty(q_rows, value_dim=v.shape[-1]) for q_rows in rows]
        for first in range(0, k.shape[-2], self.block_kv):
            for i, tile in enumerate(tiles):
                last = min(tile.last, first + self.block_kv)
                seen = tile._replace(first=max(tile.first, first), last=last)
                states[i] = self.absorb(states[i], rows[i], k, v, seen)
        return [self.finish(state, q_rows) for state, q_rows in zip(states, rows, strict=True)]


EXACT_VARIANTS = (
    tile_loop_backend("alpha_beta", softmax=AlphaBeta),
    tile_loop_backend("normalized_acc", softmax=NormalizedAcc),
    tile_loop_backend("kv_outer", loop=KvOuter),
    tile_loop_backend("lazy_rescale", softmax=LazyRescale),
)
