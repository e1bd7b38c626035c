"""Tables for a terminal."""

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """Align columns: the first ones, which are words, to the left, and the numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust] * words + [str.rjust] * (len(widths) - words)
    lines = (
        "  ".join(side(x, width) for side, x, width in zip(sides, row, widths, strict=True))
        for row in rows
    )
    return "\n".join(map(str.rstrip, lines))
