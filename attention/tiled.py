"""The tile loop: attention without the N x M score matrix, in plain PyTorch.

For each tile of queries, walk the tiles of keys that it may see. Feed each tile of scores to the
streaming softmax, then discard it:

                 keys 0:T  T:2T  2T:3T  3T:4T
    queries 0:R    [ / ]                          /  crossed by the causal diagonal: masked
            R:2R   [   ]  [ / ]                      inside: no mask
           2R:3R   [   ]  [   ]  [ / ]            (nothing drawn: skipped)

Exact and broken variants run this same code with another softmax object, or override one method.
Dao, "FlashAttention-2" (2023), algorithm 1 (forward) and 2 (backward).

Dimensions: B batch, H = H_kv * G query heads, N queries, M keys, D head dim, D_v that of the
values; a tile is R = block_q queries by T = block_kv keys. Inside the loop q is (B, H_kv, G, N, D),
k is (B, H_kv, 1, M, D) and v is (B, H_kv, 1, M, D_v).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention.decoding import decode
from attention.interface import (
    FEATURES,
    AttentionOutput,
    Backend,
    Output,
    ScoredOutput,
    ScoreMod,
    statistics_dtype,
)
from attention.mask import QueryTile, VisibleKeys, visible_keys
from attention.online_softmax import OnlineSoftmax

# called after each tile as observer(query_tile, keys, scores, state); see attention.look.diagnose
Observer = Callable[[QueryTile, slice, Tensor, OnlineSoftmax], None]


@dataclass(frozen=True)
class TileLoop:
    """The loop of one call."""

    scores: "TileScores"
    empty: Callable[..., OnlineSoftmax]  # makes the state before any key
    block_q: int
    block_kv: int
    recompute: bool  # whether backward() reruns the tiles instead of using lse
    observer: Observer | None

    def output_tiles(self, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        """out and lse of each tile of queries."""
        tiles = self.scores.visible.query_tiles(self.block_q)
        return [self.query_tile(q[..., tile.rows, :], k, v, tile) for tile in tiles]

    def query_tile(
        self, q_rows: Tensor, k: Tensor, v: Tensor, tile: QueryTile
    ) -> tuple[Tensor, Tensor]:
        """out (B, H_kv, G, R, D_v) and lse (B, H_kv, G, R) of one tile of queries."""
        state = self.empty(q_rows, value_dim=v.shape[-1])
        return self.finish(self.absorb(state, q_rows, k, v, tile), q_rows)

    def absorb(
        self, state: OnlineSoftmax, q_rows: Tensor, k: Tensor, v: Tensor, tile: QueryTile
    ) -> OnlineSoftmax:
        """The state after the keys that this tile of queries sees."""
        for keys, needs_mask in tile.key_tiles(self.block_kv):
            scores, _ = self.scores(q_rows, k[..., keys, :], tile.rows, keys, needs_mask)
            state = state.update(scores, v[..., keys, :])
            if self.observer is not None:
                self.observer(tile, keys, scores, state)
        return state

    def finish(self, state: OnlineSoftmax, q_rows: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = state.finalize()
        return out.to(q_rows.dtype), lse.to(statistics_dtype(lse))

    def backward_from_lse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of softmax attention: p = exp(score - lse) is rebuilt tile by tile."""
        dtype, scale = self.scores.dtype, self.scores.scale
        dq_tiles = []
        dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        for tile in self.scores.visible.query_tiles(self.block_q):
            rows = tile.rows
            q_rows, do_rows = q[..., rows, :].to(dtype), d_out[..., rows, :].to(dtype)
            # a row without a key has lse = -inf; exp(score - inf) = 0 keeps it out of every
            # gradient
            lse_rows = lse[..., rows].unsqueeze(-1)
            lse_rows = torch.where(lse_rows == -torch.inf, torch.inf, lse_rows)
            # sum_j p_j dp_j, from the output alone; the gradient of lse enters with the opposite
            # sign
            delta = (do_rows * out[..., rows, :].to(dtype)).sum(-1, keepdim=True)
            delta = delta - d_lse[..., rows].unsqueeze(-1)
            dq_rows = torch.zeros_like(q_rows)
            for keys, needs_mask in tile.key_tiles(self.block_kv):
                k_keys, v_keys = k[..., keys, :].to(dtype), v[..., keys, :].to(dtype)
                scores, derivative = self.scores(q_rows, k_keys, rows, keys, needs_mask)
                p = torch.exp(scores - lse_rows)
                ds = p * (do_rows @ v_keys.mT - delta) * scale
                if derivative is not None:
                    ds = ds * derivative
                dq_rows += ds @ k_keys
                # the query heads of a group share their key/value head
                dk[..., keys, :] += (ds.mT @ q_rows).sum(2, keepdim=True)
                dv[..., keys, :] += (p.mT @ do_rows).sum(2, keepdim=True)
            dq_tiles.append(dq_rows.to(q.dtype))
        return torch.cat(dq_tiles, -2), dk.to(k.dtype), dv.to(v.dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out (B, H, N, D_v) and lse (B, H, N) for q (B, H, N, D), k (B, H_kv, M, D) and v (B,
        H_kv, M, D_v).
        """
        outs, lses = zip(*self.output_tiles(*grouped(q, k, v)), strict=True)
        return torch.cat(outs, -2).flatten(1, 2), torch.cat(lses, -1).flatten(1, 2)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, *results: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv from the inputs of forward() and from `results`: out, lse, d_out, d_lse. The
        last two are enough to recompute.
        """
        results = tuple(x.unflatten(1, (k.shape[1], -1)) for x in results)
        q, k, v = grouped(q, k, v)
        if self.recompute:
            dq, dk, dv = self.backward_by_recomputing(q, k, v, *results[-2:])
        else:
            dq, dk, dv = self.backward_from_lse(q, k, v, *results)
        return dq.flatten(1, 2), dk.squeeze(2), dv.squeeze(2)

    def backward_by_recomputing(
        self, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, d_lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of whatever the softmax object computes: run each query tile again under
        autograd.

        Autograd through the whole loop would keep every tile, more memory than the score matrix
        that the loop avoids.
        """
        dq_tiles = []
        dk, dv = (torch.zeros_like(x, dtype=self.scores.dtype) for x in (k, v))
        for tile in self.scores.visible.query_tiles(self.block_q):
            leaves = [x.detach().requires_grad_() for x in (q[..., tile.rows, :], k, v)]
            if tile.first >= tile.last:  # no key, no gradient
                dq_tiles.append(torch.zeros_like(leaves[0]))
                continue
            # turns autograd on, even inside a torch.library operator, which runs below autograd
            with torch.inference_mode(False):
                outputs = self.query_tile(*leaves, tile=tile)
                gradients = d_out[..., tile.rows, :], d_lse[..., tile.rows]
                found = torch.autograd.grad(outputs, leaves, gradients)
            dq_tiles.append(found[0])
            dk += found[1]
            dv += found[2]
        return torch.cat(dq_tiles, -2), dk.to(k.dtype), dv.to(v.dtype)


@dataclass(frozen=True)
class TileScores:
    """The scores of one call, a tile at a time."""

    visible: VisibleKeys
    scale: float
    dtype: torch.dtype  # of the scores and the statistics
    softcap: float | None
    slopes: Tensor | None  # (H_kv, G, 1, 1), float32 or float64
    score_mod: ScoreMod | None

    def __call__(
        self, q_rows: Tensor, k_keys: Tensor, rows: slice, keys: slice, needs_mask: bool
    ) -> tuple[Tensor, Tensor | None]:
        """One tile of scores (B, H_kv, G, R, T): scaled, capped, biased, masked. Also returns d
        score / d scaled score, or None where it is 1.
        """
        scores = q_rows.to(self.dtype) @ k_keys.to(self.dtype).mT * self.scale
        derivative = None
        if self.softcap is not None:
            capped = torch.tanh(scores / self.softcap)
            scores = self.softcap * capped
            derivative = 1 - capped * capped
        if self.slopes is not None or self.score_mod is not None:
            num_queries, num_keys = self.visible.lo.shape[1], self.visible.num_keys
            i = torch.arange(num_queries, device=scores.device)[rows, None] + num_keys - num_queries
            j = torch.arange(num_keys, device=scores.device)[keys]
            if self.slopes is not None:
                # not in a narrow dtype, which may not hold the distance
                scores = scores - (self.slopes * (i - j)).to(self.dtype)
            elif self.score_mod is not None:
                b = torch.arange(scores.shape[0], device=scores.device).view(-1, 1, 1, 1, 1)
                h = torch.arange(scores.shape[1] * scores.shape[2], device=scores.device).view(
                    *scores.shape[1:3], 1, 1
                )
                scores, derivative = (x.to(self.dtype) for x in self.score_mod(scores, b, h, i, j))
        if needs_mask:
            scores = scores.masked_fill(~self.visible.mask(rows, keys).unsqueeze(2), -torch.inf)
        return scores, derivative


def grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q as (B, H_kv, G, N, D), k and v as (B, H_kv, 1, M, D or D_v)."""
    return q.unflatten(1, (k.shape[1], -1)), k.unsqueeze(2), v.unsqueeze(2)


class HeadMaxima:
    """An observer of the tile loop that keeps the largest score of each head, (B, H_kv, G)."""

    def __init__(self, q: Tensor) -> None:
        self.largest = q.new_full(q.shape[:3], -torch.inf, dtype=statistics_dtype(q))

    def observe(self, tile: QueryTile, keys: slice, scores: Tensor, state: OnlineSoftmax) -> None:
        tile_max = scores.amax((-1, -2)).to(self.largest.dtype)
        self.largest = torch.maximum(self.largest, tile_max)


class LoopFunction(torch.autograd.Function):
    """A TileLoop with its own backward pass, for which it saves O(N)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, loop: TileLoop) -> tuple[Tensor, Tensor]:
        out, lse = loop.forward(q, k, v)
        results = () if loop.recompute else (out, lse)
        ctx.save_for_backward(q, k, v, *results)
        # an observer sees each tile once, not again in the backward pass
        ctx.loop = replace(loop, observer=None)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        return *ctx.loop.backward(*ctx.saved_tensors, *gradients), None


@dataclass(frozen=True)
class TiledAttention:
    """Attention by a tile loop, as a Backend calls it: the parts that a variant changes."""

    loop: type[TileLoop] = TileLoop
    softmax: type[OnlineSoftmax] = OnlineSoftmax
    scores: Callable[..., TileScores] = TileScores
    visible_keys: Callable[..., VisibleKeys] = visible_keys
    # whether the gradient is that of softmax attention. Otherwise it is that of what `softmax`
    # computes, the maximum included
    exact: bool = True

    def make_loop(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        block_q: int,
        block_kv: int,
        softmax_dtype: str = "float32",
        observer: Observer | None = None,
        **mask: Any,
    ) -> TileLoop:
        """The loop for q (B, H, N, D) and k (B, H_kv, M, D), with the arguments of attention();
        `mask` is what attention.mask.intervals() takes.

        softmax_dtype: "float32" keeps scores and statistics in float32 (float64 for float64
        inputs), "input" keeps them in q's dtype.
        """
        visible = self.visible_keys(q, k, **mask)
        dtype = q.dtype if softmax_dtype == "input" else statistics_dtype(q)
        slopes = None
        if alibi_slopes is not None:
            slopes = alibi_slopes.detach().to(statistics_dtype(q)).view(k.shape[1], -1, 1, 1)
        return self.loop(
            self.scores(visible, scale, dtype, softcap, slopes, score_mod),
            partial(self.softmax.empty, dtype=dtype),
            block_q,
            block_kv,
            # an lse in low precision is too coarse for rebuilding p
            recompute=not self.exact or softmax_dtype == "input",
            observer=observer,
        )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_max_score: bool | Tensor = False,
        **settings: Any,
    ) -> Output:
        maxima = HeadMaxima(grouped(q, k, v)[0])
        watch = {"observer": maxima.observe} if return_max_score else {}
        loop = self.make_loop(q, k, **watch, **settings)
        out, lse = LoopFunction.apply(q, k, v, loop)
        if return_max_score:
            return ScoredOutput(out, lse, maxima.largest.flatten(1, 2))
        return AttentionOutput(out, lse)


def tile_loop_backend(
    name: str,
    *,
    defect: str | None = None,
    breaks: frozenset[str] = frozenset(),
    without: tuple[str, ...] = (),
    **variant: Any,
) -> Backend:
    """A Backend that runs a tile loop; `variant` is what differs in its TiledAttention."""
    exact = defect is None
    return Backend(
        name,
        TiledAttention(exact=exact, **variant),
        features=FEATURES - {"sinks", *without},
        options={"block_q": 128, "block_kv": 64, "softmax_dtype": "float32"},
        exact=exact,
        defect=defect,
        breaks=breaks,
        traceable=False,
        observable=True,
    )


TILED = replace(tile_loop_backend("tiled"), decode=decode)
