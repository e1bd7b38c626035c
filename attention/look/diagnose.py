"""What happens inside attention: the largest score, the first tile that leaves the finite range,
the distance from exact attention.

exp(score) overflows its dtype when the score exceeds LIMITS[dtype]: attention that subtracts no
maximum breaks there. In float16 the limit is that of p, which is rounded to float16 for the product
with v, whatever the dtype of the statistics.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention.interface import (
    OPTIONAL_ARGUMENTS,
    Backend,
    Output,
    ScoreMod,
    flag,
    statistics_dtype,
)
from attention.mask import QueryTile, pair
from attention.online_softmax import OnlineSoftmax
from attention.tiled import TILED, HeadMaxima, TiledAttention, grouped

LIMITS = {
    dtype: math.log(torch.finfo(dtype).max)
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
}  # 11.09, 88.72, 88.72


# scores of a tile in max_score(): 32 MiB are large products for a GPU, and small beside a model
TILE_SCORES = 2**23


@torch.no_grad()
def max_score(
    q: Tensor, k: Tensor, *, causal: bool = True, scale: float | None = None, **optional: Any
) -> Tensor:
    """The largest score of a visible key in each head, (B, H) float32 (float64 for float64 inputs);
    -inf for a head that sees no key. One pass of the tile loop, in O(N) memory.

    q (B, H, N, D), k (B, H_kv, M, D) and the arguments are those of attention(); the score includes
    cap and bias.
    """
    # square tiles compute the fewest scores that a causal mask hides
    block = max(1, math.isqrt(TILE_SCORES // (q.shape[0] * q.shape[1])))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    settings = {"block_q": block, "block_kv": block, "causal": causal, "scale": scale} | optional
    # the values do not matter, so they are narrow
    output: Any = TILED.fn(q, k, k[..., :1], return_max_score=True, **settings)
    return output.max_score


TENSORS = ("alibi_slopes", "document_ids", "key_lengths")


@torch.library.custom_op(
    "tilegpt::max_score",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor look, Tensor? alibi_slopes, Tensor? document_ids, "
    "Tensor? key_lengths, *, bool causal, float scale, SymInt[] window, float? softcap) -> Tensor",
)
def max_score_operator(
    q: Tensor, k: Tensor, look: Tensor, *tensors: Tensor | None, window: list[int], **settings: Any
) -> Tensor:
    """max_score() for a graph of torch.compile, computed where `look` holds True."""
    if not look:
        return q.new_empty(q.shape[:2], dtype=statistics_dtype(q))
    settings |= zip(TENSORS, tensors, strict=True)
    return max_score(q, k, window=tuple(window), **settings)


@max_score_operator.register_fake
def _(q: Tensor, *_: Any, **settings: Any) -> Tensor:
    return q.new_empty(q.shape[:2], dtype=statistics_dtype(q))


def companion_max_score(
    q: Tensor, k: Tensor, look: bool | Tensor, *, score_mod: ScoreMod | None, **settings: Any
) -> Tensor:
    """max_score() beside a backend that does not return it. In a compiled graph it is one operator,
    which takes no score_mod.
    """
    if score_mod is not None or not torch.compiler.is_compiling():
        return max_score(q, k, score_mod=score_mod, **settings)
    tensors = [settings.pop(name) for name in TENSORS]
    settings["window"] = pair(settings["window"])
    return max_score_operator(q.detach(), k.detach(), flag(look), *tensors, **settings)


@dataclass(frozen=True)
class Breakdown:
    """Where one attention call left the finite range."""

    tensor: str  # q, k, v (already bad on entry), scores, row_sum, acc or out
    sequence: int  # index in the batch
    head: int  # query head; for k and v the key/value head
    row: int  # the query; for k and v the key
    # if it broke in a tile: its queries and keys, each first and one past the last, and its largest
    # score in that head
    queries: tuple[int, int] | None = None
    keys: tuple[int, int] | None = None
    max_score: float | None = None
    # the output for that query: NaN, inf, zero or finite; None for a bad q, k or v
    fate: str | None = None

    def __str__(self) -> str:
        if self.queries is None or self.keys is None:
            return f"{self.tensor} is not finite"
        queries, keys = (f"{first}:{last}" for first, last in (self.queries, self.keys))
        return (
            f"{self.tensor} leaves the finite range in the tile of queries {queries} and keys "
            f"{keys}, whose largest score is {self.max_score:.2f}"
        )


class TileWatch(HeadMaxima):
    """An observer of the tile loop: the largest score of each head, and the first tile that leaves
    the finite range.
    """

    breakdown: Breakdown | None = None

    @torch.no_grad()
    def observe(self, tile: QueryTile, keys: slice, scores: Tensor, state: OnlineSoftmax) -> None:
        super().observe(tile, keys, scores, state)
        if self.breakdown is not None:
            return
        # (B, H_kv, G, R, T or 1 or D); a score of -inf is hidden
        bad = {
            "scores": scores.isnan() | (scores == torch.inf),
            "row_sum": ~state.row_sum.isfinite(),
            "acc": ~state.acc.isfinite(),
        }
        for name, is_bad in bad.items():
            if (at := _first(is_bad)) is not None:
                sequence, group, member, row = at[:4]
                self.breakdown = Breakdown(
                    name,
                    sequence,
                    group * is_bad.shape[2] + member,
                    tile.start + row,
                    queries=(tile.start, tile.stop),
                    keys=(keys.start, keys.start + scores.shape[-1]),
                    max_score=scores[sequence, group, member].amax().item(),
                )
                return


def _breakdown(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, in_tile: Breakdown | None
) -> Breakdown | None:
    """The first tensor that is not finite, of a call that returned `out`."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if (at := _first(~x.isfinite())) is not None:
            return Breakdown(name, at[0], at[1], at[2])
    found = in_tile
    if found is None and (at := _first(~out.isfinite())) is not None:
        found = Breakdown("out", at[0], at[1], at[2])
    return found and replace(found, fate=_fate(out[found.sequence, found.head, found.row]))


def _first(bad: Tensor) -> list[int] | None:
    """The index of the first true element."""
    return bad.nonzero()[0].tolist() if bad.any() else None


def _fate(x: Tensor) -> str:
    if x.isnan().any():
        return "NaN"
    return "inf" if x.isinf().any() else "finite" if x.any() else "zero"


# most scores of a tile, and of a key/value head, in the reference: 2048 x 2048, in five float64
# matrices, 160 MiB
REFERENCE_SCORES = 2**22


def compare_with_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    *,
    backend: Backend,
    causal: bool = True,
    scale: float | None = None,
    **optional: Any,
) -> dict[str, float]:
    """Compare `backend` with softmax attention in float64: out, and dq, dk, dv for the incoming
    gradient d_out. `optional` are window, softcap, ... of attention().

    Returns {name}_error, |x - exact| / |exact| in the Euclidean norm over the whole tensor, and
    {name}_cosine, for each of the four. q, d_out (B, H, N, D); k, v (B, H_kv, M, D). The exact
    values are computed from q, k, v, d_out as rounded to their dtype.

    Only the last REFERENCE_SCORES / (B * H / H_kv * M) queries are compared, all of them up to M =
    2048 without grouped heads. The incoming gradient of the other queries is set to 0, so dk and dv
    are compared whole, and the backend runs at its full length.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = q.shape[1] // k.shape[1]
    rows = min(q.shape[2], max(1, REFERENCE_SCORES // (q.shape[0] * groups * k.shape[2])))
    first = q.shape[2] - rows
    d_out = d_out.clone()
    d_out[:, :, :first] = 0
    arguments: dict[str, Any] = {"causal": causal, "scale": scale} | optional
    with torch.autocast(q.device.type, enabled=False):
        found = with_gradients(backend.fn, q, k, v, d_out, **arguments, **backend.options)
        exact = _exact(*(x.detach().double() for x in (q, k, v, d_out)), first=first, **arguments)
    row = {}
    for name, x, expected in zip(("out", "dq", "dk", "dv"), found, exact, strict=True):
        x = x[:, :, -expected.shape[2] :].double()
        row[f"{name}_error"] = ((x - expected).norm() / expected.norm()).item()
        cosine = x.flatten() @ expected.flatten() / (x.norm() * expected.norm())
        row[f"{name}_cosine"] = cosine.item()
    return row


def _exact(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, *, first: int, **arguments: Any
) -> tuple[Tensor, ...]:
    """out and dq from the query `first` on, and the dk and dv of these queries, by the tile loop:
    the scores of all heads may not fit into memory beside a model in training.
    """
    block = max(1, math.isqrt(REFERENCE_SCORES // (q.shape[0] * q.shape[1])))
    loop = TiledAttention().make_loop(q, k, block_q=block, block_kv=block, **arguments)
    visible = loop.scores.visible
    visible = replace(visible, lo=visible.lo[:, first:], hi=visible.hi[:, first:])
    loop = replace(loop, scores=replace(loop.scores, visible=visible))
    q, d_out = q[:, :, first:], d_out[:, :, first:]
    out, lse = loop.forward(q, k, v)
    return out, *loop.backward(q, k, v, out, lse, d_out, torch.zeros_like(lse))


def with_gradients(
    function: Any, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, **arguments: Any
) -> list[Tensor]:
    """out, dq, dk, dv."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = function(*inputs, **arguments).out
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


class Call(NamedTuple):
    """One call of attention(), with its place in the graph of the gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    arguments: dict[str, Any]  # causal, scale, and what else the backend declares


class Recorder:
    """Wraps a backend and records each call, one for each layer: the largest score and the
    breakdown, or the tensors.

        recorder = Recorder(backend)
        with model.using(backend=recorder.backend):
            model(tokens)

    Then read recorder.max_scores and recorder.breakdowns, or with keep_calls=True recorder.calls.
    """

    def __init__(self, backend: Backend, *, keep_calls: bool = False) -> None:
        self.max_scores: list[Tensor] = []
        self.breakdowns: list[Breakdown | None] = []
        self.calls: list[Call] = []
        self._watched, self._keep_calls = backend, keep_calls

    @property
    def backend(self) -> Backend:
        """Made anew each time: if the recorder held it, each would hold the other, and both the
        graph of the recorded tensors.
        """
        # a loop has one observer; and attention() adds the sinks, so that a call records none
        features = self._watched.features - {"max_score", "sinks"}
        return replace(self._watched, fn=self._record, features=features, traceable=False)

    def _record(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Output:
        names = ("causal", "scale", *OPTIONAL_ARGUMENTS)
        given = {name: arguments[name] for name in names if name in arguments}
        if self._keep_calls:
            output = self._watched.fn(q, k, v, **arguments)
            self.calls.append(Call(q, k, v, output.out, given))
            return output
        watch = TileWatch(grouped(q, k, v)[0])
        # observe the scores that it uses: the defect may be in them
        observer = {"observer": watch.observe} if self._watched.observable else {}
        output = self._watched.fn(q, k, v, **arguments, **observer)
        largest = watch.largest if observer else max_score(q, k, **given)
        self.max_scores.append(largest.amax())
        with torch.no_grad():
            self.breakdowns.append(_breakdown(q, k, v, output.out, watch.breakdown))
        return output
