"""A signal or a failure after the last step: the summary still tells what ran."""

import os
import signal
from pkgutil import resolve_name
from unicodedata import category

import pytest

from scripts.trace_page import SCRIPT
from tests import processes
from tests.command import contents, environment, index, run, summary, tiny, tiny_sweep
from training.record.text_table import printable


def send_at(monkeypatch, place: str, *signals: signal.Signals) -> None:
    """Send the signals to this process at the first call of our function module.name."""
    called, pending = resolve_name(place), list(signals)

    def patched(*arguments, **options):
        while pending:
            signal.raise_signal(pending.pop(0))
        return called(*arguments, **options)

    monkeypatch.setattr(place, patched)


AFTER = {
    "training.loop.run.sample_text": ["SIGTERM"],
    "training.record.outcome.write_json": ["SIGINT", "SIGINT"],
}


@pytest.mark.parametrize("place, signals", AFTER.items(), ids=AFTER)
def test_a_signal_after_the_last_step_leaves_a_completed_run(monkeypatch, tmp_path, place, signals):
    """A regression test: Ctrl-C lost the summary, or marked a completed run as interrupted."""
    send_at(monkeypatch, place, *(signal.Signals[name] for name in signals))
    done = run(*tiny(tmp_path, "sample_tokens=4", "eval_every=0"))
    assert done.code == 130 and "Traceback" not in done.output, done.output
    result = summary(tmp_path)
    assert (result["status"], result["stopped"], result["steps_done"]) == ("completed", True, 4)
    before = contents(tmp_path)
    assert "steps=4" in run(f"resume={tmp_path}").complaint()
    assert contents(tmp_path) == before
    assert run(f"resume={tmp_path}", "steps=5").code == 0
    assert summary(tmp_path)["status"] == "completed" and not summary(tmp_path)["stopped"]


def test_ctrl_c_after_a_job_ends_its_sweep(monkeypatch, tmp_path):
    """That job counts as completed."""
    send_at(monkeypatch, "training.loop.run.sample_text", signal.SIGINT)
    done = run(*tiny_sweep(tmp_path, "seed=0,1,2", "eval_every=0", "sample_tokens=4"))
    statuses = [row["status"] for row in index(tmp_path)]
    assert done.code == 130 and statuses == ["completed", "not started", "not started"]
    table = (tmp_path / "table.txt").read_text()
    assert "completed" in table and table in done.output


def test_a_summary_is_written_before_the_logger_ends(monkeypatch, tmp_path):
    """An upload may take minutes, and a job scheduler kills without asking."""
    seen = []
    finish = "training.record.loggers.Logger.finish"
    monkeypatch.setattr(finish, lambda *_, **__: seen.append(summary(tmp_path)["status"]))
    assert run(*tiny(tmp_path, "steps=1", "eval_every=0")).code == 0 and seen == ["completed"]


def test_what_fails_after_the_training_is_said_and_costs_nothing_else(tmp_path):
    """A regression test: without a curve there was no sample, and the summary did not say why."""
    assert run(*tiny(tmp_path, "sample_tokens=4")).code == 0
    (tmp_path / "sample.txt").unlink()
    (tmp_path / "loss_curve.png").mkdir()  # which cannot be written as a file
    done = run(f"resume={tmp_path}", "steps=5", curve=True)
    assert done.code == 0, done.output
    result = summary(tmp_path)
    assert result["status"] == "completed" and "loss curve" in result["error"]
    assert (tmp_path / "sample.txt").exists()
    assert result["error"].split(": ")[0] in done.output.splitlines()[-1], "nor has the table"


def test_a_sample_does_not_drive_the_terminal(tmp_path):
    """A regression test: escapes and bells of a model of bytes reached the terminal."""
    done = run(*tiny(tmp_path, "tokenizer=byte", "sample_tokens=200"))
    text = (tmp_path / "sample.txt").read_bytes().decode()
    written = {char for char in text if category(char) == "Cc"} - set("\t\n")
    assert written and not written & set(done.output + (tmp_path / "train.log").read_text())
    assert all(f"\\x{ord(char):02x}" in done.output for char in written)


def test_files_are_utf_8_whatever_the_locale(tmp_path):
    """A regression test: an empty sample.txt was left. 5 s: a process has one locale from its
    beginning.
    """
    run_dir, page = tmp_path / "run", tmp_path / "page.html"
    ascii_only = environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    given = tiny(run_dir, "tokenizer=byte", "sample_tokens=200")
    processes.run("train.py", *given, env=ascii_only, check=True)
    text, log = ((run_dir / name).read_bytes().decode() for name in ("sample.txt", "train.log"))
    assert not text.isascii() and printable(text) in log
    processes.run("-m", "scripts.trace", f"out={page}", env=ascii_only, check=True)
    assert set(SCRIPT.read_text("utf-8")) <= set(page.read_bytes().decode())


def test_a_reader_that_left_costs_neither_the_run_nor_a_traceback(tmp_path):
    """A regression test: each line of the log printed a traceback after `| head`. 5 s: a process
    that writes to a real pipe.
    """
    reader, writer = os.pipe()
    os.close(reader)
    done = processes.run("train.py", *tiny(tmp_path), stdout=writer, env=environment())
    os.close(writer)
    assert "Traceback" not in done.stderr and summary(tmp_path)["status"] == "completed"
