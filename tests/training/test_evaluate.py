"""Held-out losses are means over the targets that count, however the sequences are divided."""

import pytest
import torch
import torch.nn.functional as F

from attention import get_backend
from config import ModelConfig
from data.interface import IGNORED
from model import GPT
from tests.weights import with_weights
from training.loop.evaluate import evaluate_under


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_a_loss_is_the_mean_over_all_targets_that_count(batch_size):
    torch.manual_seed(0)
    config = ModelConfig(num_layers=1, num_heads=2, hidden_size=16, max_seq_len=8)
    model = with_weights(GPT(config, vocab_size=11, backend=get_backend("naive")), 0.5)
    inputs, targets = torch.randint(11, (2, 4, 8))
    for row, ignored in enumerate((7, 0, 3, 8)):
        targets[row, :ignored] = IGNORED
    logits = model(inputs).logits.flatten(0, 1)
    right = (logits.argmax(-1) == targets.flatten()).sum() / (targets != IGNORED).sum()
    loss, accuracy = evaluate_under(
        model,
        get_backend("sdpa"),
        inputs,
        targets,
        batch_size=batch_size,
        autocast=torch.autocast("cpu", enabled=False),
        accuracy=True,
    )
    expected = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED).item()
    assert loss == pytest.approx(expected, rel=1e-5) and accuracy == pytest.approx(right.item())
