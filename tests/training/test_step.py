"""compute_gradients: passes that add up to the step, clipped, and left alone by the ranges around
them.
"""

import copy
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from data.prefetch import Pass
from tests.command import TINY
from training import build_run, compose
from training.launch.interrupt import Interrupt
from training.loop import step
from training.loop.step import (
    PendingStep,
    Stepper,
    compute_gradients,
    copy_to_host_async,
    queue_step,
    update_if_finite,
)

UNSCALED = torch.amp.GradScaler("cpu", enabled=False)


class Output(NamedTuple):
    loss: Tensor


class Square(nn.Module):
    """The mean of (w x - y)^2; w is 2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor) -> Output:
        return Output((self.weight * x - y).square().mean())


def gradients_of(
    model: nn.Module,
    passes: list[tuple[Tensor, Tensor]],
    *,
    grad_clip: float = 0.0,
    scale: float | None = None,
):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler(
        "cpu", enabled=scale is not None, **{} if scale is None else {"init_scale": scale}
    )
    return compute_gradients(
        model,
        [Pass(tensors, len(passes)) for tensors in passes],
        optimizer=optimizer,
        scaler=scaler,
        autocast=torch.autocast("cpu", enabled=False),
        grad_clip=grad_clip,
    )


@pytest.mark.parametrize("scale", [None, 1024.0], ids=["unscaled", "scaled"])
def test_passes_add_up_to_the_whole_batch(scale):
    x, y = torch.randn(2, 12, dtype=torch.float64)
    whole, parts = Square(), Square()
    expected = gradients_of(whole, [(x, y)])
    loss, grad_norm = gradients_of(
        parts, list(zip(x.split(4), y.split(4), strict=True)), scale=scale
    )
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(parts.weight.grad, whole.weight.grad)
    torch.testing.assert_close(grad_norm, whole.weight.grad.abs())
    assert not loss.requires_grad


@pytest.mark.parametrize(("grad_clip", "kept"), [(0.0, 8.0), (3.0, 3.0), (100.0, 8.0)])
def test_the_norm_is_that_of_before_the_clipping(grad_clip, kept):
    model = Square()
    loss, grad_norm = gradients_of(
        model, [(torch.tensor([2.0]), torch.tensor([2.0]))], grad_clip=grad_clip
    )
    assert loss.item() == 4.0 and grad_norm.item() == 8.0
    assert model.weight.grad.item() == pytest.approx(kept, rel=1e-5)


def test_an_autocast_serves_every_pass_and_its_gradient_is_taken_outside():
    """One context manager is entered once a pass: train.py builds it once."""
    seen = []

    class Asks(Square):
        def forward(self, x: Tensor, y: Tensor) -> Output:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(x, y)

    model, one = Asks(), torch.ones(1)
    how = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.0), "scaler": UNSCALED}
    how["autocast"] = torch.autocast("cpu", dtype=torch.bfloat16)
    compute_gradients(model, [Pass((one, one), 3)] * 3, grad_clip=0.0, **how)
    assert seen == [True] * 3 and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("bad", [None, "inf", "nan"])
def test_an_update_is_made_where_loss_and_norm_are_finite(bad):
    """To the bit the optimizer's own, or none: weights, moments and the count of steps are then as
    before.
    """
    ours, theirs = ([nn.Parameter(torch.arange(6.0).reshape(2, 3))] for _ in range(2))
    pair = [torch.optim.AdamW(parameters, lr=0.1, fused=True) for parameters in (ours, theirs)]
    for found in (torch.tensor([1.0, 2.0]), torch.tensor([1.0, float(bad or 2.0)])):
        for parameters in (ours, theirs):
            parameters[0].grad = torch.linspace(-1, 1, 6).reshape(2, 3)
        before = copy.deepcopy(pair[0].state_dict())
        assert update_if_finite(found, optimizer=pair[0], scaler=UNSCALED)
        pair[1].step()
    if bad is None:
        assert torch.equal(ours[0], theirs[0])
        return
    assert not torch.equal(ours[0], theirs[0])
    for name, x in pair[0].state_dict()["state"][0].items():
        assert torch.equal(x, before["state"][0][name]), name
    pair[0].step()  # and goes on as if nothing had been
    assert torch.equal(ours[0], theirs[0])


def test_an_optimizer_that_cannot_judge_does_nothing():
    model = Square()
    fused, plain = (torch.optim.AdamW(model.parameters(), fused=fused) for fused in (True, False))
    scaled = torch.amp.GradScaler("cpu")  # which judges itself
    for optimizer, scaler in (
        (plain, UNSCALED),
        (torch.optim.SGD(model.parameters(), lr=0.1), UNSCALED),
        (fused, scaled),
    ):
        model.weight.grad = torch.tensor(1.0)
        assert (
            not update_if_finite(torch.ones(2), optimizer=optimizer, scaler=scaler)
            and model.weight.item() == 2.0
        )


def test_figures_arrive():
    assert copy_to_host_async(torch.tensor([1.5, 2.5]))() == [1.5, 2.5]


def queue(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: float,
    *,
    update: bool = True,
    before: PendingStep | None = None,
) -> PendingStep:
    how = {"autocast": torch.autocast("cpu", enabled=False), "grad_clip": 0.0}
    passes = [Pass((torch.tensor([x]), torch.tensor([1.0])), 1)]
    return queue_step(
        model, passes, optimizer=optimizer, scaler=UNSCALED, update=update, before=before, **how
    )


def test_a_step_queued_ahead_is_the_step_it_would_have_been():
    ours, theirs = Square(), Square()
    pair = [torch.optim.AdamW(model.parameters(), lr=0.1, fused=True) for model in (ours, theirs)]
    first = queue(ours, pair[0], 1.0)
    second = queue(ours, pair[0], 2.0, before=first)
    expected = []
    for x in (1.0, 2.0):
        now = queue(theirs, pair[1], x, update=False)
        assert not now.updated
        expected.append(now.figures())
        pair[1].step()
    assert first.updated and second.updated and [first.figures(), second.figures()] == expected
    assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize("bad", ["first", "second"])
def test_after_a_step_that_went_wrong_no_weight_moves(bad):
    """Also not by the step that was queued behind it, whose own loss is fine."""
    model = Square()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    first = queue(model, optimizer, torch.inf if bad == "first" else 1.0)
    moved = model.weight.item()
    assert (moved == 2.0) == (bad == "first")
    second = queue(model, optimizer, torch.inf if bad == "second" else 1.0, before=first)
    assert model.weight.item() == moved and first.updated and second.updated
    assert [all(map(math.isfinite, each.figures())) for each in (first, second)] == [
        bad != "first",
        bad != "second",
    ]


def test_an_update_counts_as_time_of_the_step_and_what_is_due_does_not(monkeypatch):
    """The clock stands still while a loop looks at a result, but not while it moves the weights."""
    config = compose(*TINY, "steps=8", "log_every=1", "eval_every=0", "diagnose_every=0")
    now = 0.0
    with Stepper(build_run(config)) as stepper:
        monkeypatch.setattr("training.record.throughput.perf_counter", lambda: now)
        move_weights = stepper.run.scaler.step

        def slow_update(optimizer):
            nonlocal now
            now += 2.0
            move_weights(optimizer)

        stepper.run.scaler.step = slow_update
        for result in stepper.steps():
            assert not result.updated and result.due.log
            now += 100.0
            stepper.update(result)
            now += 100.0
    counted = 8 - stepper.throughput.WARM_UP
    assert stepper.throughput.step_tokens_per_sec == 128 * counted / (2.0 * counted)


def test_steps_queued_ahead_are_the_steps_that_are_not():
    """Where nothing is due, the next step is queued first; the losses stay the same to the bit."""
    losses = []
    for log_every in (1, 100):
        never = ("eval_every=0", "diagnose_every=0", "checkpoint_every=100")
        config = compose(*TINY, "steps=6", f"log_every={log_every}", *never)
        with Stepper(build_run(config)) as stepper:
            results = []
            for result in stepper.steps():
                stepper.update(result)
                results.append(result)
        losses.append([result.loss for result in results])
        assert [result.updated for result in results[:-1]] == [log_every == 100] * 5
        assert [result.last for result in results] == [False] * 5 + [True]
        assert results[-1].tokens == 6 * 128
    assert losses[0] == losses[1]


def test_a_stop_waits_for_the_step_that_is_queued():
    stop = Interrupt()
    never = ("log_every=100", "eval_every=0", "diagnose_every=0", "checkpoint_every=100")
    with Stepper(build_run(compose(*TINY, "steps=50", *never))) as stepper:
        for result in stepper.steps(stop):
            stop.requested = result.step >= 3
            stepper.update(result)
    assert result.step == 4 and result.last and not result.finished and result.updated


def test_what_looking_compiles_does_not_count_as_speed(monkeypatch):
    """A regression test: its kernels were compiled at the first logged step, which is timed; a run
    of 60 steps reported half of its speed. The third step of an attention looks too, unseen.
    """
    looks, queue_step = [], step.queue_step

    def noted(*args, look, **options):
        looks.append(look)
        return queue_step(*args, look=look, **options)

    monkeypatch.setattr(step, "queue_step", noted)
    never = ("eval_every=0", "diagnose_every=0", "checkpoint_every=100")
    with Stepper(build_run(compose(*TINY, "steps=9", "log_every=4", *never))) as stepper:
        shown = []
        for result in stepper.steps():
            stepper.update(result)
            shown += [result.step] if result.max_scores is not None else []
            if result.step == 4:
                stepper.use_attention(stepper.run.schedule[0])
    assert [number for number, look in enumerate(looks, 1) if look] == [3, 4, 7, 8, 9]
    assert shown == [4, 8, 9]
    assert stepper.throughput.WARM_UP == 3
