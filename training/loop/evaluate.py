"""Held-out loss and accuracy of one set of weights, under its own or any other attention."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from math import log
from typing import Any

import torch
from torch import Tensor

from attention import Backend, get_backend
from data.interface import IGNORED
from model.gpt import GPT
from training.loop.ranks import ALONE, Ranks


def evaluate(
    model: GPT,
    *batch: Tensor,
    accuracy: bool,
    bytes_per_token: float | None = None,
    also: Mapping[str, Backend] | None = None,
    ranks: Ranks = ALONE,
    **options: Any,
) -> dict[str, float]:
    """Returns val/loss in nats, and val/loss_exact of the same weights under exact attention.

    Exact attention gets the model's windows, softcap, ... too. One loss curve does not show that
    an attention is broken; the difference of the two does. `accuracy` adds val/accuracy and
    val/accuracy_exact. `bytes_per_token`, of the targets, adds val/bpb and val/bpb_exact, the
    losses in bits per byte. `also` adds attentions, by the suffix of their columns.
    See evaluate_under() for the batch and the options.
    """
    device = next(model.parameters()).device
    features = model.attention_features | ({"document_ids"} if len(batch) == 3 else set())
    exact = exact_attention(model.config.head_dim, device, features)
    row = {}
    for suffix, attention in {"": model.backend, "_exact": exact, **(also or {})}.items():
        loss, share = evaluate_under(
            model, attention, *batch, accuracy=accuracy, ranks=ranks, **options
        )
        row[f"val/loss{suffix}"] = loss
        if accuracy:
            row[f"val/accuracy{suffix}"] = share
        if bytes_per_token is not None:
            row[f"val/bpb{suffix}"] = loss / log(2) / bytes_per_token
    return row


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
    loss, right = (sum(column) for column in ranks.sum(sums).T.tolist())
    return loss / count, right / count if accuracy else None
