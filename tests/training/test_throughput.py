"""The clocks of a run, and the line of its progress."""

import math
import time
from collections.abc import Callable

import pytest
import torch

from training.record.throughput import Progress, Throughput, WallClock, peak_flops


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """A clock that a test moves."""
    clock = Clock()
    monkeypatch.setattr("training.record.throughput.perf_counter", clock)
    return clock


@pytest.fixture
def throughput_after(monkeypatch) -> Callable[..., Throughput]:
    """Throughput after some steps of warm-up."""

    def build(warm_up: int, device: str = "cpu", *, peak: float | None = None, **flops: float):
        monkeypatch.setattr(Throughput, "WARM_UP", warm_up)
        return Throughput(torch.device(device), flops_per_token=flops, peak=peak)

    return build


def test_the_wall_clock_has_everything_in_it(clock):
    """A run of four steps that goes on after 1,000 s of an earlier start: rows after steps 3 and 4,
    the last with a checkpoint after it.
    """
    wall = WallClock(seconds=1000.0)
    clock.now += 30  # the validation of step 0
    assert wall.row(200) == {"seconds": 1030.0}
    assert wall.tokens_per_sec(200) is None
    clock.now += 5
    wall.begin(200)
    assert wall.tokens_per_sec(200) is None
    clock.now += 60 + 1 + 1 + 8  # the first step compiles; the row's evaluation
    assert wall.row(500) == {"seconds": 1105.0, "tokens_per_sec": 300 / 70}
    clock.now += 3 + 1 + 1  # a checkpoint, a step and what the row looks at
    assert wall.row(600) == {"seconds": 1110.0, "tokens_per_sec": 100 / 5}
    clock.now += 25
    assert wall.tokens_per_sec(600) == 400 / 100


def test_throughput_leaves_out_warm_up_and_pauses(clock, throughput_after):
    throughput = throughput_after(2)

    def steps(count: int, seconds: float) -> None:
        for _ in range(count):
            clock.now += seconds
            throughput.step(50)

    clock.now += 60  # compilation
    steps(2, 9.0)
    assert throughput.step_tokens_per_sec is None and throughput.window() is None
    steps(4, 1.0)
    assert throughput.step_tokens_per_sec == 50.0
    assert throughput.window() == 50.0
    with throughput.paused():
        clock.now += 1000  # an evaluation
        assert throughput.step_tokens_per_sec == 50.0
    steps(2, 5.0)
    assert throughput.window() == 10.0
    assert throughput.step_tokens_per_sec == pytest.approx(6 * 50 / 14)
    assert throughput.window() is None  # no step since the last row


def test_throughput_paused_during_warm_up_does_not_start_the_clock(clock, throughput_after):
    throughput = throughput_after(2)
    throughput.step(50)
    with throughput.paused():
        clock.now += 100
    clock.now += 7
    throughput.step(50)
    clock.now += 2
    throughput.step(50)
    assert throughput.step_tokens_per_sec == 25.0


def test_a_row_has_every_share_of_the_peak_by_its_name(clock, throughput_after):
    """Three rows of a run with log_every=2, an evaluation after each and passes that differ in
    length: none leaks into another.
    """
    throughput = throughput_after(1, peak=8000.0, mfu=40.0, mfu_causal=30.0)
    rows = []
    for step, seconds in enumerate((90.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0), start=1):
        clock.now += seconds
        throughput.step(100)
        with throughput.paused():
            if step % 2 == 1:
                rows.append(throughput.row())
                clock.now += 1000
    assert rows[0] == {"step_tokens_per_sec": None, "mfu": None, "mfu_causal": None}  # it compiled
    assert rows[1] == {"step_tokens_per_sec": 100.0, "mfu": 0.5, "mfu_causal": 0.375}
    assert [row["step_tokens_per_sec"] for row in rows[2:]] == [
        pytest.approx(200 / 3),
        pytest.approx(200 / 6),
    ]
    unknown = throughput_after(1, mfu=40.0)
    for _ in range(2):
        clock.now += 1
        unknown.step(10)
    assert unknown.row() == {"step_tokens_per_sec": 10.0, "mfu": None}


def test_slow_steps_on_the_way_do_not_count_either(clock, throughput_after):
    """A run that changes its attention compiles a second time."""
    throughput = throughput_after(2)
    for step, seconds in enumerate((60.0, 1.0, 1.0, 1.0, 60.0, 1.0, 2.0), start=1):
        clock.now += seconds
        throughput.step(100)
        if step == 4:
            with throughput.paused():
                throughput.warm_up()
    assert throughput.step_tokens_per_sec == 300 / 4.0


@pytest.mark.gpu
def test_the_clock_of_a_gpu_runs_with_it_and_waits_for_nothing(throughput_after):
    """Four steps of a known time on the GPU, none waited for, with work of the GPU and of the host
    in between that does not count.
    """
    throughput = throughput_after(1, "cuda")
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
        for _ in range(5):
            torch.cuda._sleep(cycles)
            throughput.step(1000)
            with throughput.paused():
                torch.cuda._sleep(3 * cycles)
        assert time.perf_counter() - began < seconds, "the host has waited"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert throughput.window() == pytest.approx(1000 / seconds, rel=0.1)
    with throughput.paused():
        torch.cuda.synchronize()
        time.sleep(20 * seconds)
    assert throughput.step_tokens_per_sec == pytest.approx(1000 / seconds, rel=0.1)


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_peak_of_known_gpus_by_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops("cuda", torch.bfloat16) == peak
    assert peak_flops("cuda", torch.float32) is None
    assert peak_flops("cpu", torch.bfloat16) is None


def test_progress_says_the_time_left_and_is_never_silent_for_long(clock):
    clock.now = 0.0
    progress = Progress(100, tokens_per_step=200, first_step=0)
    line = progress.line(0, {"step": 0, "val/loss": 5.5})
    assert "0/100" in line and "val/loss 5.5000" in line
    clock.now = 60.0
    assert progress.step(1), "the first step took a minute"
    line = progress.line(1, {"train/loss": 5.0})
    assert all(words in line for words in ("1/100", "200 tokens", "train/loss 5.0", "3 tokens/s"))
    clock.now = 74.0
    assert not progress.step(8)
    clock.now = 80.0
    # lines stand where rows of metrics do, unless these are far apart
    assert progress.step(11) and not progress.step(11, row=False)
    # two seconds a step: what came before the first does not count
    row = {"train/loss": math.nan, "lr": 1e-3, "val/loss": 4.0}
    line = progress.line(11, row)
    assert all(words in line for words in ("2,200 tokens", "train/loss nan", "val/loss 4.0000"))
    assert all(words in line for words in ("100 tokens/s", "02:58 left")) and "lr" not in line
    assert not progress.step(12)
    clock.now = 140.0
    assert progress.step(41, row=False)
    clock.now = 258.0
    assert progress.line(100, row).endswith("100 tokens/s")


def test_progress_of_a_resumed_run_counts_its_own_steps(clock):
    clock.now = 0.0
    progress = Progress(100, tokens_per_step=200, first_step=90)
    clock.now = 4.0
    progress.step(92)
    line = progress.line(92, {})
    assert all(words in line for words in ("92/100", "18,400 tokens", "100 tokens/s"))
