"""Held-out loss and accuracy."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn


@torch.no_grad()
def evaluate(
    model: nn.Module, inputs: Tensor, targets: Tensor, *, batch_size: int, device: torch.device, autocast: AbstractContextManager, accuracy: bool
) -> dict[str, float]:
    """Mean over every target that is not -100: {"loss": nats, "accuracy": share of right answers, if asked for}.

    inputs, targets (B, N) on the CPU; the model returns .loss for (inputs, targets) and .logits for inputs alone.
    """
    was_training = model.training
    model.eval()
    total_loss = total_right = 0.0
    count = int((targets != -100).sum())
    for x, y in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
        x, y = x.to(device), y.to(device)
        with autocast:
            total_loss += model(x, y).loss.item() * int((y != -100).sum())
            if accuracy:
                total_right += int((model(x).logits.argmax(-1) == y).sum())
    model.train(was_training)
    return {"loss": total_loss / count} | ({"accuracy": total_right / count} if accuracy else {})
