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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from attention import Backend, attention
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
        return {
            "scores": (self.scores.isnan() | (self.scores == torch.inf)).any(-1),  # -inf is hidden
            "p": ~self.p.isfinite().all(-1),
            "row_sum": ~self.row_sum.isfinite(),
            "acc": ~self.acc.isfinite().all(-1),
            # every exp is 0 though the row has seen keys: the output is 0/0
            "row_sum = 0": (self.row_sum == 0) & (self.row_max != -torch.inf),
        }

    def broken(self) -> Tensor:
        """(R,) true where a row has left the finite range, or has seen keys but has row_sum = 0."""
        return torch.stack([*self.causes().values()]).any(0)


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
    scores, v = pad(scores, (0, 1), value=-torch.inf), pad(v, (0, 0, 0, 1))
    with Exponentials() as heard:
        state.update(scores, v)
    p = next(x for x in heard.results if x.shape == scores.shape)
    not_rescaled = torch.ones_like(state.row_max)
    alpha = next((x for x in heard.results if x.shape == not_rescaled.shape), not_rescaled)
    return p[:, :-1].to(v.dtype), alpha.squeeze(-1)


def watch(
    see: Callable[[range, Step], None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: Backend,
    **arguments: Any,
) -> Tensor:
    """Call the backend and return out (N, D). `see` gets each step, with the rows of its tile of
    queries.
    """
    past: dict[int, OnlineSoftmax] = {}  # of each tile of queries: a loop may visit them in turns

    def observer(tile: QueryTile, keys: slice, scores: Tensor, state: OnlineSoftmax) -> None:
        row_max, row_sum, acc = (x[0, 0, 0] for x in (state.row_max, state.row_sum, state.acc))
        state, scores = replace(state, row_max=row_max, row_sum=row_sum, acc=acc), scores[0, 0, 0]
        empty = state.empty(q[0, 0, tile.rows], dtype=scores.dtype)
        p, alpha = listen(past.get(tile.start, empty), scores, v[0, 0, keys])
        past[tile.start] = state
        step = Step(
            (keys.start, keys.start + scores.shape[-1]),
            scores,
            p,
            alpha,
            row_max.squeeze(-1),
            row_sum.squeeze(-1),
            acc,
            state.finalize()[0].to(q.dtype),
        )
        see(range(tile.start, tile.stop), step)

    with torch.autocast(q.device.type, enabled=False):
        return backend.fn(q, k, v, **arguments, **backend.options, observer=observer).out[0, 0]


def steps_of(row: int, *tensors: Tensor, **call: Any) -> tuple[range, list[Step]]:
    """The rows of the query tile that contains `row`, and the steps of that tile."""
    seen: list[tuple[range, Step]] = []
    watch(lambda rows, step: seen.append((rows, step)) if row in rows else None, *tensors, **call)
    return seen[0][0], [step for _, step in seen]


class Break(NamedTuple):
    """The step from which on a row stays broken."""

    queries: range  # the tile's
    keys: tuple[int, int]  # the tile's
    cause: str  # the first broken quantity, as in Step.causes()
    max_score: float  # of the tile


def survey(*tensors: Tensor, **call: Any) -> tuple[Tensor, dict[int, Break]]:
    """out (N, D) of the whole call, and the break of each row that has one. Stores no tile."""
    breaks: dict[int, Break] = {}

    def see(rows: range, step: Step) -> None:
        causes = step.causes()
        for i, is_broken in zip(rows, step.broken().tolist(), strict=True):
            if not is_broken:
                breaks.pop(i, None)  # it had no weight before, and now has some
            elif i not in breaks:
                cause = next(name for name, where in causes.items() if where[i - rows.start])
                breaks[i] = Break(rows, step.keys, cause, step.scores.amax().item())

    return watch(see, *tensors, **call), breaks


@dataclass(frozen=True)
class Trace:
    """The trace of one call. `found` and `exact` follow the tiles of keys in the order of the
    backend; None is a tile that the exact backend skips.
    """

    # one for each query: right; wrong (finite, but not exact attention's output); zero (the whole
    # output, wrongly); inf; NaN
    fates: list[str]
    first: Break | None  # the first tile to leave the finite range
    rows: range  # the traced tile of queries
    row: int  # the query to follow
    tiles: list[tuple[int, int]]  # keys
    found: list[Step]
    exact: list[Step | None]  # the exact backend's, in the same dtype
    reference: Tensor  # (tiles, R, D), softmax attention over the keys so far in float64
    error: Tensor  # (tiles, R), distance of the output so far from `reference`
    exact_error: Tensor
    # for each of `rows`: the step from which it stays broken, or further off than rounding explains
    breaks: list[int | None]


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
    """Trace `backend` beside `exact`, which must have the same tiles. `arguments` are those of
    attention().

    row: the query to follow; None takes row_to_follow().
    """
    call, wide = (q, k, v), [x.double() for x in (q, k, v)]
    found_out, breaks = survey(*call, backend=backend, **arguments)
    exact_out, reference_out = (
        attention(*x, backend=exact, **arguments).out[0, 0] for x in (call, wide)
    )
    fates, budget = judge(found_out, exact_out, reference_out)
    broken = {i: at for i, at in breaks.items() if fates[i] != "right"}
    row = row_to_follow(fates, broken) if row is None else row
    rows, steps = steps_of(row, *call, backend=backend, **arguments)
    tiles = [step.keys for step in steps]
    _, exact_steps = steps_of(row, *call, backend=exact, **arguments)
    _, true_steps = steps_of(row, *wide, backend=exact, **arguments)

    out, exact_so_far, reference = (
        outs_so_far(each, tiles) for each in (steps, exact_steps, true_steps)
    )
    error, exact_error = ((x - reference).abs().amax(-1) for x in (out, exact_so_far))
    bad = torch.stack([step.broken() for step in steps]) | ~(error <= budget)
    # for each row, how many steps at the end are bad without a good one between them
    bad_to_the_end = bad.int().flip(0).cumprod(0).sum(0).tolist()
    exact_by_keys = {step.keys: step for step in exact_steps}
    return Trace(
        fates,
        min(broken.values(), key=lambda at: (at.queries.start, at.keys[0]), default=None),
        rows,
        row,
        tiles,
        steps,
        [exact_by_keys.get(keys) for keys in tiles],
        reference,
        error,
        exact_error,
        [
            len(steps) - count if count and fates[i] != "right" else None
            for i, count in zip(rows, bad_to_the_end, strict=True)
        ],
    )


def row_to_follow(fates: list[str], broken: dict[int, Break]) -> int:
    """In the last tile of queries in which a row leaves the finite range, the row that leaves it
    first. If all rows stay finite, the last wrong row; if none is wrong, the last.
    """
    if broken:
        return max(broken, key=lambda i: (broken[i].queries.start, -broken[i].keys[0], i))
    wrong = [i for i, fate in enumerate(fates) if fate != "right"]
    return max(wrong, default=len(fates) - 1)


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
    fates = ["right"] * len(out)
    # where several hold, the last counts
    for fate, holds in (
        ("wrong", error > budget),
        ("zero", (out == 0).all(-1) & (size > budget)),
        ("inf", out.isinf().any(-1)),
        ("NaN", out.isnan().any(-1)),
    ):
        for i in holds.nonzero()[:, 0].tolist():
            fates[i] = fate
    return fates, budget


def outs_so_far(steps: list[Step], tiles: list[tuple[int, int]]) -> Tensor:
    """The output after each of `tiles`, (tiles, R, D) float64. Where the loop skips a tile, the
    earlier one stays.
    """
    outs = {step.keys: step.out.double() for step in steps}
    past = torch.zeros_like(steps[0].out.double())
    return torch.stack([past := outs.get(keys, past) for keys in tiles])
