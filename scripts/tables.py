"""Rows of figures: group them, print them as tables, and summarise repeated measurements."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from statistics import fmean, stdev
from typing import Any

from training.record.files import Row as Row
from training.record.text_table import text_table as text_table

Cell = Callable[[list[Row]], str]  # the text of a table's cell, from the rows of its line


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """The items grouped by their key, in the order in which the keys appear."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def mean_and_deviation(values: Sequence[float], form: str) -> str:
    """1.234 ± 0.005: the mean, and the standard deviation of several values; a dash for none."""
    if not values:
        return "-"
    mean = form.format(fmean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ± {form.format(stdev(values))}"


def by(rows: Iterable[Row], *names: str) -> dict[Any, list[Row]]:
    """The rows grouped by their values of these names."""
    return grouped(rows, itemgetter(*names))


def table(title: str, groups: Mapping[str, list[Row]], columns: Mapping[str, Cell]) -> str:
    """A table with one line per group; the column `title` has the group's name."""
    lines = [[name, *(cell(rows) for cell in columns.values())] for name, rows in groups.items()]
    return text_table([[title, *columns], *lines])


def spread(name: str, form: str) -> Cell:
    """A table column with mean and standard deviation of `name`, over the rows that have it."""
    return lambda rows: mean_and_deviation([row[name] for row in rows if name in row], form)
