"""What every source promises: batches are a function of (seed, step), held-out ones of nothing."""

import pytest
import torch

from config import SYNTHETIC_SOURCES, DataConfig, TokenizerConfig
from data import build_data


@pytest.fixture(params=["text", *SYNTHETIC_SOURCES])
def data(request, config):
    """Makes the data of a seed."""
    if request.param != "text":
        config = DataConfig(source=request.param, num_keys=32, num_values=32)
    return lambda seed=0: build_data(config, TokenizerConfig(), seq_len=64, seed=seed)


def test_a_step_is_a_pure_function_of_seed_and_step(data):
    first = data(1).train_batch(7, 8)
    assert all(map(torch.equal, first, data(1).train_batch(7, 8)))
    assert not torch.equal(first.inputs, data(1).train_batch(8, 8).inputs)
    assert not torch.equal(first.inputs, data(2).train_batch(7, 8).inputs)
    assert all(x.dtype == torch.int64 and x.shape == (8, 64) and x.is_contiguous() for x in first)


def test_first_sequences_do_not_depend_on_how_many_follow(data):
    few, many = data().train_batch(2, 3), data().train_batch(2, 64)
    assert all(torch.equal(x, y[:3]) for x, y in zip(few, many, strict=True))


def test_held_out_sequences_are_fixed_and_not_trained_on(data):
    held_out = data(0).val_batch(6)
    other = data(1)
    trained = [other.train_batch(step, 6).inputs for step in range(3)]
    assert all(map(torch.equal, held_out, other.val_batch(6)))
    rows = {tuple(row) for batch in trained for row in batch.tolist()}
    assert not rows & {tuple(row) for row in held_out.inputs.tolist()}
