"""How a run ended, as data: whatever goes wrong becomes a status, so that one job of a sweep never takes down another."""

import logging
import traceback
from typing import Any

from training.memory import describe_out_of_memory, is_out_of_memory

log = logging.getLogger("tilegpt")


def outcome_of(error: BaseException, device: str) -> dict[str, Any]:
    """The status for summary.json of a run that `error` ended: oom, interrupted or failed. Says it once, in the log."""
    if isinstance(error, KeyboardInterrupt):
        log.warning("stopped at once: the steps since the last checkpoint are lost")
        return {"status": "interrupted"}
    if is_out_of_memory(error):
        found = describe_out_of_memory(error, device)
        log.error(f"out of memory: {found['message']}")
        return {"status": "oom", "oom": found}
    # what the user can mend is one line; anything else is ours, and its traceback is wanted
    if not isinstance(error, (ValueError, OSError)):
        log.error("".join(traceback.format_exception(error)))
    log.error(f"error: {error}")
    return {"status": "failed", "error": str(error) or type(error).__name__}
