"""Looking into a model's attention while it trains: the largest score, and where a run left the finite range."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from attention import LIMITS, Recorder
from model.gpt import GPT


@contextmanager
def without_dropout(model: GPT) -> Iterator[None]:
    """Looking must draw no random numbers, or a run would depend on how often it was looked at."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def largest_score(model: GPT, tokens: Tensor) -> float:
    """The largest finite attention score of any layer for tokens (B, N); a layer after a breakdown has none."""
    recorder = Recorder(model.backend)
    with model.use_backend(recorder.backend), without_dropout(model):
        model(tokens)
    return largest_finite(recorder.max_scores)


def largest_finite(scores: list[Tensor]) -> float:
    return torch.stack(scores).nan_to_num(nan=-torch.inf, posinf=-torch.inf).max().item()


def overflow_warning(score: float, previous: float) -> str | None:
    """One sentence where `score` is the first to pass a limit of exp, else None."""
    passed = {str(dtype).removeprefix("torch."): limit for dtype, limit in LIMITS.items() if previous <= limit < score}
    if not passed:
        return None
    limits = ", ".join(f"{limit:.2f} ({name})" for name, limit in passed.items())
    return f"attention/max_score {score:.2f} passed {limits}: exp(score) overflows there unless the maximum is subtracted"


@torch.no_grad()
def diagnose(model: GPT, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[str, float]:
    """Which tensor of which layer, and which tile, left the finite range first; and the largest finite score of the whole step.

    batches: (inputs, targets), each (B, N), of the step that went wrong.
    """
    recorder = Recorder(model.backend, look_for_breakdowns=True)
    with model.use_backend(recorder.backend), without_dropout(model):
        loss_is_finite = all([model(inputs, targets).loss.isfinite() for inputs, targets in batches])
    return _first_breakdown(model, recorder, loss_is_finite), largest_finite(recorder.max_scores)


def _first_breakdown(model: GPT, recorder: Recorder, loss_is_finite: bool) -> str:
    for call, breakdown in enumerate(recorder.breakdowns):
        if breakdown is not None:
            return f"layer {call % len(model.blocks)}: {breakdown}"
    if not loss_is_finite:
        return "the loss is not finite, though the output of every attention layer is"
    bad = [name for name, parameter in model.named_parameters() if parameter.grad is not None and not parameter.grad.isfinite().all()]
    if bad:
        return f"the loss is finite, the gradient is not: {len(bad)} tensors, {bad[0]} among them"
    return "the loss scale fell below 1: gradients overflowed float16 at every step"
