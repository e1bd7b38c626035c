"""Activation checkpointing, sequences in chunks, and block inputs in the host's memory.

Checkpointing (Chen et al. 2016, arXiv:1604.06174) does not keep results that are cheap to compute:
the backward pass computes them again. PyTorch does the recomputation (torch.utils.checkpoint, not
reentrant). It restores random numbers and autocast, and works inside torch.compile's graph.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Result = Tensor | tuple[Tensor, ...]
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
# PyTorch warns there about regions that keep products and work in place; ours do not work in place
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn" not in record.getMessage()
)


def recomputed(function: Callable[..., Result], *, dropout: float = 0.0) -> Callable[..., Result]:
    """The same function of tensors, for which autograd keeps only the inputs.

    Recomputing stops at the last tensor that the backward pass needs: it does not repeat a product
    at the end of the function.
    """
    # saving and restoring random states costs time, and only dropout draws random numbers
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=dropout > 0)


def elementwise_recomputed(function: Callable[..., Result]) -> Callable[..., Result]:
    """recomputed(function), for a function without dropout that ends with a matrix product.

    A compiled graph would repeat that product unless it is marked as one to keep.
    """
    run = recomputed(function)
    if torch.compiler.is_compiling():
        run = partial(run, context_fn=partial(create_selective_checkpoint_contexts, PRODUCTS))
    return run


def in_chunks(function: Callable[..., Result], *inputs: Tensor, size: int | None) -> Result:
    """function(*inputs), over `size` tokens at a time; None takes all at once.

    The tokens are dimension 1 of every input and result, and function must treat each token by
    itself. Results and gradients are those of one call, but a product may sum in another order.
    """
    if size is None or inputs[0].shape[1] <= size:
        return function(*inputs)
    kind = inputs[0].device.type
    # no cache: autocast would make one 16-bit copy of each weight for all chunks, and sum their
    # gradients in 16 bits
    with torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    ):
        parts = zip(*(x.split(size, 1) for x in inputs), strict=True)
        chunks = [function(*part) for part in parts]
    if isinstance(chunks[0], Tensor):
        return torch.cat(chunks, 1)
    return tuple(torch.cat(results, 1) for results in zip(*chunks, strict=True))


class OnHost(NamedTuple):
    """A copy of a GPU tensor in the host's memory."""

    copy: Tensor


@contextmanager
def kept_on_host(x: Tensor) -> Iterator[None]:
    """Inside, autograd keeps x and its parts in pinned host memory. On a CPU nothing changes.

    The copies are queued on the stream of the computation, so no memory is reused too early, and
    later work waits for them. For a block input of GPT-2 at a million tokens that is 0.1 s out of
    several seconds. torch.compile decides itself what to keep, so this is not for it.
    """
    copies: dict[Any, Tensor] = {}
    device, storage = x.device, x.untyped_storage().data_ptr()

    def pack(saved: Tensor) -> Tensor | OnHost:
        if device.type != "cuda" or saved.untyped_storage().data_ptr() != storage:
            return saved
        key = (saved.storage_offset(), saved.shape)  # both halves of a block keep the same rows
        if key not in copies:
            host = torch.empty(saved.shape, dtype=saved.dtype, pin_memory=True)
            copies[key] = host.copy_(saved, non_blocking=True)
        return OnHost(copies[key])

    def unpack(kept: Tensor | OnHost) -> Tensor:
        return kept.copy.to(device, non_blocking=True) if isinstance(kept, OnHost) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
