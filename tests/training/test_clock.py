"""Where the seconds of a run go, the line of its progress, and the speed of the steps alone."""

import logging
import re
import time

import pytest
import torch

from tests import processes
from tests.command import environment, run, summary, tiny
from training.record import clock as clocks
from training.record.clock import Phases, in_words, phase
from training.record.speed import Throughput, peak_flops

WARM_UP = Throughput.WARM_UP


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """A clock that a test moves."""
    clock = Clock()
    monkeypatch.setattr(clocks, "time", clock)
    monkeypatch.setattr("training.record.speed.perf_counter", clock)
    return clock


@pytest.fixture
def phases(clock, monkeypatch) -> Phases:
    """Those of a run that began five seconds ago."""
    own = Phases()
    own.begin(clock.now - 5)
    monkeypatch.setattr(clocks, "PHASES", own)
    return own


def test_seconds_count_for_the_innermost_phase_and_add_up(phases, clock):
    @phase("saving")
    def save() -> None:
        clock.now += 7

    with phase("evaluating"):
        clock.now += 1
        with phase("compiling"):
            clock.now += 30
        clock.now += 2
    phases.change("other")
    clock.now += 4
    save()
    with pytest.raises(KeyError), phase("training"):
        phases.change("compiling")  # which an error leaves open
        clock.now += 3
        raise KeyError
    clock.now += 2
    found = phases.seconds()
    expected = {"compiling": 33, "saving": 7, "other": 6, "starting": 5, "evaluating": 3}
    assert found == expected | {"training": 0}
    assert [*found.values()] == sorted(found.values(), reverse=True)
    phases.begin(clock.now)
    assert sum(phases.seconds().values()) == 0


def test_a_compilation_counts_and_says_one_line(phases, clock, caplog):
    caplog.set_level(logging.INFO, "tilegpt")

    def compiling(graph, inputs):
        clock.now += 20
        return graph.forward

    torch._dynamo.reset()
    clocks.count_compiling()
    with phase("training"):
        clock.now += 1
        for size in (3, 4):
            torch.compile(torch.sin, backend=compiling, dynamic=False)(torch.ones(size))
        clock.now += 1
    torch._dynamo.reset()
    assert phases.seconds()["compiling"] == 40 and phases.seconds()["training"] == 2
    assert sum("compiling" in message for message in caplog.messages) == 1


def test_the_seconds_of_a_run_add_up_to_its_time(tmp_path):
    clocks.program_began()  # of the tests
    before = time.time()
    done = run(*tiny(tmp_path, "sample_tokens=4", "eval_every=4", "log_every=4"), curve=True)
    took = time.time() - before
    assert done.code == 0, done.output
    result = summary(tmp_path)
    seconds = result["seconds_by_phase"]
    parts = {"starting", "training", "evaluating", "looking", "saving", "logging"}
    assert parts | {"drawing", "sampling"} <= seconds.keys()
    # each is rounded, and the wall clock is read last
    assert 0.5 * took < sum(seconds.values()) < result["wall_seconds"] + 0.01
    assert result["wall_seconds"] < took
    assert in_words(seconds) in done.output
    first, last = r"step +0/4  0 tokens  val/loss .*\n", r"step +4/4  512 tokens  train/loss .*"
    assert re.search(f"{first}{last}  val/loss .*  [\\d,]+ tokens/s\n", done.output)
    assert run(f"resume={tmp_path}", "steps=5").code == 0
    result = summary(tmp_path)
    newest = result["starts"][1]["seconds"]
    assert 0 < sum(result["seconds_by_phase"].values()) < newest + 0.01


def test_a_run_counts_its_imports_and_loads_no_compiler(tmp_path):
    """A regression test: the optimizer loaded torch.compile, only to keep itself out of it. Muon
    has AdamW beside it. 5 s: a process that has imported nothing.
    """
    program = "import runpy, sys; sys.path.insert(0, ''); "
    program += "runpy.run_path('train.py', run_name='__main__'); "
    program += "assert not {'torch._dynamo', 'torch._inductor'} & sys.modules.keys()"
    asked, began = tiny(tmp_path, "optim=muon", "steps=1"), time.time()
    processes.run("-c", program, *asked, check=True, env=environment())
    took = time.time() - began
    assert 0.5 * took < summary(tmp_path)["wall_seconds"] < took


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


PEAKS = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
}


@pytest.mark.parametrize("name", PEAKS)
def test_peak_of_known_gpus_by_name(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops("cuda", torch.bfloat16) == PEAKS[name]
    assert peak_flops("cuda", torch.float32) is None
    assert peak_flops("cpu", torch.bfloat16) is None
