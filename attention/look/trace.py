"""Trace a tile loop step by step: what each tile of keys changes for one tile of queries, and which
rows come out wrong.

Any backend that takes an observer can be traced, whatever its softmax object does. The trace runs
each update again beside the loop and records its exponentials. So `p` and `alpha` are what the code
computed, not what it should have computed.

Dimensions: N queries, M keys, D head dim; a tile is R rows by T keys. Everything here is of one
sequence and one head: q (1, 1, N, D), k and v (1, 1, M, D).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attention.interface import Backend
from attention.mask import QueryTile
from attention.online_softmax import OnlineSoftmax


@dataclass(frozen=True)
class Step:
    """The loop absorbs one tile of keys. Tensors have the dtype in which the loop holds them."""

    keys: tuple[int, int]  # first and one past the last
    scores: Tensor  # (R, T), -inf where masked
    p: Tensor  # (R, T), as it enters p @ v: in v's dtype
    alpha: Tensor  # (R,), the factor of the past sums
    row_max: Tensor  # (R,), after this tile, like all below
    row_sum: Tensor  # (R,)
    acc: Tensor  # (R, D)
    out: Tensor  # (R, D), the output over the keys so far, in q's dtype

    def broken(self) -> Tensor:
        """(R,) true where a row has left the finite range, or has seen keys but has row_sum = 0."""
        return torch.stack(list(self.causes().values())).any(0)

    def causes(self) -> dict[str, Tensor]:
        """(R,) masks of where each quantity is broken, in the order in which they are computed."""
        return {
            "scores": not_finite(self.scores, masked=True),
            "p": not_finite(self.p),
            "row_sum": not_finite(self.row_sum.unsqueeze(-1)),
            "acc": not_finite(self.acc),
            "row_sum = 0": no_weight(self.row_max, self.row_sum),
        }


def not_finite(x: Tensor, *, masked: bool = False) -> Tensor:
    """(...,) true where a row of x (..., T) holds NaN or infinity. With `masked`, -inf is a hidden
    key and allowed.
    """
    return (x.isnan() | (x == torch.inf) | ((x == -torch.inf) & (not masked))).any(-1)


def no_weight(row_max: Tensor, row_sum: Tensor) -> Tensor:
    """True where a row has seen keys (row_max shows it) but every exp is 0: the output is 0/0."""
    return (row_sum == 0) & (row_max != -torch.inf)


@torch.no_grad()
def observe(
    observer: Callable[[QueryTile, slice, Tensor, OnlineSoftmax], None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    backend: Backend,
    **arguments: Any,
) -> Tensor:
    """Call the backend with an observer of its tiles. The observer gets one head: scores (R, T), a
    state of (R, 1), (R, 1), (R, D).

    Returns out (N, D). Raises ValueError for a backend that cannot be observed.
    """
    if not backend.observable:
        raise ValueError(f"attention={backend.name} shows nothing of its tiles while it runs")

    def of_head(tile: QueryTile, keys: slice, scores: Tensor, state: OnlineSoftmax) -> None:
        row_max, row_sum, acc = (x[0, 0, 0] for x in (state.row_max, state.row_sum, state.acc))
        state = replace(state, row_max=row_max, row_sum=row_sum, acc=acc)
        observer(tile, slice(keys.start, keys.start + scores.shape[-1]), scores[0, 0, 0], state)

    with torch.autocast(q.device.type, enabled=False):
        return backend.fn(q, k, v, **arguments, **backend.options, observer=of_head).out[0, 0]


class Exponentials(TorchFunctionMode):
    """Records the results of exp and exp2, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", None) in ("exp", "exp2"):
            self.results.append(result)
        return result


def listen(state: OnlineSoftmax, scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """p (R, T) and alpha (R,) of one update with scores (R, T) and v (T, D). alpha is 1 if the
    update does not rescale.
    """
    # add one masked key, so that p never has alpha's shape
    scores, v = (
        torch.nn.functional.pad(scores, (0, 1), value=-torch.inf),
        torch.nn.functional.pad(v, (0, 0, 0, 1)),
    )
    with Exponentials() as heard:
        state.update(scores, v)
    p = next(x for x in heard.results if x.shape == scores.shape)
    alpha = next(
        (x for x in heard.results if x.shape == state.row_max.shape), torch.ones_like(state.row_max)
    )
    return p[:, :-1].to(v.dtype), alpha.squeeze(-1)


def record_steps(
    q: Tensor, k: Tensor, v: Tensor, *, backend: Backend, row: int, **arguments: Any
) -> tuple[range, list[Step]]:
    """The rows of the query tile that contains `row`, and the steps of that tile."""
    rows = range(0)
    steps: list[Step] = []
    past: OnlineSoftmax | None = None

    def record(tile: QueryTile, keys: slice, scores: Tensor, state: OnlineSoftmax) -> None:
        nonlocal past, rows
        if not tile.start <= row < tile.stop:
            return
        if past is None:
            rows = range(tile.start, tile.stop)
            past = type(state).empty(q[0, 0, tile.rows], dtype=scores.dtype)
        p, alpha = listen(past, scores, v[0, 0, keys])
        out = state.finalize()[0].to(q.dtype)
        steps.append(
            Step(
                (keys.start, keys.stop),
                scores,
                p,
                alpha,
                state.row_max.squeeze(-1),
                state.row_sum.squeeze(-1),
                state.acc,
                out,
            )
        )
        past = state

    observe(record, q, k, v, backend, **arguments)
    return rows, steps


@dataclass(frozen=True)
class Trace:
    """The trace of one call. `found` and `exact` follow the tiles of keys in the order of the
    backend; None is a tile that the exact backend skips.
    """

    # one for each query: right; wrong (finite, but not exact attention's output); zero (the whole
    # output, wrongly); inf; NaN
    fates: list[str]
    first: (
        tuple[range, tuple[int, int], str, float] | None
    )  # first tile to leave the finite range: queries, keys, quantity, largest score
    rows: range  # the traced tile of queries
    row: int  # the query to follow
    tiles: list[tuple[int, int]]  # keys
    found: list[Step]
    exact: list[Step | None]  # the exact backend's, in the same dtype
    reference: list[Tensor]  # (R, D), softmax attention over the keys so far in float64
    error: list[Tensor]  # (R,), distance of the output so far from `reference`
    exact_error: list[Tensor]
    breaks: list[
        int | None
        # for each of `rows`: the step from which it stays broken, or further off than rounding
        # explains
    ]


@torch.no_grad()
def trace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: Backend,
    exact: Backend,
    row: int | None = None,
    **arguments: Any,
) -> Trace:
    """Trace `backend` beside `exact`, which must have the same tiles. `arguments` are what
    attention() hands to backend.fn.

    row: the query to follow. None takes the last tile of queries in which a row leaves the finite
    range, and there the row that leaves it first. If all rows stay finite, it takes the row that is
    furthest off; if none is wrong, the last.
    """
    call, wide = (q, k, v), [x.double() for x in (q, k, v)]
    seen = survey(*call, backend=backend, **arguments)
    exact_out, reference_out = (survey(*x, backend=exact, **arguments).out for x in (call, wide))
    fates, budget = judge(seen.out, exact_out, reference_out)
    if row is None:
        row = _row_to_follow(seen, fates, reference_out)
    rows, steps = record_steps(*call, backend=backend, row=row, **arguments)
    tiles = [step.keys for step in steps]
    _, exact_steps = record_steps(*call, backend=exact, row=row, **arguments)
    _, true_steps = record_steps(*wide, backend=exact, row=row, **arguments)

    # where the exact loop skips a tile, its earlier output stays valid
    exact_so_far = _carried({step.keys: step.out for step in exact_steps}, tiles)
    reference = _carried({step.keys: step.out for step in true_steps}, tiles)
    error = row_errors([step.out for step in steps], reference)
    off_budget = [step.broken() | ~(off <= budget) for step, off in zip(steps, error, strict=True)]
    bad = torch.stack(off_budget)
    breaks = [
        None if fates[i] == "right" else start_of_last_run(bad[:, i - rows.start].tolist())
        for i in rows
    ]
    exact_by_keys = {step.keys: step for step in exact_steps}
    return Trace(
        fates,
        _first_break(seen, fates, *call, backend=backend, **arguments),
        rows,
        row,
        tiles,
        steps,
        [exact_by_keys.get(keys) for keys in tiles],
        reference,
        error,
        row_errors(exact_so_far, reference),
        breaks,
    )


def row_errors(outs: list[Tensor], reference: list[Tensor]) -> list[Tensor]:
    """The largest error of each row after each tile."""
    return [
        (out.double() - expected).abs().amax(-1)
        for out, expected in zip(outs, reference, strict=True)
    ]


def judge(out: Tensor, exact: Tensor, reference: Tensor) -> tuple[list[str], float]:
    """The fate of every row of out (N, D), and the largest error that still counts as right.

    That limit is four times the error of `exact` in the same dtype, and at least four roundings of
    the largest output.
    """
    size = reference.abs().amax(-1)
    error, own = ((x.double() - reference).abs().amax(-1) for x in (out, exact))
    budget = 4 * max(
        own.nan_to_num(0.0, 0.0).amax().item(), torch.finfo(out.dtype).eps * size.amax().item()
    )
    is_fate = {
        "NaN": out.isnan().any(-1),
        "inf": out.isinf().any(-1),
        "zero": (out == 0).all(-1) & (size > budget),
        "wrong": error > budget,
    }
    return [
        next((fate for fate, is_so in is_fate.items() if is_so[i]), "right")
        for i in range(len(out))
    ], budget


@dataclass(frozen=True)
class Survey:
    """The outcome of every row of one call."""

    out: Tensor  # (N, D)
    first_break: list[
        int | None
    ]  # per row: the first key of the tile from which its sums stay broken
    query_tiles: list[range]


def survey(q: Tensor, k: Tensor, v: Tensor, *, backend: Backend, **arguments: Any) -> Survey:
    """Observe the whole call without storing tiles."""
    first_break: list[int | None] = [None] * q.shape[2]
    tiles: dict[int, range] = {}

    def look(tile: QueryTile, keys: slice, scores: Tensor, state: OnlineSoftmax) -> None:
        tiles[tile.start] = range(tile.start, tile.stop)
        row_max, row_sum = state.row_max.squeeze(-1), state.row_sum.squeeze(-1)
        broken = (
            not_finite(scores, masked=True)
            | not_finite(state.row_sum)
            | not_finite(state.acc)
            | no_weight(row_max, row_sum)
        )
        for i, is_broken in zip(tiles[tile.start], broken.tolist(), strict=True):
            if not is_broken:
                first_break[i] = None  # it had no weight before, and now has some
            elif first_break[i] is None:
                first_break[i] = keys.start

    out = observe(look, q, k, v, backend, **arguments)
    return Survey(out, first_break, [tiles[start] for start in sorted(tiles)])


def _broken(seen: Survey, fates: list[str], tile: range) -> dict[int, int]:
    """The rows of a query tile that broke, each with the first key of the tile where it broke."""
    breaks = {i: seen.first_break[i] for i in tile if fates[i] != "right"}
    return {i: key for i, key in breaks.items() if key is not None}


def _row_to_follow(seen: Survey, fates: list[str], reference: Tensor) -> int:
    for tile in reversed(seen.query_tiles):
        broken = _broken(seen, fates, tile)
        if broken:
            return min(broken, key=lambda i: (broken[i], -i))
    if "wrong" in fates:
        return int((seen.out.double() - reference).abs().amax(-1).argmax())
    return len(fates) - 1


def _first_break(
    seen: Survey, fates: list[str], q: Tensor, k: Tensor, v: Tensor, **arguments: Any
) -> tuple[range, tuple[int, int], str, float] | None:
    for tile in seen.query_tiles:
        broken = _broken(seen, fates, tile)
        if broken:
            row = min(broken, key=broken.__getitem__)
            _, steps = record_steps(q, k, v, row=row, **arguments)
            step = next(step for step in steps if step.keys[0] == seen.first_break[row])
            cause = next(name for name, where in step.causes().items() if where[row - tile.start])
            return tile, step.keys, cause, step.scores.amax().item()
    return None


def _carried(outs: dict[tuple[int, int], Tensor], tiles: list[tuple[int, int]]) -> list[Tensor]:
    past = torch.zeros_like(next(iter(outs.values())))
    carried = []
    for keys in tiles:
        past = outs.get(keys, past)
        carried.append(past)
    return carried


def start_of_last_run(bad: list[bool]) -> int | None:
    """The index where the run of true values at the end of the list starts; None without one."""
    start = None
    for i in reversed(range(len(bad))):
        if not bad[i]:
            break
        start = i
    return start
