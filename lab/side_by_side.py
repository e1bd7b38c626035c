"""Measuring jobs in separate processes: if one hangs or dies, the others go on, and the file that
it has written so far stays.
"""

import json
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from scripts.tables import Row


def take_gpu(device: str, number: int) -> None:
    """Select GPU `number` modulo the number of GPUs that PyTorch sees."""
    if device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())


def ended(job: Callable[..., None], *arguments: Any, seconds: float) -> str:
    """Run the job and return how it ended: "whole", or why not. Its function and arguments must be
    picklable.
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


def measured(
    job: Callable[..., None], *arguments: Any, name: str, out: Path, seconds: float, empty: Row
) -> Row:
    """The row that the job wrote to its last argument, a file in the folder OUT.parts, and how the
    job ended. The row is `empty` if the job wrote nothing.
    """
    folder = out.with_suffix(".parts")
    folder.mkdir(exist_ok=True)
    part = folder / f"{name.translate(str.maketrans(' :/', '___'))}.json"
    part.unlink(missing_ok=True)
    how = ended(job, *arguments, part, seconds=seconds)
    return (json.loads(part.read_text()) if part.exists() else empty) | {"ended": how}
