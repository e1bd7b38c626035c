"""Where the seconds of a run go, and the line of its progress."""

import logging
import re
import time

import pytest

from tests import processes
from tests.command import environment, run, summary, tiny
from training.record import clock as clocks
from training.record.clock import Phases, in_words, phase


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """A clock that a test moves."""
    clock = Clock()
    monkeypatch.setattr(clocks, "time", clock)
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
    assert list(found.items()) == [
        ("compiling", 33),
        ("saving", 7),
        ("other", 6),
        ("starting", 5),
        ("evaluating", 3),
        ("training", 0),
    ]
    assert sum(found.values()) == clock.now - 995
    phases.begin(clock.now)
    assert sum(phases.seconds().values()) == 0


def test_a_compilation_counts_and_says_one_line(phases, clock, caplog):
    import torch

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
    assert sum(seconds.values()) == pytest.approx(result["wall_seconds"], abs=0.05)
    assert 0.5 * took < result["wall_seconds"] < took
    assert in_words(seconds) in done.output
    first, last = r"step +0/4  0 tokens  val/loss .*\n", r"step +4/4  512 tokens  train/loss .*"
    assert re.search(f"{first}{last}  val/loss .*  [\\d,]+ tokens/s\n", done.output)
    assert run(f"resume={tmp_path}", "steps=5").code == 0
    result = summary(tmp_path)
    newest = result["starts"][1]["seconds"]
    assert sum(result["seconds_by_phase"].values()) == pytest.approx(newest, abs=0.05)


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
