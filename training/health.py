"""Looking into a model's attention while it trains: the largest score, the distance from exact
attention, and where a run broke.
"""

import contextlib
import logging
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention import (
    BACKENDS,
    LIMITS,
    Backend,
    Breakdown,
    Recorder,
    compare_with_exact,
    dtype_name,
    find_breakdown,
)
from model.gpt import GPT
from training.memory import is_out_of_memory

log = logging.getLogger("tilegpt")
# what the loop of tiles looks at whole, since it takes as long as the square of it: a row of
# metrics sees no more of a sequence, whose beginning has the causal scores that it has in the whole
LOOKED_AT = 8192


class AttentionMonitor:
    """What is known of a run's attention, step by step; rows are those of metrics.jsonl that a
    resumed run goes on from.
    """

    def __init__(
        self,
        model: GPT,
        autocast: AbstractContextManager,
        rows: Iterable[dict[str, Any]] = (),
    ) -> None:
        self.model = model
        self.autocast = autocast  # of the training steps
        self.scores = {
            row["step"]: row["attention/max_score"]
            for row in rows
            if row.get("attention/max_score") is not None
        }
        self.has_room = True

    def inspect(
        self,
        step: int,
        inputs: Tensor,
        targets: Tensor,
        document_ids: Tensor | None = None,
        *,
        compare: bool,
        loss_scale: float = 1.0,
    ) -> dict[str, float]:
        """attention/max_score and, with compare, compare_layers() for one row of metrics.

        Tensors (B, N) as the model takes them, of which the first LOOKED_AT tokens of the first
        sequence are looked at. loss_scale: what one whole sequence weighs in the loss of the step.
        """
        loss_scale *= min(LOOKED_AT, inputs.shape[1]) / inputs.shape[1]
        inputs, targets, document_ids = (
            None if x is None else x[:1, :LOOKED_AT] for x in (inputs, targets, document_ids)
        )
        row = {}
        if compare and self.has_room:
            try:
                with self.autocast:
                    row = compare_layers(
                        self.model, inputs, targets, document_ids, loss_scale=loss_scale
                    )
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # the run itself fits: it shall not end for being looked at
                self.has_room = False
                log.warning(
                    f"step {step}: no memory left to compare the attention with exact attention; "
                    "diagnose_every=0 does not try"
                )
        with self.autocast:
            score = largest_score(self.model, inputs, document_ids)
        self._note(step, score)
        return row | {"attention/max_score": score}

    def diagnose(self, step: int, batches: Iterable[tuple[Tensor, ...]]) -> dict[str, Any]:
        """How this step went wrong, for summary.json: diagnose() of its batches, with the largest
        scores on the way there.
        """
        with self.autocast:
            found, score = diagnose(self.model, batches)
        self._note(step, score)
        return (
            {"step": step}
            | found
            | {
                "max_score": score,
                **self.overflow_steps(),
                "history": [list(x) for x in self.scores.items()],
            }
        )

    def summary(self) -> dict[str, Any]:
        return (
            {"max_score": max(self.scores.values()), **self.overflow_steps()} if self.scores else {}
        )

    def overflow_steps(self) -> dict[str, int | None]:
        """The first step known where exp(score) would have passed the largest number of each dtype.

        Known are the steps that were looked at, and of those the beginning of one sequence; the
        step that went wrong card() looks at whole.
        """
        return {
            f"{dtype_name(dtype)}_overflow_step": next(
                (step for step, score in self.scores.items() if score > limit), None
            )
            for dtype, limit in LIMITS.items()
        }

    def _note(self, step: int, score: float) -> None:
        """Keep the score, and say so where it is the first to pass a limit of exp."""
        previous = max(self.scores.values(), default=-math.inf)
        passed = [
            f"{limit:.2f} ({dtype_name(dtype)})"
            for dtype, limit in LIMITS.items()
            if previous <= limit < score
        ]
        if passed:
            limits = ", ".join(passed)
            log.warning(
                f"step {step}: attention/max_score {score:.2f} passed {limits}: exp(score) "
                "overflows there unless the maximum is subtracted"
            )
        if math.isfinite(score):
            self.scores[step] = max(score, self.scores.get(step, -math.inf))


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
def largest_score(model: GPT, tokens: Tensor, document_ids: Tensor | None = None) -> float:
    """The largest finite attention score of any layer for tokens, document_ids (B, N); a layer
    after a breakdown has none.
    """
    recorder = Recorder(model.backend)

    def attend(*tensors: Tensor, **arguments: Any) -> Any:
        output = recorder.backend.fn(*tensors, **arguments)
        if len(recorder.max_scores) == len(model.blocks):
            raise _Seen
        return output

    with (
        model.use_backend(replace(recorder.backend, fn=attend)),
        without_dropout(model),
        contextlib.suppress(_Seen),
    ):
        model(tokens, document_ids=document_ids)
    return largest_finite(recorder.max_scores)  # the one wait for the GPU


class _Seen(Exception):
    """Every layer has been looked at: the rest of the forward pass, the logits above all, has
    nothing more to say.
    """


def largest_finite(scores: list[Tensor]) -> float:
    return torch.stack(scores).nan_to_num(nan=-torch.inf, posinf=-torch.inf).max().item()


def compare_layers(
    model: GPT,
    inputs: Tensor,
    targets: Tensor,
    document_ids: Tensor | None = None,
    *,
    loss_scale: float = 1.0,
) -> dict[str, float]:
    """attention/{out,dq,dk,dv}_{error,cosine}: the model's attention against exact attention in
    float64, in its worst layer.

    Each layer has its real q, k, v and the real gradient of the loss (times loss_scale, which
    float16 needs) for inputs, targets and document_ids (B, N); see compare_with_exact(). Takes the
    memory of a forward and backward pass that is not compiled; the parameters' gradients stay as
    they are.
    """
    recorder = Recorder(model.backend, keep_calls=True)
    with without_dropout(model), torch.enable_grad():
        with model.use_backend(recorder.backend):
            loss = model(inputs, targets, document_ids).loss
        # what checkpointing computes again for this runs without the recorder: one call a layer
        # stays one
        d_outs = torch.autograd.grad(loss * loss_scale, [call.out for call in recorder.calls])
    layers = [
        compare_with_exact(
            call.q,
            call.k,
            call.v,
            d_out,
            backend=model.backend,
            causal=call.causal,
            scale=call.scale,
            document_ids=call.document_ids,
        )
        for call, d_out in zip(recorder.calls, d_outs, strict=True)
    ]
    row = {}
    for name in layers[0]:
        # a NaN is the worst of all, and both keep it
        worst = torch.amin if name.endswith("cosine") else torch.amax
        row[f"attention/{name}"] = worst(
            torch.tensor([layer[name] for layer in layers], dtype=torch.float64), 0
        ).item()
    return row


@torch.no_grad()
def diagnose(model: GPT, batches: Iterable[tuple[Tensor, ...]]) -> tuple[dict[str, Any], float]:
    """What left the finite range first, as far as it can be named, and the largest finite score of
    the step up to there.

    message, one sentence, is always there; layer, head, sequence (of the step), tensor, queries and
    keys (of the tile), row (the query), tile_max_score and fate (what came out) where an attention
    layer is to blame; see attention.diagnose.Breakdown. batches: inputs, targets and, with
    documents, document_ids, each (B, N), of the step that went wrong.
    """
    batches = list(batches)
    twin = _observable_twin(model.backend)
    # a kernel says that its output is bad, the loop that computes the same says where
    looped = [twin] if twin and batches[0][0].shape[1] <= LOOKED_AT else []
    for backend in (*looped, model.backend):
        recorder = Recorder(backend, look_for_breakdowns=True)
        loss_is_finite = True
        with (
            model.use_backend(_until_a_breakdown(recorder, twin)),
            without_dropout(model),
            contextlib.suppress(_Found),
        ):
            loss_is_finite = all([bool(model(*batch).loss.isfinite()) for batch in batches])
        if any(recorder.breakdowns):
            break
    return _first_breakdown(
        model, recorder, [len(batch[0]) for batch in batches], loss_is_finite
    ), largest_finite(recorder.max_scores)


def _observable_twin(backend: Backend) -> Backend | None:
    """The tile loop of that name with these options, where `backend` is another implementation of
    it.
    """
    twin = BACKENDS.get(backend.name)
    if backend.observable or twin is None or not twin.observable:
        return None
    return twin.configured(
        **{name: value for name, value in backend.options.items() if name in twin.options}
    )


class _Found(Exception):
    """A recorder has found a breakdown."""


def _until_a_breakdown(recorder: Recorder, twin: Backend | None) -> Backend:
    """The recorder's backend, which ends the model's forward pass at a breakdown: what comes after
    has nothing more to say.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
        output = recorder.backend.fn(q, k, v, **arguments)
        found = recorder.breakdowns[-1]
        if found is None:
            return output
        if twin is not None and found.tensor == "out":
            arguments = {
                name: value
                for name, value in arguments.items()
                if name not in recorder.backend.options
            }
            recorder.breakdowns[-1] = _in_its_tile(found, q, k, v, twin, **arguments)
        raise _Found

    return replace(recorder.backend, fn=attend)


def _in_its_tile(
    found: Breakdown, q: Tensor, k: Tensor, v: Tensor, twin: Backend, **arguments: Any
) -> Breakdown:
    """What the loop of tiles says of the tile of queries in which a kernel's output is bad, or
    `found` where it has nothing to say.
    """
    if not arguments["causal"] or arguments.get("document_ids") is not None:
        return found  # these queries cannot be cut out
    first = found.row // twin.options["block_q"] * twin.options["block_q"]
    rows = slice(first, first + twin.options["block_q"])
    # a causal mask is aligned with the last key
    keys = slice(min(rows.stop, q.shape[2]) + k.shape[2] - q.shape[2])
    tile = find_breakdown(q[:, :, rows], k[:, :, keys], v[:, :, keys], backend=twin, **arguments)
    if tile is None or tile.queries is None:
        return found
    return replace(
        tile, queries=(first + tile.queries[0], first + tile.queries[1]), row=first + tile.row
    )


def _first_breakdown(
    model: GPT, recorder: Recorder, sizes: list[int], loss_is_finite: bool
) -> dict[str, Any]:
    for call, found in enumerate(recorder.breakdowns):
        if found is not None:
            passes, layer = divmod(call, len(model.blocks))
            came_out = f"; out is {found.fate} there" if found.queries is not None else ""
            return {
                "message": f"layer {layer}, head {found.head}: {found}{came_out}",
                "layer": layer,
                "head": found.head,
                "sequence": sum(sizes[:passes]) + found.sequence,
                "row": found.row,
                "queries": found.queries,
                "keys": found.keys,
                "tensor": found.tensor,
                "fate": found.fate,
                "tile_max_score": found.max_score,
            }
    if not loss_is_finite:
        return {
            "message": "the loss is not finite, though the output of every attention layer is",
            "tensor": "loss",
        }
    bad = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not parameter.grad.isfinite().all()
    ]
    if bad:
        # gradients come from the end of the model: the last of them is nearest to where it began
        layer = re.match(r"blocks\.(\d+)\.", bad[-1])
        message = (
            f"the loss is finite, the gradient is not: {len(bad)} tensor{'s' * (len(bad) > 1)}, "
            f"{bad[-1]} nearest to the loss"
        )
        return {
            "message": message,
            "tensor": f"gradient of {bad[-1]}",
            "layer": int(layer[1]) if layer else None,
        }
    return {"message": "the loss scale fell below 1: gradients overflowed float16 at every step"}
