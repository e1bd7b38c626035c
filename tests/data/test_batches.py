"""Windows of text: right tokens, functions of (seed, step), a held-out half that never moves.

With data.documents=true, windows number their documents, and the fingerprint says so.
"""

import hashlib
import os
import shutil

import numpy as np
import pytest
import torch

from config import TokenizerConfig
from data import build_data
from data.batches import windows
from data.token_file import TokenFile

END = 9
# of this page's corpus, on the first version
GOLDEN = ["33c5158dd910a375", "439b183ec41eb8a5", "d3986d9f342699b2"]


def open_data(config, *, seed=0, seq_len=32, tokenizer="byte", documents=False):
    config.documents = documents
    return build_data(config, TokenizerConfig(tokenizer), seq_len=seq_len, seed=seed)


def token_file(path, count):
    np.arange(count, dtype=np.uint16).tofile(path)
    return TokenFile(path, "uint16")


def test_windows_reach_both_ends_and_targets_are_the_next_tokens(config, tmp_path):
    data = open_data(config, seq_len=32)
    data.train = token_file(tmp_path / "train.bin", 35)
    batches = [data.train_batch(step, 4) for step in range(50)]
    assert {int(first) for batch in batches for first in batch.inputs[:, 0]} == {0, 1, 2}
    assert all(torch.equal(batch.targets, batch.inputs + 1) for batch in batches)


def test_held_out_windows_are_spread_evenly(config, tmp_path):
    data = open_data(config, seq_len=10)
    data.val = token_file(tmp_path / "val.bin", 101)
    assert data.val_batch(1).inputs[:, 0].tolist() == [0]
    assert data.val_batch(4).inputs[:, 0].tolist() == [0, 30, 60, 90]
    assert data.val_batch(4).targets[-1, -1] == 100


def test_the_fingerprint_changes_with_what_a_loss_depends_on(config, tmp_path):
    fingerprint = open_data(config).fingerprint
    assert fingerprint == open_data(config, seed=3, seq_len=16).fingerprint
    others = [open_data(config, tokenizer="bpe"), open_data(config, documents=True)]
    config.val_fraction = 0.3
    others.append(open_data(config))
    config.val_fraction = 0.2
    (tmp_path / "corpus" / "07.txt").write_text("changed")
    others.append(open_data(config))
    assert len({fingerprint, *(data.fingerprint for data in others)}) == 5


@pytest.mark.parametrize("short_half", ["train", "val"])
def test_shorter_than_one_sequence(config, short_half):
    config.val_fraction = 0.99 if short_half == "train" else 0.05
    data = open_data(config, seq_len=4)
    longest = min(len(data.train), len(data.val)) - 1
    assert open_data(config, seq_len=longest).train_batch(0, 2).inputs.shape == (2, longest)
    with pytest.raises(ValueError) as refused:
        open_data(config, seq_len=longest + 1)
    for named in (
        f"path={config.path}",
        f"seq_len={longest + 1}",
        f"fraction={config.val_fraction}",
    ):
        assert f"{named} " in f"{refused.value} "


def golden(config, **settings):
    """A hash of the first batches of both halves."""
    data = open_data(config, **settings)
    batches = [*(data.train_batch(step, 8) for step in range(4)), data.val_batch(8)]
    return hashlib.sha256(
        b"".join(tensor.numpy().tobytes() for batch in batches for tensor in batch)
    ).hexdigest()[:16]


def test_batches_are_those_of_every_version(config):
    """If a step read other tokens, no earlier run could be repeated."""
    settings = ({}, {"tokenizer": "bpe", "seq_len": 9}, {"documents": True})
    assert [golden(config, seed=7, **each) for each in settings] == GOLDEN


@pytest.mark.parametrize("size", [0, 101, 1000])
def test_a_file_that_becomes_shorter_is_named(config, size):
    """A regression test: SIGBUS ended the process."""
    data = open_data(config)
    os.truncate(data.train.path, size)
    with pytest.raises(OSError, match=f"{data.train.path} .*{len(data.train):,}"):
        data.train_batch(0, 400)


def test_a_store_may_be_deleted_and_is_closed_with_the_data(config):
    """A sweep opens its data anew for every job."""
    free = os.dup(0)
    os.close(free)
    data = open_data(config)
    before = data.train_batch(0, 4).inputs
    shutil.rmtree(data.train.path.parent)
    assert torch.equal(data.train_batch(0, 4).inputs, before)
    del data
    after = os.dup(0)
    os.close(after)
    assert after == free


def test_documents_by_hand():
    """An end belongs to the document it ends, even twice in a row, as first token or as last."""
    tokens = np.array([1, 2, END, 3, END, END, 4, 5, END], dtype=np.uint16)
    batch = windows(np.stack([tokens[:7], tokens[2:]]), end_of_text=END)
    assert batch.inputs.tolist() == [[1, 2, END, 3, END, END], [END, 3, END, END, 4, 5]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, 1, 2, 3, 3]]
    assert batch.targets.tolist() == [[2, END, 3, END, END, 4], [3, END, END, 4, 5, END]]
    assert [x.dtype for x in batch] == [torch.int64, torch.int64, torch.int32]
    together = windows(np.stack([tokens[:7], tokens[2:]]))
    assert len(together) == 2 and all(map(torch.equal, together, batch))
