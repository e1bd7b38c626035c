"""The gradients of one optimizer step: what scripts.profile measures is what train.py runs."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.profiler import record_function


def compute_gradients(
    step_model: nn.Module,
    passes: Sequence[tuple[Tensor, ...]],
    *,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    autocast: AbstractContextManager,
    grad_clip: float,
) -> tuple[Tensor, Tensor]:
    """The mean loss of the passes of one step and the global norm of its gradients, both on the device and not waited for.

    The gradients lie in the parameters, clipped to `grad_clip` (0: not clipped); the norm is that of before. A pass is what
    step_model takes: inputs, targets, ... The ranges that it names show in a profiler's trace and cost microseconds without one.
    """
    loss = 0.0
    for inputs in passes:
        with record_function("forward"), autocast:
            micro_loss = step_model(*inputs).loss
        with record_function("backward"):
            scaler.scale(micro_loss / len(passes)).backward()
        loss = loss + micro_loss.detach() / len(passes)
    with record_function("optimizer"):
        scaler.unscale_(optimizer)
        return loss, nn.utils.clip_grad_norm_(step_model.parameters(), grad_clip or math.inf)
