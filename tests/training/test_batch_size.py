"""batch_size=auto: the planner proposes, an attempt decides."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from config import RunConfig
from training import batch_size
from training.batch_size import largest_batch, try_pass
from training.memory import GIB

CPU = torch.device("cpu")


@pytest.fixture
def ten_gib(monkeypatch):
    monkeypatch.setattr(batch_size, "free_bytes", lambda device: 10 * GIB)


def attempts(fits: int, error: type[Exception] = torch.OutOfMemoryError):
    """attempt(B) that fails above `fits`, and the list of what was tried."""
    tried = []

    def attempt(size: int) -> None:
        tried.append(size)
        if size > fits:
            raise error(f"no room for {size}")

    return attempt, tried


def chosen_of(sequences: int, *, predicted_bytes, attempt, device) -> int:
    config = RunConfig(batch_size="auto", seq_len=16, tokens_per_step=16 * sequences)
    return largest_batch(
        config,
        predicted_bytes=lambda sized: predicted_bytes(sized.batch_size),
        attempt=attempt,
        device=device,
    ).batch_size


def test_what_is_there_already_does_not_count_twice(ten_gib):
    config, (attempt, tried) = (
        RunConfig(batch_size="auto", seq_len=16, tokens_per_step=16 * 64),
        attempts(fits=1000),
    )
    largest_batch(
        config,
        predicted_bytes=lambda sized: (10 + sized.batch_size) * GIB,
        attempt=attempt,
        device=CPU,
        held_bytes=10 * GIB,
    )
    assert tried == [8]


@pytest.mark.parametrize("sequences, chosen", [(64, 8), (12, 6), (9, 9), (7, 7), (22, 2), (1, 1)])
def test_the_largest_divisor_that_the_calculation_allows(ten_gib, sequences, chosen):
    attempt, tried = attempts(fits=1000)
    assert (
        chosen_of(sequences, predicted_bytes=lambda size: size * GIB, attempt=attempt, device=CPU)
        == chosen
    )
    assert tried == [chosen]


def test_where_the_calculation_was_too_hopeful_the_attempt_decides(ten_gib, caplog):
    attempt, tried = attempts(fits=3)
    assert (
        chosen_of(64, predicted_bytes=lambda size: size * GIB / 4, attempt=attempt, device=CPU) == 2
    )
    assert tried == [32, 16, 8, 4, 2]
    assert "batch_size=32 was predicted to take 8.0 GiB and does not fit" in caplog.text


def test_one_sequence_is_tried_whatever_the_calculation_says(ten_gib):
    attempt, tried = attempts(fits=1)
    assert chosen_of(8, predicted_bytes=lambda size: 100 * GIB, attempt=attempt, device=CPU) == 1
    assert tried == [1]


def test_one_sequence_that_does_not_fit_is_out_of_memory(ten_gib):
    attempt, _ = attempts(fits=0)
    with pytest.raises(torch.OutOfMemoryError, match="no room for 1"):
        chosen_of(2, predicted_bytes=lambda size: 1.0, attempt=attempt, device=CPU)


def test_another_error_is_not_taken_for_memory(ten_gib):
    attempt, tried = attempts(fits=0, error=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        chosen_of(4, predicted_bytes=lambda size: 1.0, attempt=attempt, device=CPU)
    assert tried == [4]


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.shapes = []

    def forward(self, inputs, targets):
        self.shapes.append(tuple(inputs.shape))
        return SimpleNamespace(loss=(self.weight * torch.rand(3)).sum())


def test_an_attempt_leaves_no_trace():
    model, state = Noisy(), torch.get_rng_state()
    try_pass(model, 2, seq_len=5, autocast=torch.autocast("cpu", enabled=False), device=CPU)
    assert model.shapes == [(2, 5)] * 2
    assert model.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)
