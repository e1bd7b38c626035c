"""A corpus of text as batches: random windows of the training tokens, fixed windows of the held-out
ones.

    tokens   d d d d d E d d E d d d d d d ...      E is <|endoftext|>; a window may start and end
             anywhere
    window         [d d d E d]                      seq_len + 1 tokens
    inputs          d d d E
    targets           d d E d                       each input's successor

Windows are drawn with replacement, as nanoGPT draws them. There are no epochs: after as many tokens
as the training half has, a share of 1/e has not been read yet, and some tokens were read several
times.

With data.documents=true the documents of a window are kept apart: attention stays inside each, by
its number. Positions go on counting through the window, and targets are the same: what follows an
end of text is how documents begin.

    document_ids    0 0 0 0 1                       E ends its document; one that began before the
                    window has the number 0

B sequences, N = seq_len.
"""

import hashlib

import numpy as np

from config import DataConfig
from data import corpora
from data.interface import Batch, PackedBatch, Tokenizer, generator, to_batch
from data.token_file import TokenFile
from data.token_store import open_store


class TextData:
    """TrainingData over a token store; opening it builds the store if this machine has none."""

    metric = None

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, *, seq_len: int, seed: int
    ) -> None:
        store = open_store(config, tokenizer)
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.seq_len = seq_len
        self.seed = seed
        self.train, self.val = store.train.tokens, store.val.tokens
        # where neither half has a second document there is nothing to keep apart: batches and
        # losses are those without
        apart = (
            config.documents and max(store.meta["train_documents"], store.meta["val_documents"]) > 1
        )
        self.end_of_text = tokenizer.end_of_text if apart else None
        identity = (
            f"{store.meta['corpus']} {tokenizer.fingerprint} {config.val_fraction}"
            + " documents" * apart
        )
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.description = describe(config, store.meta) + ", documents kept apart" * apart
        longest = min(len(self.train), len(self.val)) - 1
        if seq_len > longest:
            shorter = f"seq_len={longest} or less, " if longest > 0 else ""
            raise ValueError(
                f"{corpora.subject(config)} is shorter than one sequence: seq_len={seq_len} needs "
                f"{seq_len + 1} tokens in each half, "
                f"and there are {len(self.train)} to train on and {len(self.val)} held out; "
                f"give more text, {shorter}or another share than "
                f"data.val_fraction={config.val_fraction}"
            )

    def train_batch(self, step: int, num_sequences: int) -> Batch | PackedBatch:
        starts = generator(self.seed, step).integers(
            len(self.train) - self.seq_len, size=num_sequences
        )
        return self._windows(self.train, starts)

    def val_batch(self, num_sequences: int) -> Batch | PackedBatch:
        last = len(self.val) - self.seq_len - 1
        starts = np.linspace(0, last, num_sequences).astype(np.int64)
        return self._windows(self.val, starts)

    def _windows(self, tokens: TokenFile, starts: np.ndarray) -> Batch | PackedBatch:
        rows = tokens.rows(starts, self.seq_len + 1)  # (B, N + 1)
        # a token without a row in the embedding would end a GPU's process: the file has changed
        # since it was checked
        if (largest := rows.max(initial=0)) >= self.vocab_size:
            raise OSError(
                f"{tokens.path} was altered while it was read: it holds token {largest}, and "
                f"there are {self.vocab_size}; "
                "the next start builds it again"
            )
        return windows(rows, end_of_text=self.end_of_text)


def windows(rows: np.ndarray, *, end_of_text: int | None = None) -> Batch | PackedBatch:
    """Windows (B, N + 1) split into inputs and targets; given the end of text, with documents kept
    apart.
    """
    inputs, targets = rows[:, :-1], rows[:, 1:]
    return to_batch(
        inputs, targets, None if end_of_text is None else number_documents(inputs, end_of_text)
    )


def number_documents(inputs: np.ndarray, end_of_text: int) -> np.ndarray:
    """(B, N) int32 for tokens (B, N): how many ends stand before each, itself not counted."""
    is_end = inputs == end_of_text
    return np.cumsum(is_end, axis=1, dtype=np.int32) - is_end


def describe(config: DataConfig, meta: dict) -> str:
    train, held_out = (
        f"{meta[f'{name}_tokens']:,} tokens of {meta[f'{name}_documents']:,} documents"
        for name in ("train", "val")
    )
    if meta["held_out"] == "end":
        train, held_out = (
            f"{meta['train_tokens']:,} tokens",
            f"the {meta['val_tokens']:,} at the end of the only document",
        )
    return (
        f"{corpora.subject(config)}: {train} to train on, {held_out} held out; tokenizer "
        f"{meta['tokenizer']}, corpus {meta['corpus'][:8]}"
    )
