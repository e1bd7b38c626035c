"""Held-out loss and accuracy of one set of weights, under its own or any other attention."""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from attention import Backend, get_backend
from data.interface import IGNORED
from model.gpt import GPT
from training.loop.ranks import ALONE, Ranks


@contextmanager
def without_dropout(model: GPT) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def exact_attention(head_dim: int, device: torch.device, features: Collection[str] = ()) -> Backend:
    """PyTorch's own attention: sdpa, or flex on a GPU for the features that sdpa does not have,
    such as document_ids or window.

    Our tile loop replaces flex on a CPU, where flex would materialise the scores, and for heads
    smaller than 16, which flex does not take.
    """
    if not features:
        return get_backend("sdpa")
    flex = get_backend("flex")
    return flex if device.type == "cuda" and head_dim in flex.head_dims else get_backend("tiled")


@torch.no_grad()
def evaluate_under(
    model: GPT,
    attention: Backend,
    *batch: Tensor,
    batch_size: int,
    autocast: AbstractContextManager,
    accuracy: bool,
    ranks: Ranks = ALONE,
) -> tuple[float, float | None]:
    """Loss (nats) and, with accuracy, accuracy of these weights under `attention`.

    batch: inputs, targets and, for attention inside documents, document_ids, (B, N) on the CPU.
    Both results are means over all targets other than -100. If the loss of one pass is not finite,
    neither is the mean. Ranks divide the passes among them, or each pass's tokens if they share
    sequences, and every rank gets the means over all.
    """
    device, targets = next(model.parameters()).device, batch[1]
    count = int((targets != IGNORED).sum())
    if not count:
        raise ValueError(
            f"none of the {targets.numel()} held-out targets counts; take more of them with "
            "eval_sequences= or seq_len="
        )
    parts = list(zip(*(x.split(batch_size) for x in batch), strict=True))
    sums = torch.zeros(len(parts), 2, dtype=torch.float64)  # losses, right answers
    columns = ranks.columns(targets.shape[1])
    with model.using(backend=attention, call=ranks.attention), without_dropout(model), autocast:
        for i in range(ranks.rank // ranks.context, len(parts), ranks.data):
            x, y, *documents = (tensor.to(device) for tensor in parts[i])
            x, y = x[:, columns], y[:, columns]
            place = {"positions": ranks.positions(x)}
            sums[i, 0] = model(x, y, *documents, **place).loss.item() * int((y != IGNORED).sum())
            if accuracy:
                logits = model(x, None, *documents, **place).logits
                sums[i, 1] = int((logits.argmax(-1) == y).sum())
    # summed in the order of the passes, so the result is the same on any number of ranks
    loss, right = (sum(column) / count for column in ranks.sum(sums).T.tolist())
    return loss, right if accuracy else None
