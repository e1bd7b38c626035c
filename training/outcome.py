"""How a run ended, as data: whatever goes wrong becomes a status, so that one job of a sweep never takes down another."""

import logging
import math
import shlex
import time
import traceback
from pathlib import Path
from typing import Any

from training.history import stop_clock
from training.memory import describe_out_of_memory, is_out_of_memory, release_memory
from training.metrics import write_json

log = logging.getLogger("tilegpt")


class Objective(float):
    """What a sweeper minimises: val/loss of a completed run, and infinity for any other. It knows how the run ended."""

    status: str

    def __new__(cls, summary: dict[str, Any]) -> "Objective":
        loss = summary.get("val/loss") if summary["status"] == "completed" else None
        objective = super().__new__(cls, math.inf if loss is None else loss)
        objective.status = summary["status"]
        return objective

    def __reduce__(self) -> tuple:
        return Objective, ({"status": self.status, "val/loss": float(self)},)


def outcome_of(error: BaseException, device: str, run_dir: Path, *, predicted_gib: float | None = None) -> dict[str, Any]:
    """The status for summary.json of a run that `error` ended: oom, interrupted or failed. Says it once, in the log."""
    if isinstance(error, KeyboardInterrupt):
        log.warning("stopped at once: the steps since the last checkpoint are lost")
        return {"status": "interrupted"}
    if is_out_of_memory(error):
        found = describe_out_of_memory(error, device) | {"predicted_gib": predicted_gib}
        expected = (
            "" if predicted_gib is None else f"; the run was predicted to take {predicted_gib:.1f} GiB in all (python -m scripts.plan)"
        )
        log.error(f"out of memory: {found['message']}{expected}")
        return {"status": "oom", "oom": found}
    # what the user can mend is one line; anything else is ours, and its traceback is wanted
    if not isinstance(error, (ValueError, OSError)):
        log.error("".join(traceback.format_exception(error)))
    way_out = f"; {go_on_with(run_dir)}" if isinstance(error, OSError) and (run_dir / "checkpoint").exists() else ""
    log.error(f"error: {error}{way_out}")
    return {"status": "failed", "error": str(error) or type(error).__name__}


def go_on_with(run_dir: Path) -> str:
    """The command that resumes a run, as a shell takes it."""
    return f"go on with: python train.py {shlex.quote(f'resume={run_dir}')}"


def outcome_around(error: BaseException, status: str, run_dir: Path) -> dict[str, Any]:
    """The same for an error before the training, when its status is running, or after it, when all that was learnt is saved.

    Says and changes nothing where the training itself has ended so.
    """
    if status == "running":
        return outcome_of(error, "cpu", run_dir)
    asked = isinstance(error, KeyboardInterrupt)
    if status in ("completed", "diverged") or (status == "interrupted" and not asked):
        log.error(f"error after the training: {error}" if str(error) else "stopped after the training")
        return {"status": "interrupted"} if asked else {}
    return {}


def close_run(run_dir: Path, summary: dict[str, Any]) -> None:
    """Write summary.json and give the memory back. A summary that cannot be written makes the run a failed one."""
    started = summary.pop("started")
    # of all starts, where the training began
    summary["wall_seconds"] = stop_clock(summary["starts"]) if "starts" in summary else time.time() - started
    try:
        # a resume that was refused leaves the summary of what the run did before
        refused = "steps_done" not in summary and any(override.startswith("resume=") for override in summary["overrides"])
        if not (refused and (run_dir / "summary.json").exists()):
            write_json(run_dir / "summary.json", summary)
    except OSError as error:
        log.error(f"error: {error}")
        summary["status"] = "failed"
    release_memory(summary.get("device", "cpu"))
