"""Rows of figures: in groups, as tables for a terminal, and several measurements in words."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

from training.files import Row as Row


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """The items by their key, in the order in which the keys appear."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of one width: the first on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def mean_and_deviation(values: Sequence[float], form: str) -> str:
    """1.234 ± 0.005: the mean and, of several, their standard deviation; a dash for none."""
    if not values:
        return "-"
    mean = form.format(fmean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ± {form.replace('+', '').format(stdev(values))}"
