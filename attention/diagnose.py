"""What happens inside attention: the largest score, and the first tile that leaves the finite range.

exp(score) passes the largest number of its dtype where the score passes LIMITS[dtype]; that is where attention without the maximum
subtracted dies. In float16 the limit is p's, which is rounded to float16 for the product with v whatever the statistics are kept in.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attention.interface import AttentionOutput, Backend
from attention.mask import QueryTile
from attention.online_softmax import OnlineSoftmax
from attention.tiled import TILED

LIMITS = {dtype: math.log(torch.finfo(dtype).max) for dtype in (torch.float16, torch.bfloat16, torch.float32)}  # 11.09, 88.72, 88.72


@torch.no_grad()
def max_score(q: Tensor, k: Tensor, *, causal: bool = True, scale: float | None = None, **optional: Any) -> Tensor:
    """The largest score a query gives a key it sees, as a 0-d float32 tensor (float64 for float64), in O(N) memory.

    q (B, H, N, D), k (B, H_kv, M, D) and the arguments are those of attention(); the score is the capped and biased one.
    """
    maxima = TileMaxima(q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # the tiles are only looked at: large ones take fewer steps
    TILED.fn(q, k, k, causal=causal, scale=scale, **optional, observer=maxima.observe, block_q=256, block_kv=1024)
    return maxima.largest()


class TileMaxima:
    """An observer of the tile loop that keeps the largest score of each tile."""

    def __init__(self, q: Tensor) -> None:
        self.values = [torch.full((), -torch.inf, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))]

    def observe(self, tile: QueryTile, keys: slice, scores: Tensor, state: OnlineSoftmax) -> None:
        self.values.append(scores.amax().to(self.values[0].dtype))

    def largest(self) -> Tensor:
        return torch.stack(self.values).amax()


@dataclass(frozen=True)
class Breakdown:
    """Where one attention call left the finite range."""

    tensor: str  # q, k, v (already bad on entry), scores, row_sum, acc or out
    queries: tuple[int, int] | None  # first and one past the last row of the tile, where a tile is to blame
    keys: tuple[int, int] | None
    max_score: float | None  # largest score of that tile

    def __str__(self) -> str:
        if self.queries is None:
            return f"{self.tensor} is not finite"
        where = " and ".join(f"{name} {tile[0]}:{tile[1]}" for name, tile in (("queries", self.queries), ("keys", self.keys)))
        return f"{self.tensor} leaves the finite range in the tile of {where}, whose largest score is {self.max_score:.2f}"


@torch.no_grad()
def find_breakdown(q: Tensor, k: Tensor, v: Tensor, *, backend: Backend, **arguments: Any) -> Breakdown | None:
    """The first tensor of this call that is not finite, or None. `arguments` are what attention() hands to backend.fn."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.isfinite().all():
            return Breakdown(name, None, None, None)
    found: list[Breakdown] = []

    def observe(tile: QueryTile, keys: slice, scores: Tensor, state: OnlineSoftmax) -> None:
        if found:
            return
        for name, x in (("scores", scores), ("row_sum", state.row_sum), ("acc", state.acc)):
            # -inf is the mask's, and right
            if x.isnan().any() or (x == torch.inf).any() or (name != "scores" and x.isinf().any()):
                found.append(Breakdown(name, (tile.start, tile.stop), (keys.start, min(keys.stop, k.shape[2])), scores.amax().item()))
                return

    observer = {"observer": observe} if backend.observable else {}
    out = backend.fn(q, k, v, **arguments, **backend.options, **observer).out
    if found:
        return found[0]
    return None if out.isfinite().all() else Breakdown("out", None, None, None)


class Recorder:
    """A backend that behaves as another and keeps, call by call, the largest score or the breakdown: one entry a layer.

    recorder = Recorder(backend)
    with model.use_backend(recorder.backend): model(tokens)
    recorder.max_scores, recorder.breakdowns
    """

    def __init__(self, backend: Backend, *, look_for_breakdowns: bool = False) -> None:
        self.max_scores: list[Tensor] = []
        self.breakdowns: list[Breakdown | None] = []

        def recorded(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> AttentionOutput:
            options = {name: arguments.pop(name) for name in backend.options}
            if look_for_breakdowns:
                self.breakdowns.append(find_breakdown(q, k, v, backend=backend.configured(**options), **arguments))
            if backend.observable:
                # the scores it really works with: a defect may lie in them
                maxima = TileMaxima(q)
                output = backend.fn(q, k, v, **arguments, **options, observer=maxima.observe)
                self.max_scores.append(maxima.largest())
                return output
            self.max_scores.append(max_score(q, k, **arguments))
            return backend.fn(q, k, v, **arguments, **options)

        self.backend = replace(backend, fn=recorded, traceable=False)
