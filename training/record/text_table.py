"""Text for a terminal: aligned columns, one line of an error, no control characters."""

import re
from collections.abc import Sequence

# all but the tab and the line feed: C0, delete, and C1, in which one character starts a sequence
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def text_table(rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """Align columns: the first ones, which are words, to the left, and the numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust] * words + [str.rjust] * (len(widths) - words)
    lines = (
        "  ".join(side(x, width) for side, x, width in zip(sides, row, widths, strict=True))
        for row in rows
    )
    return "\n".join(map(str.rstrip, lines))


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def printable(text: str) -> str:
    """The text with its control characters written out: an escape as \\x1b.

    What a model writes could otherwise move the cursor, clear the screen or rename the window.
    """
    return CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
