"""AdamW and Muon, and their learning-rate schedule.

The schedule is a function of the step, so a resumed run needs no scheduler state.
"""

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from config import OptimConfig

MOMENTUM = 0.95  # of Muon's matrices


class Uncompiled:
    """An optimizer's methods without PyTorch's wrappers.

    The wrappers import torch.compile, which takes seconds, only to exclude the methods from it.
    Nothing here compiles an optimizer.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


class AdamW(Uncompiled, torch.optim.AdamW):
    """PyTorch's AdamW."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def build_optimizer(model: nn.Module, config: OptimConfig) -> "torch.optim.AdamW | MuonAndAdamW":
    """AdamW; or with name=muon, Muon for the matrices of model.blocks and AdamW for the rest.

    AdamW's weight decay is on matrices only. Biases and norm gains have one dimension: decay would
    pull their layers towards zero output.
    """
    stacks: dict[tuple[int, ...], list[nn.Parameter]] = {}  # Muon's, by the rows of their matrices
    for module in model.blocks.modules() if config.name == "muon" else ():
        if isinstance(module, nn.Linear):
            stacks.setdefault(getattr(module, "rows", ()), []).append(module.weight)
    taken = {id(weight) for weights in stacks.values() for weight in weights}
    rest = [x for x in model.parameters() if id(x) not in taken]
    groups = [
        {"params": [x for x in rest if x.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [x for x in rest if x.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
    if not stacks:
        return adamw
    muon = Muon(
        [{"params": weights, "rows": rows} for rows, weights in stacks.items()],
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonAndAdamW(muon, adamw)


class Muon(Uncompiled, torch.optim.Muon):
    """PyTorch's Muon, for weights that stack several matrices: each is orthogonalised by itself.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces a matrix's momentum by its
    nearest orthogonal matrix. A group's "rows" are the rows of each matrix of the stack, or empty
    for a weight that is one matrix. q, k and v share a weight only so that one product computes all
    three; orthogonalised together, the largest would set the scale of the others.

    With adjust_lr_fn="match_rms_adamw" (Liu et al. 2025, arXiv:2502.16982) an update is as large as
    AdamW's usually are, so one learning rate and one weight decay serve both.
    """

    step = torch.no_grad()(inspect.unwrap(torch.optim.Muon.step))

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        momenta: list[Tensor],
    ) -> bool:
        has_complex = super()._init_group(group, params, grads, momenta)
        if group["rows"]:
            # views, which Muon writes in place
            for tensors in (params, grads, momenta):
                tensors[:] = [matrix for stack in tensors for matrix in stack.split(group["rows"])]
        return has_complex


class MuonAndAdamW:
    """Two optimizers, each with its own parameters, that training uses as one.

    It has the part of torch.optim.Optimizer that the loop, checkpoints and GradScaler use.
    GradScaler reads the gradients of param_groups, and skips step() for both optimizers.
    """

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW):
        self.muon, self.adamw = muon, adamw

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [*self.muon.param_groups, *self.adamw.param_groups]

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()

    def zero_grad(self) -> None:
        self.muon.zero_grad()
        self.adamw.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError for the state of other groups of parameters."""
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])


def set_learning_rate(
    optimizer: torch.optim.Optimizer, step: int, steps: int, config: OptimConfig
) -> None:
    """Set the learning rate of this step in all groups of parameters."""
    lr = learning_rate(step, steps, config)
    for group in optimizer.param_groups:
        group["lr"] = lr


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The learning rate of one step, counted from 0, in a run of `steps`.

    A linear warm-up over min(warmup_steps, steps / 10), whose first step is not zero. Then a cosine
    that reaches min_lr at the last step, or with schedule=constant lr throughout.
    """
    warmup_steps = min(config.warmup_steps, max(1, steps // 10))
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    if config.schedule == "constant":
        return config.lr
    # a run no longer than its warm-up has no decay left to spread
    progress = (step - warmup_steps + 1) / max(1, steps - warmup_steps)
    cosine = math.cos(math.pi * min(1.0, progress))
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + cosine)
