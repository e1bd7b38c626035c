"""Hold a backend, or all of them, to the properties of attention: the matrix, and whether it is as
it should be.

    python -m scripts.verify attention=tiled

Green: every check of the property stays in its budget, which is relative to naive attention's own
error against float64. Red: one does not. A broken backend documents what it is red in. The exit
code is 0 where every cell is green, red as documented, or refused by the backend. Arguments are
key=value, and all have a default:

    attention  a name, pkg.module:BACKEND, either with options as in tiled:block_q=16,block_kv=32,
               several with commas between, or all (all)
    device     auto, cpu or cuda (auto)
    dtype      fp32, bf16, fp16, several with commas between, or auto: fp32 on a CPU, all three on a
               GPU (auto)
    cases      random shapes besides the adversarial inputs (100)
    seed       of the random shapes (0)
    out        write every cell to this JSON file; the columns of other backends in it stay, if they
               were measured alike

Triton runs on a CPU where TRITON_INTERPRET=1 is set (minutes).
"""

import contextlib
import json
import math
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from attention import BACKENDS, Backend, kernel_choice
from conformance.backend_under_test import Subject
from conformance.cases import SHORT
from conformance.command import set_up
from conformance.properties import PROPERTIES, Cell, check_breaks, examine
from scripts.arguments import parse_backend, read_settings
from training.device import DTYPES, pick_device, pick_dtype
from training.interrupt import one_line
from training.metrics import check_writable, measured_on, write_json


@dataclass
class Options:
    attention: str = "all"
    device: str = "auto"
    dtype: str = "auto"
    cases: int = 100
    seed: int = 0
    out: Path | None = None


def read_options(arguments: list[str]) -> Options:
    """Options from key=value arguments. Raises ValueError for an unknown key or a value of the
    wrong type.
    """
    options = Options(**read_settings(Options, arguments))
    if options.cases < 0 or options.seed < 0:
        raise ValueError(f"cases={options.cases} and seed={options.seed} must be at least 0")
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise ValueError(f"out={options.out}: its folder does not exist")
    return options


def pick_backends(text: str, device: torch.device) -> dict[str, Backend]:
    """Column to backend. What a backend also has in kernels that run on this device gets a column
    of its own.
    """
    # at the commas between backends, not between the options of one
    names = list(BACKENDS) if text == "all" else re.split(r",(?![^,:=]*=)", text)
    found = {}
    for given in names:
        backend = parse_backend(given)
        check_breaks(backend)
        column = given if "=" in given else backend.name
        found[column] = backend
        for name, other in backend.implementations.items():
            subject = Subject(other, device.type, torch.float32, random_cases=0, seed=0)
            if other.fn is not backend.fn and subject.takes(subject.case(), backward=False):
                found[f"{column} ({name})"] = other
        choice = kernel_choice(backend, device=device, dtype=torch.bfloat16, head_dim=64)
        if choice and choice.kernel == "hopper" and backend.options["kernel"] == "auto":
            found[f"{column} (portable)"] = backend.configured(kernel="portable")
    return found


def pick_dtypes(text: str, device: torch.device) -> list[torch.dtype]:
    if text == "auto":
        text = "fp32" if device.type == "cpu" else "fp32,bf16,fp16"
    for name in text.split(","):
        if name not in DTYPES:
            raise ValueError(f"dtype={text} must be auto or of: {', '.join(DTYPES)}")
    return [pick_dtype(name, device) for name in text.split(",")]


def as_json(cell: Cell, dtype: torch.dtype) -> dict[str, Any]:
    """The cell's fields; figures to four digits, null where they are not finite."""
    found = {"dtype": SHORT[dtype], **asdict(cell), "ok": cell.ok}
    for name in ("worst_share", "worst_multiple"):
        value = found[name]
        found[name] = None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
    return found


def verify(
    backend: Backend, dtypes: list[torch.dtype], options: Options, device: torch.device
) -> dict[str, Any]:
    """One column: its cells of every dtype, and what was tried for them."""
    start, cells = time.perf_counter(), []
    tried = {"random": 0, "adversarial": 0, "checks": 0}
    bar = tqdm(
        total=len(dtypes) * len(PROPERTIES),
        desc=backend.name,
        unit="property",
        leave=False,
        disable=None,
    )  # at a terminal
    for dtype in dtypes:
        subject = Subject(backend, device.type, dtype, options.cases, options.seed)
        column = []
        for name in PROPERTIES:
            bar.set_postfix_str(f"{SHORT[dtype]}, {name}")
            column.append(examine(subject, name))
            bar.update()
        cells += [as_json(cell, dtype) for cell in column]
        taken = [case for case, row in subject.rows.items() if row is not None]
        tried["random"] += sum(case.seed > 0 for case in taken)
        tried["adversarial"] += sum(case.seed == 0 for case in taken)
        tried["checks"] += sum(cell.checks for cell in column)
    bar.close()
    multiples = [
        cell["worst_multiple"]
        for cell in cells
        if cell["status"] == "green" and cell["worst_multiple"] is not None
    ]
    return {
        "exact": backend.exact,
        "defect": backend.defect,
        "options": dict(backend.options),
        "tried": tried,
        "worst_multiple_of_naive": max(multiples, default=None),
        "seconds": round(time.perf_counter() - start, 1),
        "cells": cells,
    }


def mark(cells: list[dict[str, Any]]) -> str:
    """One property of one backend, over its dtypes: + green, x red as documented, ! not as
    documented, . not applicable.
    """
    if not all(cell["ok"] for cell in cells):
        return "!"
    statuses = {cell["status"] for cell in cells}
    return "x" if "red" in statuses else "+" if "green" in statuses else "."


def cells_of(column: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [cell for cell in column["cells"] if cell["property"] == name]


def matrix(columns: dict[str, dict[str, Any]]) -> str:
    """Properties down, backends across with their names written downwards."""
    width = max(map(len, PROPERTIES)) + 2
    # a target's module would make the heading long
    names = [name.rpartition(":")[2] for name in columns]
    height = max(map(len, names))
    lines = [
        " " * width + "  ".join(name.rjust(height)[row] for name in names).rstrip()
        for row in range(height)
    ]
    lines += [
        name.ljust(width) + "  ".join(mark(cells_of(column, name)) for column in columns.values())
        for name in PROPERTIES
    ]
    return "\n".join(lines)


def remarks(columns: dict[str, dict[str, Any]]) -> list[str]:
    """What the marks leave open: every cell that is not as documented, and who was not verified at
    all.
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


def not_verified(column: dict[str, Any]) -> bool:
    return all(cell["status"] == "n/a" for cell in column["cells"])


def write(
    options: Options,
    columns: dict[str, dict[str, Any]],
    dtypes: list[torch.dtype],
    device: torch.device,
) -> None:
    where = measured_on(device)
    head = {
        "environment": where,
        "device": device.type,
        "dtypes": [SHORT[dtype] for dtype in dtypes],
        "random_cases": {"number": options.cases, "seed": options.seed},
        "properties": {name: check.__doc__ for name, check in PROPERTIES.items()},
    }
    with contextlib.suppress(
        OSError, ValueError, KeyError, TypeError
    ):  # no such file yet, or another
        before = json.loads(options.out.read_text())
        # writing the file may be the very change that makes the working tree dirty
        before["environment"]["dirty"] = where["dirty"]
        if {name: before.get(name) for name in head} == head:
            columns = before["backends"] | columns
    order = list(BACKENDS)
    # in the table's order, implementations behind what they implement, and the user's own at the
    # end
    names = sorted(
        columns,
        key=lambda name: (
            order.index(name.split(" (")[0]) if name.split(" (")[0] in order else len(order),
            name,
        ),
    )
    write_json(options.out, head | {"backends": {name: columns[name] for name in names}})


@one_line("verify")
def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    try:
        options = read_options(sys.argv[1:])
        device = pick_device(options.device)
        dtypes = pick_dtypes(options.dtype, device)
        backends = pick_backends(options.attention, device)
        if options.out is not None:
            check_writable(options.out)
    except (ValueError, OSError) as error:
        sys.exit(f"verify: {error}")
    set_up(device)
    columns: dict[str, dict[str, Any]] = {}
    for name, backend in backends.items():
        columns[name] = verify(backend, dtypes, options, device)
        print(f"{name}: {columns[name]['seconds']} s", file=sys.stderr, flush=True)
        if options.out is not None:
            write(options, columns, dtypes, device)
    print(
        matrix(columns),
        "",
        "+ green   x red, as documented   ! not as documented   . refused by the backend",
        "",
        sep="\n",
    )
    for name, column in columns.items():
        worst, tried = column["worst_multiple_of_naive"], column["tried"]
        if worst is not None:
            cases = (
                f"{tried['adversarial']} fixed and {tried['random']} random cases, "
                f"{tried['checks']} checks"
            )
            print(f"{name:<16} {cases}; worst green error {worst:.2f} x naive's own or a rounding")
    print(*remarks(columns), sep="\n")
    wrong = sum(not cell["ok"] for column in columns.values() for cell in column["cells"])
    if wrong:
        sys.exit(f"verify: {wrong} cells are not as documented")
    if all(map(not_verified, columns.values())):
        sys.exit("verify: nothing was verified")


if __name__ == "__main__":
    main()
