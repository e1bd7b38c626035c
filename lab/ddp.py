"""train.py with PyTorch's DistributedDataParallel in place of our own sum of gradients, to measure
one beside the other: lab.many_gpus starts it.

    torchrun --standalone --nproc-per-node=2 -m lab.ddp attention=triton seq_len=1024

Takes train.py's settings, with one pass a step.
"""

import runpy
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from training import step
from training.environment import ROOT
from training.ranks import Ranks


class Wrapped(DistributedDataParallel):
    """With the methods of the model inside."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def add_up(_: None, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """The sum, where DistributedDataParallel has the mean: losses have their share already."""
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class LossSum(nullcontext):
    """In place of GradientSum: gradients are added up already."""

    def __init__(self, ranks: Ranks, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.ranks = ranks

    def of(self, loss: Tensor) -> Tensor:
        return self.ranks.sum(loss)


def wrapped(*arguments: Any, prepare: Any = step.prepare_model, **settings: Any) -> Wrapped:
    model = prepare(*arguments, **settings)
    found = Wrapped(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    found.register_comm_hook(None, add_up)
    return found


if __name__ == "__main__":
    step.GradientSum, step.prepare_model = LossSum, wrapped
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
