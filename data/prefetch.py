"""Read batches and copy them to the GPU in a thread, a few steps before they are needed.

    with Prefetcher(data, num_sequences, batch_size, device) as batches:
        for tensors, divisor in batches.passes(step):  # the next steps are under way
            (model(*tensors).loss / divisor).backward()

    main thread      | step 7           | step 8            | step 9
    prefetch thread    9 -> host -> GPU   10 -> host -> GPU

The result is data.train_batch(step, num_sequences), or a part of it, cut into passes of
batch_size sequences. So a run is the same with and without prefetching, whatever step it starts
from. On a CPU there is no thread: a step there takes hundreds of times as long as its batch.
"""

import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from data.interface import IGNORED, TrainingData

# one step ahead hides a batch that takes as long as a step; two also hide an occasional longer one
AHEAD = 2


class Pass(NamedTuple):
    """One forward and backward pass of a step."""

    tensors: tuple[Tensor, ...]  # the model's inputs, on the device
    # the model's loss is the mean over this pass's targets; divided by this, it adds up to the
    # step's loss
    divisor: float


class Prefetcher:
    """Use as a context manager: the thread ends with the block, after the batch it is reading."""

    def __init__(
        self,
        data: TrainingData,
        num_sequences: int,
        batch_size: int,
        device: torch.device,
        *,
        rows: slice = slice(None),
        columns: slice = slice(None),
        ahead: int | None = None,
    ) -> None:
        self.data = data
        self.num_sequences = num_sequences
        self.rows, self.columns = rows, columns
        self.batch_size = batch_size
        self.device = device
        # on a stream of their own, copies do not queue behind the step that is being computed
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.ahead = (0 if self.stream is None else AHEAD) if ahead is None else ahead
        self.pending: dict[int, Future[list[Pass]]] = {}  # by step
        # the thread starts with its first batch
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="prefetch")

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.shutdown(cancel_futures=True)

    def passes(self, step: int) -> list[Pass]:
        """The forward and backward passes of this step. Their losses, divided by their divisors,
        add up to the mean over all targets of the step that are not ignored.

        An error in reading them is raised here, and not while earlier steps run.
        """
        if not self.ahead:
            return self._read(step)
        self.pending = {
            number: self.pending.get(number) or self.executor.submit(self._read, number)
            for number in range(step, step + 1 + self.ahead)
        }
        passes = self.pending.pop(step).result()
        if self.stream is not None:
            for x in itertools.chain(*(tensors for tensors, _ in passes)):
                # the copy stream owns this memory, and must not reuse it before this stream is done
                x.record_stream(torch.cuda.current_stream(self.device))
        return passes

    def _read(self, step: int) -> list[Pass]:
        inputs, targets, *documents = self.data.train_batch(step, self.num_sequences)
        counted = int((targets != IGNORED).sum())
        # a part of a sequence attends to the whole sequence, so it needs all document_ids
        batch = (inputs[:, self.columns], targets[:, self.columns], *documents)
        parts = zip(*(x[self.rows].split(self.batch_size) for x in batch), strict=True)
        passes = []
        for tensors in parts:
            own = int((tensors[1] != IGNORED).sum())
            passes.append(Pass(tensors, counted / own if own else inf))
        if self.stream is None:
            return passes
        with torch.cuda.stream(self.stream):
            passes = [
                Pass(
                    tuple(x.pin_memory().to(self.device, non_blocking=True) for x in each), divisor
                )
                for each, divisor in passes
            ]
        self.stream.synchronize()  # only the prefetch thread waits here
        return passes
