"""First weights larger than a run has, so that the attention of a small model is sharp."""

import torch
from torch import nn

from model import GPT
from model.gpt import INIT_STD


@torch.no_grad()
def with_weights(model: GPT, std: float) -> GPT:
    """The new model with its matrices drawn from N(0, std)."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.mul_(std / INIT_STD)
    return model
