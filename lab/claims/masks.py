"""Claims about masks: tiles without a visible key, positions, the place of a modifier.

Dimensions: B batch, H heads, N queries and keys, D head dim; a tile is R queries by T keys.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attention import Backend, attention, get_backend
from attention.defects import relative_keys
from attention.mask import QueryTile, VisibleKeys, visible_keys
from attention.online_softmax import OnlineSoftmax, weighted_sum
from attention.tiled import tile_loop_backend
from lab.claims.claim import FAILS, HOLDS, Figures, claim, only_if, verdict
from lab.claims.inputs import exact, inputs, largest, relative, run


@dataclass(frozen=True)
class EveryTile(VisibleKeys):
    """The right mask, and no tile is skipped: as code without a skip walks."""

    def query_tiles(self, block_q: int) -> list[QueryTile]:
        return [
            tile._replace(first=0, last=self.num_keys, full_first=self.num_keys, full_last=0)
            for tile in super().query_tiles(block_q)
        ]


def every_tile(q: Tensor, k: Tensor, **arguments: Any) -> VisibleKeys:
    return EveryTile(**vars(visible_keys(q, k, **arguments)))


def as_printed(softmax: type[OnlineSoftmax]) -> Backend:
    """That softmax in a loop that skips no tile."""
    return tile_loop_backend(softmax.__name__, softmax=softmax, visible_keys=every_tile)


def nan_share(out: Tensor) -> float:
    return out.isnan().double().mean().item()


class AlphaBetaUnguarded(OnlineSoftmax):
    """alpha and beta as the chapter prints them: nothing is done for a tile that a row sees no key
    of.
    """

    def update(self, scores: Tensor, v: Tensor) -> "AlphaBetaUnguarded":
        tile_max = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - tile_max)
        next_max = torch.maximum(self.row_max, tile_max)
        alpha, beta = torch.exp(self.row_max - next_max), torch.exp(tile_max - next_max)
        row_sum = alpha * self.row_sum + beta * p.sum(-1, keepdim=True)
        return replace(
            self,
            row_max=next_max,
            row_sum=row_sum,
            acc=alpha * self.acc + beta * weighted_sum(p, v),
        )


class BetaGuarded(OnlineSoftmax):
    """The deep dive's remedy: beta and p are 0 for a row without a key in the tile; alpha is left
    as it was.
    """

    def update(self, scores: Tensor, v: Tensor) -> "BetaGuarded":
        tile_max = scores.amax(-1, keepdim=True)
        valid = tile_max.isfinite()
        next_max = torch.maximum(self.row_max, tile_max)
        alpha, beta = (
            torch.exp(self.row_max - next_max),
            torch.where(valid, torch.exp(tile_max - next_max), 0.0),
        )
        p = torch.where(valid, torch.exp(scores - torch.where(valid, tile_max, 0.0)), 0.0)
        row_sum = alpha * self.row_sum + beta * p.sum(-1, keepdim=True)
        return replace(
            self,
            row_max=next_max,
            row_sum=row_sum,
            acc=alpha * self.acc + weighted_sum(p * beta, v),
        )


class SumClamped(OnlineSoftmax):
    """The notebook's remedy: the row sum is kept above the smallest normal number before the
    division.
    """

    def update(self, scores: Tensor, v: Tensor) -> "SumClamped":
        next_max = torch.maximum(self.row_max, scores.amax(-1, keepdim=True))
        alpha, p = torch.exp(self.row_max - next_max), torch.exp(scores - next_max)
        row_sum = alpha * self.row_sum + p.sum(-1, keepdim=True)
        return replace(
            self, row_max=next_max, row_sum=row_sum, acc=alpha * self.acc + weighted_sum(p, v)
        )

    def finalize(self) -> tuple[Tensor, Tensor]:
        row_sum = self.row_sum.clamp(min=torch.finfo(self.row_sum.dtype).tiny)
        return self.acc / row_sum, (self.row_max + torch.log(row_sum)).squeeze(-1)


@claim(
    "chapter",
    says="The tiled attention printed in its third step is right with causal=True, so that the GPT "
    "of its sixth step trains.",
    criterion="no output is NaN",
    measured="share of NaN outputs by tile size, at 128 tokens: {nan}",
    because="A tile that lies wholly in the future of a row has maximum -inf, and "
    "exp(-inf - -inf) is "
    "NaN. Skip such tiles, or subtract a "
    "finite number there. Only the last tile of queries survives.",
    verdict=lambda f: verdict(max(f["nan"].values()) == 0),
    tiny={"tiles": (32,)},
)
def causal_as_printed(tiles: tuple[int, ...] = (16, 32, 64, 128)) -> Figures:
    q, k, v = inputs(0, 1, 2, 128, 32)
    backend = as_printed(AlphaBetaUnguarded)
    return {
        "nan": {
            str(tile): nan_share(run(backend, q, k, v, causal=True, block=tile)) for tile in tiles
        }
    }


def with_window(softmax: type[OnlineSoftmax]) -> float:
    """Share of NaN outputs under a sliding window of 40 keys, where early tiles are masked whole
    for late rows.
    """
    q, k, v = inputs(0, 1, 2, 128, 32)
    backend = as_printed(softmax).configured(block_q=32, block_kv=32)
    return nan_share(attention(q, k, v, backend=backend, causal=True, window=40).out)


@claim(
    "deep dive",
    says="Setting beta to 0 for rows that a block masks whole makes such rows safe.",
    criterion="no output is NaN, with a causal mask and with a sliding window",
    measured="{causal:.1%} NaN with a causal mask, {window:.1%} with a window of 40 keys "
    "and tiles of "
    "32; the project's guard "
    "{guarded:.1%}",
    because="alpha is still exp(-inf - -inf) for a row whose first blocks are masked "
    "whole; a causal "
    "mask alone never has such a row.",
    verdict=lambda f: (
        only_if("every row sees a key in its first block")
        if f["causal"] == 0 < f["window"]
        else verdict(f["window"] == 0)
    ),
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
    says="A causal mask from positions inside the tile is wrong at every tile after the first.",
    criterion="of all pairs of a query tile and a key tile, only the first pair gets "
    "the right mask",
    measured="of {pairs} pairs {right} are right, {right_diagonal} of them on the "
    "diagonal; the output "
    "is off by {error:.1f}, and changing "
    "a future value moves an output by {leak:.2f}",
    because="On the diagonal, positions inside the tile give the same triangle as positions in the "
    "sequence. All other tiles are wrong.",
    verdict=lambda f: (
        HOLDS
        if f["right"] == 1
        else only_if("the tile is off the diagonal")
        if f["right"] == f["right_diagonal"] and f["leak"] > 1e-3
        else FAILS
    ),
    tiny={},
    also="python -m scripts.verify attention=relative_mask",
)
def mask_inside_the_tile() -> Figures:
    q, k, v = inputs(0, 1, 2, 128, 32)
    inside, absolute = relative_keys(q, k, causal=True), visible_keys(q, k, causal=True)
    tiles = [slice(start, start + 32) for start in range(0, 128, 32)]
    right = [
        (rows, keys)
        for rows in tiles
        for keys in tiles
        if torch.equal(inside.mask(rows, keys), absolute.mask(rows, keys))
    ]
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
    criterion="the result equals a mask of -inf to 1e-5, a row without a key gives 0, and -1e9 is "
    "finite in float16",
    measured="causal difference {causal:.1e}; a row without a key returns the mean of "
    "all values, off "
    "by {mean:.0e}; in float16 -1e9 is "
    "{half}",
    because="Large, but a number: where everything is masked the masked scores are all alike, and "
    "softmax averages them.",
    verdict=lambda f: (
        only_if("every row sees a key and scores are float32") if f["causal"] < 1e-5 else FAILS
    ),
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
    measured="difference {difference:.0e}; the full mask takes {mask_bytes:,} bytes at {length:,} "
    "tokens, the intervals {interval_bytes:,}",
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
    difference = run(sliced, q, k, v, causal=True, block=32) - run(
        "tiled", q, k, v, causal=True, block=32
    )
    interval_bytes = visible.lo.nbytes + visible.hi.nbytes
    return {
        "difference": largest(difference),
        "mask_bytes": full.nbytes,
        "interval_bytes": interval_bytes,
        "length": length,
    }


@claim(
    "chapter",
    says="A score modifier such as ALiBi or a mask belongs after the scale and before the "
    "running maximum.",
    criterion="there the result is exact (1e-12 in float64), and at every other place it is "
    "wrong or overflows",
    measured="ALiBi after the scale {right:.0e}, before the scale {before_scale:.2f}, after exp "
    "{after_exp:.2f}; a bias of 800 added "
    "between maximum and exp: {after_max}; a mask applied after the maximum, with a masked score "
    "of 800: {mask_after_max}",
    because="After the maximum the shift is still common to the row, so small modifiers "
    "cancel; large "
    "ones are no longer bounded by it.",
    verdict=lambda f: verdict(
        f["right"] < 1e-12
        and min(f["before_scale"], f["after_exp"]) > 1e-3
        and "finite" not in (f["after_max"], f["mask_after_max"])
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
        "mask_after_max": "finite"
        if (hidden / hidden.sum(-1, keepdim=True)).isfinite().all()
        else "NaN",
    }
