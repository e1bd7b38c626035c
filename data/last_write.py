"""Last-write recall: a synthetic task that a broken softmax fails visibly, within a minute on a
CPU.

Every position either writes a value to a key or asks for a key, each with probability one half,
keys and values uniform. The answer to a question is the value written to that key most recently, so
the model must rank the writes of one key against each other across the whole context; with tiled
attention they lie in different tiles, and only a softmax that puts tiles on one scale gets it
right. A question about a key not yet written is not scored.

    2 keys (a, b), 2 values (0, 1)
              a=1   b=0   a=0   a?   b?   b=1   b?
    inputs      1     2     0    4    5     3    5      write (k, v) is token k * num_values + v;
                question k is num_keys * num_values + k
    targets  -100  -100  -100    6    6  -100    7      the answers are tokens of their own, after
             the questions

Were an answer the token of a write, a model with tied embeddings would have to tell the two apart.
Chance accuracy is 1 / num_values. B sequences, N = seq_len.
"""

import numpy as np

from data.interface import IGNORED, Batch, generator, to_batch

# the last seed there is: held-out sequences have a stream of their own
VAL_SEED = 2**64 - 1


class LastWriteData:
    """TrainingData that is drawn fresh at every step; there is no text, hence no tokenizer."""

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
        # one draw a position, so that the first sequences do not depend on how many follow: the
        # lower half of the range are the writes, and the upper half falls evenly on the questions
        drawn = random.integers(2 * self.num_writes, size=(num_sequences, self.seq_len))  # (B, N)
        is_write = drawn < self.num_writes
        asked = (
            drawn // self.num_values - self.num_keys
        )  # (B, N), meaningful where a question stands
        inputs = np.where(is_write, drawn, self.num_writes + asked)
        targets = np.full_like(inputs, IGNORED)
        position = np.arange(self.seq_len)
        for key_number in range(self.num_keys):
            writes_key = is_write & (drawn // self.num_values == key_number)
            last_write = np.maximum.accumulate(
                np.where(writes_key, position, -1), axis=1
            )  # (B, N), -1 before the first
            value = np.take_along_axis(drawn, last_write.clip(0), axis=1) % self.num_values
            answered = ~is_write & (asked == key_number) & (last_write >= 0)
            targets[answered] = self.first_answer + value[answered]
        return to_batch(inputs, targets)
