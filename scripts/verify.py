"""Check one backend or all against the properties of attention; print the matrix, and whether every
cell is as documented.

    python -m scripts.verify attention=tiled

Green: every check of the property stays within its budget, which is relative to naive attention's
own error against float64. Red: a check exceeds it. A broken backend documents the properties in
which it is red. A property does not apply if the backend refuses its inputs, or if the backend has
exact=False and the property is only of softmax. The exit code is 0 if every cell is green, red as
documented, or does not apply. Arguments are key=value, and all have a default:

    attention  a name, pkg.module:BACKEND, either with options as in tiled:block_q=16,block_kv=32,
               several with commas between, or all (all)
    device     auto, cpu or cuda (auto)
    dtype      fp32, bf16, fp16, several with commas between, or auto: fp32 on a CPU, all three on a
               GPU (auto)
    cases      random shapes besides the adversarial inputs (100)
    seed       of the random shapes (0)
    processes  how many run in parallel, each for some properties in one dtype (1). On a GPU most of
               the time is compilation, and each process needs up to 9 GiB of its memory
    out        write every cell to this JSON file; columns of other backends stay, if they were
               measured alike. The file grows as cells are done and lists the rest under "missing":
               the same command continues there

Triton runs on a CPU if TRITON_INTERPRET=1 is set (minutes).
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from attention import BACKENDS, Backend, kernel_choice
from conformance.backend_under_test import Subject
from conformance.cases import SHORT
from conformance.command import LARGEST_SEED, set_up
from conformance.fuzz import finite
from conformance.properties import PROPERTIES, Cell, examine
from scripts.arguments import Count, Device, Dtype, Json, Natural, command, default, parse_backend
from scripts.processes import Died, in_processes
from scripts.tables import Row
from training.device import DTYPES, pick_device, pick_dtype
from training.environment import first_difference, measured_on
from training.files import write_json
from training.interrupt import Ending

# parts of a column in one dtype, for parallel processes: starting one takes seconds. If there are
# fewer parts than processes, each property is a part
PARTS = 3


@dataclass
class Options:
    attention: list[str] = default("all")
    device: Device = "auto"
    dtype: list[Dtype] = default("auto")
    cases: Natural = 100
    seed: Natural = 0
    processes: Count = 1
    out: Json | None = None

    def __post_init__(self) -> None:
        if self.seed > LARGEST_SEED:
            raise ValueError(f"seed={self.seed} must be at most {LARGEST_SEED}")
        if self.out is not None and not self.out.absolute().parent.is_dir():
            raise ValueError(f"out={self.out}: its folder does not exist")


def pick_backends(names: list[str], device: torch.device) -> dict[str, Backend]:
    """The backends by the names of their columns. A backend's other implementations that run on
    this device get their own columns.
    """
    found = {}
    for given in BACKENDS if names == ["all"] else names:
        backend = parse_backend(given)
        column = given if "=" in given else backend.name
        found[column] = backend
        for name, other in backend.implementations.items():
            subject = Subject(other, device.type, torch.float32)
            if other.fn is not backend.fn and subject.takes(subject.case(), backward=False):
                found[f"{column} ({name})"] = other
        choice = kernel_choice(backend, device=device, dtype=torch.bfloat16, head_dim=64)
        if choice and choice.kernel == "hopper" and backend.options["kernel"] == "auto":
            found[f"{column} (portable)"] = backend.configured(kernel="portable")
    return found


def pick_dtypes(names: list[str], device: torch.device) -> list[torch.dtype]:
    if "auto" in names:
        names = ["fp32"] if device.type == "cpu" else ["fp32", "bf16", "fp16"]
    return [pick_dtype(name, device) for name in names]


def as_json(cell: Cell, dtype: str) -> Row:
    """The cell's fields; numbers to four digits, null if not finite."""
    figures = {name: finite(getattr(cell, name)) for name in ("worst_share", "worst_multiple")}
    return {"dtype": dtype, **asdict(cell), "ok": cell.ok} | figures


class Part(NamedTuple):
    """Some results of a column: cells of one dtype, the cases tried for them, and the seconds."""

    dtype: str
    cells: list[Row]
    cases: set[str]
    seconds: float


@dataclass
class Column:
    """A column of the matrix: the properties to check for a backend, and the results so far."""

    backend: Backend
    wanted: dict[str, list[str]]  # properties to check, by dtype
    parts: list[Part] = field(default_factory=list)

    def missing(self) -> dict[str, list[str]]:
        """The unchecked properties by dtype, without dtypes that are done."""
        found = {(part.dtype, cell["property"]) for part in self.parts for cell in part.cells}
        missing = {
            dtype: [name for name in names if (dtype, name) not in found]
            for dtype, names in self.wanted.items()
        }
        return {dtype: names for dtype, names in missing.items() if names}

    def row(self) -> Row:
        """The cells of every dtype, and what was tried for them. If cells are missing, also the
        names of the cases, for take_over().
        """
        cases = {
            dtype: sorted(set().union(*(x.cases for x in self.parts if x.dtype == dtype)))
            for dtype in self.wanted
        }
        order = [(dtype, name) for dtype, names in self.wanted.items() for name in names]
        cells = [cell for part in self.parts for cell in part.cells]
        cells.sort(key=lambda cell: order.index((cell["dtype"], cell["property"])))
        multiples = [
            cell["worst_multiple"]
            for cell in cells
            if cell["status"] == "green" and cell["worst_multiple"] is not None
        ]
        # the name of a random case ends with its seed
        ends = [case.rpartition("-")[2] for names in cases.values() for case in names]
        random = [end.startswith("seed") for end in ends]
        row = {
            "exact": self.backend.exact,
            "defect": self.backend.defect,
            "options": dict(self.backend.options),
            "tried": {
                "random": sum(random),
                "adversarial": len(random) - sum(random),
                "checks": sum(cell["checks"] for cell in cells),
            },
            "worst_multiple_of_naive": max(multiples, default=None),
            "seconds": round(sum(part.seconds for part in self.parts), 1),
            "cells": cells,
        }
        return row | ({"cases": cases} if self.missing() else {})

    def take_over(self, row: Row) -> None:
        """Add the parts of an unfinished row()."""
        for dtype, cases in row.get("cases", {}).items():
            cells = [cell for cell in row["cells"] if cell["dtype"] == dtype]
            seconds = 0.0 if self.parts else row["seconds"]
            self.parts.append(Part(dtype, cells, set(cases), seconds))


Found = Generator[tuple[str, Column]]  # yields name and column after each new part


def examined(
    backend: Backend,
    dtype: str,
    options: Options,
    device: torch.device,
    properties: list[str],
    done: Callable[[], Any] = lambda: None,
) -> Part:
    """Check the properties in one dtype; call `done` after each one."""
    start, cells = time.perf_counter(), []
    subject = Subject(backend, device.type, DTYPES[dtype], options.cases, options.seed)
    for name in properties:
        cells.append(as_json(examine(subject, name), dtype))
        done()
    cases = {str(case) for case, row in subject.rows.items() if row is not None}
    return Part(dtype, cells, cases, time.perf_counter() - start)


def verify(column: Column, options: Options, device: torch.device) -> Iterator[Column]:
    """Check the column in this process; yield it after each dtype."""
    missing = column.missing()
    total = sum(map(len, missing.values()))
    # shown only at a terminal
    what = {"desc": column.backend.name, "unit": "property", "leave": False, "disable": None}
    with tqdm(total=total, **what) as bar:
        for dtype, names in missing.items():
            part = examined(column.backend, dtype, options, device, names, bar.update)
            column.parts.append(part)
            yield column


def mark(cells: list[Row]) -> str:
    """The mark of one property and backend over all dtypes: + green, x red as documented, ! not as
    documented, . not applicable.
    """
    if not all(cell["ok"] for cell in cells):
        return "!"
    statuses = {cell["status"] for cell in cells}
    return "x" if "red" in statuses else "+" if "green" in statuses else "."


def cells_of(column: Row, name: str) -> list[Row]:
    return [cell for cell in column["cells"] if cell["property"] == name]


def matrix(columns: dict[str, Row]) -> str:
    """The matrix as text: a row per property, a column per backend, names written downwards."""
    rows = dict.fromkeys(cell["property"] for each in columns.values() for cell in each["cells"])
    width = max(map(len, rows)) + 2
    # without the module of a user's backend, which would make the heading long
    names = [name.rpartition(":")[2] for name in columns]
    height = max(map(len, names))
    lines = [
        " " * width + "  ".join(name.rjust(height)[row] for name in names).rstrip()
        for row in range(height)
    ]
    lines += [
        name.ljust(width) + "  ".join(mark(cells_of(column, name)) for column in columns.values())
        for name in rows
    ]
    return "\n".join(lines)


def remarks(columns: dict[str, Row]) -> list[str]:
    """Details that the marks leave out: every cell that is not as documented, and backends that
    were not verified.
    """
    lines = []
    for name, column in columns.items():
        for cell in column["cells"]:
            if not cell["ok"]:
                what = (
                    f"red, {cell['note']}"
                    if cell["status"] == "red"
                    else "green, but the backend documents it as red"
                )
                lines.append(f"! {name}, {cell['property']}, {cell['dtype']}: {what}")
        if not_verified(column):
            lines.append(f". {name}: {column['cells'][0]['note']}")
    return lines


def not_verified(column: Row) -> bool:
    return all(cell["status"] == "n/a" for cell in column["cells"])


def measured_alike(path: Path | None, head: Row) -> Row:
    """The file's backends and missing cells, if they were measured under the same `head`."""
    found: Row = {"backends": {}, "missing": {}}
    if path is None:
        return found
    # the file may not exist, or be another kind of file
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        before = json.loads(path.read_text())
        before["environment"]["dirty"] = head["environment"]["dirty"]  # perhaps only by this file
        if difference := first_difference(before, head):
            print(f"{path}: its columns will be replaced, because {difference}")
        else:
            found |= {name: before.get(name, {}) for name in found}
    return found


def write(path: Path, head: Row, before: Row, columns: dict[str, Column]) -> None:
    """Write `columns`, and the columns of other backends from `before`."""
    rows = before["backends"] | {name: x.row() for name, x in columns.items() if x.parts}
    missing = dict(before["missing"])
    for name, column in columns.items():
        if column.parts or name not in rows:
            missing[name] = [
                dtype if names == column.wanted[dtype] else f"{dtype}: {', '.join(names)}"
                for dtype, names in column.missing().items()
            ]
    order = list(BACKENDS)

    def place(column: str) -> tuple[int, str]:
        """Order of the table of backends; implementations follow theirs, your own come last."""
        name = column.split(" (")[0]
        return order.index(name) if name in order else len(order), column

    lacks = {name: missing[name] for name in sorted(missing, key=place) if missing[name]}
    backends = {name: rows[name] for name in sorted(rows, key=place)}
    write_json(path, head | ({"missing": lacks} if lacks else {}) | {"backends": backends})


def verify_here(columns: dict[str, Column], options: Options, device: torch.device) -> Found:
    """Yield name and column after each part, checked in this process."""
    for name, column in columns.items():
        for found in verify(column, options, device):
            yield name, found


def verify_side_by_side(
    columns: dict[str, Column], options: Options, device: torch.device
) -> Found:
    """Yield name and column after each part; every part has its own process."""
    missing = {name: column.missing() for name, column in columns.items()}
    few = PARTS * sum(map(len, missing.values())) < options.processes
    count = len(PROPERTIES) if few else PARTS
    jobs = [
        (options, name, dtype, names[part::count])
        for name, dtypes in missing.items()
        for part in range(count)  # the first properties take the longest
        for dtype, names in dtypes.items()
        if names[part::count]
    ]
    try:
        for (_, name, *_), part in in_processes(examine_part, jobs, options.processes):
            columns[name].parts.append(part)
            yield name, columns[name]
    except Died as died:
        _, name, dtype, names = died.args[0]
        raise ValueError(
            f"a process died that examined {name} in {dtype} ({', '.join(names)}): find it with "
            f"attention={name} processes=1"
        ) from died


def examine_part(options: Options, column: str, dtype: str, names: list[str]) -> Part:
    device = pick_device(options.device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.processes))
    set_up(device)
    backend = pick_backends(options.attention, device)[column]
    return examined(backend, dtype, options, device, names)


@command
def main(options: Options) -> None:
    device = pick_device(options.device)
    dtypes = pick_dtypes(options.dtype, device)
    set_up(device)
    head = {
        "environment": measured_on(device),  # measured before the file makes the working tree dirty
        "device": device.type,
        "dtypes": [SHORT[dtype] for dtype in dtypes],
        "random_cases": {"number": options.cases, "seed": options.seed},
        "properties": {name: check.__doc__ for name, check in PROPERTIES.items()},
    }
    before = measured_alike(options.out, head)
    wanted = {SHORT[dtype]: list(PROPERTIES) for dtype in dtypes}
    backends = pick_backends(options.attention, device)
    columns = {name: Column(backend, wanted) for name, backend in backends.items()}
    rows = dict.fromkeys(columns, {}) | go_on(columns, before)
    examine_all = verify_side_by_side if options.processes > 1 else verify_here
    found = examine_all(columns, options, device)
    with Ending(), contextlib.closing(found):
        for name, column in found:
            if not column.missing():
                print(f"{name}: {column.row()['seconds']} s", file=sys.stderr, flush=True)
            if options.out is not None:
                write(options.out, head, before, columns)
    ended(rows | {name: column.row() for name, column in columns.items()})


def go_on(columns: dict[str, Column], before: Row) -> dict[str, Row]:
    """If the file has one of the columns unfinished, continue from the file. Removes the finished
    columns from `columns` and returns their rows.
    """
    whole: dict[str, Row] = {}
    if not columns.keys() & before["missing"].keys():
        return whole
    for name in [name for name in columns if name in before["backends"]]:
        row = before["backends"][name]
        if name not in before["missing"]:
            whole[name] = row
            del columns[name]
        else:
            columns[name].take_over(row)
    missing = sum(len(x) for column in columns.values() for x in column.missing().values())
    print(f"going on with {len(columns)} columns, {missing} cells", file=sys.stderr, flush=True)
    return whole


def ended(rows: dict[str, Row]) -> None:
    """Print the report. Raises ValueError if something is not as documented."""
    print(report(rows))
    wrong = sum(not cell["ok"] for row in rows.values() for cell in row["cells"])
    if wrong:
        raise ValueError(f"{wrong} cells are not as documented")
    if all(map(not_verified, rows.values())):
        raise ValueError("nothing was verified")


def report(columns: dict[str, Row]) -> str:
    """The matrix, what was tried, and remarks."""
    marks = "+ green   x red, as documented   ! not as documented   . does not apply"
    lines = [matrix(columns), "", marks, ""]
    for name, column in columns.items():
        worst, tried = column["worst_multiple_of_naive"], column["tried"]
        if worst is not None:
            lines.append(
                f"{name:<16} {tried['adversarial']} fixed and {tried['random']} random cases, "
                f"{tried['checks']} checks; worst green error {worst:.2f} x naive's own or a "
                "rounding"
            )
    return "\n".join([*lines, *remarks(columns)])


if __name__ == "__main__":
    main()
