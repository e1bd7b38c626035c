"""A corpus of text as batches: random windows to train on, fixed windows of the held-out half.

    tokens   d d d d d E d d E d d d d d d ...      E is <|endoftext|>; a window may start and end
                                                    anywhere
    window         [d d d E d]                      seq_len + 1 tokens
    inputs          d d d E
    targets           d d E d                       the successor of each input

Windows are drawn with replacement, as in nanoGPT, so there are no epochs. After as many tokens as
the training half holds, 1/e of them have not been read yet, and others were read several times.

With data.documents=true, attention stays inside each document of a window. Positions still count
through the whole window. Targets do not change: an end of text is followed by the first token of
the next document.

    document_ids    0 0 0 0 1                       E ends its document; the document in which the
                                                    window begins is number 0

B sequences, N = seq_len.
"""

import hashlib

import numpy as np

from config import DataConfig
from data.corpora import subject
from data.interface import Batch, PackedBatch, generator, to_batch
from data.token_file import TokenFile
from data.token_store import open_store
from data.tokenizer import Tokenizer


class TextData:
    """TrainingData over a token store, which is built first if this machine has none."""

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, *, seq_len: int, seed: int
    ) -> None:
        self.train, self.val, meta = open_store(config, tokenizer)
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.seq_len = seq_len
        self.seed = seed
        documents, apart = meta["documents"], config.documents
        self.end_of_text = tokenizer.end_of_text if apart else None
        identity = f"{meta['corpus']} {tokenizer.fingerprint} {config.val_fraction}"
        identity += " documents" * apart
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.description = (
            f"{subject(config)}: "
            f"{len(self.train):,} tokens of {documents['train']:,} documents to train on, "
            f"{len(self.val):,} tokens of {documents['val']:,} documents held out; tokenizer "
            f"{tokenizer.fingerprint}, corpus {meta['corpus'][:8]}"
        )
        self.description += ", documents kept apart" * apart
        if seq_len >= min(len(self.train), len(self.val)):
            raise ValueError(
                f"{subject(config)} is shorter than one sequence: seq_len={seq_len} needs "
                f"{seq_len + 1} tokens in each half, and there are {len(self.train)} to train on "
                f"and {len(self.val)} held out; give more text, a smaller seq_len, or another "
                f"share than data.val_fraction={config.val_fraction}"
            )

    def train_batch(self, step: int, num_sequences: int) -> Batch | PackedBatch:
        random = generator(self.seed, step)
        starts = random.integers(len(self.train) - self.seq_len, size=num_sequences)
        return self._windows(self.train, starts)

    def val_batch(self, num_sequences: int) -> Batch | PackedBatch:
        if num_sequences > len(self.val):
            raise ValueError(
                f"{num_sequences} held-out sequences (eval_sequences=, or sequences= of a script) "
                f"are more than the {len(self.val)} held-out tokens"
            )
        last = len(self.val) - self.seq_len - 1
        starts = np.linspace(0, last, num_sequences).astype(np.int64)
        return self._windows(self.val, starts)

    def _windows(self, tokens: TokenFile, starts: np.ndarray) -> Batch | PackedBatch:
        rows = tokens.rows(starts, self.seq_len + 1)  # (B, N + 1)
        return windows(rows, end_of_text=self.end_of_text)


def windows(rows: np.ndarray, *, end_of_text: int | None = None) -> Batch | PackedBatch:
    """Split windows (B, N + 1) into inputs and targets; end_of_text keeps documents apart."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    if end_of_text is None:
        return to_batch(inputs, targets)
    is_end = inputs == end_of_text
    # the number of ends before each token, not counting the token itself
    document_ids = np.cumsum(is_end, axis=1, dtype=np.int32) - is_end
    return to_batch(inputs, targets, document_ids)
