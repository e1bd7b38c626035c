"""Exact variants of the tile loop that look like mistakes and are not.

Any shift that is the same for a row's numerator and denominator cancels, and so does any order of
the tiles. Each of these classes changes something of that kind. Comparing them with
`attention.defects` shows which steps carry the result.
"""

from dataclasses import replace

import torch
from torch import Tensor

from attention.online_softmax import OnlineSoftmax, finite, weighted_sum
from attention.tiled import tile_loop_backend


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
    """acc holds the normalised output of the keys seen so far, at the price of a division a
    tile.
    """

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
    """The subtracted value moves only when the maximum has outgrown it by THRESHOLD, so most tiles
    rescale nothing.

    exp(8) = 2981 leaves p far from float16's limit of 65504.
    """

    THRESHOLD = 8.0

    def next_max(self, tile_max: Tensor) -> Tensor:
        # in float16 statistics a few hundred keys at exp(8) would overflow row_sum: there it
        # rescales at once
        threshold = 0.0 if tile_max.dtype == torch.float16 else self.THRESHOLD
        return torch.where(tile_max > self.row_max + threshold, tile_max, self.row_max)


EXACT_VARIANTS = (
    tile_loop_backend("alpha_beta", softmax=AlphaBeta),
    tile_loop_backend("normalized_acc", softmax=NormalizedAcc),
    tile_loop_backend("kv_outer", kv_outer=True),
    tile_loop_backend("lazy_rescale", softmax=LazyRescale),
)
