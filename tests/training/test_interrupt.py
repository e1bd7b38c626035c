"""What a signal does at each moment of a run, and a reader that leaves."""

import os
import signal

import pytest

from tests import processes
from tests.command import environment
from training.launch.interrupt import Ending, Interrupt


def test_a_reader_of_the_help_that_has_read_enough():
    """A regression test: `python train.py --help | head` ended with a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    done = processes.run("train.py", "--help", stdout=writer, env=environment(PYTHONUNBUFFERED=""))
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_during_the_steps_only_a_second_ctrl_c_stops_at_once():
    """A closed terminal sends two SIGHUP, and timeout(1) two SIGTERM together."""
    with Interrupt() as interrupt:
        assert not interrupt.requested
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGHUP):
            signal.raise_signal(number)
            assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_under_nohup_a_closed_terminal_ends_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
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
