"""Prefetching changes when a batch is read, never which; and it leaves nothing running."""

import math
import threading
import time
from contextlib import suppress

import pytest
import torch

from config import TokenizerConfig
from data import build_data
from data.interface import IGNORED
from data.prefetch import Prefetcher

CPU = torch.device("cpu")


class Steps:
    """Data whose two tensors hold their step.

    It records the steps and threads that read it, and can fail at a step or take some seconds.
    """

    def __init__(self, *, fails_at: int | None = None, seconds: float = 0.0) -> None:
        self.fails_at, self.seconds = fails_at, seconds
        self.asked: list[int] = []
        self.threads: set[threading.Thread] = set()

    def train_batch(self, step: int, num_sequences: int):
        self.asked.append(step)
        self.threads.add(threading.current_thread())
        time.sleep(self.seconds)
        if step == self.fails_at:
            raise OSError(f"cannot read step {step}")
        return (torch.full((num_sequences, 2), step),) * 2


def read(batches: Prefetcher, steps) -> list[int]:
    """The steps whose tensors come."""
    return [batches.passes(step)[0].tensors[0][0, 0].item() for step in steps]


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("first", [0, 7])
def test_batches_are_those_without_it(config, first, documents):
    config.documents = documents
    data = build_data(config, TokenizerConfig("byte"), seq_len=32, seed=3)
    with Prefetcher(data, 6, 2, CPU, ahead=2) as batches:
        for step in range(first, first + 6):
            passes, expected = batches.passes(step), data.train_batch(step, 6)
            assert [each.divisor for each in passes] == [3.0] * 3
            tensors = zip(*(each.tensors for each in passes), strict=True)
            assert all(map(torch.equal, map(torch.cat, tensors), expected))
            assert [len(each.tensors) for each in passes] == [2 + documents] * 3


def test_a_pass_weighs_as_its_targets_and_a_rank_takes_its_rows():
    """Of four sequences, of two targets each, the first two have three to ignore."""
    data = Steps()
    ignored = torch.tensor([[1, IGNORED], [IGNORED, IGNORED], [1, 1], [1, 1]])
    data.train_batch = lambda step, count: (torch.arange(8).view(4, 2), ignored)
    with Prefetcher(data, 4, 1, CPU) as batches:
        assert [each.divisor for each in batches.passes(0)] == [5.0, math.inf, 2.5, 2.5]
    with Prefetcher(data, 4, 2, CPU, rows=slice(2, 4)) as batches:
        (only,) = batches.passes(0)
    assert only.divisor == 5 / 4 and only.tensors[0].tolist() == [[4, 5], [6, 7]]


def test_each_step_is_read_once_in_order_by_one_other_thread():
    data = Steps()
    with Prefetcher(data, 1, 1, CPU, ahead=2) as batches:
        assert read(batches, range(4, 14)) == list(range(4, 14))
    assert data.asked == sorted(set(data.asked)) and max(data.asked) <= 15
    assert len(data.threads) == 1 and threading.main_thread() not in data.threads


def test_a_jump_forgets_what_was_read_for_nothing():
    with Prefetcher(Steps(), 1, 1, CPU, ahead=2) as batches:
        steps = [0, 1, 40, 41, 3]
        assert read(batches, steps) == steps
        assert sorted(batches.pending) == [4, 5]


def test_an_error_is_raised_when_its_step_comes_and_not_before():
    data = Steps(fails_at=5)
    with Prefetcher(data, 1, 1, CPU, ahead=2) as batches:
        assert read(batches, (3, 4)) == [3, 4]
        while 5 not in data.asked:
            time.sleep(0.001)
        with pytest.raises(OSError, match="cannot read step 5"):
            batches.passes(5)


@pytest.mark.parametrize("error", [KeyboardInterrupt, None], ids=["ctrl-c", "end"])
def test_nothing_is_left_running(error):
    """However the block ends, its thread finishes its batch, starts no other, and is gone."""
    data = Steps(seconds=0.05)
    with suppress(KeyboardInterrupt), Prefetcher(data, 1, 1, CPU, ahead=1000) as batches:
        batches.passes(0)
        assert alive()
        if error:
            raise error
    assert not alive() and len(data.asked) < 1000


def test_on_a_cpu_the_step_reads_for_itself():
    data = Steps()
    with Prefetcher(data, 1, 1, CPU) as batches:
        batches.passes(3)
    assert data.asked == [3] and data.threads == {threading.main_thread()}


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
def test_on_a_gpu_batches_arrive_whole(config, documents):
    """While the GPU computes earlier steps, whose memory is freed and reused."""
    config.documents = documents
    data = build_data(config, TokenizerConfig("byte"), seq_len=512, seed=3)
    work = torch.randn(4096, 4096, device="cuda")
    weights, sums = torch.arange(512, device="cuda"), []
    with Prefetcher(data, 64, 16, torch.device("cuda")) as batches:
        for step in range(40):
            passes = [each.tensors for each in batches.passes(step)]
            assert len(passes) == 4 and all(x.is_cuda for tensors in passes for x in tensors)
            for _ in range(10):
                work = work @ work / 64
            parts = zip(*passes, strict=True)
            sums.append([sum((x * weights).sum() for x in part) for part in parts])
    for step, found in enumerate(sums):
        expected = [(x * weights.cpu()).sum().item() for x in data.train_batch(step, 64)]
        assert [x.item() for x in found] == expected, step
