"""batch_size=auto: finds the largest batch that fits into memory, by calculation and then by trial.

All ranks try the same sizes at the same time, and take the largest that fits on all of them. Works
on any `nn.Module` called as model(inputs, targets) that returns an object with a loss.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from config import RunConfig
from training.memory import GIB, LINUX, available_bytes, is_out_of_memory, release_memory
from training.ranks import ALONE, Ranks

log = logging.getLogger("tilegpt")

# the calculation was within 3 % of the measurements, and an allocator cannot use its last blocks
USABLE = 0.93


def largest_batch(
    config: RunConfig,
    *,
    predicted_bytes: Callable[[RunConfig], float],
    attempt: Callable[[int], None],
    device: torch.device,
    held_bytes: float = 0,
    ranks: Ranks = ALONE,
) -> RunConfig:
    """Returns `config` with the largest batch_size that fits and that divides the sequences of a
    step on one rank. All ranks must call this function, and all get the same size.

    predicted_bytes(config) is the calculated peak of a pass. attempt(B) runs a pass; if it runs out
    of memory, the next smaller divisor is tried. One sequence is tried whatever the calculation
    says, and its error is raised, which ends this rank and the ranks that wait for it. An attempt
    must not communicate: a rank that fails would leave the others waiting. held_bytes: the part of
    the calculation that is already in memory, that is, the weights.
    """
    sequences = config.sequences_per_step // ranks.data
    free = free_bytes(device) / (1 if device.type == "cuda" else ranks.local_world)
    usable = USABLE * min(ranks.gathered(free + held_bytes))
    divisors = [size for size in range(sequences, 0, -1) if sequences % size == 0]
    for size in divisors:
        sized = replace(config, batch_size=size)
        predicted = predicted_bytes(sized)
        if size > 1 and predicted > usable:
            continue
        fits = True
        try:
            attempt(size)
        except Exception as error:
            if size == 1 or not is_out_of_memory(error):
                raise
            fits = False
        # outside the handler, because the error there keeps the tensors of the attempt alive
        full = [str(rank) for rank, fitted in enumerate(ranks.gathered(fits)) if not fitted]
        if not full:
            log.info(f"batch_size=auto: {size} sequences a pass, {sequences // size} passes a step")
            return sized
        where = f" on rank {', '.join(full)}" if ranks.several else ""
        log.warning(
            f"batch_size={size} was predicted to take {predicted / GIB:.1f} GiB and does not "
            f"fit{where}; trying less"
        )
        release_memory(device)
    raise AssertionError("one sequence either fits or raises")


def try_pass(
    model: nn.Module,
    batch_size: int,
    *,
    seq_len: int,
    autocast: AbstractContextManager,
    device: torch.device,
    sums: bool = False,
) -> None:
    """Run two forward and backward passes of B = batch_size sequences; leaves no gradients.

    AdamW's moments are allocated too, and with `sums` the message in which ranks add up their
    gradients. The second pass adds to the gradients of the first, as gradient accumulation does.
    The random number generators of the run do not change.
    """
    tokens = torch.zeros(batch_size, seq_len, dtype=torch.int64, device=device)
    moments = [torch.empty_like(parameter) for parameter in model.parameters() for _ in range(2)]
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for _ in range(2):
                with autocast:
                    loss = model(tokens, tokens).loss
                loss.backward()
        if sums:
            found = [parameter.grad for parameter in model.parameters()]
            parameters_to_vector(x for x in found if x is not None)
    finally:
        del moments
        for parameter in model.parameters():
            parameter.grad = None


def free_bytes(device: torch.device) -> float:
    """Bytes that this process can still allocate, with the unused part of PyTorch's allocator."""
    if device.type != "cuda":
        return available_bytes() if LINUX else float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
