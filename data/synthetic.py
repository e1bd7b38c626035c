"""Synthetic tasks whose answer stands earlier in the sequence: last_write, recall and needle.

Only the answers are scored: every other target is ignored. Every step draws new sequences.

A task is a function of the settings, the random numbers and the shape (B, N): B sequences of
N = seq_len tokens. It returns inputs, the answer that each position holds, and sources, all (B, N):
the position where the answer to a question stands, -1 where nothing is asked. The first sequences
do not depend on how many follow.
"""

import numpy as np

from config import DataConfig
from data.interface import IGNORED, Batch, generator, to_batch

VAL_SEED = 2**64 - 1  # the largest seed: held-out sequences have a random stream of their own
POWER = 0.01  # exponent of the distribution of the gaps before recall's questions

Shape = tuple[int, int]
Sequences = tuple[np.ndarray, np.ndarray, np.ndarray]  # inputs, answers and sources


class SyntheticData:
    """TrainingData that is drawn anew at every step. It has no text, hence no tokenizer."""

    tokenizer = None

    def __init__(self, config: DataConfig, *, seq_len: int, seed: int) -> None:
        keys, values = config.num_keys, config.num_values
        self.config = config
        self.seq_len = seq_len
        self.seed = seed
        self.vocab_size = (1 if config.source == "recall" else keys * values) + keys + values
        self.fingerprint = f"{config.source}-{keys}x{values}"
        if config.source == "recall":
            self.fingerprint += f"-{config.pairs(seq_len)}"
        self.description = (
            f"data={config.source}: {keys} keys, {values} values, new sequences at every step; "
            f"chance accuracy {1 / values:.1%}"
        )

    def train_batch(self, step: int, num_sequences: int) -> Batch:
        return self._draw(generator(self.seed, step), num_sequences)

    def val_batch(self, num_sequences: int) -> Batch:
        return self._draw(generator(VAL_SEED, 0), num_sequences)

    def _draw(self, random: np.random.Generator, num_sequences: int) -> Batch:
        task, shape = TASKS[self.config.source], (num_sequences, self.seq_len)
        inputs, answers, sources = task(self.config, random, shape)
        found = np.take_along_axis(answers, sources.clip(0), axis=1)
        return to_batch(inputs, np.where(sources >= 0, found, IGNORED))


def last_write(config: DataConfig, random: np.random.Generator, shape: Shape) -> Sequences:
    """Last-write recall: on it a broken softmax fails within a minute on a CPU.

    Every position either writes a value to a key or asks for a key, each with probability one half.
    Keys and values are uniform. The answer to a question is the value last written to its key. A
    question about a key that was not written yet is not scored.

    So the model must rank the writes of one key across the whole context. In tiled attention they
    lie in different tiles, and only a softmax that puts all tiles on one scale ranks them right.

        2 keys (a, b), 2 values (0, 1)
                  a=1   b=0   a=0   a?   b?   b=1   b?
        inputs      1     2     0    4    5     3    5    a write (k, v) is token
                                                          k * num_values + v; a question k is
                                                          num_keys * num_values + k
        targets  -100  -100  -100    6    6  -100    7    answers are tokens of their own, after
                                                          the questions

    If an answer were the token of a write, a model with tied embeddings would have to tell the two
    apart. Chance accuracy is 1 / num_values.
    """
    num_keys, num_values = config.num_keys, config.num_values
    num_writes = num_keys * num_values
    # the lower half of the range is the writes; the upper half is divided evenly among questions
    drawn = random.integers(2 * num_writes, size=shape)
    is_write = drawn < num_writes
    key, value = drawn // num_values % num_keys, drawn % num_values
    sources, position = np.full_like(drawn, -1), np.arange(shape[1])
    for k in range(num_keys):
        writes = np.where(is_write & (key == k), position, -1)
        latest = np.maximum.accumulate(writes, axis=1)  # (B, N), -1 before the first
        sources = np.where(~is_write & (key == k), latest, sources)
    inputs = np.where(is_write, drawn, num_writes + key)
    return inputs, num_writes + num_keys + value, sources


def needle(config: DataConfig, random: np.random.Generator, shape: Shape) -> Sequences:
    """A needle in a haystack: the last token asks for a key that was written once, anywhere.

    All other positions write other keys, so every tile of the haystack holds distractors. The
    needle's position is uniform, and so is all else. Tokens are those of last_write.

        3 keys (a, b, c), 2 values (0, 1)
                  a=1   c=0   b=1   a=1   a=0   b?
        inputs      1     4     3     1     0    7
        targets  -100  -100  -100  -100  -100   10

    This is a small version of the needle tests for long contexts, with distractors instead of
    prose, as in RULER's multi-key retrieval (Hsieh et al. 2024, arXiv:2404.06654).
    """
    num_keys, num_values = config.num_keys, config.num_values
    num_writes, haystack = num_keys * num_values, shape[1] - 1
    # one draw for a sequence: the writes, the needle's position, and its key
    highest = [(num_keys - 1) * num_values] * haystack + [haystack, num_keys]
    drawn = random.integers(highest, size=(shape[0], len(highest)))
    writes, place, asked = drawn[:, :-2], drawn[:, -2:-1], drawn[:, -1:]
    # counted from the key that is asked for, so that the others differ from it
    steps = np.where(np.arange(haystack) == place, 0, 1 + writes // num_values)
    key, value = (asked + steps) % num_keys, writes % num_values
    inputs = np.hstack([key * num_values + value, num_writes + asked])
    answers = np.hstack([num_writes + num_keys + value, asked])  # nothing asks for the last
    sources = np.full_like(inputs, -1)
    sources[:, -1:] = place
    return inputs, answers, sources


def recall(config: DataConfig, random: np.random.Generator, shape: Shape) -> Sequences:
    """Multi-query associative recall, MQAR (Arora et al. 2023, "Zoology", arXiv:2312.04927).

    A sequence begins with num_pairs pairs of a key and its value, all different. Then each key is
    asked for once. The question stands an even gap behind the pairs, and short gaps are likelier:
    the g-th place has a weight of g**(POWER - 1), and no two questions share one.

        2 pairs (a=1, b=0), 8 places
                  a    1    b    0    a    .    .    .    b    .
        inputs    2    7    3    6    2    0    0    0    3    0
        targets  -100 -100 -100 -100  7  -100 -100 -100   6  -100

    Token 0 fills the gaps; keys and values follow. conf/data/recall.yaml has 4,095 keys and 4,096
    values: a vocabulary of 8,192.

    From zoology's code (zoology/data/multiquery_ar.py, and figure 2's settings in
    experiments/iclr24_zoology_figure2): the layout, the vocabulary, gaps of power 0.01 that are
    drawn in the order of the keys, gaps filled with 0, and the number of pairs for each length.
    Unlike there, no sequence is seen twice: zoology trains 64 epochs on 100,000 sequences, and
    tests on 3,000 (eval_sequences=3000). Its model has 2 layers of 1 head, without MLPs.
    """
    pairs = config.pairs(shape[1])
    weights = np.arange(1, (shape[1] - 2 * pairs) // 2 + 1) ** (POWER - 1)
    share = weights / weights.sum()
    inputs = np.zeros(shape, dtype=np.int64)
    sources = np.full_like(inputs, -1)
    # one sequence at a time: numpy cannot draw several samples without replacement at once
    for sequence, source in zip(inputs, sources, strict=True):
        keys = 1 + random.choice(config.num_keys, pairs, replace=False)
        values = 1 + config.num_keys + random.choice(config.num_values, pairs, replace=False)
        places = random.choice(len(share), pairs, replace=False, p=share)
        sequence[: 2 * pairs : 2], sequence[1 : 2 * pairs : 2] = keys, values
        questions = 2 * pairs + 2 * places
        sequence[questions] = keys
        source[questions] = np.arange(1, 2 * pairs, 2)
    return inputs, inputs, sources


TASKS = {"last_write": last_write, "recall": recall, "needle": needle}
