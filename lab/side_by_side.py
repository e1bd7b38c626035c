"""Jobs that measure, each in a process of its own: one that hangs or dies does not take the others
along, and keeps what it has written to its file.
"""

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any


def ended(job: Callable[..., None], *arguments: Any, seconds: float) -> str:
    """Runs it, and says how it ended: "whole", or why not. Its function and arguments must be such
    as pickle takes.
    """
    if seconds <= 0:
        return "not begun"
    # a GPU's driver does not survive a fork
    process = get_context("spawn").Process(target=job, args=arguments)
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return f"stopped after {seconds:.0f} s"
    return f"died with exit code {process.exitcode}" if process.exitcode else "whole"
