"""The vectorised labels against an obvious loop, and what makes comparisons fair."""

import hashlib

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from config import DataConfig, TokenizerConfig
from data import build_data
from data.interface import IGNORED
from model import loss
from tests.command import ROOT

by_shape = pytest.mark.parametrize("num_keys, num_values", [(1, 2), (3, 5), (8, 8), (16, 32)])


def task(num_keys=8, num_values=8, seq_len=256, seed=0, source="last_write", num_pairs=None):
    config = DataConfig(
        source=source, num_keys=num_keys, num_values=num_values, num_pairs=num_pairs
    )
    return build_data(config, TokenizerConfig(), seq_len=seq_len, seed=seed)


def check_frequencies(counts, expected):
    """Each count lies within six standard deviations of what is expected."""
    assert (abs(counts - expected) < 6 * np.sqrt(expected)).all()


def labels_by_loop(inputs, num_keys, num_values):
    """Read each sequence from the left, remembering what was written."""
    targets = np.full(inputs.shape, IGNORED)
    for b, sequence in enumerate(inputs.tolist()):
        memory = {}
        for i, token in enumerate(sequence):
            if token < num_keys * num_values:
                memory[token // num_values] = token % num_values
            elif (value := memory.get(token - num_keys * num_values)) is not None:
                targets[b, i] = num_keys * num_values + num_keys + value
    return targets


@by_shape
def test_labels(num_keys, num_values):
    inputs, targets = (x.numpy() for x in task(num_keys, num_values).train_batch(3, 16))
    assert np.array_equal(targets, labels_by_loop(inputs, num_keys, num_values))
    assert (targets >= 0).any()


@by_shape
def test_every_token_is_drawn_as_often_as_promised(num_keys, num_values):
    data, writes = task(num_keys, num_values), num_keys * num_values
    counts = np.bincount(data.train_batch(0, 400).inputs.flatten(), minlength=data.vocab_size)
    assert data.vocab_size == writes + num_keys + num_values
    assert not counts[writes + num_keys :].any()
    half = counts.sum() / 2
    check_frequencies(counts[:writes], half / writes)
    check_frequencies(counts[writes : writes + num_keys], half / num_keys)


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
    inputs, targets = (x.numpy() for x in data.train_batch(0, count))
    asked = inputs[:, -1] - num_keys * num_values
    written, value = np.divmod(inputs[:, :-1], num_values)
    sequences, places = np.nonzero(written == asked[:, None])
    assert (sequences == np.arange(count)).all() and (targets[:, :-1] == IGNORED).all()
    answers = targets[:, -1] - (num_keys * num_values + num_keys)
    assert (answers == value[np.arange(count), places]).all()
    # every place, key and value as often as the others, of needles and of the rest
    for drawn, kinds in ((places, 8), (asked, num_keys), (answers, num_values), (value, 4)):
        check_frequencies(np.bincount(drawn.flatten(), minlength=kinds), drawn.size / kinds)


def test_recall_asks_once_for_every_pair_and_soon_rather_than_late():
    data = task(20, 30, seq_len=32, source="recall", num_pairs=4)
    assert data.vocab_size == 1 + 20 + 30
    gaps = np.zeros(12)
    for inputs, targets in zip(*(x.numpy() for x in data.train_batch(0, 500)), strict=True):
        keys, values = inputs[:8:2], inputs[1:8:2]
        assert len(set(keys)) == len(set(values)) == 4
        assert set(keys) <= set(range(1, 21)) and set(values) <= set(range(21, 51))
        places = 8 + np.flatnonzero(inputs[8:])
        asked = dict(zip(inputs[places], targets[places], strict=True))
        assert asked == dict(zip(keys, values, strict=True))
        assert (np.flatnonzero(targets != IGNORED) == places).all()
        gaps[places[inputs[places] == keys[0]] // 2 - 4] += 1
    # the first key chooses among all places
    share = np.arange(1, 13) ** -0.99
    check_frequencies(gaps, 500 * share / share.sum())


def test_recall_has_the_sizes_of_zoology():
    config = DataConfig(**OmegaConf.load(ROOT / "conf/data/recall.yaml"))
    sizes = {length: config.pairs(length) for length in (64, 128, 256, 512)}
    assert sizes == {64: 4, 128: 8, 256: 16, 512: 64}
    data = build_data(config, TokenizerConfig(), seq_len=64, seed=0)
    assert data.vocab_size == 8192
    assert {len(np.flatnonzero(row >= 0)) for row in data.val_batch(3).targets.numpy()} == {4}
