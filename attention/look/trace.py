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

    def causes(self) -> dict[str, Tensor]:
        """(R,) masks of where each quantity is broken, in the order in which they are computed."""
        found = causes(self.scores, self.row_max, self.row_sum, self.acc)
        return {"scores": found.pop("scores"), "p": not_finite(self.p)} | found

    def broken(self) -> Tensor:
        """(R,) true where a row has left the finite range, or has seen keys but has row_sum = 0."""
        return torch.stack([*self.causes().values()]).any(0)


def causes(scores: Tensor, row_max: Tensor, row_sum: Tensor, acc: Tensor) -> dict[str, Tensor]:
    """(R,) masks for scores (R, T), row_max and row_sum (R,) and acc (R, D)."""
    return {
        "scores": not_finite(scores.masked_fill(scores == -torch.inf, 0.0)),  # hidden keys
        "row_sum": ~row_sum.isfinite(),
        "acc": not_finite(acc),
        # every exp is 0 though the row has seen keys: the output is 0/0
        "row_sum = 0": (row_sum == 0) & (row_max != -torch.inf),
    }


def not_finite(x: Tensor) -> Tensor:
    """(...,) true where a row of x (..., T) holds NaN or infinity."""
    return ~x.isfinite().all(-1)


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

    Returns out (N, D).
    """

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
    reference: Tensor  # (tiles, R, D), softmax attention over the keys so far in float64
    error: Tensor  # (tiles, R), distance of the output so far from `reference`
    exact_error: Tensor
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
    broken = seen.broken(fates)
    if row is None:
        row = len(fates) - 1
        if broken:
            keys = broken[-1]
            row = min(keys, key=lambda i: (keys[i], -i))
        elif "wrong" in fates:
            row = int((seen.out.double() - reference_out).abs().amax(-1).argmax())
    rows, steps = record_steps(*call, backend=backend, row=row, **arguments)
    tiles = [step.keys for step in steps]
    _, exact_steps = record_steps(*call, backend=exact, row=row, **arguments)
    _, true_steps = record_steps(*wide, backend=exact, row=row, **arguments)

    out, exact_so_far, reference = (
        outs_so_far(each, tiles) for each in (steps, exact_steps, true_steps)
    )
    error, exact_error = ((x - reference).abs().amax(-1) for x in (out, exact_so_far))
    bad = torch.stack([step.broken() for step in steps]) | ~(error <= budget)
    breaks = [
        None if fates[i] == "right" else start_of_last_run(bad[:, i - rows.start].tolist())
        for i in rows
    ]
    exact_by_keys = {step.keys: step for step in exact_steps}
    return Trace(
        fates,
        first_break(broken[0], *call, backend=backend, **arguments) if broken else None,
        rows,
        row,
        tiles,
        steps,
        [exact_by_keys.get(keys) for keys in tiles],
        reference,
        error,
        exact_error,
        breaks,
    )


def first_break(
    broken: dict[int, int], q: Tensor, k: Tensor, v: Tensor, **arguments: Any
) -> tuple[range, tuple[int, int], str, float]:
    """Trace.first, for the broken rows of a tile of queries as in Survey."""
    row = min(broken, key=broken.__getitem__)
    rows, steps = record_steps(q, k, v, row=row, **arguments)
    step = next(step for step in steps if step.keys[0] == broken[row])
    cause = next(name for name, where in step.causes().items() if where[row - rows.start])
    return rows, step.keys, cause, step.scores.amax().item()


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
    # for each tile of queries: its rows that broke, with the first key of the tile from which on
    # their sums stay broken
    breaks: list[dict[int, int]]

    def broken(self, fates: list[str]) -> list[dict[int, int]]:
        """`breaks` without rows whose output is right, and without tiles that have no other."""
        wrong = [{i: key for i, key in tile.items() if fates[i] != "right"} for tile in self.breaks]
        return [tile for tile in wrong if tile]


def survey(q: Tensor, k: Tensor, v: Tensor, *, backend: Backend, **arguments: Any) -> Survey:
    """Observe the whole call without storing tiles."""
    breaks: dict[int, dict[int, int]] = {}

    def look(tile: QueryTile, keys: slice, scores: Tensor, state: OnlineSoftmax) -> None:
        rows = breaks.setdefault(tile.start, {})
        sums = state.row_max.squeeze(-1), state.row_sum.squeeze(-1), state.acc
        broken = torch.stack([*causes(scores, *sums).values()]).any(0)
        for i, is_broken in enumerate(broken.tolist(), tile.start):
            if is_broken:
                rows.setdefault(i, keys.start)
            else:
                rows.pop(i, None)  # it had no weight before, and now has some

    out = observe(look, q, k, v, backend, **arguments)
    return Survey(out, [breaks[start] for start in sorted(breaks)])


def outs_so_far(steps: list[Step], tiles: list[tuple[int, int]]) -> Tensor:
    """The output after each of `tiles`, (tiles, R, D) float64. Where the loop skips a tile, the
    earlier one stays.
    """
    outs = {step.keys: step.out.double() for step in steps}
    past = torch.zeros_like(steps[0].out.double())
    return torch.stack([past := outs.get(keys, past) for keys in tiles])


def start_of_last_run(bad: list[bool]) -> int | None:
    """The index where the run of true values at the end of the list starts; None without one."""
    start = None
    for i in reversed(range(len(bad))):
        if not bad[i]:
            break
        start = i
    return start
