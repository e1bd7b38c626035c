"""Held-out loss and accuracy of one set of weights, under its own attention, exact attention, or any other."""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from attention import Backend, get_backend
from model.gpt import GPT


@torch.no_grad()
def evaluate(
    model: GPT,
    inputs: Tensor,
    targets: Tensor,
    *,
    batch_size: int,
    autocast: AbstractContextManager,
    accuracy: bool,
    also: Mapping[str, Backend] | None = None,
) -> dict[str, float]:
    """val/loss (nats) and, if asked for, val/accuracy; each also as _exact: the same weights with PyTorch's own attention.

    A loss curve alone does not show a broken attention; the distance between the two does. `also` adds further judges, by the suffix
    of their columns. Means are over every target that is not -100. inputs, targets (B, N) on the CPU.
    """
    judges = {"": model.backend, "_exact": get_backend("sdpa"), **(also or {})}
    row = {}
    for suffix, judge in judges.items():
        loss, right = judged(model, judge, inputs, targets, batch_size=batch_size, autocast=autocast, accuracy=accuracy)
        row[f"val/loss{suffix}"] = loss
        if accuracy:
            row[f"val/accuracy{suffix}"] = right
    return row


@torch.no_grad()
def judged(
    model: GPT, judge: Backend, inputs: Tensor, targets: Tensor, *, batch_size: int, autocast: AbstractContextManager, accuracy: bool
) -> tuple[float, float | None]:
    """Loss (nats) and, if asked for, accuracy of these weights under the attention `judge`; NaN where the loss is not finite."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    count = int((targets != -100).sum())
    total_loss = total_right = 0.0
    with model.use_backend(judge), autocast:
        for x, y in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
            x, y = x.to(device), y.to(device)
            total_loss += model(x, y).loss.item() * int((y != -100).sum())
            if accuracy:
                total_right += int((model(x).logits.argmax(-1) == y).sum())
    model.train(was_training)
    return total_loss / count, total_right / count if accuracy else None
