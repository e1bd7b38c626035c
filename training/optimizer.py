"""AdamW and its learning-rate schedule.

The schedule is a plain function of the step, so a resumed run needs no scheduler state.
"""

import math

import torch
from torch import nn

from config import OptimConfig

# devices on which PyTorch has AdamW as one fused kernel
FUSED_DEVICES = ("cpu", "cuda")


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over every trainable parameter, with weight decay on matrices only.

    Biases and the gains of normalisation layers have one dimension: decaying them pulls the layer towards zero output.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in parameters)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused
    )


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The learning rate of one step, counted from 0, in a run of `steps`.

    A linear warm-up over min(warmup_steps, steps / 10) whose first step is not zero; then a cosine that reaches min_lr at the
    last step, or lr throughout with schedule=constant.
    """
    warmup_steps = min(config.warmup_steps, max(1, steps // 10))
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    if config.schedule == "constant":
        return config.lr
    # a run no longer than its warm-up has no decay left to spread
    progress = (step - warmup_steps + 1) / max(1, steps - warmup_steps)
    # whoever lowers lr below the default min_lr does not ask for a schedule that rises
    min_lr = min(config.min_lr, config.lr)
    return min_lr + (config.lr - min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
