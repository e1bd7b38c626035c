"""Held-out loss and accuracy of one set of weights, under its own attention, exact attention, or
any other.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from attention import Backend, get_backend
from data.interface import IGNORED
from model.gpt import GPT


@torch.no_grad()
def evaluate(
    model: GPT,
    inputs: Tensor,
    targets: Tensor,
    document_ids: Tensor | None = None,
    *,
    batch_size: int,
    autocast: AbstractContextManager,
    accuracy: bool,
    also: Mapping[str, Backend] | None = None,
) -> dict[str, float]:
    """val/loss (nats) and, if asked for, val/accuracy; each also as _exact: the same weights with
    PyTorch's own attention.

    A loss curve alone does not show a broken attention; the distance between the two does. `also`
    adds further judges, by the suffix of their columns. Means are over every target that is not
    -100. inputs, targets and, for attention inside documents, document_ids (B, N) on the CPU.
    """
    device = next(model.parameters()).device
    exact = exact_judge(model.config.head_dim, device, documents=document_ids is not None)
    judges = {"": model.backend, "_exact": exact, **(also or {})}
    row = {}
    for suffix, judge in judges.items():
        loss, right = judged(
            model,
            judge,
            inputs,
            targets,
            document_ids,
            batch_size=batch_size,
            autocast=autocast,
            accuracy=accuracy,
        )
        row[f"val/loss{suffix}"] = loss
        if accuracy:
            row[f"val/accuracy{suffix}"] = right
    return row


def exact_judge(head_dim: int, device: torch.device, *, documents: bool) -> Backend:
    """PyTorch's own attention: sdpa, or for documents, which that cannot mask, flex on a GPU.

    On a CPU flex would materialise the scores, and it takes no head smaller than 16: our tile loop
    stands in for it there.
    """
    if not documents:
        return get_backend("sdpa")
    flex = get_backend("flex")
    return flex if device.type == "cuda" and head_dim in flex.head_dims else get_backend("tiled")


@torch.no_grad()
def judged(
    model: GPT,
    judge: Backend,
    inputs: Tensor,
    targets: Tensor,
    document_ids: Tensor | None = None,
    *,
    batch_size: int,
    autocast: AbstractContextManager,
    accuracy: bool,
) -> tuple[float, float | None]:
    """Loss (nats) and, if asked for, accuracy of these weights under the attention `judge`; NaN
    where the loss is not finite.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    count = int((targets != IGNORED).sum())
    if not count:
        raise ValueError(
            f"none of the {targets.numel()} held-out targets counts; take more of them with "
            "eval_sequences= or seq_len="
        )
    total_loss = total_right = 0.0
    with model.use_backend(judge), autocast:
        batch = [x for x in (inputs, targets, document_ids) if x is not None]
        for part in zip(*(x.split(batch_size) for x in batch), strict=True):
            x, y, *documents = (tensor.to(device) for tensor in part)
            total_loss += model(x, y, *documents).loss.item() * int((y != IGNORED).sum())
            if accuracy:
                total_right += int((model(x, None, *documents).logits.argmax(-1) == y).sum())
    model.train(was_training)
    return total_loss / count, total_right / count if accuracy else None
