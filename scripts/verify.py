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
    out        write every cell to this JSON file at the end; a file of that name is replaced then

Triton runs on a CPU if TRITON_INTERPRET=1 is set (minutes).
"""

import sys
import time
from dataclasses import asdict, dataclass

import torch
from tqdm import tqdm

from attention import BACKENDS, Backend, kernel_choice
from conformance.backend_under_test import Subject
from conformance.cases import SHORT
from conformance.command import LARGEST_SEED, set_up
from conformance.fuzz import finite
from conformance.properties import PROPERTIES, Cell, examine
from scripts.arguments import Device, Dtype, Json, Natural, command, default, parse_backend
from scripts.tables import Row
from training.loop.device import pick_device, pick_dtype
from training.record.environment import measured_on
from training.record.files import write_json


@dataclass
class Options:
    attention: list[str] = default("all")
    device: Device = "auto"
    dtype: list[Dtype] = default("auto")
    cases: Natural = 100
    seed: Natural = 0
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
    return list(dict.fromkeys(pick_dtype(name, device) for name in names))


def as_json(cell: Cell, dtype: str) -> Row:
    """The cell's fields; numbers to four digits, null if not finite."""
    figures = {name: finite(getattr(cell, name)) for name in ("worst_share", "worst_multiple")}
    return {"dtype": dtype, **asdict(cell), "ok": cell.ok} | figures


def verify(
    backend: Backend, dtypes: list[torch.dtype], options: Options, device: torch.device
) -> Row:
    """The column of a backend: its cells in every dtype, and what was tried for them."""
    start, cells, cases = time.perf_counter(), [], []
    total = len(dtypes) * len(PROPERTIES)
    # shown only at a terminal
    what = {"desc": backend.name, "unit": "property", "leave": False, "disable": None}
    with tqdm(total=total, **what) as bar:
        for dtype in dtypes:
            subject = Subject(backend, device.type, dtype, options.cases, options.seed)
            for name in PROPERTIES:
                cells.append(as_json(examine(subject, name), SHORT[dtype]))
                bar.update()
            cases += [str(case) for case, row in subject.rows.items() if row is not None]
    multiples = [
        cell["worst_multiple"]
        for cell in cells
        if cell["status"] == "green" and cell["worst_multiple"] is not None
    ]
    # the name of a random case ends with its seed
    random = [case.rpartition("-")[2].startswith("seed") for case in cases]
    return {
        "exact": backend.exact,
        "defect": backend.defect,
        "options": dict(backend.options),
        "tried": {
            "random": sum(random),
            "adversarial": len(random) - sum(random),
            "checks": sum(cell["checks"] for cell in cells),
        },
        "worst_multiple_of_naive": max(multiples, default=None),
        "seconds": round(time.perf_counter() - start, 1),
        "cells": cells,
    }


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


@command
def main(options: Options) -> None:
    device = pick_device(options.device)
    dtypes = pick_dtypes(options.dtype, device)
    set_up(device)
    backends = pick_backends(options.attention, device)
    head = {
        "environment": measured_on(device),  # measured before the file makes the working tree dirty
        "device": device.type,
        "dtypes": [SHORT[dtype] for dtype in dtypes],
        "random_cases": {"number": options.cases, "seed": options.seed},
        "properties": {name: check.__doc__ for name, check in PROPERTIES.items()},
    }
    if options.out is not None and options.out.exists():
        print(f"{options.out} will be replaced", flush=True)
    columns: dict[str, Row] = {}
    for name, backend in backends.items():
        columns[name] = verify(backend, dtypes, options, device)
        print(f"{name}: {columns[name]['seconds']} s", file=sys.stderr, flush=True)
    if options.out is not None:
        write_json(options.out, head | {"backends": columns})
    ended(columns)


def ended(columns: dict[str, Row]) -> None:
    """Print the report. Raises ValueError if something is not as documented."""
    print(report(columns))
    wrong = sum(not cell["ok"] for column in columns.values() for cell in column["cells"])
    if wrong:
        raise ValueError(f"{wrong} cells are not as documented")
    if all(map(not_verified, columns.values())):
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
