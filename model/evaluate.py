"""Held-out loss and accuracy, under the model's own attention and under exact attention."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from attention import get_backend
from model.gpt import GPT


@torch.no_grad()
def evaluate(
    model: GPT, inputs: Tensor, targets: Tensor, *, batch_size: int, autocast: AbstractContextManager, accuracy: bool
) -> dict[str, float]:
    """val/loss (nats) and, if asked for, val/accuracy; each also as _exact: the same weights with PyTorch's own attention.

    A loss curve alone does not show a broken attention; the distance between the two does. Means are over every target that is not
    -100. inputs, targets (B, N) on the CPU.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    count = int((targets != -100).sum())
    row = {}
    for suffix, judge in (("", model.backend), ("_exact", get_backend("sdpa"))):
        total_loss = total_right = 0.0
        with model.use_backend(judge), autocast:
            for x, y in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
                x, y = x.to(device), y.to(device)
                total_loss += model(x, y).loss.item() * int((y != -100).sum())
                if accuracy:
                    total_right += int((model(x).logits.argmax(-1) == y).sum())
        row[f"val/loss{suffix}"] = total_loss / count
        if accuracy:
            row[f"val/accuracy{suffix}"] = total_right / count
    model.train(was_training)
    return row
