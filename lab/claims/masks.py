"""Masks: rows that see no key of a tile, and positions.

Dimensions: N queries and keys, D head dim; a tile is R queries by T keys.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention import Backend
from attention.defects import relative_keys, replace_bounds
from attention.mask import QueryTile, VisibleKeys, visible_keys
from attention.online_softmax import OnlineSoftmax, weighted_sum
from attention.tiled import tile_loop_backend
from lab.claims.claim import Figures, claim
from lab.claims.inputs import exact, inputs, largest, run


class EveryTile(VisibleKeys):
    """The right mask, but no tile is skipped, as in the documents' code."""

    def query_tiles(self, block_q: int) -> list[QueryTile]:
        return [replace_bounds(tile, self.num_keys) for tile in super().query_tiles(block_q)]


def every_tile(q: Tensor, k: Tensor, **arguments: Any) -> VisibleKeys:
    return EveryTile(**vars(visible_keys(q, k, **arguments)))


def as_printed(softmax: type[OnlineSoftmax]) -> Backend:
    """A backend with this softmax, in a loop that skips no tile."""
    return tile_loop_backend(softmax.__name__, softmax=softmax, visible_keys=every_tile)


class AlphaBetaUnguarded(OnlineSoftmax):
    """alpha and beta as printed in the chapter, without a guard for rows that see no key of the
    tile.
    """

    def guard(self, x: Tensor, tile_max: Tensor) -> Tensor:
        return x

    def update(self, scores: Tensor, v: Tensor) -> "AlphaBetaUnguarded":
        tile_max = scores.amax(-1, keepdim=True)
        next_max = torch.maximum(self.row_max, tile_max)
        alpha = torch.exp(self.row_max - next_max)
        beta = self.guard(torch.exp(tile_max - next_max), tile_max)
        p = self.guard(torch.exp(scores - tile_max), tile_max)
        row_sum = alpha * self.row_sum + beta * p.sum(-1, keepdim=True)
        acc = alpha * self.acc + beta * weighted_sum(p, v)
        return replace(self, row_max=next_max, row_sum=row_sum, acc=acc)


class BetaGuarded(AlphaBetaUnguarded):
    """The fix of the deep dive: beta and p are 0 for such a row; alpha does not change."""

    def guard(self, x: Tensor, tile_max: Tensor) -> Tensor:
        return torch.where(tile_max.isfinite(), x, 0.0)


class SumClamped(OnlineSoftmax):
    """The fix of the notebook: the row sum is at least the smallest normal number; alpha has no
    guard.
    """

    def correction(self, next_max: Tensor) -> Tensor:
        return torch.exp(self.row_max - next_max)

    def finalize(self) -> tuple[Tensor, Tensor]:
        row_sum = self.row_sum.clamp(min=torch.finfo(self.row_sum.dtype).tiny)
        return self.acc / row_sum, (self.row_max + torch.log(row_sum)).squeeze(-1)


def nan_share(softmax: type[OnlineSoftmax], block: int, **mask: Any) -> float:
    """Share of NaN outputs at 128 tokens under a causal mask."""
    out = run(as_printed(softmax), *inputs(0, 1, 2, 128, 32), causal=True, block=block, **mask)
    return out.isnan().double().mean().item()


@claim(
    "exercise",
    holds=lambda f: f["with_key"] == f["without_key"] == 0,
    only_if=("the first tile holds a key that the row sees", lambda f: f["with_key"] == 0),
)
def first_correction() -> Figures:
    """With the maximum at -inf and the sums at 0, the first correction is 0 and discards the
    empty state.

    Holds if the correction is 0 after a first tile with a key, and after one without.

    Measured: {with_key} after a tile with a key, {without_key} after a tile without.

    -inf - -inf is NaN: the subtracted maximum needs a guard, or every row must see a key in its
    first tile.
    """

    def correction(tile_max: float) -> float:
        row_max = torch.tensor(-torch.inf)
        return torch.exp(row_max - torch.maximum(row_max, torch.tensor(tile_max))).item()

    without_key = correction(-math.inf)
    return {
        "with_key": correction(0.7),
        "without_key": "NaN" if math.isnan(without_key) else without_key,
    }


@claim(
    "chapter",
    holds=lambda f: max(f["nan"].values()) == 0,
)
def causal_as_printed() -> Figures:
    """The tiled attention of the chapter's third step is right with causal=True, so that the
    GPT of its sixth step trains.

    Holds if no output is NaN.

    Measured: share of NaN outputs by tile size, at 128 tokens: {nan}.

    A tile that lies wholly in the future of a row has maximum -inf, and exp(-inf - -inf) is
    NaN. Skip such tiles, or subtract a finite number there. Only the last tile of queries
    survives.
    """
    return {"nan": {str(tile): nan_share(AlphaBetaUnguarded, tile) for tile in (16, 32, 64, 128)}}


@claim(
    "deep dive",
    holds=lambda f: f["causal"] == f["window"] == 0,
    only_if=("every row sees a key in its first block", lambda f: f["causal"] == 0),
)
def beta_guard() -> Figures:
    """Setting beta to 0 for rows that a block masks whole makes such rows safe.

    Holds if no output is NaN, with a causal mask and with a sliding window.

    Measured: {causal:.1%} NaN with a causal mask, {window:.1%} with a window of 40 keys and
    tiles of 32; the project's guard {guarded:.1%}.

    alpha is still exp(-inf - -inf) for a row whose first blocks are masked whole; a causal mask
    alone never has such a row.
    """
    return {
        "causal": nan_share(BetaGuarded, 32),
        "window": nan_share(BetaGuarded, 32, window=40),
        "guarded": nan_share(OnlineSoftmax, 32, window=40),
    }


@claim(
    "notebook",
    holds=lambda f: f["window"] == 0,
)
def clamped_sum() -> Figures:
    """Clamping the row sum to the smallest normal number makes the final division safe.

    Holds if no output is NaN under a sliding window of 40 keys with tiles of 32.

    Measured: {window:.1%} NaN.

    The sum is NaN already, from exp(-inf - -inf) in the update; clamp(NaN) is NaN.
    """
    return {"window": nan_share(SumClamped, 32, window=40)}


@claim(
    "guide",
    holds=lambda f: f["causal"] < 1e-5 and f["mean"] > 1e-3 and f["half"] != "-inf",
    only_if=("every row sees a key and scores are float32", lambda f: f["causal"] < 1e-5),
)
def minus_1e9() -> Figures:
    """Masking with -1e9 inside the tile handles causal attention.

    Holds if the result equals a mask of -inf to 1e-5, a row without a key does not return the
    mean of all values, and -1e9 is finite in float16.

    Measured: causal difference {causal:.1e}; a row without a key returns the mean of all
    values, off by {mean:.0e}; in float16 -1e9 is {half}.

    Large, but a number: where everything is masked the masked scores are all alike, and softmax
    averages them.
    """
    q, k, v = inputs(0, 1, 2, 128, 32)
    scores = q @ k.mT * 32**-0.5
    everything = torch.ones(128, 128)
    masked, nothing = (
        (scores + mask * -1e9).softmax(-1) @ v for mask in (everything.triu(1), everything)
    )
    return {
        "causal": largest(masked - exact(q, k, v, causal=True)),
        "mean": largest(nothing - v.mean(-2, keepdim=True)),
        "half": str(torch.tensor(-1e9, dtype=torch.float16).item()),
    }


@claim(
    "chapter",
    holds=lambda f: f["right"] == 1,
    only_if=(
        "the tile is off the diagonal",
        lambda f: f["right"] == f["right_diagonal"] and f["leak"] > 1e-3,
    ),
)
def mask_inside_the_tile() -> Figures:
    """A causal mask from positions inside the tile is wrong at every tile after the first.

    Holds if of all pairs of a query tile and a key tile, only the first pair gets the right
    mask.

    Measured: of {pairs} pairs {right} are right, {right_diagonal} of them on the diagonal; the
    output is off by {error:.1f}, and changing a future value moves an output by {leak:.2f}.

    On the diagonal, positions inside the tile give the same triangle as positions in the
    sequence. All other tiles are wrong.
    """
    q, k, v = inputs(0, 1, 2, 128, 32)
    inside, absolute = relative_keys(q, k, causal=True), visible_keys(q, k, causal=True)
    tiles = [slice(start, start + 32) for start in range(0, 128, 32)]
    right = [
        (rows, keys)
        for rows in tiles
        for keys in tiles
        if torch.equal(inside.mask(rows, keys), absolute.mask(rows, keys))
    ]
    changed = v.clone()
    changed[..., -1, :] += 10
    out, moved = (run("relative_mask", q, k, x, causal=True, block=32) for x in (v, changed))
    return {
        "pairs": len(tiles) ** 2,
        "right": len(right),
        "right_diagonal": sum(rows == keys for rows, keys in right),
        "error": largest(out - exact(q, k, v, causal=True)),
        "leak": largest((moved - out)[..., :-1, :]),
    }
