"""Rescaling: bringing earlier tiles to the scale of later ones.

Dimensions: N queries and keys, D head dim; a tile is R queries by T keys.
"""

from dataclasses import replace

import torch
from torch import Tensor

from attention.online_softmax import OnlineSoftmax, weighted_sum
from attention.tiled import tile_loop_backend
from lab.claims.claim import Figures, claim
from lab.claims.inputs import CHAPTER_SHAPE, exact, inputs, largest, over_seeds, relative, run


class RescaleWithoutMax(OnlineSoftmax):
    """p = exp(score), unshifted, although earlier sums are still multiplied by alpha."""

    def update(self, scores: Tensor, v: Tensor) -> "RescaleWithoutMax":
        next_max = torch.maximum(self.row_max, scores.amax(-1, keepdim=True))
        alpha, p = self.correction(next_max), torch.exp(scores)
        row_sum = alpha * self.row_sum + p.sum(-1, keepdim=True)
        acc = alpha * self.acc + weighted_sum(p, v)
        return replace(self, row_max=next_max, row_sum=row_sum, acc=acc)


@claim(
    "chapter",
    holds=lambda f: f["nan"] > 0,
)
def rescaling_without_subtraction() -> Figures:
    """Removing the subtraction and keeping the rescaling gives NaN.

    Holds if some output is NaN at scores of standard deviation 1, in float32.

    Measured: {nan:.0%} NaN; the outputs are finite and off by {error:.2f}.

    p is no longer shifted, so nothing may shrink; but alpha still shrinks the earlier sums. The
    result is wrong, not NaN, until a score overflows.
    """
    backend = tile_loop_backend("rescale_without_max", softmax=RescaleWithoutMax)

    def errors(q: Tensor, k: Tensor, v: Tensor) -> Figures:
        out = run(backend, q, k, v, block=32)
        return {"nan": out.isnan().double().mean().item(), "error": largest(out - exact(q, k, v))}

    figures = over_seeds(errors, 20)
    return figures | {"nan": figures["nan"]["max"]}


@claim(
    "chapter",
    holds=lambda f: f["difference"]["min"] >= 0.1 and f["difference"]["max"] <= 0.5,
)
def no_rescale_difference() -> Figures:
    """Without the rescaling the chapter's own check shows a largest difference of 0.1 to 0.5.

    Holds if for every seed of that check (2 x 4 heads, 256 tokens of 32, tiles of 32) it lies
    between 0.1 and 0.5.

    Measured: {difference:.2f}; with a causal mask {causal:.2f}; by standard deviation of q and
    k: {by_std}.

    The size depends on the scores: at those of a freshly initialised GPT the difference is
    nearly invisible.
    """

    def error(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> float:
        out = run("no_rescale", q, k, v, causal=causal, block=32)
        return largest(out - exact(q, k, v, causal=causal))

    figures = over_seeds(
        lambda *qkv: {"difference": error(*qkv), "causal": error(*qkv, causal=True)}, 20
    )
    by_std = {
        f"{std:g}": error(*inputs(0, *CHAPTER_SHAPE, std=std)) for std in (0.1, 0.25, 0.5, 2, 3)
    }
    return figures | {"by_std": by_std}


@claim(
    "notebook, guide",
    holds=lambda f: f["error"]["64"] > 0.1 and f["error"]["256"] < 1e-5,
)
def softmax_per_tile() -> Figures:
    """A softmax of each tile on its own is not attention.

    Holds if the relative error exceeds 0.1, and vanishes with one tile.

    Measured: relative error {error}, by tile size at 256 tokens; the weights of a row sum to
    {weights}.

    A test with one tile proves nothing about what happens between tiles.
    """
    q, k, v = inputs(0, *CHAPTER_SHAPE)
    truth = exact(q, k, v)
    error, weights = {}, {}
    for tile in (32, 64, 256):
        error[str(tile)] = relative(run("local_softmax", q, k, v, block=tile), truth)
        ones = run("local_softmax", q, k, torch.ones_like(v), block=tile)
        weights[str(tile)] = ones.mean().item()
    return {"error": error, "weights": weights}
