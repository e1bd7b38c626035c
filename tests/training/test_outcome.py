"""How a run ended, and what of it is written down."""

import errno
import json
import math
import re
from pathlib import Path

import pytest

from training.record import outcome
from training.record.outcome import close_run, objective, outcome_of


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "summary.json").write_text('{"status": "completed", "steps_done": 60}')
    return tmp_path


def closed(run_dir: Path, **summary) -> dict:
    close_run(run_dir, {"status": "oom", "overrides": []} | summary)
    return json.loads((run_dir / "summary.json").read_text())


def test_a_resume_that_was_refused_leaves_what_the_run_did(run_dir):
    assert closed(run_dir, overrides=["steps=9", f"resume={run_dir}"]) == {
        "status": "completed",
        "steps_done": 60,
    }


def test_a_resume_that_began_says_how_it_ended(run_dir):
    """Before its first row too: config.yaml is that of the new start by then."""
    starts = [{"started": 0.0}]
    assert closed(run_dir, overrides=[f"resume={run_dir}"], starts=starts)["status"] == "oom"


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("status", "error", "new", "said"),
    [
        ("running", FULL, "failed", "Errno 28"),
        ("completed", FULL, "completed", "Errno 28"),
        ("running", KeyboardInterrupt(), "interrupted", "stopped"),
        ("running", MemoryError("8 GiB"), "oom", "8 GiB"),
        ("running", SystemExit(3), "failed", "SystemExit: 3"),
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


@pytest.mark.parametrize("error", [ValueError, OSError, RuntimeError])
def test_an_error_in_a_users_file_is_located(tmp_path, caplog, error):
    """A regression test: a ValueError or OSError was its bare message, without file or line."""
    try:
        raise error("not mine")
    except Exception as raised:
        found = outcome_of(raised, tmp_path)
    said = rf"{error.__name__}: not mine \(.*test_outcome.py, line \d+\)"
    assert re.fullmatch(said, found["error"]) and found["error"] in caplog.messages[-1]
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("summary", "value"),
    [
        ({"status": "completed", "val/loss": 2.5}, 2.5),
        ({"status": "completed"}, math.inf),
        ({"status": "diverged", "val/loss": 2.5}, math.inf),
    ],
)
def test_what_a_sweeper_minimises(summary, value):
    assert objective(summary) == value
