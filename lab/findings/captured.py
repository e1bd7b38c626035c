"""The q, k and v inside the models of runs, and the results of an attention on them.

Dimensions: B sequences, H heads, N tokens, D head dim.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention import AttentionOutput, Backend, attention
from attention.tiled import TiledAttention, TileLoop
from conformance.cases import run
from model import GPT
from scripts.agree import load
from training.run import build_run
from training.trained import read_run_config


class Weights(NamedTuple):
    """The model of a run at one step, and held-out sequences for it."""

    model: GPT
    inputs: Tensor  # (B, N)
    targets: Tensor  # (B, N)


class Captured(NamedTuple):
    """The inputs of one layer's attention, and the gradient of its output."""

    q: Tensor  # (B, H, N, D)
    k: Tensor  # (B, H, N, D)
    v: Tensor  # (B, H, N, D)
    d_out: Tensor  # (B, H, N, D)


def weights_of(
    run: Path, sequences: int, device: torch.device, *, initial: bool = False
) -> Weights:
    """The final weights of a run, or its initial ones."""
    trained, inputs, targets, _ = load(run, device, "fp32", sequences)
    model = build_run(read_run_config(run)).model if initial else trained.model
    return Weights(model.to(device).eval(), inputs, targets)


def capture(weights: Weights, backend: Backend) -> list[Captured]:
    """The inputs and output gradient of each layer's attention with this backend, for the summed
    loss of the sequences.
    """
    kept: list[list[Tensor]] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> AttentionOutput:
        found = attention(q, k, v, backend=backend, **mask)
        tensors = [x.detach() for x in (q, k, v)]
        kept.append(tensors)
        found.out.register_hook(partial(keep, tensors))
        return AttentionOutput(found.out, found.lse)

    def keep(tensors: list[Tensor], gradient: Tensor) -> None:
        tensors.append(gradient.detach())

    watching = Backend("watched", watched, features=frozenset({"lse"}), exact=False)
    model, inputs, targets = weights
    with model.use_backend(watching):
        (len(inputs) * model(inputs, targets).loss).backward()
    model.zero_grad()
    return [Captured(*tensors) for tensors in kept]


def in_bfloat16(loop: Callable[..., TileLoop]) -> Callable[..., AttentionOutput]:
    """A Backend's fn that rounds q, k and v to bfloat16 and computes out and lse with this loop."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> AttentionOutput:
        out, lse = TiledAttention(loop)(*(x.bfloat16() for x in (q, k, v)), **settings)
        return AttentionOutput(out.to(q.dtype), lse)

    return attend


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """The causal scores (B, H, N, N) of q and k rounded to bfloat16."""
    q, k = (x.bfloat16().float() for x in (q, k))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -torch.inf)


def called(layer: Captured, backend: str | Backend, dtype: torch.dtype) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv in float64, from q, k and v rounded to bfloat16 and passed as dtype."""
    tensors = [x.bfloat16().to(dtype) for x in layer[:3]]
    return run(backend, tensors, {}, layer.d_out.to(dtype).double(), None)
