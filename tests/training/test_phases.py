"""Where the seconds of a run go, and the lines that say what it is doing."""

import logging
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.command import ROOT, environment, index, run, summary, tiny, tiny_sweep
from training.record import phases
from training.record.phases import Phases, doing, in_words, phase


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run_phases(clock, monkeypatch) -> Iterator[Phases]:
    """Those of a run that began five seconds ago, whose thread does not wake up."""
    monkeypatch.setattr(phases, "time", clock)
    monkeypatch.setattr(Phases, "tick_seconds", 1000)
    with Phases(clock.now - 5) as own:
        yield own


def test_seconds_count_for_the_innermost_phase_and_add_up(run_phases, clock):
    @phase("saving")
    def save() -> None:
        clock.now += 7

    with phase("evaluating"):
        clock.now += 1
        with phase("compiling"):
            clock.now += 30
        clock.now += 2
    run_phases.started()
    clock.now += 4
    with phase("training"):
        clock.now += 20
        run_phases.charge(seconds_compiling=6)
    save()
    assert run_phases.seconds() == {
        "compiling": 36,
        "training": 14,
        "saving": 7,
        "starting": 5,
        "other": 4,
        "evaluating": 3,
    }
    assert sum(run_phases.spent.values()) == clock.now - run_phases.began


def test_an_error_ends_its_phases_and_those_left_open_within(run_phases, clock):
    with pytest.raises(KeyError), phase("training"):
        run_phases.push("compiling", "left open")
        clock.now += 3
        raise KeyError
    clock.now += 2
    assert run_phases.seconds() == {"starting": 7, "compiling": 3, "training": 0}


def test_a_phase_says_what_it_does_after_two_seconds_and_then_rarely(run_phases, clock, caplog):
    caplog.set_level(logging.INFO, "tilegpt")

    def said(seconds: float) -> list[str]:
        """The lines of that many seconds."""
        caplog.clear()
        for _ in range(round(seconds / 0.2)):
            clock.now += 0.2
            run_phases.tick()
        return caplog.messages

    run_phases.started()
    assert said(60) == []  # nothing in particular
    with phase("evaluating", "evaluating"):
        assert said(1.8) == []  # it was quick
    with phase("evaluating", "evaluating"):
        doing("3 of 16")
        (line,) = said(3)
        assert "3 of 16" in line and " 2 s" in line
        doing("9 of 16")
        first, second = said(37)
        assert "9 of 16" in first and " 15 s" in first
        assert "9 of 16" in second and " 30 s" in second
    with phase("training", "step 1"):
        (line,) = said(5)
        assert "step 1" in line and " 2 s" in line
    with phase("training", "step 2"):
        assert said(5) == []  # every step has its line in time
        (line,) = said(15)
        assert "step 2" in line and " 15 s" in line


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        ({"compiling": 31.2, "training": 17.1, "other": 0.6}, "49 s: 31 compiling, 17 training"),
        ({"training": 0.62, "starting": 0.31, "other": 0.01}, "0.9 s: 0.6 training, 0.3 starting"),
    ],
)
def test_the_line_at_the_end(seconds, line):
    assert in_words(seconds) == line


def test_the_seconds_of_a_run_add_up_to_its_time(tmp_path):
    before = time.time()
    done = run(*tiny(tmp_path, "sample_tokens=4", "eval_every=4", "log_every=4"), curve=True)
    took = time.time() - before
    assert done.code == 0, done.output
    result = summary(tmp_path)
    seconds = result["seconds_by_phase"]
    parts = {"starting", "training", "evaluating", "looking", "saving", "logging"}
    assert parts | {"drawing", "sampling"} <= seconds.keys()
    assert sum(seconds.values()) == pytest.approx(result["wall_seconds"], abs=0.05)
    assert took - 0.5 < result["wall_seconds"] < took
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True)
    assert in_words(seconds) in done.output


def test_the_first_run_of_a_process_counts_its_imports_and_the_next_does_not(tmp_path):
    """And the seconds of a job are its own."""
    done = run(*tiny_sweep(tmp_path, "seed=0,1", "steps=1", "eval_every=0"))
    assert done.code == 0, done.output
    for row in index(tmp_path):
        assert sum(row["seconds_by_phase"].values()) == pytest.approx(row["wall_seconds"], abs=0.05)
    assert phases.process_began is None
    first, second = index(tmp_path)
    assert first["starts"][0]["started"] + first["wall_seconds"] <= second["starts"][0]["started"]


def test_a_resumed_run_has_the_seconds_of_its_newest_start(tmp_path):
    assert run(*tiny(tmp_path, "eval_every=0")).code == 0
    assert run(f"resume={tmp_path}", "steps=5").code == 0
    result = summary(tmp_path)
    newest = result["starts"][1]["seconds"]
    assert sum(result["seconds_by_phase"].values()) == pytest.approx(newest, abs=0.05)


def test_a_slow_step_is_announced_and_answers_a_signal_at_once(tmp_path, monkeypatch):
    """A regression test: under Triton's interpreter nothing was said for minutes, not even after
    SIGTERM.
    """
    monkeypatch.setattr(Phases, "tick_seconds", 0.02)
    done = run(*tiny(tmp_path, "steps=50", "eval_every=0", "attention=tests.user_backends:SLOW"))
    assert done.code == 130 and summary(tmp_path)["status"] == "interrupted"
    (answer,) = [line for line in done.output.splitlines() if "SIGTERM: " in line]
    step = summary(tmp_path)["steps_done"]
    assert f"step {step} " in answer and "s so far" in answer
    assert done.output.index(answer) < done.output.index(f"interrupted after step {step}")


def test_a_run_that_compiles_nothing_loads_no_compiler(tmp_path):
    """A regression test: the optimizer loaded torch.compile, only to keep itself out of it. Muon
    has AdamW beside it. 5 s: a process that has imported nothing.
    """
    code = (
        "import sys; from training import run; run(*sys.argv[1:]); "
        "assert 'torch._dynamo' not in sys.modules and 'torch._inductor' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *tiny(tmp_path, "optim=muon")],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
