"""How a run ended, what of it is written down, what a signal does at each moment of a run, and a
reader that leaves.
"""

import errno
import json
import math
import os
import re
import signal

import pytest

from tests import processes
from tests.command import environment
from training.launch.interrupt import Ending, Interrupt
from training.record import outcome
from training.record.outcome import close_run, objective, outcome_of


def test_a_resume_that_was_refused_leaves_what_the_run_did(tmp_path):
    """One that began says how it ended, before its first row too."""
    path, resume = tmp_path / "summary.json", {"status": "oom", "overrides": [f"resume={tmp_path}"]}
    path.write_text('{"status": "completed"}')
    for starts, status in (([], "completed"), ([{"started": 0.0}], "oom")):
        close_run(tmp_path, resume | {"starts": starts})
        assert json.loads(path.read_text())["status"] == status


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("status", "error", "new", "said"),
    [
        ("unfinished", FULL, "failed", "Errno 28"),
        ("completed", FULL, "completed", "Errno 28"),
        ("unfinished", KeyboardInterrupt(), "interrupted", "stopped"),
        ("unfinished", MemoryError("8 GiB"), "oom", "8 GiB"),
        ("unfinished", SystemExit(3), "failed", "SystemExit: 3"),
        ("completed", KeyboardInterrupt(), "completed", "completed"),
        ("interrupted", KeyboardInterrupt(), "interrupted", ""),  # the loop has said it
        ("failed", FULL, "failed", ""),
    ],
)
def test_an_error_outside_the_loop(tmp_path, caplog, status, error, new, said):
    try:
        exec(compile("raise error", outcome.__file__, "exec"), {"error": error})
    except BaseException as raised:
        found = outcome_of(raised, tmp_path, status=status)
    assert ({"status": status} | found)["status"] == new
    assert len(caplog.messages[-1:]) == bool(said) and said in "".join(caplog.messages[-1:])


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_an_error_in_a_users_file_is_located(tmp_path, caplog, error):
    """A regression test: a ValueError or OSError was its bare message, without file or line."""
    try:
        raise error("not mine")
    except Exception as raised:
        found = outcome_of(raised, tmp_path)
    said = rf"{error.__name__}: not mine \(.*test_outcome.py, line \d+\)"
    assert re.fullmatch(said, found["error"]) and found["error"] in caplog.messages[-1]
    assert "Traceback" in caplog.text


def test_what_a_sweeper_minimises():
    assert objective({"status": "completed", "val/loss": 2.5}) == 2.5
    assert objective({"status": "completed"}) == math.inf
    assert objective({"status": "diverged", "val/loss": 2.5}) == math.inf


def test_a_reader_of_the_help_that_has_read_enough():
    """A regression test: `python train.py --help | head` ended with a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    done = processes.run("train.py", "--help", stdout=writer, env=environment(PYTHONUNBUFFERED=""))
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_during_the_steps_only_a_second_ctrl_c_stops_at_once():
    """A closed terminal sends two SIGHUP, and timeout(1) two SIGTERM together."""
    with Interrupt({}) as interrupt:
        assert not interrupt.requested
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGHUP):
            signal.raise_signal(number)
            assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_under_nohup_a_closed_terminal_ends_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt({}) as interrupt:
            signal.raise_signal(signal.SIGHUP)
        assert not interrupt.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_around_a_run_a_signal_raises_and_at_its_end_waits():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), Ending():
        signal.raise_signal(signal.SIGTERM)
    written = False
    with pytest.raises(KeyboardInterrupt), Ending() as ending:
        ending.held = True
        signal.raise_signal(signal.SIGINT)
        written = ending.requested
    assert written and signal.getsignal(signal.SIGTERM) is before
