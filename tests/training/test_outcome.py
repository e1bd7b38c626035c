"""How a run ended, and what of it is written down."""

import errno
import json
import math
import re

import pytest

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
