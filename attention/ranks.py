"""One sequence over several processes: each holds some of its tokens, and attends for some heads.

Before a call of attention() the ranks exchange tokens for heads, and after it heads for tokens. So
every backend, mask and defect computes what it computes in one process. Jacobs et al., "DeepSpeed
Ulysses" (2023, arXiv:2309.14509).

    tokens of rank r, all heads  --to_heads-->   all tokens, heads of rank r
                                                     attention(), any backend
    tokens of rank r, all heads  <--to_tokens--  all tokens, heads of rank r

Dimensions: B batch, H heads, H_kv key/value heads, n tokens of a rank, W ranks, N = W n tokens of
the sequence, D head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from attention.interface import AttentionOutput, Output, ScoredOutput, ScoreMod


@dataclass(frozen=True)
class Shards:
    """The ranks that share a sequence. Rank r has its tokens r n to (r + 1) n."""

    group: str  # the name of their process group
    rank: int  # of this process among them
    size: int  # W, which divides H and H_kv

    def attention(
        self,
        attend: Callable[..., Output],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        alibi_slopes: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        sinks: Tensor | None = None,
        **arguments: Any,
    ) -> Output:
        """Run `attend`, which is attention(), on the whole sequence; return the part of this rank.

        q (B, H, n, D), k, v (B, H_kv, n, D) and out (B, H, n, D) hold this rank's tokens.
        document_ids (B, N) cover the whole sequence, alibi_slopes and sinks (H,) all heads. lse is
        None, because it stays with the rank of its head. max_score (B, H) is -inf for the heads of
        other ranks.
        """
        q, k, v = self.to_heads(q, k, v)
        first_head = self.rank * q.shape[1]
        own = slice(first_head, first_head + q.shape[1])
        if score_mod is not None:
            score_mod = replace(score_mod, first_head=score_mod.first_head + first_head)
        output = attend(
            q,
            k,
            v,
            alibi_slopes=None if alibi_slopes is None else alibi_slopes[own],
            score_mod=score_mod,
            sinks=None if sinks is None else sinks[own],
            **arguments,
        )
        out = self.to_tokens(output.out)
        if not isinstance(output, ScoredOutput):
            return AttentionOutput(out)
        max_score = output.max_score
        if max_score is not None:
            of_all = max_score.new_full((len(q), q.shape[1] * self.size), -torch.inf)
            of_all[:, own] = max_score
            max_score = of_all
        return ScoredOutput(out, None, max_score)

    def to_heads(self, *tensors: Tensor) -> Sequence[Tensor]:
        """From (B, H, n, D), this rank's tokens, to (B, H / W, N, D), its heads. All tensors go in
        one message; their H may differ. A token's heads lie side by side in memory.
        """
        counts = [x.shape[1] // self.size for x in tensors]
        by_rank = [x.unflatten(1, (self.size, -1)).permute(1, 0, 3, 2, 4) for x in tensors]
        arrived = all_to_all(torch.cat(by_rank, 3), self.group)  # (W, B, n, sum of H / W, D)
        packed = arrived.transpose(0, 1).flatten(1, 2)  # a copy only where B > 1
        # split before transposing: Inductor copies to make the gradient of a transposed tensor's
        # parts
        return [x.transpose(1, 2) for x in packed.split(counts, 2)]

    def to_tokens(self, x: Tensor) -> Tensor:
        """From (B, H / W, N, D), this rank's heads, to (B, H, n, D), its tokens."""
        by_rank = x.unflatten(2, (self.size, -1)).permute(2, 0, 3, 1, 4)  # (W, B, n, H / W, D)
        arrived = all_to_all(by_rank, self.group)
        return arrived.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)

    def own_positions(self, tokens: Tensor) -> Tensor:
        """The positions of this rank's tokens (B, n) in the whole sequence, (n,)."""
        count = tokens.shape[1]
        return torch.arange(count, device=tokens.device) + self.rank * count


def share(rank: int, world: int, context: int, timeout: timedelta | None = None) -> Shards:
    """Form the process groups in which every `context` consecutive ranks share a sequence. All
    ranks of the world must call this. A rank waits `timeout` for another; None takes PyTorch's
    default.
    """
    from torch import distributed

    # every rank takes part in making each group
    groups = [
        distributed.new_group(list(range(first, first + context)), timeout=timeout)
        for first in range(0, world, context)
    ]
    return Shards(name_of(groups[rank // context]), rank % context, context)


# ProcessGroups by name, because an operator cannot take one
_groups: dict[str, Any] = {}


def name_of(group: Any) -> str:
    """The name by which all_to_all() finds this ProcessGroup."""
    _groups[group.group_name] = group
    return group.group_name


@torch.library.custom_op("tilegpt::all_to_all", mutates_args=())
def all_to_all(x: Tensor, group: str) -> Tensor:
    """Send x[i] to rank i of the group; return what all ranks sent here, in their order.

    An operator, because torch.compile does not trace into it. In a graph that PyTorch 2.11 traced
    through the exchange, attention had no gradient.
    """
    from torch import distributed

    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    distributed.all_to_all_single(received, x.contiguous(), group=_groups[group])
    return received


@all_to_all.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def send_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return all_to_all(gradient, ctx.group), None


all_to_all.register_autograd(send_back, setup_context=keep_group)
