"""A step: passes that add up, clipped; an update that a device skips by itself; and a look one step
late.
"""

import copy
import math
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from attention import get_backend
from config import OptimConfig
from data.prefetch import Pass
from model.seam import LOOKING, Seam, SeamedModel
from tests.command import TINY, same
from tests.steps import take_steps
from training import build_run, compose
from training.loop.optimizer import AdamW
from training.loop.ranks import ALONE
from training.loop.step import Figures, Stepper, gradients, update

NEVER = ("log_every=100", "eval_every=0", "diagnose_every=0", "checkpoint_every=100")


class Output(NamedTuple):
    loss: Tensor


class Square(SeamedModel):
    """The mean of (w x - y)^2; w is 2."""

    def __init__(self) -> None:
        super().__init__()
        self.seam = Seam(get_backend("naive"))
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor, *, positions: None) -> Output:
        return Output((self.weight * x - y).square().mean())


def run_of(model: nn.Module, *, grad_clip: float = 0.0, scale: float = 0.0):
    return SimpleNamespace(
        step_model=model,
        optimizer=AdamW(model.parameters(), lr=0.0),
        scaler=torch.amp.GradScaler("cpu", enabled=scale > 0, init_scale=scale),
        autocast=torch.autocast("cpu", enabled=False),
        config=SimpleNamespace(optim=OptimConfig(grad_clip=grad_clip)),
        ranks=ALONE,
    )


@pytest.mark.parametrize("scale", [0.0, 1024.0], ids=["unscaled", "scaled"])
def test_passes_add_up_to_the_whole_batch(scale):
    x, y = torch.randn(2, 12, dtype=torch.float64)
    whole, parts = Square(), Square()
    expected, _, _ = gradients(run_of(whole), [Pass((x, y), 1)])
    passes = [Pass(pair, 3) for pair in zip(x.split(4), y.split(4), strict=True)]
    loss, norm, scores = gradients(run_of(parts, scale=scale), passes)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(parts.weight.grad, whole.weight.grad)
    torch.testing.assert_close(norm, whole.weight.grad.abs())
    assert not loss.requires_grad and scores is None


@pytest.mark.parametrize(("grad_clip", "kept"), [(0.0, 8.0), (3.0, 3.0)])
def test_the_norm_is_that_of_before_the_clipping(grad_clip, kept):
    model, two = Square(), torch.tensor([2.0])
    loss, norm, _ = gradients(run_of(model, grad_clip=grad_clip), [Pass((two, two), 1)])
    assert loss.item() == 4.0 and norm.item() == 8.0
    assert model.weight.grad.item() == pytest.approx(kept, rel=1e-5)


@pytest.mark.parametrize(("loss", "norm"), [(1.0, math.inf), (math.nan, 2.0)])
def test_an_update_is_made_where_loss_and_norm_are_finite(loss, norm):
    """To the bit the optimizer's own, or none: weights, moments and the count of steps are then as
    before.
    """
    ours, theirs = (nn.Parameter(torch.arange(6.0).reshape(2, 3)) for _ in range(2))
    optimizer, other = (AdamW([x], lr=0.1, fused=True) for x in (ours, theirs))
    unscaled = torch.amp.GradScaler("cpu", enabled=False)
    run = SimpleNamespace(optimizer=optimizer, scaler=unscaled)
    ours.grad = theirs.grad = torch.linspace(-1, 1, 6).reshape(2, 3)
    update(run, Figures(1, torch.tensor(1.0), torch.tensor(2.0), None))
    other.step()
    assert torch.equal(ours, theirs)
    before = copy.deepcopy(optimizer.state[ours])
    update(run, Figures(2, torch.tensor(loss), torch.tensor(norm), None))
    assert torch.equal(ours, theirs) and same(before, optimizer.state[ours])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_that_is_seen_late_is_the_step_it_would_have_been(optimizer):
    """The losses stay the same to the bit. Muon cannot skip an update, so each step is seen."""
    losses, seen = {}, {}
    for log_every in (1, 100):
        asked = (*NEVER, f"optim={optimizer}", "steps=6", f"log_every={log_every}")
        with Stepper(build_run(compose(*TINY, *asked)), 0, {}) as stepper:
            taken = [seen for seen, _ in take_steps(stepper)]
        losses[log_every] = {each.step: each.loss for each in taken}
        seen[log_every] = [each.step for each in taken]
    late = [1, 1, 2, 3, 4, 6] if optimizer == "adamw" else [1, 2, 3, 4, 5, 6]
    assert (seen[1], seen[100]) == ([1, 2, 3, 4, 5, 6], late)
    assert losses[100].items() <= losses[1].items()


@pytest.mark.parametrize("log_every", [1, 100], ids=["at once", "late"])
def test_after_a_step_that_diverged_no_weight_moves(log_every):
    """The gradients are those that broke, though the next step's may have replaced them."""
    run = build_run(compose(*TINY, *NEVER, "steps=9", f"log_every={log_every}"))
    layer, read, taken, weights = run.model.blocks[0].attention, [], [], []
    with Stepper(run, 0, {}) as stepper:
        passes = stepper.batches.passes
        stepper.batches.passes = lambda step: read.append(step) or passes(step)
        layer.register_forward_hook(lambda *x: x[-1] * (math.nan if read[-1] == 3 else 1))
        for seen, _ in take_steps(stepper):
            taken.append((seen.step, seen.diverged))
            weights.append([x.detach().clone() for x in run.model.parameters()])
    good = [1, 2, 3] if log_every == 1 else [1, 1, 2, 3]
    assert taken == [*((step, False) for step in good), (4, True)]
    assert all(map(torch.equal, run.model.parameters(), weights[2]))
    assert layer.qkv.weight.grad.isnan().any()


def test_an_update_counts_as_time_of_the_step_and_what_is_due_does_not(monkeypatch):
    """The clock stands still while a loop looks at a step, but not while it moves the weights."""
    now = 0.0

    def slow(function, seconds):
        def called(*args, **how):
            nonlocal now
            result = function(*args, **how)
            now += seconds
            return result

        return called

    asked = ("steps=8", "log_every=1", "eval_every=0", "diagnose_every=0")
    with Stepper(build_run(compose(*TINY, *asked)), 0, {}) as stepper:
        monkeypatch.setattr("training.record.speed.perf_counter", lambda: now)
        stepper.run.scaler.step = slow(stepper.run.scaler.step, 2.0)
        stepper.see = slow(stepper.see, 100.0)
        for _ in take_steps(stepper):
            now += 100.0
    assert stepper.throughput.step_tokens_per_sec == 128 / 2.0


def test_what_looking_compiles_does_not_count_as_speed(monkeypatch):
    """A regression test: its kernels were compiled at the first logged step, which is timed; a run
    of 60 steps reported half of its speed. The third step of an attention looks too, unseen.
    """
    asked = (*NEVER, "steps=9", "log_every=4", "attention.switch_at=4", "attention.switch_to=tiled")
    looked = []
    with Stepper(build_run(compose(*TINY, *asked)), 0, {}) as stepper:
        seam = stepper.run.model.seam
        stepper.run.model.blocks[0].attention.register_forward_hook(
            lambda *_: looked.append(stepper.step) if seam.look is LOOKING else None
        )
        list(take_steps(stepper))
    assert looked == [3, 4, 7, 8, 9] and stepper.throughput.WARM_UP == 3
