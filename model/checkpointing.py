"""What a block keeps for its backward pass, and where: activation checkpointing, sequences in
chunks, inputs in the host's memory.

Chen et al. 2016 (arXiv:1604.06174): what is cheap to compute is not kept but computed again when
the backward pass needs it. The recomputation is PyTorch's (torch.utils.checkpoint, not reentrant),
which brings random numbers and autocast back as they were, and which torch.compile takes into its
graph.
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
# PyTorch asks there whether a region that keeps its products works in place; ours does not
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn" not in record.getMessage()
)


def recomputed(function: Callable[..., Result], *, dropout: float = 0.0) -> Callable[..., Result]:
    """The same function of tensors, of which autograd keeps the inputs alone.

    Recomputing stops where the last tensor that the backward pass wants is there: a product at the
    function's end is not done again.
    """

    def run(*inputs: Tensor) -> Result:
        # reading and setting random states costs time, and only dropout draws any
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=dropout > 0)

    return run


def elementwise_recomputed(function: Callable[..., Result]) -> Callable[..., Result]:
    """recomputed(function) for a function without dropout that ends with a product, in a compiled
    graph too.

    There nothing stops before the product, unless it is named as something to keep.
    """

    def run(*inputs: Tensor) -> Result:
        if not torch.compiler.is_compiling():
            return recomputed(function)(*inputs)
        keep_products = partial(create_selective_checkpoint_contexts, PRODUCTS)
        return checkpoint(
            function,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=keep_products,
        )

    return run


def in_chunks(function: Callable[..., Result], *inputs: Tensor, size: int | None) -> Result:
    """function(*inputs), over `size` tokens at a time; None takes all at once.

    In every tensor, in and out, the tokens are dimension 1. What function computes for a token must
    not depend on the others. The results are those of one call, but for the order in which a
    product may sum, and so are the gradients.
    """
    if size is None or inputs[0].shape[1] <= size:
        return function(*inputs)
    kind = inputs[0].device.type
    # autocast would make one 16-bit copy of each weight for all chunks, and add their gradients up
    # in 16 bits
    with torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    ):
        chunks = [function(*rows) for rows in zip(*(x.split(size, 1) for x in inputs), strict=True)]
    return (
        torch.cat(chunks, 1)
        if isinstance(chunks[0], Tensor)
        else tuple(torch.cat(parts, 1) for parts in zip(*chunks, strict=True))
    )


class OnHost(NamedTuple):
    """A tensor of the GPU, waiting in the host's memory."""

    copy: Tensor


@contextmanager
def kept_on_host(x: Tensor) -> Iterator[None]:
    """What autograd keeps of x inside, whole or in parts, it keeps in pinned host memory; on a CPU
    there is nothing to do.

    The copies are queued on the stream of the computation: what follows waits for them (a block
    input of GPT-2 at a million tokens takes 0.1 s of some seconds), and no memory is used again too
    early. Not for torch.compile, which decides itself what to keep.
    """
    copies: dict[Any, Tensor] = {}
    device, storage = x.device, x.untyped_storage().data_ptr()

    def pack(saved: Tensor) -> Tensor | OnHost:
        if device.type != "cuda" or saved.untyped_storage().data_ptr() != storage:
            return saved
        key = (saved.storage_offset(), saved.shape)  # the two halves of a block keep the same rows
        if key not in copies:
            host = torch.empty(saved.shape, dtype=saved.dtype, pin_memory=True)
            copies[key] = host.copy_(saved, non_blocking=True)
        return OnHost(copies[key])

    def unpack(kept: Tensor | OnHost) -> Tensor:
        return kept.copy.to(device, non_blocking=True) if isinstance(kept, OnHost) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
