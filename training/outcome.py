"""How a run ended, as data: whatever goes wrong becomes a status, so that one job of a sweep never
takes down another.
"""

import logging
import math
import shlex
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from training.interrupt import Ending, Stopped
from training.memory import describe_out_of_memory, is_out_of_memory, release_memory
from training.metrics import write_json
from training.resume import stop_clock

log = logging.getLogger("tilegpt")


class Objective(float):
    """What a sweeper minimises: val/loss of a completed run, and infinity for any other. It knows
    how the run ended.
    """

    status: str
    stopped: bool  # whether a signal came, also where it was too late to interrupt the run

    def __new__(cls, summary: dict[str, Any]) -> "Objective":
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
    predicted_gib: float | None = None,
) -> dict[str, Any]:
    """What summary.json says of a run that `error` ended: oom, interrupted or failed. Says it once,
    in the log.

    status: completed or diverged where the training was over by then, and only its last checkpoint
    was still being written.
    """
    if isinstance(error, Stopped):
        if status != "running":
            return _stopped_after(status)
        log.warning("stopped at once: the steps since the last checkpoint are lost")
        return {"status": "interrupted"}
    if is_out_of_memory(error):
        found = describe_out_of_memory(error, device) | {"predicted_gib": predicted_gib}
        expected = (
            ""
            if predicted_gib is None
            else (
                f"; the run was predicted to take {predicted_gib:.1f} GiB in all (python -m "
                "scripts.plan)"
            )
        )
        log.error(f"out of memory: {found['message']}{expected}")
        return {"status": "oom", "oom": found}
    if not isinstance(error, Exception):  # sys.exit() in a user's module, say
        reason = _raised(error)
        log.error(
            f"error: {reason}, which is no way to end a run; raise an exception of "
            "another type there"
        )
        return {"status": "failed", "error": reason}
    # what the user can mend is one line; anything else is ours, and its traceback is wanted
    if not isinstance(error, (ValueError, OSError)):
        log.error("".join(traceback.format_exception(error)))
    way_out = (
        f"; {resume_command(run_dir)}"
        if isinstance(error, OSError) and (run_dir / "checkpoint").exists()
        else ""
    )
    log.error(f"error: {error}{way_out}")
    return {"status": "failed", "error": str(error) or type(error).__name__}


def _raised(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = f"{type(error).__name__}({error})"
    return f"{said} was raised in {frame.filename}, line {frame.lineno}"


def _stopped_after(status: str) -> dict[str, Any]:
    log.warning(
        f"stopped after the training, which is {status} and saved; the loss curve or the sample "
        "may be missing"
    )
    return {"stopped": True}


@contextmanager
def after_training(what: str, summary: dict[str, Any]) -> Iterator[None]:
    """What is made of a run that is over, `what` in words. A failure is said and stands in the
    summary, and costs nothing else.
    """
    try:
        yield
    # the library that draws, a tokenizer or a kernel that takes no single query may raise anything
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        log.error(f"error after the training: no {what}: {reason}")
        summary["error"] = "; ".join(filter(None, [summary.get("error"), f"no {what}: {reason}"]))


def resume_command(run_dir: Path) -> str:
    """The command that resumes a run, as a shell takes it."""
    return f"go on with: python train.py {shlex.quote(f'resume={run_dir}')}"


def outcome_outside_training(error: BaseException, status: str, run_dir: Path) -> dict[str, Any]:
    """The same for an error before the training, when its status is running, or after it, when all
    that was learnt is saved.

    Says and changes nothing where the training itself has ended so.
    """
    if status == "running":
        return outcome_of(error, "cpu", run_dir)
    if status not in ("completed", "diverged", "interrupted"):
        return {}
    if isinstance(error, Stopped):
        return {} if status == "interrupted" else _stopped_after(status)
    log.error(f"error after the training: {str(error) or type(error).__name__}")
    return {"error": str(error) or type(error).__name__}


def save_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Write what is known so far, in case that this process does not come to close_run(), which
    says what cannot be written.
    """
    with suppress(OSError):
        write_json(
            run_dir / "summary.json",
            {key: value for key, value in summary.items() if key != "started"},
        )


def close_run(run_dir: Path, summary: dict[str, Any], ending: Ending) -> None:
    """Give the memory back and write summary.json. A summary that cannot be written makes the run a
    failed one.

    "stopped" says of a run that a signal came, also where it was too late to interrupt it: a sweep
    ends there.
    """
    started = summary.pop("started")
    # of all starts, where the training began
    summary["wall_seconds"] = (
        stop_clock(summary["starts"]) if "starts" in summary else time.time() - started
    )
    release_memory(summary.get("device", "cpu"))
    # what comes from here on is raised after the run: by then its summary is written
    summary["stopped"] = ending.noted or summary.get("stopped", False)
    ending.noted = False
    # a resume that was refused leaves the summary of what the run did before, if it came to one
    if "steps_done" not in summary and any(
        override.startswith("resume=") for override in summary["overrides"]
    ):
        return
    try:
        write_json(run_dir / "summary.json", summary)
    except OSError as error:
        log.error(f"error: {error}")
        summary["status"] = "failed"
