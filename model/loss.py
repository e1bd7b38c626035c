"""The training loss.

Dimensions: B batch, N tokens of a sequence.
"""

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the target where no loss is taken


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log p(target) in nats over the targets that count; 0 where none does.

    logits (B, N, vocab_size) of any floating dtype, targets (B, N) int64 with -100 where no loss is taken; a float32 scalar comes back.
    """
    total = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum().clamp(min=1)
