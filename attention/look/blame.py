"""Where an error was raised: in the project, or in a user's file."""

import os
from pathlib import Path
from traceback import FrameSummary, extract_tb

ROOT, STDLIB = Path(__file__).resolve().parents[2], Path(os.__file__).resolve().parent
OURS = "attention conformance data hydra_plugins lab model scripts training config.py train.py"


def is_foreign(error: BaseException) -> bool:
    """Whether the innermost call outside of installed packages is in a user's file."""
    frames = [x for x in extract_tb(error.__traceback__) if _is_ours(x) or not _is_installed(x)]
    return bool(frames) and not _is_ours(frames[-1])


def with_place(error: BaseException) -> str:
    """The error's type, message and place, in one line if the message is."""
    return f"{type(error).__name__}: {error} ({place(error)}){without_gpu(error)}"


def without_gpu(error: BaseException) -> str:
    """What to add to an error of Triton that found no GPU, as its own message does not say so."""
    if "0 active drivers" not in str(error):
        return ""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "; Triton needs a GPU for this, even with TRITON_INTERPRET=1"
    return "; Triton needs a GPU, or TRITON_INTERPRET=1 set before the start"


def place(error: BaseException) -> str:
    """FILE, line N: the innermost call in a user's file; without one, the innermost of all."""
    frames = extract_tb(error.__traceback__)
    users = [x for x in frames if not _is_ours(x) and not _is_installed(x)]
    frame = (users or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}"


def _is_ours(frame: FrameSummary) -> bool:
    file = Path(frame.filename).resolve()
    return file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in OURS.split()


def _is_installed(frame: FrameSummary) -> bool:
    file = Path(frame.filename).resolve()
    folders = {"site-packages", "dist-packages"}
    # modules that Python starts with are frozen into it
    frozen = frame.filename.startswith("<frozen ")
    return frozen or file.is_relative_to(STDLIB) or bool(folders & {*file.parts})
