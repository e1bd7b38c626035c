"""AdamW's parameter groups and the learning-rate schedule."""

import pytest
import torch
from torch import nn

from config import OptimConfig
from training.optimizer import build_optimizer, learning_rate


def test_weight_decay_reaches_matrices_only():
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    optimizer = build_optimizer(model, OptimConfig(lr=1e-3, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-7))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.1,
        "1.weight": 0.0,
        "1.bias": 0.0,
        "2.weight": 0.1,
        "2.bias": 0.0,
    }
    assert all(group["fused"] and group["betas"] == (0.8, 0.9) and group["eps"] == 1e-7 for group in optimizer.param_groups)


def test_frozen_parameters_are_left_out():
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    groups = build_optimizer(model, OptimConfig(lr=1e-3)).param_groups
    assert [p is model.weight for group in groups for p in group["params"]] == [True]


def test_fused_equals_the_textbook_update():
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    config = OptimConfig(lr=0.01, weight_decay=0.1)
    optimizer = build_optimizer(model, config)
    expected = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in expected.items()}
    for step in range(1, 4):
        loss = model(torch.randn(7, 6)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        for name, p in model.named_parameters():
            grad, (first, second) = p.grad.double(), moments[name]
            first.mul_(config.beta1).add_((1 - config.beta1) * grad)
            second.mul_(config.beta2).add_((1 - config.beta2) * grad**2)
            decay = config.weight_decay if p.dim() >= 2 else 0.0
            ratio = (first / (1 - config.beta1**step)) / ((second / (1 - config.beta2**step)).sqrt() + config.eps)
            expected[name] = expected[name] * (1 - config.lr * decay) - config.lr * ratio
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_warmup_then_cosine_to_min_lr():
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=100)
    # a tenth of 200 steps is less than warmup_steps
    rates = [learning_rate(step, 200, config) for step in range(200)]
    assert rates[0] == pytest.approx(1 / 20)
    assert rates[9] == pytest.approx(0.5)
    assert rates[19] == 1.0
    assert rates[109] == pytest.approx(0.55)  # half way down
    assert rates[199] == pytest.approx(0.1)
    assert rates[:20] == sorted(rates[:20])
    assert rates[19:] == sorted(rates[19:], reverse=True)


def test_warmup_is_at_most_warmup_steps():
    assert learning_rate(9, 10_000, OptimConfig(lr=1.0, warmup_steps=10)) == 1.0
    assert learning_rate(4, 10_000, OptimConfig(lr=1.0, warmup_steps=10)) == pytest.approx(0.5)


def test_constant_schedule_warms_up_too():
    config = OptimConfig(lr=1.0, schedule="constant")
    assert [learning_rate(step, 40, config) for step in (0, 3, 4, 39)] == [0.25, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("steps", [1, 2, 3, 11])
@pytest.mark.parametrize("warmup_steps", [0, 1, 100])
def test_short_runs_never_stand_still(steps, warmup_steps):
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=warmup_steps)
    rates = [learning_rate(step, steps, config) for step in range(steps)]
    assert all(0.1 <= rate <= 1.0 for rate in rates)


def test_a_peak_below_min_lr_does_not_rise():
    config = OptimConfig(lr=1e-5, min_lr=1e-4, warmup_steps=0)
    assert {learning_rate(step, 50, config) for step in range(50)} == {1e-5}
