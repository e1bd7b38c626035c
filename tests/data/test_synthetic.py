"""The vectorised labels against an obvious loop, and what makes comparisons fair."""

import hashlib

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from config import DataConfig, TokenizerConfig
from data import build_data
from data.interface import IGNORED, generator
from model import loss
from tests.command import ROOT

SHAPES = [(1, 2), (3, 5), (8, 8), (16, 32)]
by_shape = pytest.mark.parametrize(
    "num_keys, num_values", SHAPES, ids=[f"K{keys}-V{values}" for keys, values in SHAPES]
)


def task(num_keys=8, num_values=8, seq_len=256, seed=0, source="last_write", num_pairs=None):
    config = DataConfig(
        source=source, num_keys=num_keys, num_values=num_values, num_pairs=num_pairs
    )
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


def test_a_batch_of_last_write_stays_what_it_was():
    """A run that was begun with an earlier version goes on with the same sequences."""
    batch = task().train_batch(0, 16)
    assert hashlib.sha256(batch.inputs.numpy()).hexdigest().startswith("71d4a756211e0261")


def test_fingerprint_names_the_task():
    assert task(3, 5).fingerprint != task(5, 3).fingerprint
    assert task(3, 5, seq_len=64, seed=1).fingerprint == task(3, 5, seq_len=128, seed=2).fingerprint


def test_the_needle_is_the_only_write_of_the_key_asked_for():
    num_keys, num_values, count = 3, 4, 2000
    data = task(num_keys, num_values, seq_len=9, source="needle")
    inputs, targets, sources = data.draw(generator(0, 0), count)
    (places,) = sources[:, -1:].T
    asked = inputs[:, -1] - num_keys * num_values
    written, value = np.divmod(inputs[:, :-1], num_values)
    assert ((written == asked[:, None]) == (np.arange(8) == places[:, None])).all()
    assert (targets[:, :-1] == IGNORED).all() and (sources[:, :-1] == -1).all()
    answers = targets[:, -1] - (num_keys * num_values + num_keys)
    assert (answers == value[np.arange(count), places]).all()
    # every place, key and value as often as the others, of needles and of the rest
    for drawn, kinds in ((places, 8), (asked, num_keys), (answers, num_values), (value, 4)):
        counts = np.bincount(drawn.flatten(), minlength=kinds)
        assert len(counts) == kinds
        assert (abs(counts - counts.mean()) < 6 * np.sqrt(counts.mean())).all()


def test_recall_asks_once_for_every_pair_and_soon_rather_than_late():
    data = task(20, 30, seq_len=32, source="recall", num_pairs=4)
    assert data.vocab_size == 1 + 20 + 30
    gaps = np.zeros(12)
    for inputs, targets, sources in zip(*data.draw(generator(0, 0), 500), strict=True):
        keys, values = inputs[:8:2], inputs[1:8:2]
        assert len(set(keys)) == len(set(values)) == 4
        assert set(keys) <= set(range(1, 21)) and set(values) <= set(range(21, 51))
        places = np.flatnonzero(inputs[8:])
        assert dict(zip(keys, values, strict=True)) == {
            inputs[8 + place]: targets[8 + place] for place in places
        }
        assert (np.flatnonzero(targets != IGNORED) == 8 + places).all()
        assert (inputs[sources[8 + places]] == targets[8 + places]).all()
        gaps[places[inputs[8 + places] == keys[0]] // 2] += 1
    # the first key chooses among all places
    share = np.arange(1, 13) ** -0.99
    expected = 500 * share / share.sum()
    assert (abs(gaps - expected) < 5 * np.sqrt(expected)).all()


def test_recall_has_the_sizes_of_zoology():
    config = DataConfig(**OmegaConf.load(ROOT / "conf/data/recall.yaml"))
    sizes = {length: config.pairs(length) for length in (64, 128, 256, 512)}
    assert sizes == {64: 4, 128: 8, 256: 16, 512: 64}
    data = build_data(config, TokenizerConfig(), seq_len=64, seed=0)
    assert data.vocab_size == 8192
    assert {len(np.flatnonzero(row >= 0)) for row in data.val_batch(3).targets.numpy()} == {4}


def test_scored_by_accuracy_without_a_tokenizer():
    data = task(num_values=4)
    assert (data.metric, data.tokenizer) == ("accuracy", None)
    assert "25.0%" in data.description
