"""A corpus of text as batches: random windows of the training tokens, fixed windows of the held-out ones.

    tokens   d d d d d E d d E d d d d d d ...      E is <|endoftext|>; a window may start and end anywhere
    window         [d d d E d]                      seq_len + 1 tokens
    inputs          d d d E
    targets           d d E d                       each input's successor

B sequences, N = seq_len.
"""

import hashlib

import numpy as np

from config import DataConfig
from data import corpora
from data.interface import Batch, Tokenizer, generator, to_batch
from data.token_store import open_store


class TextData:
    """TrainingData over a token store; opening it builds the store if this machine has none."""

    metric = None

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, *, seq_len: int, seed: int) -> None:
        store = open_store(config, tokenizer)
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.seq_len = seq_len
        self.seed = seed
        self.train, self.val = store.train.tokens, store.val.tokens
        identity = f"{store.meta['corpus']} {tokenizer.fingerprint} {config.val_fraction}"
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.description = describe(config, store.meta)
        longest = min(len(self.train), len(self.val)) - 1
        if seq_len > longest:
            shorter = f"seq_len={longest} or less, " if longest > 0 else ""
            raise ValueError(
                f"{corpora.subject(config)} is shorter than one sequence: seq_len={seq_len} needs {seq_len + 1} tokens in each half, "
                f"and there are {len(self.train)} to train on and {len(self.val)} held out; "
                f"give more text, {shorter}or another share than data.val_fraction={config.val_fraction}"
            )

    def train_batch(self, step: int, num_sequences: int) -> Batch:
        starts = generator(self.seed, step).integers(len(self.train) - self.seq_len, size=num_sequences)
        return windows(self.train, starts, self.seq_len)

    def val_batch(self, num_sequences: int) -> Batch:
        last = len(self.val) - self.seq_len - 1
        return windows(self.val, np.linspace(0, last, num_sequences).astype(np.int64), self.seq_len)


def windows(tokens: np.ndarray, starts: np.ndarray, seq_len: int) -> Batch:
    """The windows of `seq_len` + 1 tokens at `starts`, split into inputs and targets."""
    # rows are copied in the stored type and widened once: several times faster than widening row by row
    rows = np.empty((len(starts), seq_len + 1), dtype=tokens.dtype)  # (B, N + 1)
    for row, start in zip(rows, starts, strict=True):
        row[:] = tokens[start : start + seq_len + 1]
    return to_batch(rows[:, :-1], rows[:, 1:])


def describe(config: DataConfig, meta: dict) -> str:
    train, held_out = (f"{meta[f'{name}_tokens']:,} tokens of {meta[f'{name}_documents']:,} documents" for name in ("train", "val"))
    if meta["held_out"] == "end":
        train, held_out = f"{meta['train_tokens']:,} tokens", f"the {meta['val_tokens']:,} at the end of the only document"
    return (
        f"{corpora.subject(config)}: {train} to train on, {held_out} held out; tokenizer {meta['tokenizer']}, corpus {meta['corpus'][:8]}"
    )
