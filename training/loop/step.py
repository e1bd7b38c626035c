"""Takes the steps of a run. Each step is queued before the host looks at the one before it.

train.py and scripts.profile both run this code.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from attention import Backend
from config import Due
from data.prefetch import Pass
from model.seam import LOOKING
from training.launch.interrupt import Interrupt
from training.loop.graph import StepGraphs
from training.loop.optimizer import learning_rate, set_learning_rate
from training.loop.ranks import ALONE, GradientSum, Ranks
from training.loop.schedule import backend_after, prepare_model, run_compiles, will_graph
from training.record.memory import MemoryMeter
from training.record.phases import phase
from training.record.starts import FIRST_START, Start
from training.record.throughput import Throughput, flops_per_token, peak_flops

if TYPE_CHECKING:
    from training.loop.run import Run


class PendingStep(NamedTuple):
    """A step that is queued on the device; the host has not waited for its loss."""

    passes: Sequence[Pass]
    loss_and_norm: Tensor  # the loss and the norm of the gradients, on the device
    # waits for the same two on the host, and for the largest scores after them if they are due
    figures: Callable[[], list[float]]
    updated: bool  # whether the optimizer's step is queued too


NEVER = Interrupt()  # not entered, so it hears no signal


class StepResult(NamedTuple):
    """A step whose loss the host knows."""

    step: int  # how many are done, this one included
    tokens: int  # of all steps so far
    loss: float  # nats, the mean over the step's passes
    lr: float
    grad_norm: float  # before clipping
    max_scores: list[list[float]] | None  # of each layer and head; None if no row is due
    passes: Sequence[Pass]  # of this rank
    sequences: Callable[[], Sequence[Pass]]  # passes with whole sequences, if ranks share them
    loss_scale: float  # the weight of one sequence in the loss that was differentiated
    updated: bool  # whether the weights have moved already
    diverged: bool
    finished: bool  # whether this is the last step, or a diverged one
    last: bool  # whether the run ends here: finished, or stopped
    due: Due


class Stepper:
    """Takes the steps of a run. A context manager that on exit stops the thread that reads ahead.

    with Stepper(run, start) as stepper:
        for result in stepper.steps():  # if nothing is due, the next step is queued already
            ...                         # the clock of step_tokens_per_sec is stopped here
            stepper.update(result)
    """

    def __init__(self, run: "Run", start: Start = FIRST_START) -> None:
        self.run, self.start = run, start
        self.batches = run.batches()
        self.optim = run.config.optimizer()
        self.step_args = {
            "optimizer": run.optimizer,
            "scaler": run.scaler,
            "autocast": run.autocast,
            "grad_clip": self.optim.grad_clip,
            "ranks": run.ranks,
        }
        flops = {
            "mfu": flops_per_token(run.model, run.config.seq_len),
            "mfu_causal": flops_per_token(run.model, run.config.seq_len, causal=True),
        }
        peak = peak_flops(run.device, run.dtype)
        peak = peak and peak * run.ranks.world
        self.throughput = Throughput(run.device, flops_per_token=flops, peak=peak)
        self.memory = MemoryMeter(run.device, run.ranks)
        self.done = start.step
        self.use_attention(backend_after(run.schedule, start.step))

    def __enter__(self) -> "Stepper":
        self.batches.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.graphs is not None:  # an error's traceback may still refer to it
            self.graphs.drop()
        self.batches.__exit__(*error)

    @property
    def compiled(self) -> bool:
        return run_compiles(self.run.config, self.run.model.backend, self.run.device.type)

    def use_attention(self, backend: Backend) -> None:
        """Train with this attention from here on; the speed excludes the compilation."""
        self.model = prepare_model(self.run.model, backend, compile_mode=self.run.config.compile)
        self.throughput.warm_up()
        graphed = will_graph(self.run.config, backend, dtype=self.run.dtype, device=self.run.device)
        looks = "max_score" in backend.features
        self.graphs = StepGraphs(compute_gradients, looks=looks) if graphed else None
        # the second step from here is compiled, has the optimizer's state, and is not timed
        self.measured_step = min(self.done + 1, self.run.config.steps - 1)
        # the third is not timed either; it looks for scores, so that this compiles untimed too
        self.looking_step = self.done + 2

    def steps(self, stop: Interrupt = NEVER) -> Iterator[StepResult]:
        """Yield a result per step, until the last step, a diverged one, or stop.requested."""
        config, heads = self.run.config, self.run.config.model.num_heads
        any_rank = self.run.ranks.any  # one that stops alone would leave the others waiting
        step, ahead = self.start.step, None
        while step < config.steps:
            pending = ahead or self._queue(step)
            ahead = None
            if pending.updated and not any_rank(stop.requested):
                ahead = self._queue(step + 1, before=pending)
            with record_function("optimizer"), phase("training", f"step {step + 1}"):
                loss, grad_norm, *scores = pending.figures()  # the one wait for the GPU
                self.run.ranks.check()
            step = self.done = step + 1
            scale = self.run.scaler.get_scale()
            diverged = self._diverged(loss, grad_norm, scale)
            finished = diverged or step == config.steps
            due = config.due(step, diverged=diverged)
            if not (due.log or due.compare):
                scores = []
            result = StepResult(
                step=step,
                tokens=self.start.tokens + (step - self.start.step) * self.run.tokens_per_step,
                loss=loss,
                lr=learning_rate(step - 1, config.steps, self.optim),
                grad_norm=grad_norm,
                max_scores=[scores[i : i + heads] for i in range(0, len(scores), heads)] or None,
                passes=pending.passes,
                sequences=partial(self._sequences, step - 1, pending.passes),
                loss_scale=scale / config.sequences_per_step,
                updated=pending.updated,
                diverged=diverged,
                finished=finished,
                # a queued step must be waited for first
                last=finished or (ahead is None and any_rank(stop.requested)),
                due=due,
            )
            with self.throughput.paused():
                yield result
            if result.last:
                return

    def update(self, result: StepResult) -> None:
        """Update the weights, unless that is queued already. Counts as part of the step."""
        if result.updated:
            return
        self.throughput.resume()
        with (
            phase("training", f"step {result.step}"),
            record_function("optimizer"),
            self._measured(result.step - 1, result.passes),
        ):
            self.run.scaler.step(self.run.optimizer)
            self.run.scaler.update()
        self.throughput.step(self.run.tokens_per_step)
        self.throughput.pause()

    def restore_gradients(self, result: StepResult) -> None:
        """Compute the gradients of a diverged step again if a queued step has cleared them.

        The weights are still the same: the device skips an update if a loss or norm is not finite.
        """
        if result.updated:
            compute_gradients(self.model, result.passes, **self.step_args)

    def _queue(self, step: int, before: PendingStep | None = None) -> PendingStep:
        config = self.run.config
        set_learning_rate(self.run.optimizer, step, config.steps, self.optim)
        self.run.ranks.seed_step(config.seed, step)
        with phase("training", f"step {step + 1} of {config.steps}"):
            with record_function("data"):
                passes = self.batches.passes(step)
            # if something is due after this step, the weights must not change before it is done
            due = config.due(step + 1)
            look = due.log or due.compare or step == self.looking_step
            how = {"update": not any(due), "look": look}
            how["compute"] = self.graphs
            if step == self.measured_step:  # freed before, so as not to be freed while it measures
                self.run.optimizer.zero_grad(set_to_none=True)
            with self._measured(step, passes):
                pending = queue_step(self.model, passes, **self.step_args, **how, before=before)
        if pending.updated:
            self.throughput.step(self.run.tokens_per_step)
        return pending

    def _sequences(self, step: int, passes: Sequence[Pass]) -> Sequence[Pass]:
        if self.run.ranks.context == 1:
            return passes
        with self.run.batches(whole=True) as batches:
            return batches.passes(step)

    def _measured(self, step: int, passes: Sequence[Pass]) -> AbstractContextManager:
        """Measures the memory of a CPU, if this is the step to measure."""
        if step != self.measured_step:
            return nullcontext()
        weights = [*self.run.model.parameters(), *self.run.model.buffers()]
        gradients = [weight.grad for weight in weights]
        return self.memory.measured(
            weights, gradients, self.run.optimizer.state_dict()["state"], passes
        )

    def _diverged(self, loss: float, grad_norm: float, scale: float) -> bool:
        if self.run.scaler.is_enabled():
            # a loss scaler causes infinite gradients on purpose; only a collapsed scale is an error
            return not isfinite(loss) or scale < 1
        return not (isfinite(loss) and isfinite(grad_norm))


def queue_step(
    step_model: nn.Module,
    passes: Sequence[Pass],
    *,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    update: bool,
    ranks: Ranks = ALONE,
    look: bool = False,
    before: PendingStep | None = None,
    compute: Callable[..., tuple[Tensor, Tensor]] | None = None,
    **step_args: Any,
) -> PendingStep:
    """Enqueue forward and backward, and the optimizer's step too if `update` is set and the fused
    optimizer can skip non-finite gradients by itself. With `look` the attention also returns the
    largest score of each head.

    The next step can then be enqueued before the host looks at this one, so the device never waits
    for the host. `before` is the step before this one: unless both are finite, no weights change.
    `step_args` are passed to `compute`: StepGraphs, or if it is None compute_gradients().
    """
    compute = compute or compute_gradients
    step_args |= {"optimizer": optimizer, "scaler": scaler, "ranks": ranks}
    scores: list[Tensor] | None = [] if look else None
    loss_and_norm = torch.stack(compute(step_model, passes, **step_args, scores=scores))
    figures = loss_and_norm
    if scores:
        largest = ranks.largest(torch.stack(scores).amax(0))
        figures = torch.cat((loss_and_norm, largest.flatten()))
    figures = copy_to_host_async(figures)
    decisive = loss_and_norm
    if before is not None:
        decisive = torch.cat((before.loss_and_norm, loss_and_norm))
    updated = update and update_if_finite(decisive, optimizer=optimizer, scaler=scaler)
    return PendingStep(passes, loss_and_norm, figures, updated)


def compute_gradients(
    step_model: nn.Module,
    passes: Sequence[Pass],
    *,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    autocast: AbstractContextManager,
    grad_clip: float,
    ranks: Ranks = ALONE,
    scores: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the mean loss of a step, over all passes of all ranks, and the norm of its gradients.

    Both stay on the device, and nothing waits for them. Gradients are left in the parameters,
    clipped to `grad_clip` unless that is 0 or the norm is not finite. The norm is that before
    clipping. The named ranges show in a profiler's trace, and cost microseconds without one.

    If `scores` is a list, the largest scores (num_layers, H) of each pass are appended to it.
    """
    optimizer.zero_grad(set_to_none=True)
    loss, terms = 0.0, {}
    parameters = list(step_model.parameters())  # a slow look-up, so once
    total = GradientSum(ranks, parameters)
    # around the backward passes too: they may run attention again
    with step_model.using(call=ranks.attention) if ranks.shards else nullcontext():
        for number, (inputs, divisor) in enumerate(passes, start=1):
            if ranks.shards:
                terms["positions"] = ranks.shards.own_positions(inputs[0])
            looking = nullcontext() if scores is None else step_model.using(look=LOOKING)
            with record_function("forward"), autocast, looking:
                micro_loss = step_model(*inputs, **terms).loss
            if scores is not None:
                scores.append(step_model.max_scores().amax(1))
            summing = total if number == len(passes) else nullcontext()
            with record_function("backward"), summing:
                scaler.scale(micro_loss / divisor).backward()
            loss = loss + micro_loss.detach() / divisor
    loss = total.of(loss)
    with record_function("optimizer"):
        scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm(
            parameter.grad for parameter in parameters if parameter.grad is not None
        )
        # a norm that is not finite would make every gradient non-finite, and hide which was first
        nn.utils.clip_grads_with_norm_(
            parameters, grad_clip or inf, norm.nan_to_num(nan=0.0, posinf=0.0)
        )
        return loss, norm


def copy_to_host_async(x: Tensor) -> Callable[[], list[float]]:
    """Start copying x to the host; returns a function that waits for the copy, with its values.

    It does not wait for what is enqueued on the GPU after the copy.
    """
    if x.device.type != "cuda":
        return x.tolist
    host, arrived = torch.empty_like(x, device="cpu", pin_memory=True), torch.cuda.Event()
    host.copy_(x, non_blocking=True)
    arrived.record()

    def wait() -> list[float]:
        arrived.synchronize()
        return host.tolist()

    return wait


def update_if_finite(
    decisive: Tensor, *, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> bool:
    """Enqueue an optimizer step that skips itself unless all of `decisive` is finite.

    `decisive` holds losses and norms, on the device. Returns False, and does nothing, if the
    optimizer cannot skip or an enabled GradScaler decides. PyTorch's fused AdamW can skip, through
    the two attributes that GradScaler uses.
    """
    if scaler.is_enabled() or not (
        isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["fused"]
    ):
        return False
    optimizer.grad_scale, optimizer.found_inf = None, (~decisive.isfinite()).any().float()
    try:
        with record_function("optimizer"):
            optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    return True
