"""Batches read, widened and copied to the GPU by a thread, a few steps before they are needed:
reading hides behind computing.

    with Prefetcher(data, num_sequences, batch_size, device) as batches:
        for pass_ in batches.passes(step):  # on the device, and the steps after it are under way
            model(*pass_)

    main thread    | step 7          | step 8          | step 9
    this thread      9 -> host -> GPU  10 -> host -> GPU

What comes out is data.train_batch(step, num_sequences), cut into passes of batch_size sequences, so
a run is the same with it and without it, from whatever step it goes on. On a CPU there is no
thread: a step there takes hundreds of times as long as its batch.
"""

import itertools
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from data.interface import TrainingData

# one step is enough to hide a batch that takes as long as a step; two also hide one that now and
# then takes longer
AHEAD = 2


class Prefetcher:
    """Use as a context manager: the thread ends with the block, however that is left, after the
    batch it is reading.
    """

    def __init__(
        self,
        data: TrainingData,
        num_sequences: int,
        batch_size: int,
        device: torch.device,
        *,
        ahead: int | None = None,
    ) -> None:
        self.data, self.num_sequences, self.batch_size, self.device = (
            data,
            num_sequences,
            batch_size,
            device,
        )
        self.on_gpu = device.type == "cuda"
        self.ahead = (AHEAD if self.on_gpu else 0) if ahead is None else ahead
        self.pending: dict[int, Future[list[tuple[Tensor, ...]]]] = {}  # by step
        self.thread = ThreadPoolExecutor(
            1, thread_name_prefix="prefetch"
        )  # starts with the first batch it is given
        # copies on a stream of their own do not queue behind the step that is being computed
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.shutdown(cancel_futures=True)
        self.pending.clear()

    def passes(self, step: int) -> list[tuple[Tensor, ...]]:
        """What the model takes in one forward and backward pass after the other of this step, on
        the device: inputs, targets, ...

        What reading them raised is raised here, and not before its step has come.
        """
        if not self.ahead:
            return self._read(step)
        wanted = range(step, step + 1 + self.ahead)
        self.pending = {
            number: self.pending.get(number) or self.thread.submit(self._read, number)
            for number in wanted
        }
        passes = self.pending.pop(step).result()
        if self.on_gpu:
            for x in itertools.chain(*passes):
                # its memory belongs to the other stream, which must not write to it again before
                # this one has read it
                x.record_stream(torch.cuda.current_stream(self.device))
        return passes

    def _read(self, step: int) -> list[tuple[Tensor, ...]]:
        batch = self.data.train_batch(step, self.num_sequences)
        passes = list(zip(*(x.split(self.batch_size) for x in batch), strict=True))
        if not self.on_gpu:
            return passes
        with torch.cuda.stream(self.stream):
            passes = [
                tuple(x.pin_memory().to(self.device, non_blocking=True) for x in tensors)
                for tensors in passes
            ]
        self.stream.synchronize()  # here it is this thread that waits
        return passes
