"""One sequence over several processes: each holds consecutive tokens, and attends for its heads.

    tokens of rank r, all heads  --to_heads-->  all tokens, heads of rank r
                                                    attention(), any backend
    tokens of rank r, all heads  <--to_tokens--

Two exchanges around a call that knows nothing of them: every backend, mask and defect computes what
it computes in one process. Jacobs et al., "DeepSpeed Ulysses" (2023, arXiv:2309.14509).

Dimensions: B batch, H heads, N tokens of the sequence, W ranks, D head dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_groups: dict[str, Any] = {}  # process groups by name: an operator takes no group


@dataclass(frozen=True)
class Shards:
    """The ranks that share a sequence, and which of them this process is."""

    group: str
    rank: int
    world: int

    def to_heads(self, x: Tensor) -> Tensor:
        """From (B, H, N / W, D), the tokens of this rank, to (B, H / W, N, D), its heads."""
        return exchange_tokens(x, self.group, self.world)

    def to_tokens(self, x: Tensor) -> Tensor:
        """The way back."""
        return exchange_heads(x, self.group, self.world)

    def among_all_heads(self, x: Tensor) -> Tensor:
        """From (B, H / W) of this rank's heads to (B, H), -inf for the heads of the others."""
        count = x.shape[1]
        own = slice(self.rank * count, (self.rank + 1) * count)
        found = x.new_full((x.shape[0], count * self.world), -torch.inf)
        found[:, own] = x
        return found

    def first_token(self, num_tokens: int) -> int:
        """The position of this rank's first token; every rank has num_tokens."""
        return self.rank * num_tokens


def register_group(name: str, group: Any) -> None:
    """Make a torch.distributed process group known to the operators below."""
    _groups[name] = group


def _swap(parts: Tensor, group: str) -> Tensor:
    """Send parts[i] to rank i; returns what all ranks sent here, in their order."""
    from torch import distributed

    received = torch.empty_like(parts)
    distributed.all_to_all_single(received, parts, group=_groups[group])
    return received


@torch.library.custom_op("tilegpt::exchange_tokens", mutates_args=())
def exchange_tokens(x: Tensor, group: str, world: int) -> Tensor:
    """(B, H, N / W, D) to (B, H / W, N, D)."""
    parts = x.unflatten(1, (world, -1)).movedim(1, 0).contiguous()  # (W, B, H / W, N / W, D)
    return _swap(parts, group).movedim(0, 2).flatten(2, 3).contiguous()


@torch.library.custom_op("tilegpt::exchange_heads", mutates_args=())
def exchange_heads(x: Tensor, group: str, world: int) -> Tensor:
    """(B, H / W, N, D) to (B, H, N / W, D)."""
    parts = x.unflatten(2, (world, -1)).movedim(2, 0).contiguous()  # (W, B, H / W, N / W, D)
    return _swap(parts, group).movedim(0, 1).flatten(1, 2).contiguous()


@exchange_tokens.register_fake
def _(x: Tensor, group: str, world: int) -> Tensor:
    batch, heads, tokens, dim = x.shape
    return x.new_empty(batch, heads // world, tokens * world, dim)


@exchange_heads.register_fake
def _(x: Tensor, group: str, world: int) -> Tensor:
    batch, heads, tokens, dim = x.shape
    return x.new_empty(batch, heads * world, tokens // world, dim)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group, ctx.world = inputs


# the gradient of a permutation across ranks is the way back
exchange_tokens.register_autograd(
    lambda ctx, grad: (exchange_heads(grad, ctx.group, ctx.world), None, None), setup_context=_keep
)
exchange_heads.register_autograd(
    lambda ctx, grad: (exchange_tokens(grad, ctx.group, ctx.world), None, None), setup_context=_keep
)
