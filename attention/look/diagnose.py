"""What happens inside attention: the largest score, the first tile that leaves the finite range,
the distance from exact attention.

exp(score) overflows its dtype when the score exceeds LIMITS[dtype]: attention that subtracts no
maximum breaks there. In float16 the limit is that of p, which is rounded to float16 for the product
with v, whatever the dtype of the statistics.
"""

import math
from collections.abc import Sequence
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
from attention.mask import QueryTile
from attention.naive import naive_attention
from attention.online_softmax import OnlineSoftmax
from attention.tiled import HeadMaxima, TileLoop, grouped

LIMITS = {
    dtype: math.log(torch.finfo(dtype).max)
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
}  # 11.09, 88.72, 88.72


# scores of a tile in max_score(): 64 MiB are large products for a GPU, and small beside a model
TILE_SCORES = 2**24


@torch.no_grad()
def max_score(
    q: Tensor, k: Tensor, *, causal: bool = True, scale: float | None = None, **optional: Any
) -> Tensor:
    """The largest score of a visible key in each head, (B, H) float32 (float64 for float64 inputs);
    -inf for a head that sees no key. One pass of the tile loop without values, in O(N) memory.

    q (B, H, N, D), k (B, H_kv, M, D) and the arguments are those of attention(); the score includes
    cap and bias.
    """
    # square tiles compute the fewest scores that a causal mask hides
    block = max(1, math.isqrt(TILE_SCORES // (q.shape[0] * q.shape[1])))
    factor: float = q.shape[-1] ** -0.5 if scale is None else scale
    tiles = {"block_q": block, "block_kv": block}
    scores_of = TileLoop.of(q, k, causal=causal, scale=factor, **tiles, **optional).scores
    q, k, _ = grouped(q, k, k)
    maxima = HeadMaxima(q)
    for tile in scores_of.visible.query_tiles(block):
        q_rows = q[..., tile.rows, :]
        for keys, needs_mask in tile.key_tiles(block):
            scores, _ = scores_of(q_rows, k[..., keys, :], tile.rows, keys, needs_mask)
            maxima.observe(tile, keys, scores)
    return maxima.largest.flatten(1, 2)


@torch.library.custom_op("tilegpt::max_score", mutates_args=())
def max_score_operator(
    q: Tensor,
    k: Tensor,
    look: Tensor,
    causal: bool,
    scale: float,
    window: Sequence[int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    document_ids: Tensor | None,
    key_lengths: Tensor | None,
) -> Tensor:
    """max_score() for a graph of torch.compile, computed where `look` holds True."""
    if not look:
        return q.new_empty(q.shape[:2], dtype=statistics_dtype(q))
    return max_score(
        q,
        k,
        causal=causal,
        scale=scale,
        window=None if window is None else tuple(window),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        document_ids=document_ids,
        key_lengths=key_lengths,
    )


@max_score_operator.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[:2], dtype=statistics_dtype(q))


def companion_max_score(
    q: Tensor, k: Tensor, look: bool | Tensor, *, score_mod: ScoreMod | None, **settings: Any
) -> Tensor:
    """max_score() beside a backend that does not return it. In a compiled graph it is one operator,
    which takes no score_mod.
    """
    if score_mod is not None or not torch.compiler.is_compiling():
        return max_score(q, k, score_mod=score_mod, **settings)
    window = settings["window"]
    if not (window is None or isinstance(window, tuple)):
        settings["window"] = (window - 1, 0)  # a query's own key is the last of them
    return max_score_operator(q.detach(), k.detach(), flag(look), **settings)


@dataclass(frozen=True)
class Breakdown:
    """Where one attention call left the finite range."""

    tensor: str  # q, k, v (already bad on entry), scores, row_sum, acc or out
    queries: (
        tuple[int, int] | None
    )  # first and one past the last row of the tile, if it broke in a tile
    keys: tuple[int, int] | None
    max_score: float | None  # largest score of that tile, in the head named below
    sequence: int | None = None  # index in the batch
    head: int | None = None  # query head; for k and v the key/value head
    row: int | None = None  # the query; for k and v the key
    fate: str | None = (
        # the output for that query: NaN, inf, zero or finite; None for a bad q, k or v
        None
    )

    def __str__(self) -> str:
        if self.queries is None or self.keys is None:
            return f"{self.tensor} is not finite"
        where = " and ".join(
            f"{name} {tile[0]}:{tile[1]}"
            for name, tile in (("queries", self.queries), ("keys", self.keys))
        )
        return (
            f"{self.tensor} leaves the finite range in the tile of {where}, whose largest score "
            f"is {self.max_score:.2f}"
        )


class TileWatch:
    """An observer of the tile loop: the largest score, and the first tile that leaves the finite
    range.
    """

    def __init__(self, q: Tensor) -> None:
        self.largest = torch.full((), -torch.inf, device=q.device, dtype=statistics_dtype(q))
        self.breakdown: Breakdown | None = None

    @torch.no_grad()
    def observe(self, tile: QueryTile, keys: slice, scores: Tensor, state: OnlineSoftmax) -> None:
        self.largest = torch.maximum(self.largest, scores.amax().to(self.largest.dtype))
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
                    queries=(tile.start, tile.stop),
                    keys=(keys.start, keys.start + scores.shape[-1]),
                    max_score=scores[sequence, group, member].amax().item(),
                    sequence=sequence,
                    head=group * is_bad.shape[2] + member,
                    row=tile.start + row,
                )
                return


@torch.no_grad()
def find_breakdown(
    q: Tensor, k: Tensor, v: Tensor, *, backend: Backend, **arguments: Any
) -> Breakdown | None:
    """The first tensor of this call that is not finite, or None. `arguments` are what attention()
    hands to backend.fn.
    """
    watch = TileWatch(q)
    observer = {"observer": watch.observe} if backend.observable else {}
    out = backend.fn(q, k, v, **arguments, **backend.options, **observer).out
    return _breakdown(q, k, v, out, watch.breakdown)


def _breakdown(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, in_tile: Breakdown | None
) -> Breakdown | None:
    """find_breakdown() for a finished call that returned `out`."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if (at := _first(~x.isfinite())) is not None:
            return _outside_the_loop(name, at)
    found = in_tile
    if found is None and (at := _first(~out.isfinite())) is not None:
        found = _outside_the_loop("out", at)
    return found and replace(found, fate=_fate(out[found.sequence, found.head, found.row]))


def _outside_the_loop(tensor: str, at: list[int]) -> Breakdown:
    sequence, head, row, _ = at
    return Breakdown(tensor, None, None, None, sequence, head, row)


def _first(bad: Tensor) -> list[int] | None:
    """The index of the first true element."""
    return bad.nonzero()[0].tolist() if bad.any() else None


def _fate(x: Tensor) -> str:
    if x.isnan().any():
        return "NaN"
    return "inf" if x.isinf().any() else "finite" if x.any() else "zero"


# most scores in the reference for one key/value head: 2048 x 2048, in five float64 matrices, 160
# MiB
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
    d_out = torch.cat((torch.zeros_like(d_out[:, :, :first]), d_out[:, :, first:]), 2)
    # as attention() calls it: with every argument that the backend declares
    arguments: dict[str, Any] = {
        name: optional.get(name) for name in OPTIONAL_ARGUMENTS if name in backend.features
    }
    arguments |= backend.options
    with torch.autocast(q.device.type, enabled=False):
        out, dq, dk, dv = with_gradients(
            backend.fn, q, k, v, d_out, causal=causal, scale=scale, **arguments
        )
        exact = _exact_by_head(
            q[:, :, first:], k, v, d_out[:, :, first:], causal=causal, scale=scale, **optional
        )
    results = {"out": out[:, :, first:], "dq": dq[:, :, first:], "dk": dk, "dv": dv}
    row = {}
    for (name, x), expected in zip(results.items(), exact, strict=True):
        x = x.double()
        row[f"{name}_error"] = ((x - expected).norm() / expected.norm()).item()
        cosine = x.flatten() @ expected.flatten() / (x.norm() * expected.norm())
        row[f"{name}_cosine"] = cosine.item()
    return row


def _exact_by_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    *,
    document_ids: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    **arguments: Any,
) -> list[Tensor]:
    """out, dq, dk, dv of softmax attention in float64, one key/value head at a time: the scores of
    all heads may not fit into memory beside a model in training.

    q, d_out: the last queries. A bottom-right aligned mask shows them the same keys as before.
    """
    groups = q.shape[1] // k.shape[1]
    if document_ids is not None:
        score_mod = _inside_documents(document_ids, score_mod)
    by_head = []
    for head in range(k.shape[1]):
        own, kv = slice(head * groups, (head + 1) * groups), slice(head, head + 1)
        wide = (x.double() for x in (q[:, own], k[:, kv], v[:, kv], d_out[:, own]))
        if alibi_slopes is not None:
            arguments["alibi_slopes"] = alibi_slopes[own]
        if score_mod is not None:
            first = score_mod.first_head + own.start
            arguments["score_mod"] = replace(score_mod, first_head=first)
        by_head.append(with_gradients(naive_attention, *wide, **arguments))
    return [torch.cat(parts, 1) for parts in zip(*by_head, strict=True)]


def _inside_documents(document_ids: Tensor, score_mod: ScoreMod | None) -> ScoreMod:
    """A ScoreMod that applies score_mod and hides other documents. attention() itself takes
    document_ids (B, N) only for as many queries as keys.
    """
    starts = document_ids.diff(dim=1, prepend=document_ids[:, :1]) != 0
    document = starts.cumsum(1)  # (B, N): unlike ids, these never repeat

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, _: Any) -> Any:
        if score_mod is not None:
            score = score_mod(score, b, h, i, j)[0]
        inside = document[b, i] == document[b, j]
        return score.masked_fill(~inside, -torch.inf), inside  # naive reads no derivative

    return ScoreMod(change)


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

        def recorded(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Output:
            if keep_calls:
                output = backend.fn(q, k, v, **arguments)
                settings = backend.options.keys() | {"module"}
                kept = {name: x for name, x in arguments.items() if name not in settings}
                self.calls.append(Call(q, k, v, output.out, kept))
                return output
            watch = TileWatch(q)
            if backend.observable:
                # observe the scores that it uses: the defect may be in them
                output = backend.fn(q, k, v, **arguments, observer=watch.observe)
                self.max_scores.append(watch.largest)
            else:
                output = backend.fn(q, k, v, **arguments)
                names = ("causal", "scale", *OPTIONAL_ARGUMENTS)
                settings = {name: arguments[name] for name in names if name in arguments}
                self.max_scores.append(max_score(q, k, **settings).amax())
            with torch.no_grad():
                self.breakdowns.append(_breakdown(q, k, v, output.out, watch.breakdown))
            return output

        # a loop has one observer; and attention() adds the sinks, so that a call records none
        features = backend.features - {"max_score", "sinks"}
        self.backend = replace(backend, fn=recorded, features=features, traceable=False)
