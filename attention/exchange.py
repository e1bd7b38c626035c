"""Ranks that share a sequence exchange tokens for heads, in one message and with few copies.

A token's heads lie side by side in memory: in the projection that q, k and v are views of, in the
message sent and in the message received. With one sequence, attention reads the received memory
without a copy.

    q, k, v (B, H or H_kv, n, D)    --copied into-->    the message (W, B, n, H' + 2 H'_kv, D)
                     which arrives in the order of its tokens: (B, N, H' + 2 H'_kv, D)

On the way back, the memory of one sequence is sent without a copy, and the received message is
copied.

Dimensions: B batch, H heads of all ranks, H' those of one, n tokens of one rank, N of all, W ranks,
D head dim.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention.interface import operator

groups: dict[str, Any] = {}  # process groups by name: an operator cannot take a group
WIDE = torch.complex128, torch.int64  # to copy 16 or 8 bytes at a time


def exchanged(tensors: Sequence[Tensor], group: str, world: int, *, back: bool) -> list[Tensor]:
    """Exchange each (B, H, n, D) into (B, H', N, D), or the reverse with `back`; their H may
    differ. The results are parts of one tensor in which a token's heads lie side by side. Without a
    group no message is sent, and data from other ranks is arbitrary.
    """
    if torch.is_grad_enabled():
        return list(Exchange.apply(back, group, world, *tensors))
    return moved(tensors, group, world, back=back)


def moved(tensors: Sequence[Tensor], group: str, world: int, *, back: bool) -> list[Tensor]:
    """exchanged() without a gradient."""
    if torch.compiler.is_compiling():
        exchange = exchange_heads if back else exchange_tokens
    else:
        exchange = heads_to_tokens if back else tokens_to_heads
    return parts_of(exchange(tensors, group, world), counts_of(tensors, world, back))


def counts_of(tensors: Sequence[Tensor], world: int, back: bool) -> list[int]:
    """The number of heads of each tensor after the exchange."""
    return [x.shape[1] * world if back else x.shape[1] // world for x in tensors]


def parts_of(packed: Tensor, counts: list[int]) -> list[Tensor]:
    """Split packed (B, N, sum of H, D) into tensors (B, H, N, D)."""
    if len(counts) == 1:  # no split, because its gradient would be a copy
        return [packed.transpose(1, 2)]
    # split before transposing: Inductor copies to make the gradient of a transposed tensor's parts
    return [x.transpose(1, 2) for x in packed.split_with_sizes(counts, 2)]


class Exchange(torch.autograd.Function):
    """exchanged() with its gradient, which is the reverse exchange."""

    @staticmethod
    def forward(ctx: Any, back: bool, group: str, world: int, *tensors: Tensor) -> Any:
        ctx.settings, ctx.back = (group, world), back
        return tuple(moved(tensors, group, world, back=back))

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        # a compiled graph has no gradients of gradients
        exchange = moved if torch.compiler.is_compiling() else exchanged
        return None, None, None, *exchange(gradients, *ctx.settings, back=not ctx.back)


def tokens_to_heads(tensors: Sequence[Tensor], group: str, world: int) -> Tensor:
    """Exchange tensors (B, H, n, D) into one tensor (B, N, sum of H', D)."""
    counts = counts_of(tensors, world, back=False)
    batch, _, tokens, dim = tensors[0].shape
    sent = tensors[0].new_empty(world, batch, tokens, sum(counts), dim)
    numbers = numbers_to_copy(tensors)
    places = sent.view(numbers).split_with_sizes(counts, 3)
    for place, x in zip(places, tensors, strict=True):
        parts = x.view(numbers).unflatten(1, (world, -1))  # (B, W, H', n, D)
        place.copy_(parts.permute(1, 0, 3, 2, 4))
    received = passed(sent, group)
    if batch > 1:
        sent.view(numbers).view(batch, world, tokens, -1).copy_(
            received.view(numbers).flatten(3).transpose(0, 1)
        )
        received = sent
    # with one sequence, its tokens have arrived in order
    return received.view(batch, world * tokens, sum(counts), dim)


def heads_to_tokens(tensors: Sequence[Tensor], group: str, world: int) -> Tensor:
    """Exchange tensors (B, H', N, D) into one tensor (B, n, sum of H, D)."""
    counts = [x.shape[1] for x in tensors]
    batch, _, length, dim = tensors[0].shape
    shape = world, batch, length // world, sum(counts), dim
    sent = one_memory(tensors, counts) if batch == 1 else None
    numbers = numbers_to_copy(tensors)
    if sent is None:
        sent = tensors[0].new_empty(shape)
        places = sent.view(numbers).split_with_sizes(counts, 3)
        for place, x in zip(places, tensors, strict=True):
            parts = x.view(numbers).unflatten(2, (world, -1))  # (B, H', W, n, D)
            place.copy_(parts.permute(2, 0, 3, 1, 4))
    received = passed(sent.view(shape), group).view(numbers).split_with_sizes(counts, 3)
    del sent
    packed = tensors[0].new_empty(*shape[1:3], world * sum(counts), dim)
    places = packed.view(numbers).split_with_sizes(counts_of(tensors, world, back=True), 2)
    for place, parts in zip(places, received, strict=True):
        place.unflatten(2, (world, -1)).copy_(parts.permute(1, 2, 0, 3, 4))  # (B, n, W, H', D)
    return packed


def passed(sent: Tensor, group: str) -> Tensor:
    """All-to-all: send sent[i] to rank i; return what all ranks sent here, in their order."""
    from torch import distributed

    received = torch.empty_like(sent)
    if group:
        distributed.all_to_all_single(received, sent, group=groups[group])
    return received


def one_memory(tensors: Sequence[Tensor], counts: list[int]) -> Tensor | None:
    """The contiguous (1, N, sum of H', D) whose parts_of() are these (1, H', N, D), or None."""
    first = tensors[0]
    length, dim = first.shape[2:]
    row, start, storage = sum(counts) * dim, first.data_ptr(), first.untyped_storage().data_ptr()
    for x, count in zip(tensors, counts, strict=True):
        beside = x.stride(2) == row and x.stride(3) == 1 and (count == 1 or x.stride(1) == dim)
        if not beside or x.data_ptr() != start or x.untyped_storage().data_ptr() != storage:
            return None
        start += count * dim * x.element_size()
    return first.as_strided((1, length, sum(counts), dim), (length * row, row, dim, 1))


def numbers_to_copy(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype to copy these tensors as: one of 16 or 8 bytes if all allow it, else their own.
    PyTorch copies strided memory number by number, whatever their width.
    """
    dtype = tensors[0].dtype
    if any(x.stride(-1) != 1 for x in tensors):
        return dtype
    steps = math.gcd(*(step for x in tensors for step in (x.storage_offset(), *x.stride()[:-1])))
    granule = math.gcd(steps, tensors[0].shape[-1]) * dtype.itemsize
    granule = math.gcd(granule, *(x.data_ptr() for x in tensors))
    return next((wide for wide in WIDE if granule % wide.itemsize == 0), dtype)


# the same as operators, which torch.compile does not trace into. Each returns one tensor, because
# an operator may not return views of one tensor. Exchange computes their gradient: a registered
# gradient would need the gradient of that one tensor, and autograd would copy the parts' gradients
# to join them
exchange_tokens = operator("exchange_tokens")(tokens_to_heads)
exchange_heads = operator("exchange_heads")(heads_to_tokens)


@torch.library.register_fake("tilegpt::exchange_tokens")
def _(tensors: Sequence[Tensor], group: str, world: int) -> Tensor:
    batch, _, tokens, dim = tensors[0].shape
    counts = counts_of(tensors, world, back=False)
    return tensors[0].new_empty(batch, tokens * world, sum(counts), dim)


@torch.library.register_fake("tilegpt::exchange_heads")
def _(tensors: Sequence[Tensor], group: str, world: int) -> Tensor:
    batch, _, length, dim = tensors[0].shape
    counts = counts_of(tensors, world, back=True)
    return tensors[0].new_empty(batch, length // world, sum(counts), dim)
