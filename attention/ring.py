"""One sequence over a ring of ranks: keys and values go round, and each rank merges the results.

    hop          0            1            2            3
    rank 0    q0 k0 v0     q0 k3 v3     q0 k2 v2     q0 k1 v1
    rank 1    q1 k1 v1     q1 k0 v0     q1 k3 v3     q1 k2 v2
    rank 2    q2 k2 v2     q2 k1 v1     q2 k0 v0     q2 k3 v3
    rank 3    q3 k3 v3     q3 k2 v2     q3 k1 v1     q3 k0 v0

Each rank keeps its queries. In a hop it attends to the keys it holds, sends them to the next rank
and receives those of the rank before. Its result for a row is a state of the streaming softmax, so
two blocks of keys merge as two tiles do. Liu et al., "Ring Attention with Blockwise Transformers"
(2023, arXiv:2310.01889).

The program of a rank is a generator that yields what it sends. One process can play all ranks
(play), or each of several processes can run one rank (attention.context).

Dimensions: B batch, H query heads, H_kv key/value heads, N queries and M keys of the sequence, D
head dim; W ranks; a rank has N_r queries and M_r keys.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from attention.interface import statistics_dtype
from attention.mask import VisibleKeys, Window, intervals
from attention.online_softmax import OnlineSoftmax

PARTS = ("row_max", "row_sum", "acc")  # fields of a softmax state

Merge = Callable[[OnlineSoftmax, OnlineSoftmax], OnlineSoftmax]


class Blockwise(Protocol):
    """Attention of queries to one block of the keys: q (B, H, N_r, D); k, v (B, H_kv, M_r, D).

    All results are in statistics_dtype(q): rounding every block's result would add an error that
    grows with the number of ranks.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, visible: VisibleKeys, *, look: bool, **settings: Any
    ) -> tuple[OnlineSoftmax, Tensor | None]:
        """The state after this block, (B, H, N_r, 1 or D); with `look`, also each head's largest
        score (B, H).
        """
        ...

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
        visible: VisibleKeys,
        **settings: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This block's part of dq, and its dk and dv; out and lse are those over all keys."""
        ...

    def differentiate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        d_state: OnlineSoftmax,
        visible: VisibleKeys,
        **settings: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv from the gradient of the state that forward() returned. Only a broken merge
        needs this.
        """
        ...


class Fused(Protocol):
    """Adds up or merges several parts in one pass over memory; see attention.kernels.parts."""

    MOST: int  # parts in one pass

    def summed(
        self, parts: Sequence[tuple[slice, Tensor]], like: Tensor, dtype: torch.dtype
    ) -> Tensor: ...

    def merged(
        self, parts: Sequence[tuple[slice, OnlineSoftmax]], like: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Ring:
    """How an attention runs on a ring: what computes a block, and what merges two states."""

    blocks: Blockwise
    merge: Merge = OnlineSoftmax.merge
    # whether the merged result is softmax attention, so that p = exp(score - lse) for every block
    exact: bool = True
    # returns what does the same as `merge` and as a sum in fewer passes over memory
    fused: Callable[[], Fused] | None = None


class Sent(NamedTuple):
    """A tensor that a rank sends to the next one, and the shape of the tensor that it receives."""

    tensor: Tensor
    receives: tuple[int, ...]


class Part(NamedTuple):
    """The visible part of a block: the queries `rows` see some of `keys`, and no other keys."""

    rows: slice
    keys: slice
    visible: VisibleKeys  # of these queries and keys

    @property
    def empty(self) -> bool:
        return not (self.visible.lo.shape[1] and self.visible.num_keys)

    def of_rows(self, rows: slice, *, narrow: bool) -> "Part":
        """The part that these of its rows see; with `narrow`, shrunk by narrowed()."""
        lo, hi = self.visible.lo[:, rows], self.visible.hi[:, rows]
        visible = replace(self.visible, lo=lo, hi=hi, causal=None)
        part = narrowed(visible) if narrow else everything(visible)
        return part._replace(
            rows=moved(part.rows, self.rows.start + (rows.start or 0)),
            keys=moved(part.keys, self.keys.start),
        )


def moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def everything(visible: VisibleKeys) -> Part:
    """A Part with all rows and keys of a block."""
    return Part(slice(0, visible.lo.shape[1]), slice(0, visible.num_keys), visible)


def narrowed(visible: VisibleKeys) -> Part:
    """The smallest part of a block that holds every visible key. Waits for a GPU."""
    lo, hi = (ends.cpu() for ends in (visible.lo, visible.hi))
    rows = (hi > lo).any(0).nonzero().flatten()
    if not len(rows):
        return Part(
            slice(0, 0), slice(0, 0), replace(visible, lo=lo[:, :0], hi=hi[:, :0], num_keys=0)
        )
    seen = slice(int(rows[0]), int(rows[-1]) + 1)
    filled = (hi > lo)[:, seen]
    lo, hi = lo[:, seen], hi[:, seen]
    keys = slice(int(lo[filled].min()), int(hi[filled].max()))
    # an empty interval may lie outside these keys
    lo, hi = (ends.clamp(keys.start, keys.stop) - keys.start for ends in (lo, hi))
    found = VisibleKeys(lo, hi, keys.stop - keys.start)
    causal = None
    if not lo.any():
        queries, num_keys = lo.shape[1], found.num_keys
        if bool((hi == num_keys).all()):
            causal = False
        elif bool((hi == torch.arange(num_keys - queries + 1, num_keys + 1)).all()):
            causal = True
    device = visible.lo.device
    return Part(seen, keys, replace(found, lo=lo.to(device), hi=hi.to(device), causal=causal))


# a rank's program yields what it sends, and gets a function that waits and returns what arrived
RankProgram = Generator[list[Sent], Callable[[], list[Tensor]], Any]


def zigzag(length: int, world: int, device: torch.device | None = None) -> list[Tensor]:
    """The sorted positions of each rank's tokens: rank r has the r-th of 2 W chunks from both ends.

    Under a causal mask every rank then computes as much as any other.
    """
    chunks = torch.arange(length, device=device).tensor_split(2 * world)
    return [torch.cat((chunks[rank], chunks[-1 - rank])) for rank in range(world)]


def token_major(x: Tensor) -> Tensor:
    """x (..., H, N, D) in the layout of empty_heads(), which the model and the messages use."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def together(k: Tensor, v: Tensor) -> Tensor:
    """k and v in one tensor (2, B, H_kv, M, D), laid out as token_major()."""
    return torch.stack((k.transpose(1, 2), v.transpose(1, 2))).transpose(2, 3)


class Joined:
    """Joins parts of a result in the order in which they come, one at a time or up to fused.MOST in
    one pass. A part is for some tokens of `like` (B, H, N, D), and may be changed in place.
    """

    def __init__(self, like: Tensor, fused: Fused | None) -> None:
        self.like, self.fused = like, fused
        self.parts: list[tuple[slice, Any]] = []

    def add(self, where: slice, part: Any) -> None:
        """Join a part for the tokens `where`."""
        if self.fused and len(self.parts) == self.fused.MOST:
            self._join()
        self.parts.append((where, part))
        if not self.fused:
            self._join()

    def _join(self) -> None:
        self.parts = [(slice(0, self.like.shape[-2]), self.joined())]

    def joined(self) -> Any:
        """All parts as one for all tokens."""
        raise NotImplementedError


class Total(Joined):
    """The sum of tensors."""

    def joined(self) -> Tensor:
        return self.result(self.parts[0][1].dtype)

    def result(self, dtype: torch.dtype) -> Tensor:
        (_, first), *others = self.parts
        if first.shape != self.like.shape:
            first, others = torch.zeros_like(self.like, dtype=first.dtype), self.parts
        elif not others:
            return first.to(dtype)
        if self.fused is not None:
            return self.fused.summed(self.parts, self.like, dtype)
        for where, part in others:
            first[..., where, :] += part
        return first.to(dtype)


def add_all(totals: Sequence[Total], where: slice, parts: Sequence[Tensor]) -> None:
    """Add a part to each total, unless there are none."""
    for total, part in zip(totals, parts, strict=bool(parts)):
        total.add(where, part)


class Merged(Joined):
    """The merge of states of the queries q (B, H, N, D)."""

    def __init__(self, ring: Ring, q: Tensor) -> None:
        # a broken merge is not to be replaced
        super().__init__(q, ring.fused() if ring.fused and ring.exact else None)
        self.merge = ring.merge

    def joined(self) -> OnlineSoftmax:
        (_, state), *others = self.parts
        if self.fused is not None:
            out, lse = self.fused.merged(self.parts, self.like, state.acc.dtype)
            lse = lse.unsqueeze(-1)
            return OnlineSoftmax(lse, torch.ones_like(lse), out)
        if state.row_max.shape[2] != self.like.shape[2]:
            state = OnlineSoftmax.empty(self.like, dtype=state.acc.dtype)
            others = self.parts
        for rows, block in others:
            if block.row_max.shape[2] == self.like.shape[2]:
                state = self.merge(state, block)
                continue
            past = {name: getattr(state, name)[..., rows, :] for name in PARTS}
            merged = self.merge(replace(state, **past), block)
            for name, x in past.items():
                x.copy_(getattr(merged, name))
        return state

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """out in `dtype`, and lse."""
        if self.fused is not None:
            return self.fused.merged(self.parts, self.like, dtype)
        out, lse = self.joined().finalize()
        return out.to(dtype), lse


@dataclass(frozen=True)
class RingCall:
    """One call of attention on a ring, as all ranks know it."""

    ring: Ring
    queries: list[Tensor]  # for each rank, their sorted positions in the sequence
    keys: list[Tensor]
    visible: VisibleKeys  # of the whole sequence
    settings: dict[str, Any]  # scale, softcap and the backend's options
    look: bool = False
    # whether other calls have the same mask, so that the parts of blocks are computed only once
    standing: bool = False
    parts: dict[tuple[int, int], Part] = field(default_factory=dict)  # by rank and source
    halves: dict[int, tuple[Part, Part]] = field(default_factory=dict)  # by rank

    @property
    def world(self) -> int:
        return len(self.queries)

    def sees(self, rank: int, source: int) -> VisibleKeys:
        """The intervals of keys of `source` that the queries of `rank` see.

        Positions are sorted, so an interval of the sequence is an interval of any rank's part.
        Causal masks, windows and documents need no special case.
        """
        rows, keys = self.queries[rank], self.keys[source]
        lo, hi = (
            torch.searchsorted(keys, ends[:, rows].contiguous())
            for ends in (self.visible.lo, self.visible.hi)
        )
        return VisibleKeys(lo, hi, len(keys))

    def part(self, rank: int, source: int) -> Part:
        """The part of the block of `rank`'s queries and `source`'s keys to compute. Only a standing
        mask narrows it. A broken merge gets the whole block: it may treat rows that see nothing
        like others.
        """
        if not (self.standing and self.ring.exact):
            return everything(self.sees(rank, source))
        if (rank, source) not in self.parts:
            self.parts[rank, source] = narrowed(self.sees(rank, source))
        return self.parts[rank, source]

    def forward(self, rank: int, q: Tensor, k: Tensor, v: Tensor) -> RankProgram:
        """Returns out, lse and max_score of this rank's queries."""
        merged, max_scores = Merged(self.ring, q), []
        held = together(k, v)
        for hop in range(self.world):
            source = (rank - hop) % self.world
            arriving = yield self._leaving(hop, source, held)
            rows, block, max_score = self._block(rank, source, q, held)
            merged.add(rows, block)
            max_scores.append(max_score)
            held = next(iter(arriving()), held)
        out, lse = merged.result(q.dtype)
        max_score = torch.stack(max_scores).amax(0) if self.look else None
        return out, lse, max_score

    def _leaving(self, hop: int, source: int, held: Tensor) -> list[Sent]:
        """Pass the keys and values on, except in the last hop."""
        if hop + 1 == self.world:
            return []
        before = (source - 1) % self.world
        return [Sent(held, (*held.shape[:3], len(self.keys[before]), held.shape[-1]))]

    def _block(
        self, rank: int, source: int, q: Tensor, held: Tensor
    ) -> tuple[slice, OnlineSoftmax, Tensor | None]:
        """The rows of `rank` that see keys of `source`, their state after these keys, and the
        largest scores.
        """
        part = self.part(rank, source)
        q = q[..., part.rows, :]
        if part.empty:
            state = OnlineSoftmax.empty(q, dtype=statistics_dtype(q))
            return part.rows, state, state.row_max.new_full(q.shape[:2], -torch.inf)
        (k, v), blocks = held[..., part.keys, :], self.ring.blocks
        found = blocks.forward(q, k, v, part.visible, look=self.look, **self.settings)
        return part.rows, *found

    def backward(
        self,
        rank: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
    ) -> RankProgram:
        """Returns dq, dk and dv of this rank's tokens.

        The keys go round once more. Their gradients follow one hop behind: each rank adds its part,
        and the last hop brings them home. During that hop a rank computes the later half of its
        queries against its own keys. It computed the first half while the first keys of others
        arrived.
        """
        d_states = []
        if not self.ring.exact:
            d_states = yield from self._differentiate_merge(rank, q, k, v, d_out, d_lse)
        whole = out, lse, d_out, d_lse
        first, later = self._halves(rank)
        held, fused = together(k, v), self.ring.fused() if self.ring.fused else None
        dq, *own = (Total(x, fused) for x in (q, k, v))  # of this rank's tokens
        gradients: list[Tensor] = []  # of the keys that it held last
        for hop in range(self.world):
            source = (rank - hop) % self.world
            leaving = self._leaving(hop, source, held)
            behind = [Sent(x, tuple(held.shape[1:])) for x in gradients]
            arriving = yield leaving + behind
            part = self.part(rank, source) if hop else first
            d_state = d_states[hop] if d_states else None
            found = self._gradients(part, q, held, whole, d_state)
            dq.add(part.rows, found[0])
            arrived = arriving()
            # the last tensors to arrive are the gradients of these keys
            totals = [Total(x, None if behind else fused) for x in held] if hop else own
            add_all(totals, slice(0, held.shape[-2]), arrived[len(leaving) :])
            add_all(totals, part.keys, found[1:])
            gradients = [x.result(statistics_dtype(q)) for x in totals] if hop else []
            held = arrived[0] if leaving else held
            del found, leaving, behind, arrived, totals  # the next hop needs their memory
        home = (yield [Sent(x, tuple(k.shape)) for x in gradients]) if gradients else None
        if later is not None:
            found = self._gradients(later, q, (k, v), whole, None)
            dq.add(later.rows, found[0])
            add_all(own, later.keys, found[1:])
        if home is not None:
            add_all(own, slice(0, k.shape[2]), home())
        return tuple(total.result(total.like.dtype) for total in (dq, *own))

    def _halves(self, rank: int) -> tuple[Part, Part | None]:
        """The part of this rank's own keys that its earlier and its later queries see. With no
        other rank, or a broken merge, all in one part and None.
        """
        whole = self.part(rank, rank)
        if self.world == 1 or not self.ring.exact:
            return whole, None
        if rank not in self.halves:
            half = whole.visible.lo.shape[1] // 2
            self.halves[rank] = (
                whole.of_rows(slice(0, half), narrow=self.standing),
                whole.of_rows(slice(half, None), narrow=self.standing),
            )
        return self.halves[rank]

    def _gradients(
        self,
        part: Part,
        q: Tensor,
        held: Tensor | tuple[Tensor, Tensor],
        whole: tuple[Tensor, Tensor, Tensor, Tensor],
        d_state: OnlineSoftmax | None,
    ) -> tuple[Tensor, ...]:
        """dq, dk, dv for the rows and keys of this part; `held` are the block's k and v."""
        blocks = self.ring.blocks
        q, (k, v) = q[..., part.rows, :], (x[..., part.keys, :] for x in held)
        if part.empty:
            return tuple(torch.zeros_like(x, dtype=statistics_dtype(q)) for x in (q, k, v))
        if d_state is not None:
            return blocks.differentiate(q, k, v, d_state, part.visible, **self.settings)
        out, lse, d_out, d_lse = (x[:, :, part.rows] for x in whole)
        known = q, k, v, out, lse, d_out, d_lse
        return blocks.backward(*known, part.visible, **self.settings)

    def _differentiate_merge(
        self, rank: int, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, d_lse: Tensor
    ) -> RankProgram:
        """Returns the gradient of each hop's block state.

        A broken merge has no closed formula for it, so the states are computed again.
        """
        held, states = together(k, v), []
        for hop in range(self.world):
            source = (rank - hop) % self.world
            arriving = yield self._leaving(hop, source, held)
            states.append(self._block(rank, source, q, held)[1])
            held = next(iter(arriving()), held)
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [
                replace(state, **{x: getattr(state, x).detach().requires_grad_() for x in PARTS})
                for state in states
            ]
            merged = reduce(self.ring.merge, leaves).finalize()
            inputs = [getattr(leaf, name) for leaf in leaves for name in PARTS]
            found = torch.autograd.grad(
                merged, inputs, (d_out.to(merged[0].dtype), d_lse), materialize_grads=True
            )
        parts = zip(found[0::3], found[1::3], found[2::3], strict=True)
        return [OnlineSoftmax(row_max, row_sum, acc) for row_max, row_sum, acc in parts]


class GatherCall(RingCall):
    """A RingCall with one block: a rank gathers all keys before it uses any, and merges nothing."""

    def forward(self, rank: int, q: Tensor, k: Tensor, v: Tensor) -> RankProgram:
        """Returns out, lse and max_score of this rank's queries."""
        k, v = yield from self._gathered(rank, k, v)
        state, max_score = self.ring.blocks.forward(
            q, k, v, self._sees_of_all(rank), look=self.look, **self.settings
        )
        out, lse = state.finalize()
        return out.to(q.dtype), lse, max_score

    def backward(
        self,
        rank: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
    ) -> RankProgram:
        """Returns dq, dk and dv of this rank's tokens."""
        k, v = yield from self._gathered(rank, k, v)
        known = (out, lse, d_out, d_lse, self._sees_of_all(rank))
        dq, dk, dv = self.ring.blocks.backward(q, k, v, *known, **self.settings)
        gradients = torch.stack((dk, dv))
        # the gradient of rank r's keys starts at rank r + 1; each rank on the way to r adds its
        # part
        total = gradients[..., self.keys[rank - 1], :]
        for hop in range(1, self.world):
            own = gradients[..., self.keys[(rank - 1 - hop) % self.world], :]
            (arrived,) = (yield [Sent(total, tuple(own.shape))])()
            total = own + arrived
        return dq.to(q.dtype), *total.to(k.dtype)

    def _gathered(self, rank: int, k: Tensor, v: Tensor) -> RankProgram:
        """Returns the keys and values of all ranks (2, B, H_kv, M, D), in order."""
        held = together(k, v)
        parts = {rank: held}
        for hop in range(self.world - 1):
            source = (rank - hop) % self.world
            (held,) = (yield self._leaving(hop, source, held))()
            parts[(source - 1) % self.world] = held
        order = torch.cat(self.keys).argsort()
        return torch.cat([parts[source] for source in range(self.world)], -2)[..., order, :]

    def _sees_of_all(self, rank: int) -> VisibleKeys:
        lo, hi = (ends[:, self.queries[rank]] for ends in (self.visible.lo, self.visible.hi))
        return replace(self.visible, lo=lo, hi=hi)


@lru_cache(maxsize=8)
def standing_call(
    kind: type[RingCall],
    ring: Ring,
    num_queries: int,
    num_keys: int,
    world: int,
    device: torch.device,
    settings: frozenset[tuple[str, Any]],
    causal: bool,
    window: Window,
) -> RingCall:
    """A call whose mask does not depend on the inputs, cached."""
    with torch.inference_mode(False), torch.no_grad():
        queries, keys = (zigzag(length, world, device) for length in (num_queries, num_keys))
        visible = intervals(num_queries, num_keys, device, causal=causal, window=window)
    return kind(ring, queries, keys, visible, dict(settings), standing=True)


def make_call(
    kind: type[RingCall],
    ring: Ring,
    num_queries: int,
    num_keys: int,
    world: int,
    device: torch.device,
    settings: dict[str, Any],
    *,
    causal: bool,
    look: bool,
    window: Window = None,
    **of_batch: Tensor | None,
) -> RingCall:
    """A call whose tokens zigzag() distributes. of_batch: the masks that are tensors, as in
    attention.mask.intervals().
    """
    if all(x is None for x in of_batch.values()):
        shape = num_queries, num_keys, world, device
        call = standing_call(kind, ring, *shape, frozenset(settings.items()), causal, window)
        return replace(call, look=look)
    queries, keys = (zigzag(length, world, device) for length in (num_queries, num_keys))
    mask = {"causal": causal, "window": window, **of_batch}
    visible = intervals(num_queries, num_keys, device, **mask)
    return kind(ring, queries, keys, visible, settings, look=look)


def play(programs: Sequence[RankProgram]) -> list[Any]:
    """Run the programs of all ranks in this process, hop by hop; return their results."""
    sent = [next(program) for program in programs]
    results: list[Any] = []
    while not results:
        previous, sent = sent, []
        for rank, program in enumerate(programs):
            arrived = [each.tensor for each in previous[rank - 1]]
            try:
                sent.append(program.send(lambda arrived=arrived: arrived))
            except StopIteration as end:  # all programs end after the same hop
                results.append(end.value)
    return results
