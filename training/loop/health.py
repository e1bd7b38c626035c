"""Watches a model's attention while it trains: largest score, error, and where a run broke."""

import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain

import torch
from torch import Tensor

from attention import (
    BACKENDS,
    LIMITS,
    Backend,
    Recorder,
    compare_with_exact,
    dtype_name,
)
from config import Due
from model.gpt import GPT
from training.loop.evaluate import without_dropout
from training.loop.run import Run
from training.record.clock import phase
from training.record.files import Row
from training.record.memory import is_out_of_memory

log = logging.getLogger("tilegpt")
# compare and diagnose at most this many tokens: the tile loop is quadratic in length, and under a
# causal mask a prefix has the same scores as in the full sequence
MAX_INSPECTED = 8192


class AttentionMonitor:
    """Looks at a run's attention, step by step, and notes in `summary` how large its scores became.

    `rows` are the rows of metrics.jsonl that a resumed run continues.
    """

    def __init__(self, run: Run, rows: Iterable[Row], summary: Row) -> None:
        self.run, self.model, self.summary = run, run.model, summary
        self.scores = {  # the largest attention score of each logged step
            row["step"]: row["attention/max_score"]
            for row in rows
            if row.get("attention/max_score") is not None
        }
        self.has_room = True  # enough memory for compare_layers()
        self._tell()

    @phase("looking")
    def inspect(self, step: int, max_scores: list[list[float]] | None, due: Due) -> Row:
        """The attention's part of a row of metrics: the largest scores (num_layers, H) of the step
        and compare_layers(), each if it is due.

        attention/max_score is the largest finite score of the step's whole batch, and
        attention/max_score_by_head that of each layer and head, None if it is not finite.
        """
        row = self._compare(step) if due.compare else {}
        if not max_scores or not (due.log or due.compare):
            return row
        largest = largest_finite(chain(*max_scores))
        self._note(step, largest)
        by_head = [
            [float(f"{score:.6g}") if math.isfinite(score) else None for score in layer]
            for layer in max_scores
        ]
        return row | {"attention/max_score": largest, "attention/max_score_by_head": by_head}

    def _compare(self, step: int) -> dict[str, float]:
        """compare_layers() on at most MAX_INSPECTED tokens of the step's first sequence."""
        # an attention that computes another function cannot be compared with softmax attention
        if not (self.has_room and self.model.backend.claims_softmax):
            return {}
        batch = [x[:1, :MAX_INSPECTED] for x in self.run.sequences(step)[0]]
        # its part of the loss of the whole step, as float16 has it
        loss_scale = self.run.scaler.get_scale() * batch[0].numel() / self.run.tokens_per_step
        try:
            with self.run.autocast:
                return compare_layers(self.model, *batch, loss_scale=loss_scale)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # the run itself fits, so it must not end because of its inspection
        self.has_room = False
        log.warning(
            f"step {step}: no memory left to compare the attention with exact attention; "
            "diagnose_every=0 does not try"
        )
        return {}

    @phase("looking")
    def diagnose(self, step: int) -> Row:
        """How this step diverged, for summary.json: diagnose() and the history of the scores."""
        with self.run.autocast:
            found, score = diagnose(self.model, self.run.sequences(step))
        self._note(step, score)
        history = [list(item) for item in self.scores.items()]
        return {"step": step, **found, "max_score": score, **self._overflows(), "history": history}

    def _note(self, step: int, score: float) -> None:
        """Record the score; warn where it is the first to pass a limit of exp."""
        previous = max(self.scores.values(), default=-math.inf)
        passed = [
            f"{limit:.2f} ({dtype_name(dtype)})"
            for dtype, limit in LIMITS.items()
            if previous <= limit < score
        ]
        if passed:
            log.warning(
                f"step {step}: attention/max_score {score:.2f} passed {', '.join(passed)}: "
                "exp(score) overflows there unless the maximum is subtracted"
            )
        if math.isfinite(score):
            self.scores[step] = max(score, self.scores.get(step, -math.inf))
        self._tell()

    def _tell(self) -> None:
        if self.scores:
            self.summary |= {"max_score": max(self.scores.values()), **self._overflows()}

    def _overflows(self) -> dict[str, int | None]:
        """The first logged step where exp(score) would have overflowed each dtype."""
        return {
            f"{dtype_name(dtype)}_overflow_step": next(
                (step for step, score in self.scores.items() if score > limit), None
            )
            for dtype, limit in LIMITS.items()
        }


def largest_finite(scores: Iterable[float]) -> float:
    return max((score for score in scores if math.isfinite(score)), default=-math.inf)


def compare_layers(model: GPT, *batch: Tensor, loss_scale: float = 1.0) -> dict[str, float]:
    """attention/{out,dq,dk,dv}_{error,cosine} of the worst layer, against float64 attention.

    Each layer is compared on its own q, k, v and gradient of the output, for the loss of this
    batch: inputs, targets and, with documents, document_ids, each (B, N); see compare_with_exact().
    float16 needs loss_scale, which multiplies the loss. Takes the memory of an uncompiled forward
    and backward pass. Gradients of parameters do not change.
    """
    recorder = Recorder(model.backend, keep_calls=True)
    with without_dropout(model), torch.enable_grad():
        with model.using(backend=recorder.backend):
            loss = model(*batch).loss
        d_outs = torch.autograd.grad(loss * loss_scale, [call.out for call in recorder.calls])
    layers = [
        compare_with_exact(call.q, call.k, call.v, d_out, backend=model.backend, **call.arguments)
        for call, d_out in zip(recorder.calls, d_outs, strict=True)
    ]
    row = {}
    for name in layers[0]:
        # NaN counts as the worst, and both functions return it
        worst = torch.amin if name.endswith("cosine") else torch.amax
        figures = torch.tensor([layer[name] for layer in layers], dtype=torch.float64)
        row[f"attention/{name}"] = worst(figures).item()
    return row


@torch.no_grad()
def diagnose(model: GPT, batches: Sequence[tuple[Tensor, ...]]) -> tuple[Row, float]:
    """Finds what first became non-finite in a diverged step. Returns a diagnosis, and the largest
    finite score of the passes until then.

    The diagnosis has a one-sentence message. If an attention layer is to blame, it also has layer,
    head, sequence (of the step), tensor, queries and keys (of the tile), row (the query),
    tile_max_score and fate (the output); see attention.Breakdown. batches: the inputs, targets and,
    with documents, document_ids of the step, each (B, N).
    """
    # the tile loop shows where an attention breaks; a kernel, only that its output is bad
    loop = _loop_of(model.backend) if batches[0][0].shape[1] <= MAX_INSPECTED else None
    for backend in filter(None, (loop, model.backend)):
        recorder, loss_is_finite = Recorder(backend), True
        with model.using(backend=recorder.backend), without_dropout(model):
            for batch in batches:
                loss_is_finite &= bool(model(*batch).loss.isfinite())
                if any(recorder.breakdowns):
                    break
        if any(recorder.breakdowns):
            break
    found = _first_failure(model, recorder, batches, loss_is_finite)
    return found, largest_finite(torch.stack(recorder.max_scores).tolist())


def _loop_of(kernel: Backend) -> Backend | None:
    """The tile loop that computes what this kernel computes, with its options; None if there is
    none, or if `kernel` is a tile loop itself.
    """
    loop = BACKENDS.get(kernel.name)
    if kernel.observable or loop is None or not loop.observable:
        return None
    options = {name: value for name, value in kernel.options.items() if name in loop.options}
    return loop.configured(**options)


def _first_failure(
    model: GPT, recorder: Recorder, batches: Sequence[tuple[Tensor, ...]], loss_is_finite: bool
) -> Row:
    for call, breakdown in enumerate(recorder.breakdowns):
        if breakdown is None:
            continue
        number, layer = divmod(call, len(model.blocks))
        place = asdict(breakdown)
        place["tile_max_score"] = place.pop("max_score")
        place["sequence"] += sum(len(inputs) for inputs, *_ in batches[:number])
        output = f"; out is {breakdown.fate} there" if breakdown.queries is not None else ""
        message = f"layer {layer}, head {breakdown.head}: {breakdown}{output}"
        return {"message": message, "layer": layer} | place
    if not loss_is_finite:
        message = "the loss is not finite, though the output of every attention layer is"
        return {"message": message, "tensor": "loss"}
    bad = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not parameter.grad.isfinite().all()
    ]
    if bad:
        # backward starts at the end of the model, so the last of them is nearest to the cause
        layer = re.match(r"blocks\.(\d+)\.", bad[-1])
        return {
            "message": f"the loss is finite, the gradient is not: {len(bad)} "
            f"tensor{'s' * (len(bad) > 1)}, {bad[-1]} nearest to the loss",
            "tensor": f"gradient of {bad[-1]}",
            "layer": int(layer[1]) if layer else None,
        }
    device = next(model.parameters()).device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
        # the gradients of the last try are gone
        message = "the loss scale fell below 1: gradients overflowed float16 at every step"
    else:
        message = "the loss and every gradient are finite, the sum of the gradients' squares is not"
    return {"message": message}
