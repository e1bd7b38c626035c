"""data.documents=true: windows number their documents, and the fingerprint says so.

Tokens and targets stay as they are.
"""

import numpy as np
import torch

from config import TokenizerConfig
from data import Batch, PackedBatch, build_data
from data.batches import windows

END = 9


def open_data(config, *, documents=True, seq_len=32):
    config.documents = documents
    return build_data(config, TokenizerConfig("byte"), seq_len=seq_len, seed=0)


def test_numbers_by_hand():
    """An end belongs to the document it ends, even twice in a row, as first token or as last."""
    tokens = np.array([1, 2, END, 3, END, END, 4, 5, END], dtype=np.uint16)
    batch = windows(np.stack([tokens[:7], tokens[2:]]), end_of_text=END)
    assert batch.inputs.tolist() == [[1, 2, END, 3, END, END], [END, 3, END, END, 4, 5]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, 1, 2, 3, 3]]
    assert batch.targets.tolist() == [[2, END, 3, END, END, 4], [3, END, END, 4, 5, END]]


def test_numbers_are_those_of_the_stored_documents(config):
    """Document numbers change where the stored documents end, wherever a window begins."""
    data = open_data(config, seq_len=200)
    text = data.train.rows(np.array([0]), len(data.train))[0]
    ends = np.flatnonzero(text == data.end_of_text)
    starts = np.arange(0, len(text) - 201, 97)
    batch = windows(data.train.rows(starts, 201), end_of_text=data.end_of_text)
    of_token = np.searchsorted(ends, np.arange(len(text)))  # the document of each token
    for start, ids in zip(starts, batch.document_ids, strict=True):
        expected = of_token[start : start + 200]
        assert np.array_equal(ids, expected - expected[0])
    assert batch.document_ids.max() > 5


def test_tokens_and_targets_are_those_without(config):
    apart, together = (
        open_data(config).train_batch(3, 64),
        open_data(config, documents=False).train_batch(3, 64),
    )
    assert isinstance(together, Batch) and all(map(torch.equal, together, apart[:2]))
    assert isinstance(apart, PackedBatch) and (apart.document_ids > 0).any()
    assert [x.dtype for x in apart] == [torch.int64, torch.int64, torch.int32]
    assert all(x.shape == (64, 32) and x.is_contiguous() for x in apart)


def test_fingerprint_and_description_tell_whether_documents_are_apart(config):
    apart, together = open_data(config), open_data(config, documents=False)
    assert apart.fingerprint != together.fingerprint
    assert apart.description.startswith(together.description) and "apart" in apart.description


def test_a_single_document_is_the_same_either_way(config, tmp_path):
    """Its end is a target but never an input: there is nothing to keep apart."""
    config.path = str(tmp_path / "corpus" / "59.txt")
    apart, together = open_data(config), open_data(config, documents=False)
    assert apart.fingerprint == together.fingerprint and apart.description == together.description
    for read in (lambda data: data.train_batch(0, 8), lambda data: data.val_batch(8)):
        assert all(map(torch.equal, read(apart), read(together)))
