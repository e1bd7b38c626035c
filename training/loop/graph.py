"""Launches the forward and backward passes of a step as one CUDA graph.

A step of a small model is a thousand short kernels. A host may take longer to launch them one by
one than the GPU takes to run them. The graph also holds clipping and, under torchrun, the messages
between ranks. It replays the same kernels on the same addresses, so no bit of the results changes.

A graph keeps as much memory as the step needs, and evaluation cannot use it. A step that needs more
than ROOM of the GPU's memory gets no graph. Steps that look at scores have a second graph in the
same memory, or none.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from data.prefetch import Pass
from training.loop.run import Run

log = logging.getLogger("tilegpt")

Results = tuple[Tensor, Tensor, Tensor | None]  # of gradients()
Compute = Callable[..., Results]

ROOM = 0.45
WARM_UP = 3  # calls that compile, with scores and without


class StepGraphs:
    """Replays gradients() for steps of one kind, and calls it for all others.

    graphs = StepGraphs(gradients)
    loss, norm, scores = graphs(run, passes, look=look)

    The next call overwrites loss, norm, scores and the gradients of the parameters. A kind is the
    shapes of the passes and the divisors of their losses. It is captured when it comes for the
    second time in a row, after WARM_UP calls.

    looks: whether steps that look at scores are captured too. The scores of a backend that does not
    return them are computed beside it, by code that asks the GPU.
    """

    def __init__(self, compute: Compute, *, looks: bool = True) -> None:
        self.compute, self.looks, self.calls = compute, looks, 0
        self.kind: Hashable = None
        self.inputs: list[Pass] = []
        # every graph leaves them at the same addresses
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []
        self.graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Results]] = {}  # by `look`
        self.pool: Any = None  # the memory that they share
        self.given_up = False

    def __call__(self, run: Run, passes: Sequence[Pass], *, look: bool = False) -> Results:
        kind = tuple(
            (divisor, *((x.shape, x.dtype) for x in tensors)) for tensors, divisor in passes
        )
        self.calls += 1
        never = self.given_up or (look and not self.looks)
        if never or kind != self.kind or self.calls <= WARM_UP:
            if not self.graphs:
                self.kind = kind
            return self.compute(run, passes, look=look)
        if not self.inputs:
            self.inputs = [Pass(tuple(map(torch.clone, x.tensors)), x.divisor) for x in passes]
        for given, kept in zip(passes, self.inputs, strict=True):
            torch._foreach_copy_(kept.tensors, given.tensors)
        if look not in self.graphs and not self._capture(run, look=look):
            return self.compute(run, passes, look=look)
        graph, results = self.graphs[look]
        graph.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return results

    def _capture(self, run: Run, *, look: bool) -> bool:
        """Whether there is a graph now; without the memory for it, all further steps go without."""
        needed = torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties().total_memory
        if self.pool is None and needed > ROOM:
            log.info(f"the steps are no CUDA graph: they need {needed:.0%} of the GPU's memory")
            self.drop()
            return False
        run.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        try:
            # another thread may copy the next batch to the GPU meanwhile
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                results = self.compute(run, self.inputs, look=look)
                if self.gradients:
                    kept = [gradient for _, gradient in self.gradients]
                    torch._foreach_copy_(kept, [parameter.grad for parameter, _ in self.gradients])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # nothing can go on: random numbers and pinned memory of PyTorch 2.11 stay in the state
            # of a capture. Its end fails too, and hides why
            why = str(error.__context__ or error).splitlines()[0]
            raise RuntimeError(
                f"the steps cannot be a CUDA graph: {why}; cuda_graph=false trains without one"
            ) from error
        if not self.gradients:
            self.gradients = [(x, x.grad) for x in run.model.parameters() if x.grad is not None]
        self.graphs[look], self.pool = (graph, results), graph.pool()
        return True

    def drop(self) -> None:
        """Destroy the graphs; further steps go without. NCCL ends only after graphs that send."""
        self.given_up = True
        self.graphs, self.gradients, self.inputs = {}, [], []
