"""Claims about bringing earlier tiles to the scale of later ones.

Dimensions: B batch, H heads, N queries and keys, D head dim; a tile is R queries by T keys.
"""

from dataclasses import replace

import torch
from torch import Tensor

from attention.online_softmax import OnlineSoftmax, weighted_sum
from attention.tiled import tile_loop_backend
from lab.claims.claim import Figures, claim, only_if, spread, verdict
from lab.claims.inputs import STEP_4, exact, inputs, largest, relative, run
from lab.claims.masks import as_printed, nan_share


class RescaleWithoutMax(OnlineSoftmax):
    """p = exp(score), unshifted, while the past sums still shrink by alpha."""

    def update(self, scores: Tensor, v: Tensor) -> "RescaleWithoutMax":
        next_max = torch.maximum(self.row_max, scores.amax(-1, keepdim=True))
        alpha, p = self.correction(next_max), torch.exp(scores)
        row_sum = alpha * self.row_sum + p.sum(-1, keepdim=True)
        return replace(
            self, row_max=next_max, row_sum=row_sum, acc=alpha * self.acc + weighted_sum(p, v)
        )


@claim(
    "chapter",
    says="Removing the subtraction and keeping the rescaling gives NaN.",
    criterion="some output is NaN at scores of standard deviation 1, in float32",
    measured="{nan:.0%} NaN; the outputs are finite and off by {error:.2f}",
    because="p is no longer shifted, so nothing may shrink; but alpha still shrinks the "
    "earlier sums. "
    "Wrong, not NaN, until a score "
    "overflows.",
    verdict=lambda f: verdict(f["nan"] > 0),
    tiny={"seeds": 1},
)
def rescaling_without_subtraction(seeds: int = 20) -> Figures:
    error, nan = [], 0.0
    for seed in range(seeds):
        q, k, v = inputs(seed, *STEP_4)
        out = run(as_printed(RescaleWithoutMax), q, k, v, block=32)
        nan = max(nan, nan_share(out))
        error.append(largest(out - exact(q, k, v)))
    return {"nan": nan, "error": spread(error)}


@claim(
    "chapter",
    says="Without the rescaling its own check shows a largest difference of 0.1 to 0.5.",
    criterion="for every seed of that check (2 x 4 heads, 256 tokens of 32, tiles of 32) it lies "
    "between 0.1 and 0.5",
    measured="{difference:.2f}; with a causal mask {causal:.2f}; by standard deviation of q "
    "and k: {by_std}",
    because="The size depends on the scores: at those of a freshly initialised GPT the "
    "difference is "
    "nearly invisible.",
    verdict=lambda f: verdict(f["difference"]["min"] >= 0.1 and f["difference"]["max"] <= 0.5),
    also="python -m scripts.verify attention=no_rescale",
    tiny={"seeds": 8},
)
def no_rescale_difference(seeds: int = 20) -> Figures:
    difference, causal = [], []
    for seed in range(seeds):
        q, k, v = inputs(seed, *STEP_4)
        difference.append(largest(run("no_rescale", q, k, v, block=32) - exact(q, k, v)))
        causal.append(
            largest(run("no_rescale", q, k, v, causal=True, block=32) - exact(q, k, v, causal=True))
        )
    by_std = {}
    for std in (0.1, 0.25, 0.5, 2, 3):
        q, k, v = inputs(0, *STEP_4, std=std)
        by_std[f"{std:g}"] = largest(run("no_rescale", q, k, v, block=32) - exact(q, k, v))
    return {"difference": spread(difference), "causal": spread(causal), "by_std": by_std}


class NoRescaleUnguarded(OnlineSoftmax):
    """The chapter's second break as printed: each tile's own maximum, raw sums, no guard."""

    def update(self, scores: Tensor, v: Tensor) -> "NoRescaleUnguarded":
        tile_max = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - tile_max)
        return replace(
            self,
            row_max=tile_max,
            row_sum=self.row_sum + p.sum(-1, keepdim=True),
            acc=self.acc + weighted_sum(p, v),
        )

    def finalize(self) -> tuple[Tensor, Tensor]:
        return self.acc / self.row_sum, (self.row_max + torch.log(self.row_sum)).squeeze(-1)


@claim(
    "chapter",
    says="The second break, as printed, gives no NaN.",
    criterion="no output is NaN, with and without a causal mask",
    measured="{full:.0%} NaN without a mask, {causal:.0%} with a causal one; exact again with one "
    "tile: {one_tile:.1e}",
    because="The missing guard again: exp(-inf - -inf) in tiles of the future. The project's "
    "no_rescale has the guard and stays finite.",
    verdict=lambda f: (
        only_if("no tile is masked whole")
        if f["full"] == 0 < f["causal"]
        else verdict(f["causal"] == 0)
    ),
    tiny={},
)
def no_rescale_is_finite() -> Figures:
    q, k, v = inputs(0, *STEP_4)
    backend = as_printed(NoRescaleUnguarded)
    return {
        "full": nan_share(run(backend, q, k, v, block=32)),
        "causal": nan_share(run(backend, q, k, v, causal=True, block=64)),
        "one_tile": largest(run(backend, q, k, v, block=256) - exact(q, k, v)),
    }


class SumsOnlyRescaled(OnlineSoftmax):
    """The guide's first pitfall: row_sum is rescaled, acc is not."""

    def update(self, scores: Tensor, v: Tensor) -> "SumsOnlyRescaled":
        state = super().update(scores, v)
        return replace(state, acc=state.acc + (1 - self.correction(state.row_max)) * self.acc)


class NormalizedNotRescaled(OnlineSoftmax):
    """The deep dive's first pitfall: the normalised output so far is left as it is, the new block
    is divided by the new sum.
    """

    def update(self, scores: Tensor, v: Tensor) -> "NormalizedNotRescaled":
        state = super().update(scores, v)
        return replace(
            state, acc=self.acc + weighted_sum(torch.exp(scores - state.row_max), v) / state.row_sum
        )

    def finalize(self) -> tuple[Tensor, Tensor]:
        return self.acc, self.row_max.squeeze(-1)


@claim(
    "guide, deep dive",
    says="Adding a block to the output without rescaling what is there gives a wrong result.",
    criterion="both documents' wrong lines are off by more than 0.1 (relative to float64)",
    measured="the guide's line {guide:.2f}, the deep dive's {deep_dive:.2f}",
    verdict=lambda f: verdict(min(f["guide"]["min"], f["deep_dive"]["min"]) > 0.1),
    tiny={"seeds": 1},
)
def output_not_rescaled(seeds: int = 5) -> Figures:
    found: dict[str, list[float]] = {"guide": [], "deep_dive": []}
    for seed in range(seeds):
        q, k, v = inputs(seed, *STEP_4)
        truth = exact(q, k, v)
        for name, softmax in (("guide", SumsOnlyRescaled), ("deep_dive", NormalizedNotRescaled)):
            found[name].append(
                relative(run(tile_loop_backend(name, softmax=softmax), q, k, v, block=32), truth)
            )
    return {name: spread(values) for name, values in found.items()}


@claim(
    "notebook, guide",
    says="A softmax of each tile on its own is not attention.",
    criterion="the relative error exceeds 0.1, and vanishes with one tile",
    measured="relative error {error}, by tile size at 256 tokens; the weights of a row "
    "sum to {weights}",
    verdict=lambda f: verdict(f["error"]["64"] > 0.1 and f["error"]["256"] < 1e-5),
    tiny={},
    also="python -m scripts.verify attention=local_softmax",
)
def softmax_per_tile() -> Figures:
    q, k, v = inputs(0, *STEP_4)
    truth = exact(q, k, v)
    ones = torch.ones_like(v)
    tiles = (32, 64, 256)
    return {
        "error": {
            str(tile): relative(run("local_softmax", q, k, v, block=tile), truth) for tile in tiles
        },
        "weights": {
            str(tile): run("local_softmax", q, k, ones, block=tile).mean().item() for tile in tiles
        },
    }


@claim(
    "chapter",
    says="All of the three running states are needed.",
    criterion="leaving out any one costs a wrong result or a second pass over the scores",
    measured="no maximum, own maximum for each tile: relative error {no_max_own:.2f}; "
    "no maximum at "
    "all, at a score of 12 in float16: "
    "{no_max_raw}; no sum: {no_sum:.1f}; no output: the scores are computed again, "
    "{no_output:.1f} times the arithmetic",
    verdict=lambda f: verdict(
        min(f["no_max_own"], f["no_sum"]) > 0.1
        and f["no_max_raw"] != "finite"
        and f["no_output"] > 1
    ),
    tiny={},
)
def three_states() -> Figures:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = inputs(0, *STEP_4)
    truth = exact(q, k, v)

    class NoSum(OnlineSoftmax):
        def finalize(self) -> tuple[Tensor, Tensor]:
            return self.acc, self.row_max.squeeze(-1)

    hot = torch.full((1, 1, 64, 16), 1.0, dtype=torch.float16)
    raw = run("no_max", hot, hot * 3, hot, softmax_dtype="input")  # every score 16 * 3 / 4 = 12
    with FlopCounterMode(display=False) as once:
        run("tiled", q, k, v, block=32)
    with FlopCounterMode(display=False) as twice:
        # first pass: maximum and sum only; second pass: scores again, for the weights
        tiles = [q @ tile.mT for tile in k.split(32, 2)]
        lse = torch.cat(tiles, -1).logsumexp(-1, keepdim=True)
        sum(
            torch.exp(q @ tile.mT - lse) @ values
            for tile, values in zip(k.split(32, 2), v.split(32, 2), strict=True)
        )
    return {
        "no_max_own": relative(run("no_rescale", q, k, v, block=32), truth),
        "no_max_raw": "NaN" if raw.isnan().any() else "inf" if raw.isinf().any() else "finite",
        "no_sum": relative(
            run(tile_loop_backend("no_sum", softmax=NoSum), q, k, v, block=32), truth
        ),
        "no_output": twice.get_total_flops() / once.get_total_flops(),
    }
