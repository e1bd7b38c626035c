"""Windows of text: right tokens, functions of (seed, step), a held-out half that never moves."""

import hashlib
import os

import numpy as np
import pytest

from config import TokenizerConfig
from data import build_data
from data.batches import windows
from data.token_file import TokenFile

# of this page's corpus, on the first version
GOLDEN = ["33c5158dd910a375", "439b183ec41eb8a5", "d3986d9f342699b2"]


def open_data(config, *, seed=0, seq_len=32, tokenizer="byte"):
    return build_data(config, TokenizerConfig(tokenizer), seq_len=seq_len, seed=seed)


def test_targets_are_the_next_tokens():
    batch = windows(np.array([[3, 4, 5, 6, 7], [50, 51, 52, 53, 54]], dtype=np.uint16))
    assert batch.inputs.tolist() == [[3, 4, 5, 6], [50, 51, 52, 53]]
    assert batch.targets.tolist() == [[4, 5, 6, 7], [51, 52, 53, 54]]


def token_file(path, tokens):
    tokens.tofile(path)
    return TokenFile(path, tokens.dtype.name)


def test_training_windows_reach_both_ends(config, tmp_path):
    data = open_data(config, seq_len=32)
    data.train = token_file(tmp_path / "train.bin", np.arange(35, dtype=np.uint16))
    firsts = {int(first) for step in range(50) for first in data.train_batch(step, 4).inputs[:, 0]}
    assert firsts == {0, 1, 2}


def test_held_out_windows_are_spread_evenly(config, tmp_path):
    data = open_data(config, seq_len=10)
    data.val = token_file(tmp_path / "val.bin", np.arange(101, dtype=np.uint16))
    assert data.val_batch(1).inputs[:, 0].tolist() == [0]
    assert data.val_batch(4).inputs[:, 0].tolist() == [0, 30, 60, 90]
    assert data.val_batch(4).targets[-1, -1] == 100


def test_description_names_the_corpus(config):
    data = open_data(config)
    assert f"data.path={config.path}" in data.description and "\n" not in data.description


def test_files_are_closed_with_the_data(config):
    """A sweep opens its data anew for every job."""
    free = os.dup(0)
    os.close(free)
    for _ in range(3):
        open_data(config)
    after = os.dup(0)
    os.close(after)
    assert after == free


def test_fingerprint_changes_with_corpus_tokenizer_and_share_alone(config, tmp_path):
    fingerprint = open_data(config).fingerprint
    assert fingerprint == open_data(config, seed=3, seq_len=16).fingerprint
    others = {open_data(config, tokenizer="bpe").fingerprint}
    config.val_fraction = 0.3
    others.add(open_data(config).fingerprint)
    config.val_fraction = 0.2
    (tmp_path / "corpus" / "07.txt").write_text("changed")
    others.add(open_data(config).fingerprint)
    assert len(others | {fingerprint}) == 4


@pytest.mark.parametrize("short_half", ["train", "val"])
def test_shorter_than_one_sequence(config, short_half):
    config.val_fraction = 0.99 if short_half == "train" else 0.05
    data = open_data(config, seq_len=4)
    longest = min(len(data.train), len(data.val)) - 1
    assert open_data(config, seq_len=longest).train_batch(0, 2).inputs.shape == (2, longest)
    with pytest.raises(ValueError) as refused:
        open_data(config, seq_len=longest + 1)
    words = (f"data.path={config.path}", f"seq_len={longest}", f"seq_len={longest + 1}")
    for named in (*words, f"data.val_fraction={config.val_fraction}"):
        assert named in str(refused.value)


def golden(config, **settings):
    """A hash of the first batches of both halves."""
    data = open_data(config, **settings)
    batches = [*(data.train_batch(step, 8) for step in range(4)), data.val_batch(8)]
    return hashlib.sha256(
        b"".join(tensor.numpy().tobytes() for batch in batches for tensor in batch)
    ).hexdigest()[:16]


def test_batches_are_those_of_every_version(config):
    """If a step read other tokens, no earlier run could be repeated."""
    found = [golden(config, seed=7), golden(config, seed=7, tokenizer="bpe", seq_len=9)]
    config.documents = True
    assert [*found, golden(config, seed=7)] == GOLDEN


@pytest.mark.parametrize(
    "half, read",
    [("train", lambda data: data.train_batch(0, 400)), ("val", lambda data: data.val_batch(9))],
)
def test_a_file_that_becomes_shorter_is_named(config, half, read):
    """A regression test: mapped into memory, it ended the process with SIGBUS."""
    data = open_data(config)
    tokens = getattr(data, half)
    assert tokens.path.name == f"{half}.bin"
    os.truncate(tokens.path, tokens.path.stat().st_size // 2)
    with pytest.raises(OSError, match=f"{tokens.path} .*{len(tokens):,}"):
        read(data)
