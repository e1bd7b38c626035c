"""Deliberately broken attention: each changes one step of the streaming softmax, of the scores or
of the mask, and nothing else.

The defects run through the same tile loop as the exact code. Their gradient is the true gradient of
what they compute, including the maximum. So a loss curve shows the effect of the mistake, not of a
mismatched backward pass.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from attention.interface import Backend
from attention.kernels import broken_triton_backend
from attention.mask import QueryTile, VisibleKeys, visible_keys
from attention.online_softmax import OnlineSoftmax, finite, weighted_sum
from attention.tiled import TileScores, tile_loop_backend


class NoMax(OnlineSoftmax):
    """No maximum is subtracted: p = exp(score), and nothing is ever rescaled."""

    def next_max(self, tile_max: Tensor) -> Tensor:
        # -inf still marks a row that has seen no key
        return torch.where(tile_max == -torch.inf, self.row_max, 0.0)

    def correction(self, next_max: Tensor) -> Tensor:
        return torch.ones_like(next_max)


class NoRescale(OnlineSoftmax):
    """Each tile subtracts its own maximum, and the sums of earlier tiles are never rescaled."""

    def next_max(self, tile_max: Tensor) -> Tensor:
        return torch.where(tile_max == -torch.inf, self.row_max, tile_max)

    def correction(self, next_max: Tensor) -> Tensor:
        return torch.ones_like(next_max)


class LocalSoftmax(OnlineSoftmax):
    """Each tile is normalised on its own and the results are added: tiling without the streaming
    part.
    """

    def update(self, scores: Tensor, v: Tensor) -> "LocalSoftmax":
        tile_max = scores.amax(-1, keepdim=True)
        no_key = tile_max == -torch.inf
        p = torch.exp(scores - finite(tile_max))
        tile_sum = torch.where(no_key, 1.0, p.sum(-1, keepdim=True))
        p = p / tile_sum
        # includes the tile's divisor, so that a single tile has the right lse
        row_max = torch.where(no_key, self.row_max, tile_max + torch.log(tile_sum))
        return replace(
            self,
            row_max=row_max,
            row_sum=torch.ones_like(self.row_sum),
            acc=self.acc + weighted_sum(p, v),
        )


class ZeroInitMax(OnlineSoftmax):
    """The running maximum starts at 0 instead of -inf."""

    @classmethod
    def empty(cls, q: Tensor, **options: Any) -> Self:
        state = super().empty(q, **options)
        return replace(state, row_max=torch.zeros_like(state.row_max))


@dataclass(frozen=True)
class RelativeMask(VisibleKeys):
    """The causal mask compares positions inside the tile, so every tile, past or future, gets the
    mask of the first one.
    """

    def query_tiles(self, block_q: int) -> list[QueryTile]:
        # visit every key and mask every tile: skipping future tiles would hide the leak
        bounds = {"first": 0, "last": self.num_keys, "full_first": self.num_keys, "full_last": 0}
        return [tile._replace(**bounds) for tile in super().query_tiles(block_q)]

    def mask(self, rows: slice | None = None, keys: slice | None = None) -> Tensor:
        absolute = super().mask(rows, keys)
        i, j = (torch.arange(n, device=absolute.device) for n in absolute.shape[-2:])
        return (j <= i[:, None]).expand_as(absolute)


def relative_keys(q: Tensor, k: Tensor, *, causal: bool, **optional: Any) -> VisibleKeys:
    visible = visible_keys(q, k, causal=causal, **optional)
    return RelativeMask(visible.lo, visible.hi, visible.num_keys) if causal else visible


def unscaled(visible: VisibleKeys, scale: float, *others: Any) -> TileScores:
    """The scores are not scaled, whatever scale was requested."""
    return TileScores(visible, 1.0, *others)


# properties that compare the result with softmax attention; names from
# conformance.properties.PROPERTIES
WRONG = frozenset(
    {
        "forward",
        "gradients",
        "lse",
        "large logits",
        "logits + 100",
        "logits - 120",
        "float32 statistics",
        "ragged tails",
        "every length",
        "first tile masked",
        "N != M",
        "grouped heads",
        "optional arguments",
        "wider calls",
    }
)
# properties that fail if no maximum is subtracted
DIES_OF_LOGITS = frozenset(
    {
        "large logits",
        "logits + 100",
        "logits - 120",
        "float32 statistics",
        "every length",
        "rows of one key",
    }
)
LEAKS = frozenset(
    {
        "rows without a key",
        "no leak (outputs)",
        "no leak (gradients)",
        "mask positions",
        "prefill = decode",
    }
)


def also_in_triton(backend: Backend) -> Backend:
    """The backend with the same mistake in the Triton kernels, which a run on a GPU takes."""
    triton = broken_triton_backend(backend.name, defect=backend.defect, breaks=backend.breaks)
    return replace(backend, on_gpu=triton)


NO_MAX = also_in_triton(
    tile_loop_backend(
        "no_max",
        softmax=NoMax,
        defect="no maximum is subtracted: exact until one score passes ln(largest number), 88.72 "
        "in float32 and bfloat16 and 11.09 in float16 (p is cast for p @ v); then inf, NaN or "
        "exact zeros; NaN too where every score of a row is below -104, as every exp is 0",
        breaks=DIES_OF_LOGITS,
    )
)
NO_RESCALE = also_in_triton(
    tile_loop_backend(
        "no_rescale",
        softmax=NoRescale,
        defect="each tile subtracts its own maximum and earlier sums are never rescaled: finite, "
        "plausible and wrong, every tile counts as if its best key were equally good; exact when "
        "one tile holds all keys",
        breaks=WRONG | {"block sizes", "key permutation"},
    )
)
DEFECTS = (
    NO_MAX,
    NO_RESCALE,
    tile_loop_backend(
        "local_softmax",
        softmax=LocalSoftmax,
        defect="each tile is normalised on its own and the results are summed: the weights of a "
        "row add up to the number of its tiles",
        breaks=WRONG | {"block sizes", "key permutation", "rows sum to one"},
    ),
    tile_loop_backend(
        "zero_init_max",
        softmax=ZeroInitMax,
        defect="the running maximum starts at 0: exact unless every score of a row is very "
        "negative (NaN near -104 in float32, -17 in float16); a row without a key is NaN",
        breaks=frozenset(
            {"logits - 120", "every length", "rows without a key", "rows of one key", "wider calls"}
        ),
    ),
    tile_loop_backend(
        "relative_mask",
        visible_keys=relative_keys,
        without=("window", "document_ids", "two_sided_window", "key_lengths", "cu_seqlens"),
        defect="the causal mask uses positions inside the tile: tiles of the future leak in, tiles "
        "of the past are half hidden",
        breaks=(WRONG - {"first tile masked"}) | LEAKS | {"block sizes", "key permutation"},
    ),
    tile_loop_backend(
        "no_scale",
        scores=unscaled,
        defect="scores are not divided by sqrt(head_dim): sqrt(head_dim) times too large, the "
        "stress under which no_max dies first",
        breaks=WRONG,
    ),
)
