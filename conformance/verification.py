"""Backends held to the properties, as one table: what `scripts.verify` and `attn-conform run` print
and write.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from conformance.backend_under_test import Subject
from conformance.cases import SHORT
from conformance.properties import PROPERTIES, Cell, Property, examine

LARGEST_SEED = 10**12  # each random call has a seed of its own, of 64 bits
MARKS = "+ green   x red, as documented   ! not as documented   . does not apply"

Row = dict[str, Any]  # an object of a JSON file


def set_up(device: torch.device) -> None:
    """Prepare the process: repeatable matrix products on a GPU, one thread on a CPU."""
    # cuBLAS needs this to be deterministic, and reads it at its first call
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type == "cpu":
        torch.set_num_threads(1)  # the tensors are small: threads would only wait for one another
    else:
        from torch import _dynamo

        # flex is compiled for every kind of case; past the limit it runs uncompiled
        _dynamo.config.recompile_limit = 1000


def finite(x: float | None) -> float | None:
    """A number for JSON: four digits, None if it is not finite."""
    return None if x is None or not math.isfinite(x) else float(f"{x:.4g}")


def verify(
    subjects: Sequence[Subject],
    properties: Mapping[str, Property] = PROPERTIES,
    *,
    seen: Callable[[Subject, Cell], Row | None] = lambda subject, cell: None,
) -> Row:
    """The column of a backend: its cells, and how many checks they hold. subjects: the backend in
    each dtype. seen: called after each property; what it returns is added to the cell.
    """
    start, cells, given = time.perf_counter(), [], subjects[0].given
    for subject in subjects:
        for name, check in properties.items():
            cell = examine(subject, name, check)
            figures = {key: finite(getattr(cell, key)) for key in ("worst_share", "worst_multiple")}
            row = {"dtype": SHORT[subject.dtype], **asdict(cell), "ok": cell.ok} | figures
            cells.append(row | (seen(subject, cell) or {}))
    multiples = [cell["worst_multiple"] for cell in cells if cell["status"] == "green"]
    return {
        "exact": given.exact,
        "defect": given.defect,
        "options": dict(given.options),
        "checks": sum(cell["checks"] for cell in cells),
        "worst_multiple_of_naive": max(filter(None, multiples), default=None),
        "seconds": round(time.perf_counter() - start, 1),
        "cells": cells,
    }


def mark(cells: list[Row]) -> str:
    """The mark of one property and backend over all dtypes; see MARKS."""
    if not all(cell["ok"] for cell in cells):
        return "!"
    statuses = {cell["status"] for cell in cells}
    return "x" if "red" in statuses else "+" if "green" in statuses else "."


def matrix(columns: Mapping[str, Row]) -> Iterable[str]:
    """Lines: a row per property, a column per backend, names written downwards."""
    rows = dict.fromkeys(cell["property"] for each in columns.values() for cell in each["cells"])
    width = max(map(len, rows)) + 2
    # without the module of a user's backend, which would make the heading long
    names = [name.rpartition(":")[2] for name in columns]
    height = max(map(len, names))
    lines = ["  ".join(name.rjust(height)[line] for name in names) for line in range(height)]
    for line in lines if len(names) > 1 else names:
        yield " " * width + line.rstrip()
    for name in rows:
        cells = [
            [cell for cell in column["cells"] if cell["property"] == name]
            for column in columns.values()
        ]
        yield name.ljust(width) + "  ".join(map(mark, cells))


def remarks(columns: Mapping[str, Row]) -> Iterable[str]:
    """Lines: what the marks leave out of each cell that is not as documented, and of a backend that
    was not verified. Of a single backend, every cell that is not green.
    """
    for name, column in columns.items():
        if not_verified(column):
            yield f". {name}: {column['cells'][0]['note']}"
            continue
        for cell in column["cells"]:
            if cell["ok"] and (len(columns) > 1 or cell["status"] == "green"):
                continue
            found = f": {cell['note']}" if cell["note"] else ", but the backend documents it as red"
            yield (
                f"{mark([cell])} {name}, {cell['property']}, {cell['dtype']}: "
                f"{cell['status']}{found}"
            )
            if "script" in cell:
                yield f"  a call that shows it: {cell['script'] or 'none with random inputs'}"


def not_verified(column: Row) -> bool:
    return all(cell["status"] == "n/a" for cell in column["cells"])


def report(columns: Mapping[str, Row]) -> str:
    """The matrix, the worst errors, and remarks."""
    lines = [*matrix(columns), "", MARKS, ""]
    for name, column in columns.items():
        worst = column["worst_multiple_of_naive"]
        if worst is not None:
            lines.append(
                f"{name:<16} {column['checks']} checks; worst green error {worst:.2f} x naive's "
                "own or a rounding"
            )
    return "\n".join([*lines, *remarks(columns)])


def failure(columns: Mapping[str, Row]) -> str | None:
    """What is wrong with the columns in a few words; None if they are as documented."""
    if all(map(not_verified, columns.values())):
        return "nothing was verified"
    wrong = sum(not cell["ok"] for column in columns.values() for cell in column["cells"])
    return f"{wrong} cells are not as documented" if wrong else None
