"""Last-write recall: a synthetic task on which a broken softmax fails within a minute on a CPU.

Every position either writes a value to a key or asks for a key, each with probability one half.
Keys and values are uniform. The answer to a question is the value last written to its key. A
question about a key that was not written yet is not scored.

So the model must rank the writes of one key across the whole context. In tiled attention they lie
in different tiles, and only a softmax that puts all tiles on one scale ranks them right.

    2 keys (a, b), 2 values (0, 1)
              a=1   b=0   a=0   a?   b?   b=1   b?
    inputs      1     2     0    4    5     3    5      a write (k, v) is token k * num_values + v;
                                                        a question k is num_keys * num_values + k
    targets  -100  -100  -100    6    6  -100    7      answers are tokens of their own, after the
                                                        questions

If an answer were the token of a write, a model with tied embeddings would have to tell the two
apart. Chance accuracy is 1 / num_values. B sequences, N = seq_len.
"""

import numpy as np

from data.interface import IGNORED, Batch, generator, to_batch

VAL_SEED = 2**64 - 1  # the largest seed: held-out sequences have a random stream of their own


class LastWriteData:
    """TrainingData that is drawn anew at every step. It has no text, hence no tokenizer."""

    tokenizer = None
    metric = "accuracy"

    def __init__(self, *, num_keys: int, num_values: int, seq_len: int, seed: int) -> None:
        self.num_keys, self.num_values = num_keys, num_values
        self.seq_len = seq_len
        self.seed = seed
        self.num_writes = num_keys * num_values
        self.first_answer = self.num_writes + num_keys
        self.vocab_size = self.first_answer + num_values
        self.fingerprint = f"last_write-{num_keys}x{num_values}"
        self.description = (
            f"data=last_write: {num_keys} keys, {num_values} values, new sequences at every step; "
            f"chance accuracy {1 / num_values:.1%}"
        )

    def train_batch(self, step: int, num_sequences: int) -> Batch:
        return self.draw(generator(self.seed, step), num_sequences)

    def val_batch(self, num_sequences: int) -> Batch:
        return self.draw(generator(VAL_SEED, 0), num_sequences)

    def draw(self, random: np.random.Generator, num_sequences: int) -> Batch:
        # one draw a position, so that the first sequences do not depend on how many follow. The
        # lower half of the range is the writes; the upper half is divided evenly among questions
        drawn = random.integers(2 * self.num_writes, size=(num_sequences, self.seq_len))  # (B, N)
        is_write = drawn < self.num_writes
        key, value = drawn // self.num_values % self.num_keys, drawn % self.num_values
        targets = np.full_like(drawn, IGNORED)
        position = np.arange(self.seq_len)
        for k in range(self.num_keys):
            writes = np.where(is_write & (key == k), position, -1)
            last_write = np.maximum.accumulate(writes, axis=1)  # (B, N), -1 before the first
            last_value = np.take_along_axis(value, last_write.clip(0), axis=1)
            scored = ~is_write & (key == k) & (last_write >= 0)
            targets[scored] = self.first_answer + last_value[scored]
        return to_batch(np.where(is_write, drawn, self.num_writes + key), targets)
