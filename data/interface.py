"""What the rest of the project sees of the data: batches, a tokenizer, and one object that hands
out both halves of a corpus.

B sequences, N tokens of one sequence.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # a target that takes no loss: cross_entropy's own default


class Batch(NamedTuple):
    """Token `targets[b, i]` is what the model should say after reading `inputs[b, :i + 1]`.

    This or a PackedBatch: a tuple of tensors in the order in which the model takes them,
    `model(*batch)`.
    """

    inputs: "Tensor"  # (B, N) int64, on the CPU
    targets: "Tensor"  # (B, N) int64, on the CPU; IGNORED where no loss is taken


class PackedBatch(NamedTuple):
    """A Batch whose sequences hold several documents that shall not see one another.

    A document's end of text is its last token. Its target is the first token of the next document,
    and counts like any other: that is how a model learns what documents begin with, which an empty
    prompt, one end of text, asks of it.
    """

    inputs: "Tensor"  # (B, N) int64, on the CPU
    targets: "Tensor"  # (B, N) int64, on the CPU
    # (B, N) int32, on the CPU: 0 for the document a sequence begins in, 1 for the next, ...
    document_ids: "Tensor"


class Tokenizer(Protocol):
    name: str
    vocab_size: (
        int  # the end of text included, and tokens that no text has where more were asked for
    )
    end_of_text: int  # the token that follows every document
    fingerprint: str  # equal fingerprints give equal tokens

    def encode(self, text: str) -> np.ndarray:
        """The tokens of any text; `<|endoftext|>` written in it is ordinary text."""
        ...

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of any tokens; bytes that are not UTF-8 become U+FFFD, tokens that no text has
        become nothing.
        """
        ...


class TrainingData(Protocol):
    tokenizer: Tokenizer | None  # None where the tokens stand for no text
    vocab_size: int
    # of corpus, held-out share, tokenizer, and whether documents are kept apart: losses are
    # comparable only where it is equal
    fingerprint: str
    description: str  # one line for the start of a run
    metric: Literal["accuracy"] | None  # what is reported beside the loss

    def train_batch(self, step: int, num_sequences: int) -> Batch | PackedBatch:
        """Random sequences: a pure function of (seed, step), of which the first k do not depend on
        `num_sequences`.
        """
        ...

    def val_batch(self, num_sequences: int) -> Batch | PackedBatch:
        """Held-out sequences, the same ones at every call and for every seed."""
        ...


def generator(seed: int, step: int) -> np.random.Generator:
    """The random numbers of one step. Philox is a function of its key: any step can be drawn
    without drawing those before it.
    """
    # as one number: a pair of numbers past 2**63 would go through floating point
    return np.random.Generator(np.random.Philox(key=seed << 64 | step))


def to_batch(
    inputs: np.ndarray, targets: np.ndarray, document_ids: np.ndarray | None = None
) -> Batch | PackedBatch:
    """(B, N) integer arrays as tensors."""
    import torch

    batch = Batch(
        torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(targets.astype(np.int64))
    )
    return (
        batch
        if document_ids is None
        else PackedBatch(*batch, torch.from_numpy(document_ids.astype(np.int32)))
    )
