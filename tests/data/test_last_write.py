"""The vectorised labels against an obvious loop, and what makes comparisons fair."""

import time

import numpy as np
import pytest
import torch

from config import DataConfig, TokenizerConfig
from data import build_data
from data.interface import IGNORED
from model import loss
from tests import forked

SHAPES = [(1, 2), (3, 5), (8, 8), (16, 32)]
by_shape = pytest.mark.parametrize(
    "num_keys, num_values", SHAPES, ids=[f"K{keys}-V{values}" for keys, values in SHAPES]
)


def task(num_keys=8, num_values=8, seq_len=256, seed=0):
    config = DataConfig(source="last_write", num_keys=num_keys, num_values=num_values)
    return build_data(config, TokenizerConfig(), seq_len=seq_len, seed=seed)


def labels_by_loop(inputs, num_keys, num_values):
    """Read each sequence from the left, remembering what was written."""
    targets = np.full(inputs.shape, -100)
    for b, sequence in enumerate(inputs.tolist()):
        memory = {}
        for i, token in enumerate(sequence):
            if token < num_keys * num_values:
                memory[token // num_values] = token % num_values
            else:
                value = memory.get(token - num_keys * num_values)
                targets[b, i] = -100 if value is None else num_keys * num_values + num_keys + value
    return targets


@by_shape
def test_labels(num_keys, num_values):
    batch = task(num_keys, num_values).train_batch(3, 16)
    assert (
        batch.targets.numpy().tolist()
        == labels_by_loop(batch.inputs.numpy(), num_keys, num_values).tolist()
    )
    assert (batch.targets >= 0).any()


@by_shape
def test_every_token_is_drawn_as_often_as_promised(num_keys, num_values):
    data = task(num_keys, num_values)
    counts = np.bincount(data.train_batch(0, 400).inputs.flatten(), minlength=data.vocab_size)
    assert data.vocab_size == num_keys * num_values + num_keys + num_values
    counts, answers = (
        counts[: num_keys * num_values + num_keys],
        counts[num_keys * num_values + num_keys :],
    )
    assert not answers.any()
    total, writes = counts.sum(), num_keys * num_values
    expected = np.array([total / 2 / writes] * writes + [total / 2 / num_keys] * num_keys)
    assert (abs(counts - expected) < 6 * np.sqrt(expected)).all()


def test_the_loss_ignores_the_targets_that_data_ignores():
    """data and model cannot import one another, so each names PyTorch's ignored target itself."""
    assert IGNORED == loss.IGNORED == torch.nn.CrossEntropyLoss().ignore_index


def test_batches_are_int64_tensors():
    batch = task().train_batch(0, 4)
    assert {(tensor.dtype, tensor.shape) for tensor in batch} == {(torch.int64, (4, 256))}


def test_a_step_is_a_pure_function_of_seed_and_step():
    assert torch.equal(task(seed=1).train_batch(7, 8).inputs, task(seed=1).train_batch(7, 8).inputs)
    assert not torch.equal(
        task(seed=1).train_batch(7, 8).inputs, task(seed=1).train_batch(8, 8).inputs
    )
    assert not torch.equal(
        task(seed=1).train_batch(7, 8).inputs, task(seed=2).train_batch(7, 8).inputs
    )


def test_another_process_draws_the_same():
    code = (
        "from config import *; from data import build_data;"
        "d = build_data(DataConfig(source='last_write'), TokenizerConfig(), seq_len=64, seed=5);"
        "print(d.train_batch(9, 4).inputs.flatten().tolist())"
    )
    printed = forked.run("-c", code, check=True).stdout
    assert printed.strip() == str(
        task(seq_len=64, seed=5).train_batch(9, 4).inputs.flatten().tolist()
    )


def test_first_sequences_do_not_depend_on_how_many_follow():
    few, many = task().train_batch(2, 3), task().train_batch(2, 64)
    assert torch.equal(few.inputs, many.inputs[:3]) and torch.equal(few.targets, many.targets[:3])


def test_held_out_sequences_are_fixed_and_not_trained_on():
    held_out = task(seed=0).val_batch(8).inputs
    assert torch.equal(held_out, task(seed=1).val_batch(8).inputs)
    assert all(
        not torch.equal(held_out, task(seed=seed).train_batch(step, 8).inputs)
        for seed in range(3)
        for step in range(3)
    )


def test_fingerprint_names_the_task():
    assert task(3, 5).fingerprint != task(5, 3).fingerprint
    assert task(3, 5, seq_len=64, seed=1).fingerprint == task(3, 5, seq_len=128, seed=2).fingerprint


def test_scored_by_accuracy_without_a_tokenizer():
    data = task(num_values=4)
    assert (data.metric, data.tokenizer) == ("accuracy", None)
    assert "chance accuracy 25.0%" in data.description


def test_a_batch_takes_milliseconds():
    data = task()
    data.train_batch(0, 64)
    times = []
    for step in range(5):
        start = time.perf_counter()
        data.train_batch(step, 64)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02
