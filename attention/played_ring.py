"""Attention on a ring whose ranks all run in one process, also with a deliberately broken merge.

    python train.py -m attention=ring_no_rescale attention.ranks=1,2,4

The ranks run the same programs as on several processes (attention.context), so the numbers are the
same. The broken merges make the mistakes of attention.defects one level up: exact on one rank,
wrong on two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention.defects import DIES_OF_LOGITS, WRONG
from attention.interface import FEATURES, AttentionOutput, Backend, Output, ScoredOutput
from attention.mask import MASKS
from attention.online_softmax import OnlineSoftmax
from attention.ring import Merge, RankProgram, Ring, RingCall, make_call, play
from attention.tiled import TileBlocks

RANKS = 4  # played by one process


class PlayedCall(torch.autograd.Function):
    """A call in which this process plays all ranks. It saves what the ranks would save."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: RingCall
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        outs, lses, max_scores = zip(*play(programs(call.forward, call, q, k, v)), strict=True)
        out, lse = collected(outs, call.queries), collected(lses, call.queries)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        return out, lse, torch.stack(max_scores).amax(0) if call.look else None

    @staticmethod
    @once_differentiable  # which hides the name of ctx
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, d_out: Tensor, d_lse: Tensor, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return *play_backward(ctx.call, *ctx.saved_tensors, d_out, d_lse), None


def play_backward(call: RingCall, *tensors: Tensor) -> tuple[Tensor, ...]:
    """dq, dk and dv from q, k, v, out, lse, d_out and d_lse."""
    gradients = zip(*play(programs(call.backward, call, *tensors)), strict=True)
    return tuple(map(collected, gradients, (call.queries, call.keys, call.keys)))


def programs(
    program: Callable[..., RankProgram], call: RingCall, q: Tensor, k: Tensor, v: Tensor, *of_q
) -> list[RankProgram]:
    """The program of each rank, with its part of each tensor; the tensors of_q are split like q."""
    parts = [
        *(dealt(x, call.keys) for x in (k, v)),
        *(dealt(x, call.queries) for x in of_q),
    ]
    return [
        program(rank, *own)
        for rank, own in enumerate(zip(dealt(q, call.queries), *parts, strict=True))
    ]


def dealt(x: Tensor, positions: Sequence[Tensor]) -> list[Tensor]:
    """Each rank's part of x (B, H, N) or (B, H, N, D)."""
    return [x[:, :, each] for each in positions]


def collected(parts: Sequence[Tensor], positions: Sequence[Tensor]) -> Tensor:
    """The inverse of dealt()."""
    return torch.cat(list(parts), 2)[:, :, torch.cat(list(positions)).argsort()]


@dataclass(frozen=True)
class PlayedRing:
    """The fn of a backend: it plays `ranks` ranks, each with its part of queries and keys."""

    ring: Ring

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_max_score: bool | Tensor = False, **given
    ) -> Output:
        call = self.call_of(q, k, look=bool(return_max_score), **given)
        out, lse, max_score = PlayedCall.apply(q, k, v, call)
        if return_max_score is False:
            return AttentionOutput(out, lse)
        return ScoredOutput(out, lse, max_score)

    def backward(self, q: Tensor, k: Tensor, *tensors: Tensor, **given) -> tuple[Tensor, ...]:
        """dq, dk, dv from q, k, v, out, lse, d_out and d_lse; attention.tile_op needs this."""
        return play_backward(self.call_of(q, k, **given), q, k, *tensors)

    def call_of(
        self,
        q: Tensor,
        k: Tensor,
        *,
        causal: bool,
        ranks: int,
        look: bool = False,
        **settings: Any,
    ) -> RingCall:
        # masks of the whole sequence, not of a block
        mask = {name: settings.pop(name) for name in MASKS if name in settings}
        shape = q.shape[2], k.shape[2], ranks, q.device
        return make_call(RingCall, self.ring, *shape, settings, causal=causal, look=look, **mask)


def no_max(state: OnlineSoftmax, other: OnlineSoftmax) -> OnlineSoftmax:
    """Multiply each block's sums by exp(row_max), with no maximum subtracted."""
    zero = torch.where(torch.maximum(state.row_max, other.row_max) == -torch.inf, -torch.inf, 0.0)
    alpha, beta = torch.exp(state.row_max), torch.exp(other.row_max)
    return weighted(zero, state, alpha, other, beta)


def no_rescale(state: OnlineSoftmax, other: OnlineSoftmax) -> OnlineSoftmax:
    """Add the sums of blocks unchanged, though each block has subtracted its own maximum."""
    latest = torch.where(other.row_max == -torch.inf, state.row_max, other.row_max)
    return weighted(latest, state, 1.0, other, 1.0)


def local_softmax(state: OnlineSoftmax, other: OnlineSoftmax) -> OnlineSoftmax:
    """Add the outputs of softmax attention on each block alone."""
    # finalize() normalises the first block; a merged state has row_sum 1 already
    (past, past_lse), (out, lse) = state.finalize(), other.finalize()
    seen = (other.row_max != -torch.inf).to(out.dtype)
    row_max = torch.where(seen > 0, lse.unsqueeze(-1), past_lse.unsqueeze(-1))
    return replace(state, row_max=row_max, row_sum=torch.ones_like(seen), acc=past + seen * out)


def weighted(
    row_max: Tensor,
    state: OnlineSoftmax,
    alpha: Tensor | float,
    other: OnlineSoftmax,
    beta: Tensor | float,
) -> OnlineSoftmax:
    row_sum = alpha * state.row_sum + beta * other.row_sum
    acc = alpha * state.acc + beta * other.acc
    return replace(state, row_max=row_max, row_sum=row_sum, acc=acc)


def ring_backend(name: str, ring: Ring, **fields: Any) -> Backend:
    return Backend(
        name,
        PlayedRing(ring),
        features=FEATURES - {"alibi_slopes", "score_mod", "value_dim"},
        options={"block_q": 128, "block_kv": 64, "ranks": RANKS},
        exact=ring.exact,
        traceable=False,
        ring=ring,
        **fields,
    )


def broken(name: str, merge: Merge, says: str, breaks: frozenset[str]) -> Backend:
    ring = Ring(TileBlocks(), merge, exact=False)
    return ring_backend(name, ring, defect=f"{says}; exact on one rank", breaks=breaks)


RING = ring_backend("ring", Ring(TileBlocks()))
RING_DEFECTS = (
    broken(
        "ring_no_max",
        no_max,
        "ranks are merged by exp(row_max) without a common maximum: exact until a score passes "
        "88.72 in float32, then inf or NaN; zeros where all scores of a block are below -104",
        DIES_OF_LOGITS,
    ),
    broken(
        "ring_no_rescale",
        no_rescale,
        "each rank subtracts its own maximum and the sums are added as they are: every rank counts "
        "as if its best key were equally good",
        WRONG | {"key permutation", "prefill = decode"},
    ),
    broken(
        "ring_local_softmax",
        local_softmax,
        "each rank takes the softmax of its own keys and the results are summed: the weights of a "
        "row add up to the number of ranks it sees",
        WRONG | {"key permutation", "rows sum to one", "prefill = decode"},
    ),
)
