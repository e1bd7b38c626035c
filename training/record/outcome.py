"""How a run ended, as data: every error becomes a status, so that the jobs of a sweep go on."""

import logging
import math
import shlex
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attention.look.blame import is_foreign, place, with_place
from training.launch.interrupt import Ending, Stopped
from training.loop.ranks import why_another_failed
from training.record.files import Row, write_json
from training.record.memory import describe_out_of_memory, is_out_of_memory, release_memory
from training.record.phases import current, in_words
from training.record.starts import stop_clock

log = logging.getLogger("tilegpt")


class Objective(float):
    """What a sweeper minimises: val/loss of a completed run, infinity for any other.

    It also says how the run ended.
    """

    status: str
    stopped: bool  # whether a signal came, even if too late to interrupt the run

    def __new__(cls, summary: Row) -> "Objective":
        loss = summary.get("val/loss") if summary["status"] == "completed" else None
        objective = super().__new__(cls, math.inf if loss is None else loss)
        objective.status, objective.stopped = summary["status"], summary["stopped"]
        return objective

    def __reduce__(self) -> tuple:
        return Objective, (
            {"status": self.status, "stopped": self.stopped, "val/loss": float(self)},
        )


def outcome_of(
    error: BaseException,
    device: str,
    run_dir: Path,
    *,
    status: str = "running",
) -> Row:
    """The entries of summary.json for a run that `error` ended; logs it in one line.

    `status` is completed or diverged if the training was over, and only its last checkpoint was
    still being written.
    """
    if isinstance(error, Stopped) and status != "running":
        return _stopped_after(status)
    if (told := why_another_failed(error)) is not None:
        reason = str(told.get("error") or told["status"])
        if "rank" in told and not reason.startswith(f"rank {told['rank']} "):
            reason = f"rank {told['rank']}: {reason}"
        log.error(f"error: {reason}; {resume_command(run_dir)}")
        return told
    if isinstance(error, Stopped):
        log.warning("stopped at once: the steps since the last checkpoint are lost")
        return {"status": "interrupted"}
    if is_out_of_memory(error):
        oom = describe_out_of_memory(error, device)
        log.error(f"out of memory: {oom['message']}")
        return {"status": "oom", "oom": oom}
    if not isinstance(error, Exception):  # sys.exit() in a user's module, say
        reason = f"{type(error).__name__}({error}) was raised in {place(error)}"
        log.error(
            f"error: {reason}, and cannot end a run; raise an exception of another type there"
        )
        return {"status": "failed", "error": reason}
    reason = str(error) or type(error).__name__
    # the message of our ValueError or OSError tells users what to fix; other errors are bugs
    way_out = ""
    if not isinstance(error, (ValueError, OSError)) or is_foreign(error):
        way_out = _log_traceback(error)
        reason = with_place(error)
    if isinstance(error, OSError) and (run_dir / "checkpoint").exists():
        way_out += f"; {resume_command(run_dir)}"
    log.error(f"error: {reason}{way_out}")
    return {"status": "failed", "error": reason}


def _log_traceback(error: Exception) -> str:
    """Log the traceback; in files only, if users need no more than the place in their own file.

    Returns what the line of the error adds about it.
    """
    text = "".join(traceback.format_exception(error))
    handlers = [*log.handlers, *(logging.root.handlers if log.propagate else ())]
    files = [each for each in handlers if isinstance(each, logging.FileHandler)]
    if not is_foreign(error) or not files:
        log.error(text)
        return ""
    for file in files:
        file.handle(logging.LogRecord(log.name, logging.ERROR, "", 0, text, (), None))
    return f"; its traceback is in {files[0].baseFilename}"


def _stopped_after(status: str) -> Row:
    log.warning(
        f"stopped after the training, which is {status} and saved; the loss curve or the sample "
        "may be missing"
    )
    return {"stopped": True}


@contextmanager
def after_training(what: str, summary: Row) -> Iterator[None]:
    """Guards what is made after a run. A failure is logged and noted in the summary, not raised."""
    try:
        yield
    # a plotting library, a tokenizer, or a kernel that takes no single query may raise anything
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        log.error(f"error after the training: no {what}: {reason}")
        summary["error"] = "; ".join(filter(None, [summary.get("error"), f"no {what}: {reason}"]))


def resume_command(run_dir: Path) -> str:
    """The shell command that resumes a run."""
    return f"go on with: python train.py {shlex.quote(f'resume={run_dir}')}"


def outcome_outside_training(error: BaseException, status: str, run_dir: Path) -> Row:
    """outcome_of() for an error before the training began, or after it ended and was saved.

    Returns nothing where the training itself ended with an error.
    """
    if status == "running":
        return outcome_of(error, "cpu", run_dir)
    if status not in ("completed", "diverged", "interrupted"):
        return {}
    if isinstance(error, Stopped):
        return {} if status == "interrupted" else _stopped_after(status)
    log.error(f"error after the training: {str(error) or type(error).__name__}")
    return {"error": str(error) or type(error).__name__}


def save_summary(run_dir: Path, summary: Row) -> None:
    """Write the summary so far, in case this process is killed before close_run().

    close_run() reports a summary that cannot be written.
    """
    with suppress(OSError):
        written = {key: value for key, value in summary.items() if key != "started"}
        write_json(run_dir / "summary.json", written)


def close_run(run_dir: Path, summary: Row, ending: Ending) -> None:
    """Release the memory and write summary.json. If that cannot be written, the run has failed.

    "stopped" says that a signal came, even if too late to interrupt the run: a sweep ends there.
    """
    started = summary.pop("started")
    release_memory(summary.get("device", "cpu"))
    # the time of all starts, unless the training never began
    starts = summary.get("starts")
    summary["wall_seconds"] = stop_clock(starts) if starts else time.time() - started
    summary["seconds_by_phase"] = current().seconds()
    if starts:
        log.info(in_words(summary["seconds_by_phase"]))
    # a later signal is raised after the run, when its summary is written
    summary["stopped"] = ending.noted or summary.get("stopped", False)
    ending.noted = False
    # a refused resume leaves the summary of the run as it was
    resumes = any(override.startswith("resume=") for override in summary["overrides"])
    if resumes and "steps_done" not in summary:
        return
    try:
        write_json(run_dir / "summary.json", summary)
    except OSError as error:
        log.error(f"error: {error}")
        summary["status"] = "failed"
