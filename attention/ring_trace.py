"""A ring of ranks, hop by hop: whose keys each rank holds, what it sends, and what each merge does
to every query.

The trace plays the real programs of the ranks and records what they compute and send. It then runs
the ring's own merge again on each rank's blocks. The derivative of the merge shows the factor for
either side, and the weight of a block in the output. So the trace of your own merge shows what it
does, not what it should do.

Dimensions: N queries, M keys, D head dim; W ranks. Everything here is of one sequence and one head:
q (1, 1, N, D), k and v (1, 1, M, D).
"""

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention.interface import Backend
from attention.online_softmax import OnlineSoftmax
from attention.played_ring import PlayedRing, collected, dealt
from attention.ring import PARTS, RingCall, Sent, play
from attention.trace import judge, no_weight, not_finite, row_errors, start_of_last_run


class Cell(NamedTuple):
    """What one rank does in one hop."""

    source: int  # the rank whose keys it holds
    keys: list[int]  # their positions in the sequence
    pairs: int  # of a query and a visible key
    elements: int  # of keys and values that it sends to the next rank
    bytes: int


@dataclass(frozen=True)
class Hop:
    """One hop for all queries, on all ranks. Queries are in the order of the sequence."""

    block: OnlineSoftmax  # (N, 1), (N, 1), (N, D), over the keys held in this hop
    state: OnlineSoftmax  # after the merge
    alpha: Tensor | None  # (N,), the merge's factor for the past; None if nothing merged
    beta: Tensor | None  # (N,), its factor for the block
    out: Tensor  # (N, D), the output over the keys so far, in q's dtype
    weight: Tensor  # (N,), weight of this block in the output after the last hop

    def causes(self) -> dict[str, Tensor]:
        """(N,) masks of where each quantity is broken, in the order in which they are computed."""
        nothing = torch.zeros_like(self.weight, dtype=torch.bool)
        alpha, beta = (
            nothing if x is None else not_finite(x.unsqueeze(-1)) for x in (self.alpha, self.beta)
        )
        return {
            "block": not_finite(self.block.row_sum) | not_finite(self.block.acc),
            "alpha": alpha,
            "beta": beta,
            "row_sum": not_finite(self.state.row_sum),
            "acc": not_finite(self.state.acc),
            "row_sum = 0": no_weight(self.state.row_max, self.state.row_sum).squeeze(-1),
        }

    def broken(self) -> Tensor:
        """(N,) true where a query is no longer finite, or has seen keys but has row_sum = 0."""
        return torch.stack(list(self.causes().values())).any(0)


@dataclass(frozen=True)
class Watched(RingCall):
    """A RingCall that records what each rank sends in each hop, and each block's state."""

    sent: dict[tuple[int, int], list[Sent]] = field(default_factory=dict)
    blocks: dict[tuple[int, int], OnlineSoftmax] = field(default_factory=dict)

    def _leaving(self, hop: int, source: int, held: Tensor) -> list[Sent]:
        rank = (source + hop) % self.world
        self.sent[rank, hop] = super()._leaving(hop, source, held)
        return self.sent[rank, hop]

    def _block(
        self, rank: int, source: int, q: Tensor, held: Tensor
    ) -> tuple[slice, OnlineSoftmax, Tensor | None]:
        rows, block, max_score = super()._block(rank, source, q, held)
        self.blocks[rank, (rank - source) % self.world] = block
        return rows, block, max_score

    def cell(self, rank: int, hop: int) -> Cell:
        source = (rank - hop) % self.world
        sees = self.sees(rank, source)
        tensors = [each.tensor for each in self.sent[rank, hop]]
        return Cell(
            source,
            self.keys[source].tolist(),
            int((sees.hi - sees.lo).sum()),
            sum(x.numel() for x in tensors),
            sum(x.nbytes for x in tensors),
        )

    def hops(self, dtype: torch.dtype) -> list[Hop]:
        """The Hop of each merge; `dtype` is that of q."""
        blocks = [self._block_of_all(hop) for hop in range(self.world)]
        with torch.enable_grad():
            blocks = [replace(block, acc=block.acc.requires_grad_()) for block in blocks]
            states = list(accumulate(blocks, self.ring.merge))
            outs = [state.finalize()[0] for state in states]
            shares = factors(outs[-1], [block.acc for block in blocks])
            merges = [
                factors(state.acc, [past.acc, block.acc])
                for past, block, state in zip(states, blocks[1:], states[1:], strict=False)
            ]
        return [
            Hop(
                replace(block, acc=block.acc.detach()),
                replace(state, acc=state.acc.detach()),
                alpha,
                beta,
                out.detach().to(dtype),
                share * block.row_sum.squeeze(-1),
            )
            for block, state, (alpha, beta), out, share in zip(
                blocks, states, [(None, None), *merges], outs, shares, strict=True
            )
        ]

    def _block_of_all(self, hop: int) -> OnlineSoftmax:
        """The state of every query over the keys that its rank held: (N, 1), (N, 1), (N, D)."""
        blocks = [self.blocks[rank, hop] for rank in range(self.world)]
        row_max, row_sum, acc = (
            collected([getattr(block, name) for block in blocks], self.queries)[0, 0]
            for name in PARTS
        )
        return OnlineSoftmax(row_max, row_sum, acc)


def factors(merged: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """(N,) the factor of each of `parts` (N, D) in their weighted sum `merged` (N, D). All columns
    have the same factor.
    """
    found = torch.autograd.grad(
        merged[:, 0].sum(), parts, retain_graph=True, materialize_grads=True
    )
    return [x[:, 0] for x in found]


def watch(
    q: Tensor, k: Tensor, v: Tensor, *, backend: Backend, **arguments: Any
) -> tuple[Tensor, Watched]:
    """One call of a backend that plays a ring: out (N, D), and the call with its records."""
    assert isinstance(backend.fn, PlayedRing)
    call = backend.fn.call_of(q, k, **arguments, **backend.options)
    # a standing mask would leave out rows of a block that see nothing
    call = Watched(**vars(replace(call, standing=False)))
    tokens = (call.queries, call.keys, call.keys)
    parts = zip(*map(dealt, (q, k, v), tokens), strict=True)
    outs, *_ = zip(
        *play([call.forward(rank, *each) for rank, each in enumerate(parts)]), strict=True
    )
    return collected(outs, call.queries)[0, 0], call


@dataclass(frozen=True)
class RingTrace:
    """The trace of one call. Lists have one entry a hop unless the comment says otherwise."""

    fates: list[str]  # one for each query: see attention.trace.Trace
    # first merge to leave the finite range: query, hop, quantity, largest score so far
    first: tuple[int, int, str, float] | None
    row: int  # the query to follow
    ranks: list[int]  # for each query, the rank that it is on
    cells: list[list[Cell]]  # for each rank, one a hop
    found: list[Hop]
    exact: list[Hop]  # the exact ring's, in the same dtype
    error: list[Tensor]  # (N,), distance of the output so far from the exact ring's in float64
    exact_error: list[Tensor]
    # for each query: the hop from which it stays broken, or further off than rounding explains
    breaks: list[int | None]


@torch.no_grad()
def trace_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: Backend,
    exact: Backend,
    row: int | None = None,
    **arguments: Any,
) -> RingTrace:
    """Trace `backend` beside `exact`, which must have as many ranks; both play a ring. `arguments`
    are what attention() hands to backend.fn.

    row: the query to follow. None takes the first that leaves the finite range. If all stay finite,
    it takes the wrong one that is furthest off; if none is wrong, the last.
    """
    out, call = watch(q, k, v, backend=backend, **arguments)
    exact_out, exact_call = watch(q, k, v, backend=exact, **arguments)
    wide = [x.double() for x in (q, k, v)]
    reference, true_call = watch(*wide, backend=exact, **arguments)
    hops, exact_hops = (each.hops(q.dtype) for each in (call, exact_call))
    true_outs = [hop.out for hop in true_call.hops(torch.float64)]
    fates, budget = judge(out, exact_out, reference)
    error = row_errors([hop.out for hop in hops], true_outs)
    broken = torch.stack([hop.broken() for hop in hops])
    bad = broken | ~(torch.stack(error) <= budget)

    def starts(where: Tensor) -> list[int | None]:
        """For each query that is not right, the first hop from which `where` holds to the end."""
        return [
            None if fate == "right" else start_of_last_run(column)
            for fate, column in zip(fates, where.T.tolist(), strict=True)
        ]

    left = [(hop, query) for query, hop in enumerate(starts(broken)) if hop is not None]
    first = None
    if left:
        hop, query = min(left)
        cause = next(name for name, where in hops[hop].causes().items() if where[query])
        score = max(each.block.row_max[query].item() for each in hops[: hop + 1])
        first = query, hop, cause, score
    if row is None:
        row = len(fates) - 1
        if "wrong" in fates:
            row = int(error[-1].nan_to_num(0.0).argmax())
        if first is not None:
            row = first[0]
    world = range(call.world)
    on_rank = {x: rank for rank in world for x in call.queries[rank].tolist()}
    return RingTrace(
        fates,
        first,
        row,
        [on_rank[query] for query in range(len(fates))],
        [[call.cell(rank, hop) for hop in world] for rank in world],
        hops,
        exact_hops,
        error,
        row_errors([hop.out for hop in exact_hops], true_outs),
        starts(bad),
    )
