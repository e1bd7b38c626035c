"""A training step: gradients(), a look at its figures, update(). Stepper runs them, and keeps a GPU
busy.

On a GPU nothing waits until something is due. A whole step is queued before the host looks at the
loss of the step before, so the GPU always has work:

    host  | gradients 7, update 7 | sees 6 | gradients 8, update 8 | sees 7 | ...
    GPU    gradients 6, update 6 ...  gradients 7, update 7 ...

So a divergence is seen one step late. The weights have not moved by then: the GPU skips an update
if the loss or the norm of its step, or of the step before, is not finite.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from math import inf, isfinite
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from attention import Backend
from config import Due
from data.prefetch import Pass
from model.seam import LOOKING, QUIET
from training.loop.flops import flops_per_token
from training.loop.graph import StepGraphs
from training.loop.optimizer import learning_rate
from training.loop.ranks import GradientSum
from training.loop.run import Run
from training.loop.schedule import backend_after, prepare_model, run_compiles, will_graph
from training.record.clock import phase
from training.record.files import Row
from training.record.memory import MemoryMeter, cpu_memory_limit
from training.record.speed import Throughput, peak_flops

log = logging.getLogger("tilegpt")


def gradients(
    run: Run, passes: Sequence[Pass], *, look: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Forward and backward: leaves the gradients of a step in the parameters, clipped.

    Returns the mean loss over all passes of all ranks, the norm of the gradients before clipping
    and, with `look`, the largest score of each head (num_layers, H). All three stay on the device,
    and nothing waits for them. The named ranges show in a profiler's trace.
    """
    model, scaler, ranks = run.step_model, run.scaler, run.ranks
    parameters = list(model.parameters())  # a slow look-up, so once
    loss, scores, total = 0.0, [], GradientSum(ranks, parameters)
    run.optimizer.zero_grad()
    # around the backward passes too: they may run attention again
    with model.using(call=ranks.attention):
        for number, (inputs, divisor) in enumerate(passes, start=1):
            looking = model.using(look=LOOKING if look else QUIET)
            with record_function("forward"), run.autocast, looking:
                part = model(*inputs, positions=ranks.positions(inputs[0])).loss / divisor
            if look:
                scores.append(model.max_scores().amax(1))
            summing = total if number == len(passes) else nullcontext()
            with record_function("backward"), summing:
                scaler.scale(part).backward()
            loss = loss + part.detach()
    loss = total.of(loss)
    with record_function("optimizer"):
        scaler.unscale_(run.optimizer)
        norm = nn.utils.get_total_norm(x.grad for x in parameters if x.grad is not None)
        # a norm that is not finite would make every gradient non-finite, and hide which was first
        limit, finite = run.config.optim.grad_clip or inf, norm.nan_to_num(nan=0.0, posinf=0.0)
        nn.utils.clip_grads_with_norm_(parameters, limit, finite)
    return loss, norm, ranks.largest(torch.stack(scores).amax(0)) if look else None


def update(run: Run, *figures: "Figures") -> None:
    """The optimizer's step. The device skips it unless these losses and norms are finite."""
    optimizer, scaler, skips = run.optimizer, run.scaler, skips_by_itself(run)
    with record_function("optimizer"):
        if skips:  # by the two attributes that GradScaler uses
            decisive = torch.cat([each.on_device for each in figures])
            bad = (~decisive.isfinite()).any().float()
            optimizer.grad_scale, optimizer.found_inf = None, bad
        scaler.step(optimizer)
        scaler.update()
        if skips:
            del optimizer.grad_scale, optimizer.found_inf


def skips_by_itself(run: Run) -> bool:
    """Whether the device can skip an update. PyTorch's fused AdamW can; a GradScaler asks first."""
    return isinstance(run.optimizer, torch.optim.AdamW) and not run.scaler.is_enabled()


class Figures:
    """The loss of a step, the norm of its gradients and the largest scores: on the device, and on
    their way to the host. Reading them there waits for the step, not for what is queued after it.
    """

    def __init__(self, step: int, loss: Tensor, norm: Tensor, scores: Tensor | None) -> None:
        self.step = step  # how many are done, this one included
        self.diverged: bool | None = None  # known once Stepper.see() has looked
        # a copy: the next replay of a graph overwrites loss and norm
        self.on_device = torch.stack((loss, norm))
        tensors = [self.on_device] if scores is None else [self.on_device, scores]
        # from a GPU, into pinned memory
        self._host = [x.to("cpu", non_blocking=True) for x in tensors]
        self._arrived = torch.cuda.current_stream().record_event() if loss.is_cuda else None

    def _read(self, index: int) -> list[Any]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host[index].tolist()

    @property
    def loss(self) -> float:
        return self._read(0)[0]

    @property
    def grad_norm(self) -> float:
        return self._read(0)[1]

    @property
    def max_scores(self) -> list[list[float]] | None:
        """Of each layer and head; None if the step did not look."""
        return self._read(1) if len(self._host) > 1 else None


class Stepper(ExitStack):
    """Runs gradients() and update() of each step: timed, measured, and on a GPU as CUDA graphs
    where that is possible. As a context manager it ends the reading of batches.

    done: steps that an earlier start has taken.
    """

    def __init__(self, run: Run, done: int, summary: Row) -> None:
        super().__init__()
        self.run, self.summary = run, summary
        self.step = done  # the newest
        self.batches = run.batches()
        self.batch: Sequence[Pass] = ()  # of that step
        self.before: Figures | None = None  # the step before
        self.updated = done  # the newest step whose update see() has queued
        self.peaks: Row | None = {}  # of the memory, from a look until the next step begins
        self.memory = MemoryMeter(run.device, run.ranks.largest_of)
        length, peak = run.config.seq_len, peak_flops(run.device, run.dtype)
        flops = {
            "mfu": flops_per_token(run.model, length),
            "mfu_causal": flops_per_token(run.model, length, causal=True),
        }
        peak = peak and peak * run.ranks.world
        self.throughput = Throughput(run.device, flops_per_token=flops, peak=peak)
        summary["compiled"] = self._prepare(backend_after(run.schedule, done))

    def use_attention(self, backend: Backend) -> None:
        """Train with this attention from here on."""
        options = dict(backend.options) or ""
        log.info(f"step {self.step}: from here on attention={backend.name} {options}")
        self._prepare(backend)

    def _prepare(self, backend: Backend) -> bool:
        """Whether the model is compiled now. The speed excludes that."""
        run, config = self.run, self.run.config
        compiled = run_compiles(config, backend, run.device.type)
        run.step_model = prepare_model(run.model, backend, compiled=compiled)
        self.throughput.warm_up()
        graphed = will_graph(config, backend, dtype=run.dtype, device=run.device)
        looks = "max_score" in backend.features
        self.graphs = StepGraphs(gradients, looks=looks) if graphed else None
        # the second step from here is compiled, has the optimizer's state, and is not timed
        self.measured_step = min(self.step + 2, config.steps)
        # the third is not timed either; it looks for scores, so that this compiles untimed too
        self.looking_step = self.step + 3
        return compiled

    def __enter__(self) -> Self:
        self.enter_context(cpu_memory_limit())
        self.enter_context(self.batches)
        # an error's traceback may still refer to it
        self.callback(lambda: self.graphs and self.graphs.drop())
        return self

    @phase("training")
    def passes(self, step: int) -> Sequence[Pass]:
        """Begin a step: its batch on the device, in passes that fit into memory."""
        run, self.step = self.run, step
        run.ranks.seed_step(run.config.seed, step - 1)
        if self.peaks is not None:  # to look and to evaluate is no part of a step
            self.memory.reset()
            self.peaks = None
        if step == self.measured_step:  # freed before, so as not to be freed while it measures
            run.optimizer.zero_grad()
        self.throughput.resume()
        with record_function("data"):
            self.batch = self.batches.passes(step - 1)
        return self.batch

    def queue(self, part: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """Run gradients() or update() of this step, on the clock. A GPU only queues it."""
        if part is update and self.step == self.updated:
            return None
        if part is gradients:
            part = self.graphs or gradients
            how["look"] = how.get("look", False) or self.step == self.looking_step
        self.throughput.resume()
        with phase("training"), self._measured():
            return part(self.run, *args, **how)

    @phase("training")
    def see(self, now: Figures, due: Due, *, last: bool) -> Figures:
        """Wait for a step: for `now`, or for the step before it while a GPU works on `now`. Returns
        whichever diverged first. If something is due the clock stands still until the update.
        """
        before, self.before = self.before, now
        late = before is not None and skips_by_itself(self.run) and not (last or any(due))
        if late:
            # queued before the look: a GPU would be done with the gradients of a short step
            self.queue(update, now, before)
            self.updated = self.step
        seen = before if before is not None and (late or self._diverged(before)) else now
        if self._diverged(seen) or last or any(due):
            self.throughput.pause()
        if seen.diverged or due.log or due.compare or due.evaluate:
            self.peaks = self.memory.row()
        if seen.diverged and seen is not now:
            # the gradients of `now` have replaced those that broke; the weights are still the same
            gradients(self.run, self.batches.passes(seen.step - 1))
        return seen

    def _diverged(self, seen: Figures) -> bool:
        if seen.diverged is None:
            # a GradScaler causes infinite gradients on purpose; only a collapsed scale is an error
            scaler, bad_norm = self.run.scaler, not isfinite(seen.grad_norm)
            broke = scaler.get_scale() < 1 if scaler.is_enabled() else bad_norm
            seen.diverged = broke or not isfinite(seen.loss)
        return seen.diverged

    def row(self, seen: Figures, due: Due) -> Row:
        """End a step. Returns its figures that are due, and memory and speed since the last row."""
        row: Row = {}
        if not seen.diverged:
            self.throughput.step(self.run.tokens_per_step)
        if any(due):
            self.throughput.pause()
        if self.peaks:
            row |= self.peaks
            self.summary |= self.memory.summary
            self.summary["step_tokens_per_sec"] = self.throughput.step_tokens_per_sec
        if due.log:
            config = self.run.config
            lr = learning_rate(seen.step - 1, config.steps, config.optimizer())
            row |= {"train/loss": seen.loss, "lr": lr, "grad_norm": seen.grad_norm}
            row |= self.throughput.row()
        return row

    def _measured(self) -> AbstractContextManager:
        """Measures the memory of a CPU, if this is the step to measure."""
        if self.step != self.measured_step or self.run.device.type != "cpu":
            return nullcontext()
        weights = [*self.run.model.parameters(), *self.run.model.buffers()]
        held = weights, [each.grad for each in weights], self.run.optimizer.state_dict()
        return self.memory.measured(*held, self.batch)
