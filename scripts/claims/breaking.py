"""Claims about what breaks and how: the maximum, the rescaling, the masks, the dtypes.

Dimensions: B batch, H heads, N queries and keys, D head dim; a tile is R queries by T keys.
"""

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from attention import LIMITS, Backend, attention, get_backend
from attention.defects import relative_keys
from attention.mask import QueryTile, VisibleKeys, visible_keys
from attention.online_softmax import OnlineSoftmax, weighted_sum
from attention.tiled import tile_loop_backend
from scripts.claims.claim import FAILS, HOLDS, Figures, claim, only_if, spread, verdict
from scripts.claims.rounding import STEP_4, exact, inputs, largest, relative, run

HALF = {"float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class EveryTile(VisibleKeys):
    """The right mask, and no tile is skipped: as code without a skip walks."""

    def query_tiles(self, block_q: int) -> list[QueryTile]:
        return [tile._replace(first=0, last=self.num_keys, full_first=self.num_keys, full_last=0) for tile in super().query_tiles(block_q)]


def every_tile(q: Tensor, k: Tensor, **arguments: Any) -> VisibleKeys:
    return EveryTile(**vars(visible_keys(q, k, **arguments)))


class AlphaBetaUnguarded(OnlineSoftmax):
    """alpha and beta as the chapter prints them: nothing is done for a tile that a row sees no key of."""

    def update(self, scores: Tensor, v: Tensor) -> "AlphaBetaUnguarded":
        tile_max = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - tile_max)
        next_max = torch.maximum(self.row_max, tile_max)
        alpha, beta = torch.exp(self.row_max - next_max), torch.exp(tile_max - next_max)
        row_sum = alpha * self.row_sum + beta * p.sum(-1, keepdim=True)
        return replace(self, row_max=next_max, row_sum=row_sum, acc=alpha * self.acc + beta * weighted_sum(p, v))


class BetaGuarded(OnlineSoftmax):
    """The deep dive's remedy: beta and p are 0 for a row without a key in the tile; alpha is left as it was."""

    def update(self, scores: Tensor, v: Tensor) -> "BetaGuarded":
        tile_max = scores.amax(-1, keepdim=True)
        valid = tile_max.isfinite()
        next_max = torch.maximum(self.row_max, tile_max)
        alpha, beta = torch.exp(self.row_max - next_max), torch.where(valid, torch.exp(tile_max - next_max), 0.0)
        p = torch.where(valid, torch.exp(scores - torch.where(valid, tile_max, 0.0)), 0.0)
        row_sum = alpha * self.row_sum + beta * p.sum(-1, keepdim=True)
        return replace(self, row_max=next_max, row_sum=row_sum, acc=alpha * self.acc + weighted_sum(p * beta, v))


class SumClamped(OnlineSoftmax):
    """The notebook's remedy: the row sum is kept above the smallest normal number before the division."""

    def update(self, scores: Tensor, v: Tensor) -> "SumClamped":
        next_max = torch.maximum(self.row_max, scores.amax(-1, keepdim=True))
        alpha, p = torch.exp(self.row_max - next_max), torch.exp(scores - next_max)
        row_sum = alpha * self.row_sum + p.sum(-1, keepdim=True)
        return replace(self, row_max=next_max, row_sum=row_sum, acc=alpha * self.acc + weighted_sum(p, v))

    def finalize(self) -> tuple[Tensor, Tensor]:
        row_sum = self.row_sum.clamp(min=torch.finfo(self.row_sum.dtype).tiny)
        return self.acc / row_sum, (self.row_max + torch.log(row_sum)).squeeze(-1)


class RescaleWithoutMax(OnlineSoftmax):
    """p = exp(score), unshifted, while the past sums still shrink by alpha."""

    def update(self, scores: Tensor, v: Tensor) -> "RescaleWithoutMax":
        next_max = torch.maximum(self.row_max, scores.amax(-1, keepdim=True))
        alpha, p = self.correction(next_max), torch.exp(scores)
        row_sum = alpha * self.row_sum + p.sum(-1, keepdim=True)
        return replace(self, row_max=next_max, row_sum=row_sum, acc=alpha * self.acc + weighted_sum(p, v))


class NoRescaleUnguarded(OnlineSoftmax):
    """The chapter's second break as printed: each tile's own maximum, raw sums, no guard."""

    def update(self, scores: Tensor, v: Tensor) -> "NoRescaleUnguarded":
        tile_max = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - tile_max)
        return replace(self, row_max=tile_max, row_sum=self.row_sum + p.sum(-1, keepdim=True), acc=self.acc + weighted_sum(p, v))

    def finalize(self) -> tuple[Tensor, Tensor]:
        return self.acc / self.row_sum, (self.row_max + torch.log(self.row_sum)).squeeze(-1)


def as_printed(softmax: type[OnlineSoftmax]) -> Backend:
    """That softmax in a loop that skips no tile."""
    return tile_loop_backend(softmax.__name__, softmax=softmax, visible_keys=every_tile)


def nan_share(out: Tensor) -> float:
    return out.isnan().double().mean().item()


@claim(
    "chapter",
    says="The tiled attention printed in its third step is right with causal=True, so that the GPT of its sixth step trains.",
    criterion="no output is NaN",
    measured="share of NaN outputs by tile size, at 128 tokens: {nan}",
    because="A tile that lies wholly in the future of a row has maximum -inf, and exp(-inf - -inf) is NaN. Skip such tiles, or subtract a "
    "finite number there. Only the last tile of queries survives.",
    verdict=lambda f: verdict(max(f["nan"].values()) == 0),
    tiny={"tiles": (32,)},
)
def causal_as_printed(tiles: tuple[int, ...] = (16, 32, 64, 128)) -> Figures:
    q, k, v = inputs(0, 1, 2, 128, 32)
    backend = as_printed(AlphaBetaUnguarded)
    return {"nan": {str(tile): nan_share(run(backend, q, k, v, causal=True, block=tile)) for tile in tiles}}


def with_window(softmax: type[OnlineSoftmax]) -> float:
    """Share of NaN outputs under a sliding window of 40 keys, where early tiles are masked whole for late rows."""
    q, k, v = inputs(0, 1, 2, 128, 32)
    backend = as_printed(softmax).configured(block_q=32, block_kv=32)
    return nan_share(attention(q, k, v, backend=backend, causal=True, window=40).out)


@claim(
    "deep dive",
    says="Setting beta to 0 for rows that a block masks whole makes such rows safe.",
    criterion="no output is NaN, with a causal mask and with a sliding window",
    measured="{causal:.1%} NaN with a causal mask, {window:.1%} with a window of 40 keys and tiles of 32; the project's guard "
    "{guarded:.1%}",
    because="alpha is still exp(-inf - -inf) for a row whose first blocks are masked whole; a causal mask alone never has such a row.",
    verdict=lambda f: only_if("every row sees a key in its first block") if f["causal"] == 0 < f["window"] else verdict(f["window"] == 0),
    tiny={},
)
def beta_guard() -> Figures:
    q, k, v = inputs(0, 1, 2, 128, 32)
    return {
        "causal": nan_share(run(as_printed(BetaGuarded), q, k, v, causal=True, block=32)),
        "window": with_window(BetaGuarded),
        "guarded": with_window(OnlineSoftmax),
    }


@claim(
    "notebook",
    says="Clamping the row sum to the smallest normal number makes the final division safe.",
    criterion="no output is NaN under a sliding window of 40 keys with tiles of 32",
    measured="{window:.1%} NaN",
    because="The sum is NaN already, from exp(-inf - -inf) in the update; clamp(NaN) is NaN.",
    verdict=lambda f: verdict(f["window"] == 0),
    tiny={},
)
def clamped_sum() -> Figures:
    return {"window": with_window(SumClamped)}


@claim(
    "chapter",
    says="A running maximum that starts at 0 instead of -inf gives errors of 1e-1 or more.",
    criterion="the largest error is at least 0.1 at scores of standard deviation 1",
    measured="{normal:.1e} at ordinary scores; with every score at -100 {at_100:.1e}, at -110 {at_110}",
    because="Zero is a legal shift like any other. It fails where all of a row lies so far below zero that exp() has no bits left.",
    verdict=lambda f: verdict(f["normal"]["max"] >= 0.1),
    tiny={"seeds": 1},
)
def maximum_from_zero(seeds: int = 5) -> Figures:
    normal = []
    for seed in range(seeds):
        q, k, v = inputs(seed, *STEP_4)
        normal.append(largest(run("zero_init_max", q, k, v, block=32) - exact(q, k, v)))
    _, _, v = inputs(0, 1, 1, 128, 16)
    far = []
    for score in (-100, -110):
        q, k = torch.full((1, 1, 128, 16), 1.0), torch.full((1, 1, 128, 16), score / 4)  # 16 * score / 4 / sqrt(16)
        out = run("zero_init_max", q, k, v, block=32)
        far.append("NaN" if out.isnan().all() else largest(out - exact(q, k, v)))
    return {"normal": spread(normal), "at_100": far[0], "at_110": far[1]}


@claim(
    "chapter",
    says="exp(89) is about 4e38, past float32's largest number; exp(12) is about 162,754, past float16's 65,504.",
    criterion="both values agree to two digits, and both overflow",
    measured="{exp_89:.2e} and {exp_12:.0f}; overflow starts at a score of {limit_float32:.2f} in float32 and {limit_float16:.2f} in "
    "float16",
    verdict=lambda f: verdict(f"{f['exp_89']:.0e}" == "4e+38" and round(f["exp_12"]) in (162754, 162755) and f["both_overflow"]),
    tiny={},
)
def limits_of_exp() -> Figures:
    overflow = [
        torch.exp(torch.tensor(score, dtype=dtype)).isinf().item() for score, dtype in ((89.0, torch.float32), (12.0, torch.float16))
    ]
    limits = {f"limit_{name}": LIMITS[dtype] for name, dtype in HALF.items()}
    return {
        "exp_89": math.exp(89),
        "exp_12": math.exp(12),
        "both_overflow": all(overflow),
        "ratio": limits["limit_float32"] / limits["limit_float16"],
        **limits,
    }


@claim(
    "chapter",
    says="Without the maximum, scores in the tens overflow float32 because the sum over several tiles does.",
    criterion="a row sum of exp(20) overflows within 131,072 keys",
    measured="at a score of 20, {keys:,} keys sum to {row_sum:.1e}; overflow would take {needed:.0e} keys. One score of 88.8 overflows "
    "alone: {one_key}",
    because="exp(20) is 5e8. What kills float32 is a single score above 88.72, not a sum.",
    verdict=lambda f: verdict(math.isinf(f["row_sum"])),
    tiny={"keys": 8192},
)
def sums_of_tens(keys: int = 131072) -> Figures:
    state = get_softmax("no_max").empty(torch.zeros(1, 1), dtype=torch.float32)
    for _ in range(0, keys, 4096):
        state = state.update(torch.full((1, 4096), 20.0), torch.ones(4096, 1))
    alone = get_softmax("no_max").empty(torch.zeros(1, 1), dtype=torch.float32).update(torch.full((1, 1), 88.8), torch.ones(1, 1))
    return {
        "keys": keys,
        "row_sum": state.row_sum.item(),
        "needed": torch.finfo(torch.float32).max / math.exp(20),
        "one_key": "inf" if alone.row_sum.isinf() else "finite",
    }


def get_softmax(name: str) -> type[OnlineSoftmax]:
    """The streaming softmax that this backend runs through the tile loop."""
    return get_backend(name).fn.keywords["softmax"]


def first_overflow(dtype: torch.dtype, std: float, *, length: int, tile: int, seed: int = 0) -> Figures:
    """no_max with everything in `dtype`: the share of rows that leave the finite range, and at which key tile the first one does."""
    q, k, v = inputs(seed, 2, 4, length, 32, std=std, dtype=dtype)
    bad_tile = torch.full((2, 4, length), -1)  # of each row; -1 while it is finite
    scores_seen = []

    def observe(query_tile: QueryTile, keys: slice, scores: Tensor, state: OnlineSoftmax) -> None:
        scores_seen.append(scores.amax().item())
        bad = ~(state.row_sum.isfinite() & state.acc.isfinite()).all(-1).flatten(1, 2)
        rows = bad_tile[..., query_tile.rows]
        rows[bad & (rows < 0)] = keys.start // tile

    backend = get_backend("no_max", block_q=length, block_kv=tile, softmax_dtype="input")
    out = backend.fn(q, k, v, causal=False, scale=32**-0.5, **backend.options, observer=observe).out
    bad = bad_tile[bad_tile >= 0].tolist()
    return {
        "max_score": max(scores_seen),
        "bad_rows": len(bad) / bad_tile.numel(),
        "first_tile": min(bad) if bad else "none",
        "half": median(bad) if bad else "none",
        "nan_rows": out.isnan().any(-1).double().mean().item(),
        "inf_rows": out.isinf().any(-1).double().mean().item(),
        "zero_rows": (out == 0).all(-1).double().mean().item(),
    }


@claim(
    "chapter",
    says="Without the maximum, float16 at 256 tokens is NaN within the first tile or two.",
    criterion="some row leaves the finite range in the first two tiles of 32, at q and k of standard deviation 1",
    measured="by standard deviation of q and k, the first bad tile is {first_tile}; share of bad rows {bad_rows}; largest score "
    "{max_score}",
    because="It takes a score above 11.09, or a row sum above 65,504; ordinary random inputs have neither.",
    verdict=lambda f: (
        verdict(True)
        if f["first_tile"]["1"] in (0, 1)
        else only_if(f"q and k have a standard deviation of {f['from_std']} or more")
        if f["from_std"]
        else FAILS
    ),
    tiny={"stds": (1, 1.5)},
)
def float16_first_tiles(stds: tuple[float, ...] = (1, 1.5, 2, 3, 4)) -> Figures:
    rows = {f"{std:g}": first_overflow(torch.float16, std, length=256, tile=32) for std in stds}
    early = [std for std, row in rows.items() if row["first_tile"] in (0, 1)]
    names = ("first_tile", "bad_rows", "max_score")
    return {name: {std: row[name] for std, row in rows.items()} for name in names} | {"from_std": early[0] if early else ""}


@claim(
    "chapter",
    says="Overflow comes earlier in float16 than in float32.",
    criterion="at every size of the scores, float16 breaks at the same tile or earlier, and at one of them earlier",
    measured="first bad tile of 16 (64 keys each, 1,024 tokens), by standard deviation of q and k: float16 {float16}; float32 {float32}. "
    "Share of bad rows: float16 {float16_rows:.1%}; float32 {float32_rows:.1%}. Tile at which half of them have broken: float16 "
    "{float16_half:.0f}; float32 {float32_half:.0f}",
    because="The scores grow with the square of that standard deviation, and float32 stands 88.72 where float16 stands 11.09.",
    verdict=lambda f: verdict(earlier(f)),
    also="python -m scripts.trace attention=no_max dtype=fp16 inputs=large",
    tiny={"length": 256, "stds": (3, 4)},
)
def overflow_by_dtype(length: int = 1024, stds: tuple[float, ...] = (1, 1.5, 2, 3, 4, 5, 6)) -> Figures:
    found: Figures = {}
    for name, dtype in HALF.items():
        rows = {f"{std:g}": first_overflow(dtype, std, length=length, tile=64) for std in stds}
        found[name] = {std: row["first_tile"] for std, row in rows.items()}
        found[f"{name}_rows"] = {std: row["bad_rows"] for std, row in rows.items()}
        found[f"{name}_half"] = {std: row["half"] for std, row in rows.items()}
    return found


def earlier(f: Figures) -> bool:
    half, single = ([math.inf if tile == "none" else tile for tile in f[name].values()] for name in HALF)
    return all(a <= b for a, b in zip(half, single, strict=True)) and half != single


@claim(
    "chapter",
    says="When it overflows, the result is NaN.",
    criterion="every row that overflows ends as NaN, over float16 inputs with all scores equal (1,024 keys) and random ones",
    measured="all scores 5: {at_5}; 8: {at_8}; 11: {at_11}; random of standard deviation 3: {random}",
    because="A sum that overflows alone makes finite / inf = 0, an output that overflows alone makes inf. A detector of NaN misses the "
    "zeros.",
    verdict=lambda f: verdict(f["only_nan"]),
    tiny={"length": 512},
)
def overflow_gives_nan(length: int = 1024) -> Figures:
    found = {}
    _, _, v = inputs(0, 1, 1, length, 16, dtype=torch.float16)
    backend = get_backend("no_max", block_q=length, block_kv=64, softmax_dtype="input")
    for score in (5, 8, 11):
        q, k = (torch.full((1, 1, length, 16), x, dtype=torch.float16) for x in (1.0, score / 4))
        found[f"at_{score}"] = kinds(attention(q, k, v, backend=backend, causal=False).out)
    q, k, v = inputs(0, 1, 4, length, 32, std=3, dtype=torch.float16)
    found["random"] = kinds(attention(q, k, v, backend=backend, causal=False).out)
    return found | {"only_nan": not any(kind["inf"] or kind["zero"] for kind in found.values())}


def kinds(out: Tensor) -> Figures:
    """Share of outputs that are NaN, infinite or exactly 0."""
    return {name: x.double().mean().item() for name, x in (("NaN", out.isnan()), ("inf", out.isinf()), ("zero", out == 0))}


@claim(
    "chapter",
    says="Removing the subtraction and keeping the rescaling gives NaN.",
    criterion="some output is NaN at scores of standard deviation 1, in float32",
    measured="{nan:.0%} NaN; the outputs are finite and off by {error:.2f}",
    because="p is no longer shifted, so nothing may shrink; but alpha still shrinks the earlier sums. Wrong, not NaN, until a score "
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
    criterion="for every seed of that check (2 x 4 heads, 256 tokens of 32, tiles of 32) it lies between 0.1 and 0.5",
    measured="{difference:.2f}; with a causal mask {causal:.2f}; by standard deviation of q and k: {by_std}",
    because="The size depends on the scores: at those of a freshly initialised GPT the difference is nearly invisible.",
    verdict=lambda f: verdict(f["difference"]["min"] >= 0.1 and f["difference"]["max"] <= 0.5),
    also="python -m scripts.verify attention=no_rescale",
    tiny={"seeds": 8},
)
def no_rescale_difference(seeds: int = 20) -> Figures:
    difference, causal = [], []
    for seed in range(seeds):
        q, k, v = inputs(seed, *STEP_4)
        difference.append(largest(run("no_rescale", q, k, v, block=32) - exact(q, k, v)))
        causal.append(largest(run("no_rescale", q, k, v, causal=True, block=32) - exact(q, k, v, causal=True)))
    by_std = {}
    for std in (0.1, 0.25, 0.5, 2, 3):
        q, k, v = inputs(0, *STEP_4, std=std)
        by_std[f"{std:g}"] = largest(run("no_rescale", q, k, v, block=32) - exact(q, k, v))
    return {"difference": spread(difference), "causal": spread(causal), "by_std": by_std}


class SumsOnlyRescaled(OnlineSoftmax):
    """The guide's first pitfall: row_sum is rescaled, acc is not."""

    def update(self, scores: Tensor, v: Tensor) -> "SumsOnlyRescaled":
        state = super().update(scores, v)
        return replace(state, acc=state.acc + (1 - self.correction(state.row_max)) * self.acc)


class NormalizedNotRescaled(OnlineSoftmax):
    """The deep dive's first pitfall: the normalised output so far is left as it is, the new block is divided by the new sum."""

    def update(self, scores: Tensor, v: Tensor) -> "NormalizedNotRescaled":
        state = super().update(scores, v)
        return replace(state, acc=self.acc + weighted_sum(torch.exp(scores - state.row_max), v) / state.row_sum)

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
            found[name].append(relative(run(tile_loop_backend(name, softmax=softmax), q, k, v, block=32), truth))
    return {name: spread(values) for name, values in found.items()}


@claim(
    "chapter",
    says="The second break, as printed, gives no NaN.",
    criterion="no output is NaN, with and without a causal mask",
    measured="{full:.0%} NaN without a mask, {causal:.0%} with a causal one; exact again with one tile: {one_tile:.1e}",
    because="The missing guard again: exp(-inf - -inf) in tiles of the future. The project's no_rescale has the guard and stays finite.",
    verdict=lambda f: only_if("no tile is masked whole") if f["full"] == 0 < f["causal"] else verdict(f["causal"] == 0),
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


@claim(
    "notebook, guide",
    says="A softmax of each tile on its own is not attention.",
    criterion="the relative error exceeds 0.1, and vanishes with one tile",
    measured="relative error {error}, by tile size at 256 tokens; the weights of a row sum to {weights}",
    verdict=lambda f: verdict(f["error"]["64"] > 0.1 and f["error"]["256"] < 1e-5),
    tiny={},
)
def softmax_per_tile() -> Figures:
    q, k, v = inputs(0, *STEP_4)
    truth = exact(q, k, v)
    ones = torch.ones_like(v)
    tiles = (32, 64, 256)
    return {
        "error": {str(tile): relative(run("local_softmax", q, k, v, block=tile), truth) for tile in tiles},
        "weights": {str(tile): run("local_softmax", q, k, ones, block=tile).mean().item() for tile in tiles},
    }


@claim(
    "chapter",
    says="A causal mask from positions inside the tile is wrong at every tile after the first.",
    criterion="of all pairs of a query tile and a key tile, only the first pair gets the right mask",
    measured="of {pairs} pairs {right} are right, {right_diagonal} of them on the diagonal; the output is off by {error:.1f}, and changing "
    "a "
    "future value moves an output by {leak:.2f}",
    because="On the diagonal, positions inside the tile give the same triangle as positions in the sequence. All other tiles are wrong.",
    verdict=lambda f: (
        HOLDS
        if f["right"] == 1
        else only_if("the tile is off the diagonal")
        if f["right"] == f["right_diagonal"] and f["leak"] > 1e-3
        else FAILS
    ),
    tiny={},
)
def mask_inside_the_tile() -> Figures:
    q, k, v = inputs(0, 1, 2, 128, 32)
    inside, absolute = relative_keys(q, k, causal=True), visible_keys(q, k, causal=True)
    tiles = [slice(start, start + 32) for start in range(0, 128, 32)]
    right = [(rows, keys) for rows in tiles for keys in tiles if torch.equal(inside.mask(rows, keys), absolute.mask(rows, keys))]
    out, changed = run("relative_mask", q, k, v, causal=True, block=32), v.clone()
    changed[..., -1, :] += 10
    moved = run("relative_mask", q, k, changed, causal=True, block=32) - out
    return {
        "pairs": len(tiles) ** 2,
        "right": len(right),
        "right_diagonal": sum(rows == keys for rows, keys in right),
        "error": largest(out - exact(q, k, v, causal=True)),
        "leak": largest(moved[..., :-1, :]),
    }


@claim(
    "guide",
    says="Masking with -1e9 inside the tile handles causal attention.",
    criterion="the result equals a mask of -inf to 1e-5, a row without a key gives 0, and -1e9 is finite in float16",
    measured="causal difference {causal:.1e}; a row without a key returns the mean of all values, off by {mean:.0e}; in float16 -1e9 is "
    "{half}",
    because="Large, but a number: where everything is masked the masked scores are all alike, and softmax averages them.",
    verdict=lambda f: only_if("every row sees a key and scores are float32") if f["causal"] < 1e-5 else FAILS,
    tiny={},
)
def minus_1e9() -> Figures:
    q, k, v = inputs(0, 1, 2, 128, 32)
    scores = q @ k.mT * 32**-0.5
    future = torch.ones(128, 128, dtype=torch.bool).triu(1)
    masked = (scores + future * -1e9).softmax(-1) @ v
    nothing = (scores + torch.ones(128, 128) * -1e9).softmax(-1) @ v
    return {
        "causal": largest(masked - exact(q, k, v, causal=True)),
        "mean": largest(nothing - v.mean(-2, keepdim=True)),
        "half": str(torch.tensor(-1e9, dtype=torch.float16).item()),
    }


@claim(
    "guide",
    says="An ordinary causal mask does not work with tiling.",
    criterion="tiles masked by slices of one N x N mask differ from tiles masked by positions",
    measured="difference {difference:.0e}; the full mask takes {mask_bytes:,} bytes at {length:,} tokens, the intervals {interval_bytes:,}",
    because="It works, it only costs the N x N booleans that tiling avoids.",
    verdict=lambda f: verdict(f["difference"] > 0),
    tiny={"length": 128},
)
def sliced_mask(length: int = 1024) -> Figures:
    q, k, v = inputs(0, 1, 2, length, 32)
    full = torch.ones(length, length, dtype=torch.bool).tril()
    visible = visible_keys(q, k, causal=True)

    @dataclass(frozen=True)
    class Sliced(VisibleKeys):
        def mask(self, rows: slice = slice(None), keys: slice = slice(None)) -> Tensor:
            return full[rows, keys][None, None]

    sliced = tile_loop_backend("sliced", visible_keys=lambda *_, **__: Sliced(**vars(visible)))
    difference = run(sliced, q, k, v, causal=True, block=32) - run("tiled", q, k, v, causal=True, block=32)
    interval_bytes = visible.lo.nbytes + visible.hi.nbytes
    return {"difference": largest(difference), "mask_bytes": full.nbytes, "interval_bytes": interval_bytes, "length": length}


@claim(
    "deep dive",
    says="An accumulator kept unnormalised grows and risks overflow.",
    criterion="it overflows for some dtype of the accumulator",
    measured="{length:,} equal scores and values of 32 give {acc}; the bound is N * max|v|",
    because="The weights are at most 1 each. In float32 the bound is out of reach, which is why FlashAttention-2 normalises once, at the "
    "end.",
    verdict=lambda f: (
        FAILS
        if "inf" not in f["acc"].values()
        else only_if("the accumulator is float16")
        if [name for name, acc in f["acc"].items() if acc == "inf"] == ["float16"]
        else HOLDS
    ),
    tiny={},
)
def unnormalised_accumulator(length: int = 4096) -> Figures:
    acc = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        state = OnlineSoftmax.empty(torch.zeros(1, 1), dtype=dtype)
        for _ in range(0, length, 64):
            state = state.update(torch.zeros(1, 64, dtype=dtype), torch.full((64, 1), 32.0, dtype=dtype))
        acc[str(dtype).removeprefix("torch.")] = state.acc.item() if state.acc.isfinite() else "inf"
    return {"acc": acc, "length": length}


@claim(
    "chapter, deep dive",
    says="With the maximum subtracted, every exponential and every correction lies between 0 and 1, whatever the scores.",
    criterion="the largest over all tiles is 1 and none is negative, for scores up to 1e4",
    measured="largest score {max_score:,.0f}; p from {p_min:.0f} to {p_max:.0f}, corrections from {alpha_min:.0f} to {alpha_max:.0f}",
    verdict=lambda f: verdict(min(f["p_min"], f["alpha_min"]) >= 0 and max(f["p_max"], f["alpha_max"]) <= 1),
    tiny={},
)
def exponentials_up_to_one() -> Figures:
    q, k, v = inputs(0, 1, 2, 256, 32, std=45)
    seen: dict[str, list[float]] = {"score": [], "p": [], "alpha": []}

    class Watched(OnlineSoftmax):
        def update(self, scores: Tensor, v: Tensor) -> OnlineSoftmax:
            state = super().update(scores, v)
            found = {"score": scores, "p": torch.exp(scores - state.row_max), "alpha": self.correction(state.row_max)}
            for name, x in found.items():
                seen[name] += [x.amin().item(), x.amax().item()]
            return state

    run(tile_loop_backend("watched", softmax=Watched), q, k, v, block=32)
    both = {f"{name}_{kind}": pick(seen[name]) for name in ("p", "alpha") for kind, pick in (("min", min), ("max", max))}
    return {"max_score": max(seen["score"])} | both


@claim(
    "deep dive, notebook",
    says="Without 1 / sqrt(d), scores at d = 128 are about 11 times too large; products of vectors with entries of variance 1 have a "
    "variance proportional to d.",
    criterion="the ratio is between 11 and 12, and the variance grows like d to the power 0.9 to 1.1",
    measured="ratio {ratio:.2f}; the variance grows like d^{exponent:.2f}, the scores themselves like its root; the mean largest weight "
    "goes "
    "from {weight:.2f} to {weight_unscaled:.2f}",
    because="So scores grow with the square root of d, not in proportion to d as the deep dive's first sentence has it.",
    verdict=lambda f: verdict(11 <= f["ratio"] <= 12 and 0.9 <= f["exponent"] <= 1.1),
    tiny={"length": 128},
)
def missing_scale(length: int = 512) -> Figures:
    variance = {}
    for head_dim in (16, 32, 64, 128):
        q, k, _ = inputs(0, 1, 4, length, head_dim)
        variance[head_dim] = (q @ k.mT).var().item()
    raw = q @ k.mT
    scaled = raw * 128**-0.5
    return {
        "ratio": (raw.std() / scaled.std()).item(),
        "exponent": math.log(variance[128] / variance[16]) / math.log(128 / 16),
        "weight": scaled.softmax(-1).amax(-1).mean().item(),
        "weight_unscaled": raw.softmax(-1).amax(-1).mean().item(),
    }


@claim(
    "deep dive",
    says="Without the scale the softmax is nearly one-hot and its gradients vanish.",
    criterion="at d = 128 the mean largest weight exceeds 0.5, and the gradient of the scores (median over rows of its norm) falls below a "
    "tenth",
    measured="largest weight {weight:.2f}, from {weight_scaled:.2f}; gradient norm {gradient:.3f}, from {gradient_scaled:.3f}; rows whose "
    "gradient is below "
    "a tenth of the scaled one: {vanished:.0%}",
    because="A flat softmax over many keys has small gradients as well: 1 / N a key. They vanish for the rows that are saturated; in the "
    "others a "
    "few keys take all of the gradient.",
    verdict=lambda f: (
        HOLDS
        if f["weight"] > 0.5 and f["gradient"] < f["gradient_scaled"] / 10
        else only_if("the row is saturated")
        if f["weight"] > 0.5 and f["vanished"] > 0.01
        else FAILS
    ),
    tiny={"length": 256},
)
def gradients_without_the_scale(length: int = 512) -> Figures:
    q, k, _ = inputs(0, 1, 4, length, 128)
    raw = q @ k.mT
    d_weights = torch.randn(raw.shape, generator=torch.Generator().manual_seed(1))
    found = {}
    for name, scores in (("", raw), ("_scaled", raw * 128**-0.5)):
        p = scores.softmax(-1)
        found[f"weight{name}"] = p.amax(-1).mean().item()
        gradient = (p * (d_weights - (p * d_weights).sum(-1, keepdim=True))).norm(dim=-1)
        found[f"gradient{name}"] = gradient.median().item()
        if not name:
            unscaled = gradient
    return found | {"vanished": (unscaled < gradient / 10).double().mean().item()}


@claim(
    "chapter",
    says="All of the three running states are needed.",
    criterion="leaving out any one costs a wrong result or a second pass over the scores",
    measured="no maximum, own maximum for each tile: relative error {no_max_own:.2f}; no maximum at all, at a score of 12 in float16: "
    "{no_max_raw}; "
    "no sum: {no_sum:.1f}; no output: the scores are computed again, {no_output:.1f} times the arithmetic",
    verdict=lambda f: verdict(min(f["no_max_own"], f["no_sum"]) > 0.1 and f["no_max_raw"] != "finite" and f["no_output"] > 1),
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
        sum(torch.exp(q @ tile.mT - lse) @ values for tile, values in zip(k.split(32, 2), v.split(32, 2), strict=True))
    return {
        "no_max_own": relative(run("no_rescale", q, k, v, block=32), truth),
        "no_max_raw": "NaN" if raw.isnan().any() else "inf" if raw.isinf().any() else "finite",
        "no_sum": relative(run(tile_loop_backend("no_sum", softmax=NoSum), q, k, v, block=32), truth),
        "no_output": twice.get_total_flops() / once.get_total_flops(),
    }


@claim(
    "chapter",
    says="A score modifier such as ALiBi or a mask belongs after the scale and before the running maximum.",
    criterion="there the result is exact (1e-12 in float64), and at every other place it is wrong or overflows",
    measured="ALiBi after the scale {right:.0e}, before the scale {before_scale:.2f}, after exp {after_exp:.2f}; a bias of 800 added "
    "between maximum "
    "and exp: {after_max}; a mask applied after the maximum, with a masked score of 800: {mask_after_max}",
    because="After the maximum the shift is still common to the row, so small modifiers cancel; large ones are no longer bounded by it.",
    verdict=lambda f: verdict(
        f["right"] < 1e-12 and min(f["before_scale"], f["after_exp"]) > 1e-3 and "finite" not in (f["after_max"], f["mask_after_max"])
    ),
    tiny={},
)
def place_of_a_modifier() -> Figures:
    q, k, v = inputs(0, 1, 4, 64, 16, dtype=torch.float64)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    i = torch.arange(64)
    bias = -slopes[:, None, None] * (i[:, None] - i)
    causal = torch.ones(64, 64, dtype=torch.bool).tril()
    raw = q @ k.mT

    def attend(scores: Tensor) -> Tensor:
        return scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v

    truth = attend(raw / 4 + bias)
    backend = get_backend("tiled", block_q=16, block_kv=16)
    p = torch.exp((raw / 4).masked_fill(~causal, -torch.inf)) + bias * causal
    late = torch.exp(raw / 4 + 800 * causal - (raw / 4).amax(-1, keepdim=True))
    spike = raw / 4 + torch.where(i == 63, 800.0, 0.0)  # the last key, masked for every other row
    hidden = torch.exp(spike - spike.amax(-1, keepdim=True)) * causal
    return {
        "right": largest(attention(q, k, v, backend=backend, alibi_slopes=slopes).out - truth),
        "before_scale": relative(attend((raw + bias) / 4), truth),
        "after_exp": relative(p / p.sum(-1, keepdim=True) @ v, truth),
        "after_max": "finite" if (late / late.sum(-1, keepdim=True)).isfinite().all() else "NaN",
        "mask_after_max": "finite" if (hidden / hidden.sum(-1, keepdim=True)).isfinite().all() else "NaN",
    }
