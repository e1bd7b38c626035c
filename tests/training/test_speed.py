"""The speed of the steps alone, and its share of a GPU's peak."""

import time

import pytest
import torch

from tests.training.test_clock import Clock
from training.record.speed import Throughput, peak_flops

WARM_UP = Throughput.WARM_UP


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """A clock that a test moves."""
    clock = Clock()
    monkeypatch.setattr("training.record.speed.perf_counter", clock)
    return clock


def test_throughput_leaves_out_warm_up_and_pauses(clock):
    throughput = Throughput(torch.device("cpu"), flops_per_token={}, peak=None)

    def steps(count: int, seconds: float) -> None:
        throughput.resume()
        for _ in range(count):
            clock.now += seconds
            throughput.step(50)

    def since_the_last_row() -> float | None:
        return throughput.row()["step_tokens_per_sec"]

    clock.now += 60  # compilation
    steps(1, 9.0)
    throughput.pause()
    clock.now += 100  # a look before the clock has started
    steps(WARM_UP - 1, 9.0)
    assert throughput.step_tokens_per_sec is None and since_the_last_row() is None
    steps(4, 1.0)
    assert throughput.step_tokens_per_sec == 50.0
    assert since_the_last_row() == 50.0
    clock.now += 1000  # an evaluation
    assert throughput.step_tokens_per_sec == 50.0
    steps(2, 5.0)
    assert since_the_last_row() == 10.0
    assert throughput.step_tokens_per_sec == pytest.approx(6 * 50 / 14)
    assert since_the_last_row() is None  # no step since the last row
    throughput.warm_up()  # another attention compiles a second time
    steps(WARM_UP, 60.0)
    steps(1, 1.0)
    assert since_the_last_row() == 50.0


def test_a_row_has_every_share_of_the_peak_by_its_name(clock):
    cpu, flops = torch.device("cpu"), {"mfu": 40.0, "mfu_causal": 30.0}
    throughput = Throughput(cpu, flops_per_token=flops, peak=8000.0)
    unknown = Throughput(cpu, flops_per_token={"mfu": 40.0}, peak=None)
    assert throughput.row() == {"step_tokens_per_sec": None, "mfu": None, "mfu_causal": None}
    for _ in range(WARM_UP + 1):
        clock.now += 1
        throughput.step(100)
        unknown.step(10)
    assert throughput.row() == {"step_tokens_per_sec": 100.0, "mfu": 0.5, "mfu_causal": 0.375}
    assert unknown.row() == {"step_tokens_per_sec": 10.0, "mfu": None}


@pytest.mark.gpu
def test_the_clock_of_a_gpu_runs_with_it_and_waits_for_nothing():
    """Four steps of a known time on the GPU, none waited for, with work of the GPU and of the host
    in between that does not count.
    """
    throughput = Throughput(torch.device("cuda"), flops_per_token={}, peak=None)
    cycles = 50_000_000
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    start.record()
    torch.cuda._sleep(cycles)
    stop.record()
    torch.cuda.synchronize()
    seconds = start.elapsed_time(stop) / 1000
    torch.cuda.set_sync_debug_mode("error")
    try:
        began = time.perf_counter()
        for _ in range(WARM_UP + 4):
            torch.cuda._sleep(cycles)
            throughput.step(1000)
            throughput.pause()
            torch.cuda._sleep(3 * cycles)
            throughput.resume()
        assert time.perf_counter() - began < seconds, "the host has waited"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert throughput.row()["step_tokens_per_sec"] == pytest.approx(1000 / seconds, rel=0.1)
    torch.cuda.synchronize()
    time.sleep(20 * seconds)
    throughput.resume()
    assert throughput.step_tokens_per_sec == pytest.approx(1000 / seconds, rel=0.1)


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_peak_of_known_gpus_by_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops("cuda", torch.bfloat16) == peak
    assert peak_flops("cuda", torch.float32) is None
    assert peak_flops("cpu", torch.bfloat16) is None
