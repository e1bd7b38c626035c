"""How a run ended, as data: every error becomes a status, so that the jobs of a sweep go on.

completed    all steps are done
diverged     the loss or a gradient was not finite
oom          memory ran out
interrupted  by Ctrl-C or another signal
failed       by any other error

Until then it is unfinished, and so is a run that was killed.
"""

import logging
import math
import shlex
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attention.look.blame import is_foreign, with_place
from training.record.clock import PHASES, in_words
from training.record.files import LATEST, Row, write_json
from training.record.memory import describe_out_of_memory, is_out_of_memory, release_memory
from training.record.starts import stop_clock
from training.record.text_table import first_line

log = logging.getLogger("tilegpt")


def objective(summary: Row) -> float:
    """What a sweeper minimises: val/loss of a completed run, infinity for any other."""
    loss = summary.get("val/loss") if summary["status"] == "completed" else None
    return math.inf if loss is None else loss


def outcome_of(error: BaseException, run_dir: Path, *, status: str = "unfinished") -> Row:
    """The entries of summary.json for an error by which a run ended; logs it in one line.

    `status` is "unfinished" until the training is over and saved. {} if it ended with this error,
    so that it is noted already.
    """
    stopped = isinstance(error, KeyboardInterrupt)
    if status in ("oom", "failed") or (stopped and status == "interrupted"):
        return {}
    if status == "unfinished":
        if stopped:
            log.warning("stopped at once: the steps since the last checkpoint are lost")
            return {"status": "interrupted"}
        if is_out_of_memory(error):
            oom = describe_out_of_memory(error)
            log.error(f"out of memory: {oom['message']}")
            return {"status": "oom", "oom": oom}
        return {"status": "failed", "error": _failure(error, run_dir)}
    if stopped:
        log.warning(
            f"stopped after the training, which is {status} and saved; the loss curve or the "
            "sample may be missing"
        )
        return {"stopped": True}
    log.error(f"error after the training: {first_line(error)}")
    return {"error": first_line(error)}


def _failure(error: BaseException, run_dir: Path) -> str:
    """Log why a run failed; returns it in one line."""
    reason = str(error) or type(error).__name__
    # the message of our ValueError or OSError tells users what to fix; other errors are bugs
    if not isinstance(error, (ValueError, OSError)) or is_foreign(error):
        log.error("".join(traceback.format_exception(error)))
        reason = with_place(error)
    saved = isinstance(error, OSError) and (run_dir / LATEST).exists()
    log.error(f"error: {reason}" + (f"; {resume_command(run_dir)}" if saved else ""))
    return reason


@contextmanager
def after_training(what: str, summary: Row) -> Iterator[None]:
    """Guards what is made after a run. A failure is logged and noted in the summary, not raised."""
    try:
        yield
    # a plotting library, a tokenizer, or a kernel that takes no single query may raise anything
    except Exception as error:
        reason = f"no {what}: {first_line(error)}"
        log.error(f"error after the training: {reason}")
        summary["error"] = "; ".join(filter(None, [summary.get("error"), reason]))


def resume_command(run_dir: Path) -> str:
    """The shell command that resumes a run."""
    return f"go on with: python train.py {shlex.quote(f'resume={run_dir}')}"


def save_summary(run_dir: Path, summary: Row) -> None:
    """Write the summary so far, in case this process is killed before close_run().

    close_run() reports a summary that cannot be written.
    """
    with suppress(OSError):
        write_json(run_dir / "summary.json", summary | {"seconds_by_phase": PHASES.seconds()})


def close_run(run_dir: Path, summary: Row) -> None:
    """Release the memory and write summary.json. If that cannot be written, the run has failed."""
    release_memory(summary.get("device", "cpu"))
    seconds = summary["seconds_by_phase"] = PHASES.seconds()
    if starts := summary.get("starts"):
        log.info(in_words(seconds))
    elif any(override.startswith("resume=") for override in summary["overrides"]):
        return  # a refused resume leaves the summary of the run as it was
    summary["wall_seconds"] = stop_clock(starts) if starts else time.time() - PHASES.began
    try:
        write_json(run_dir / "summary.json", summary)
    except OSError as error:
        log.error(f"error: {error}")
        summary["status"] = "failed"
