"""What the rest of the project sees of the data: batches for training and held-out ones.

B sequences, N tokens of one sequence.
"""

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # a target that takes no loss: the default ignore_index of torch's cross-entropy


class Batch(NamedTuple):
    """Token `targets[b, i]` is what the model should say after reading `inputs[b, :i + 1]`.

    The tensors stand in the order in which the model takes them, as in `model(*batch)`. So do those
    of a PackedBatch.
    """

    inputs: "Tensor"  # (B, N) int64, on the CPU
    targets: "Tensor"  # (B, N) int64, on the CPU; IGNORED where no loss is taken


class PackedBatch(NamedTuple):
    """A Batch whose sequences hold several documents that must not see one another.

    The end of text is the last token of its document. Its target, the first token of the next
    document, counts like any other: from it a model learns how documents begin. Sampling from an
    empty prompt, which is a single end of text, relies on that.
    """

    inputs: "Tensor"  # (B, N) int64, on the CPU
    targets: "Tensor"  # (B, N) int64, on the CPU
    # (B, N) int32, on the CPU: 0 for the document a sequence begins in, 1 for the next, ...
    document_ids: "Tensor"


class TrainingData(Protocol):
    # None if the tokens are not text; the accuracy is reported then, beside the loss
    tokenizer: Tokenizer | None
    vocab_size: int
    # a hash of the corpus, the held-out share, the tokenizer, and whether documents are kept apart:
    # losses can be compared only where fingerprints are equal
    fingerprint: str
    description: str  # one line for the start of a run

    def train_batch(self, step: int, num_sequences: int) -> Batch | PackedBatch:
        """Random sequences, a pure function of (seed, step).

        The first k sequences are the same for every `num_sequences`.
        """
        ...

    def val_batch(self, num_sequences: int) -> Batch | PackedBatch:
        """Held-out sequences, the same ones at every call and for every seed."""
        ...


def generator(seed: int, step: int) -> np.random.Generator:
    """The random numbers of one step.

    Philox is a function of its key: a step can be drawn without drawing the steps before it.
    """
    # one integer, because numpy would convert a pair with a number past 2**63 to floating point
    return np.random.Generator(np.random.Philox(key=seed << 64 | step))


def to_batch(
    inputs: np.ndarray, targets: np.ndarray, document_ids: np.ndarray | None = None
) -> Batch | PackedBatch:
    """Tensors from (B, N) integer arrays; document_ids are int32."""
    import torch

    tensors = [torch.from_numpy(x.astype(np.int64)) for x in (inputs, targets)]
    if document_ids is None:
        return Batch(*tensors)
    return PackedBatch(*tensors, torch.from_numpy(document_ids))
