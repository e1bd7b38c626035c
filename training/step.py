"""One optimizer step: what scripts.profile measures is what train.py runs."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function


class PendingStep(NamedTuple):
    """A step that is on its way: the device has it all, and the host has not looked at it."""

    passes: Sequence[tuple[Tensor, ...]]
    found: Tensor  # its loss and the norm of its gradients, on the device
    figures: Callable[[], list[float]]  # the same two for the host, which waits for them
    updated: bool  # whether the optimizer's step is queued too


def queue_step(
    step_model: nn.Module,
    passes: Sequence[tuple[Tensor, ...]],
    *,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    update: bool,
    before: PendingStep | None = None,
    **how: Any,
) -> PendingStep:
    """Queue the gradients of a step and, if `update` and the device can tell a step that went
    wrong, what the optimizer makes of them.

    Thus the next step can be queued before the host has looked at this one, and the device never
    waits for the host. It is then the `before` of the next, which moves no weights if either of the
    two went wrong. how: what compute_gradients takes.
    """
    found = torch.stack(
        compute_gradients(step_model, passes, optimizer=optimizer, scaler=scaler, **how)
    )
    figures = copy_to_host_async(found)
    decisive = found if before is None else torch.cat((before.found, found))
    return PendingStep(
        passes,
        found,
        figures,
        update and update_if_finite(decisive, optimizer=optimizer, scaler=scaler),
    )


def compute_gradients(
    step_model: nn.Module,
    passes: Sequence[tuple[Tensor, ...]],
    *,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    autocast: AbstractContextManager,
    grad_clip: float,
) -> tuple[Tensor, Tensor]:
    """The mean loss of the passes of one step and the global norm of its gradients, both on the
    device and not waited for.

    The gradients lie in the parameters, clipped to `grad_clip` (not where it is 0 or their norm not
    finite); the norm is that of before. A pass is what step_model takes: inputs, targets, ... The
    ranges that it names show in a profiler's trace and cost microseconds without one.
    """
    optimizer.zero_grad(set_to_none=True)
    loss = 0.0
    for inputs in passes:
        with record_function("forward"), autocast:
            micro_loss = step_model(*inputs).loss
        with record_function("backward"):
            scaler.scale(micro_loss / len(passes)).backward()
        loss = loss + micro_loss.detach() / len(passes)
    with record_function("optimizer"):
        scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm(
            parameter.grad for parameter in step_model.parameters() if parameter.grad is not None
        )
        # a factor made of a norm that is not finite would leave no gradient finite, and nobody
        # could tell where it began
        nn.utils.clip_grads_with_norm_(
            step_model.parameters(), grad_clip or math.inf, norm.nan_to_num(nan=0.0, posinf=0.0)
        )
        return loss, norm


def copy_to_host_async(x: Tensor) -> Callable[[], list[float]]:
    """Start copying x to the host; what comes back waits for the copy, but not for what is queued
    on the GPU after it.
    """
    if x.device.type != "cuda":
        return x.tolist
    host, arrived = torch.empty_like(x, device="cpu", pin_memory=True), torch.cuda.Event()
    host.copy_(x, non_blocking=True)
    arrived.record()

    def wait() -> list[float]:
        arrived.synchronize()
        return host.tolist()

    return wait


def update_if_finite(
    found: Tensor, *, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> bool:
    """Queue the optimizer's step behind the gradients; False where it cannot judge for itself, and
    nothing was done.

    found: what decides, losses and norms, on the device. If one is not finite, weights and moments
    stay as they are. PyTorch's fused AdamW has this for GradScaler, which judges for itself where
    it is enabled.
    """
    if scaler.is_enabled() or not (
        isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["fused"]
    ):
        return False
    optimizer.grad_scale, optimizer.found_inf = None, (~found.isfinite()).any().float()
    try:
        with record_function("optimizer"):
            optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    return True
