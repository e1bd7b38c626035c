"""Where Python would print a traceback: Ctrl-C in imports and finalizers, and a closed pipe."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command import ROOT, environment
from training.launch.interrupt import Ending, Interrupt, Stopped, one_line


class Pressed:
    """Ctrl-C comes while this is finalized."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def lose_ctrl_c() -> None:
    """Ctrl-C in a finalizer, then a wait, which it must end."""
    Pressed()
    began = time.monotonic()
    try:
        time.sleep(10)
    finally:
        assert time.monotonic() - began < 5


def test_a_script_ends_by_a_ctrl_c_in_a_finalizer(capsys):
    """A regression test: torch.compile finalizes much. verify printed a traceback and went on."""
    with pytest.raises(SystemExit) as ended:
        one_line("verify")(lose_ctrl_c)()
    assert ended.value.code == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("verify: ")


def test_a_run_is_stopped_by_a_ctrl_c_in_a_finalizer(capsys):
    with pytest.raises(Stopped), Ending():
        lose_ctrl_c()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("imported", "command"),
    [("hydra", ["train.py"]), ("torch", ["-m", "scripts.verify"])],
    ids=["train", "script"],
)
def test_ctrl_c_during_the_imports_shows_no_traceback(tmp_path: Path, imported, command):
    (tmp_path / f"{imported}.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGINT
    assert done.stdout + done.stderr == ""


def test_a_reader_of_the_help_that_has_read_enough():
    """A regression test: `python train.py --help | head` ended with a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "train.py", "--help"],
        cwd=ROOT,
        env=environment(PYTHONUNBUFFERED=""),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_second_signal_stops_at_once():
    """Ctrl-C at any time, SIGTERM a second later: timeout(1) sends two together."""
    with Interrupt() as interrupt:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGINT)
        interrupt.since -= 2
        signal.raise_signal(signal.SIGHUP)  # a closed terminal sends two
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)


def test_the_first_signal_is_answered_at_once(caplog):
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.requested and "SIGTERM" in caplog.text
