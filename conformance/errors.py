"""An exception in one line, with its cause."""

import re

from attention.look.blame import without_gpu

LONGEST = 300  # characters of the first line, and of the cause
NAMED = re.compile(r"\b\w*(?:Error|Exception)\b[:(].*")  # an exception that a message quotes


def in_one_line(error: BaseException) -> str:
    """The type, the first line of the message, and the cause if that line does not tell it.

    The first line of a compiler's message often says only where it was. PyTorch's then quotes the
    exception, Triton's ends with it, and others raise theirs from it.
    """
    first, *further = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    cause = next((found[0] for line in further if (found := NAMED.search(line))), "")
    # a message often repeats that of the exception it was raised from
    if not cause and error.__cause__ is not None and str(error.__cause__) not in first:
        cause = in_one_line(error.__cause__)
    if not cause and further and first.endswith(":"):
        cause = further[-1]
    line = f"{type(error).__name__}: {shortened(first)}"
    line = f"{line} ({shortened(cause)})" if cause else line
    way_out = without_gpu(error)
    return f"{line.removesuffix('.')}{way_out}" if way_out else line


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
