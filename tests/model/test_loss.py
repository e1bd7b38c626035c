"""Cross-entropy: what counts, what does not, and in which dtype."""

import math

import torch

from model import cross_entropy


def test_is_the_mean_over_the_targets_that_count():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, -100, 4], [-100, 0, -100]])
    log_p = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    expected = -(log_p[0, 0, 1] + log_p[0, 2, 4] + log_p[1, 1, 0]) / 3
    assert math.isclose(cross_entropy(logits, targets).item(), expected.item(), rel_tol=1e-6)


def test_ignored_positions_get_no_gradient():
    logits = torch.randn(1, 3, 5).requires_grad_()
    cross_entropy(logits, torch.tensor([[2, -100, 3]])).backward()
    assert logits.grad[0, 1].eq(0).all()
    assert logits.grad[0, [0, 2]].ne(0).all()


def test_no_target_at_all_is_a_loss_of_zero_with_zero_gradients():
    logits = torch.randn(2, 3, 5).requires_grad_()
    loss = cross_entropy(logits, torch.full((2, 3), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad.eq(0).all()


def test_is_float32_for_narrow_logits():
    logits = torch.randn(1, 64, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(64)[None]
    loss = cross_entropy(logits, targets)
    assert loss.dtype == torch.float32
    # to the last digits what float64 makes of the same bfloat16 logits: nothing was rounded to bfloat16 on the way
    expected = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-6)
