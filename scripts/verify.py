"""Hold a backend, or all of them, to the properties of attention: the matrix, and whether it is as
it should be.

    python -m scripts.verify attention=tiled

Green: every check of the property stays in its budget, which is relative to naive attention's own
error against float64. Red: one does not. A broken backend documents what it is red in. The exit
code is 0 where every cell is green, red as documented, or does not apply: the backend refuses such
inputs, or with exact=False does not claim what is of softmax alone. Arguments are key=value, and
all have a default:

    attention  a name, pkg.module:BACKEND, either with options as in tiled:block_q=16,block_kv=32,
               several with commas between, or all (all)
    device     auto, cpu or cuda (auto)
    dtype      fp32, bf16, fp16, several with commas between, or auto: fp32 on a CPU, all three on a
               GPU (auto)
    cases      random shapes besides the adversarial inputs (100)
    seed       of the random shapes (0)
    context    processes that share every sequence (1); on GPUs one each
    how        their way: ring, heads or gather, as parallel.how (ring)
    target     instead of attention: pkg.module:NAME of a Backend that is distributed itself, called
               in each process with its tokens
    layout     of target's tokens: zigzag (of 2 W chunks the r-th from both ends) or contiguous
               (zigzag)
    processes  that examine side by side, each some properties in one dtype (1); on a GPU compiling
               takes the time, and each needs up to 9 GiB of it
    out        write every cell to this JSON file; the columns of other backends in it stay, if they
               were measured alike

Triton runs on a CPU where TRITON_INTERPRET=1 is set (minutes).
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from tqdm import tqdm

from attention import BACKENDS, Backend, kernel_choice
from conformance.backend_under_test import Subject
from conformance.cases import SHORT, Case
from conformance.command import LARGEST_SEED, set_up
from conformance.fuzz import finite
from conformance.properties import PROPERTIES, Cell, Property, check_breaks, examine
from scripts.arguments import Count, Device, Dtype, Natural, command, parse_backend
from scripts.tables import Row
from training.device import pick_device, pick_dtype
from training.environment import measured_on
from training.files import check_writable, write_json
from training.sharing import RINGS

# of a column in one dtype, for processes side by side: a start takes seconds. Where these are fewer
# than the processes, each property is a part
PARTS = 3


@dataclass
class Options:
    attention: list[str] = field(default_factory=lambda: ["all"])
    device: Device = "auto"
    dtype: list[Dtype] = field(default_factory=lambda: ["auto"])
    cases: Natural = 100
    seed: Natural = 0
    context: Count = 1
    how: Literal["ring", "heads", "gather"] = "ring"
    target: str | None = None
    layout: Literal["zigzag", "contiguous"] = "zigzag"
    processes: Count = 1
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.seed > LARGEST_SEED:
            raise ValueError(f"seed={self.seed} must be at most {LARGEST_SEED}")
        if self.context > 1 and self.processes > 1:
            raise ValueError(
                f"processes={self.processes} is for context=1: with context={self.context} every "
                "call takes as many processes"
            )
        if self.target is not None and self.context == 1:
            raise ValueError(f"target={self.target} is called in several processes: add context=2")
        if self.out is not None and not self.out.absolute().parent.is_dir():
            raise ValueError(f"out={self.out}: its folder does not exist")


def pick_backends(names: list[str], device: torch.device) -> dict[str, Backend]:
    """Column to backend. What a backend also has in kernels that run on this device gets a column
    of its own.
    """
    found = {}
    for given in BACKENDS if names == ["all"] else names:
        backend = parse_backend(given)
        check_breaks(backend)
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


def as_json(cell: Cell, dtype: torch.dtype) -> Row:
    """The cell's fields; figures to four digits, null where they are not finite."""
    figures = {name: finite(getattr(cell, name)) for name in ("worst_share", "worst_multiple")}
    return {"dtype": SHORT[dtype], **asdict(cell), "ok": cell.ok} | figures


class Part(NamedTuple):
    """What was found of a column: cells of one dtype, the cases tried for them, and the seconds."""

    dtype: torch.dtype
    cells: list[Cell]
    cases: set[Case]
    seconds: float


def examined(
    backend: Backend,
    dtype: torch.dtype,
    options: Options,
    device: torch.device,
    properties: Mapping[str, Property | None],
    done: Callable[[], Any] = lambda: None,
) -> Part:
    """`done` is called after each property."""
    multiple = 1 if options.context == 1 else 2 * options.context
    start, cells = time.perf_counter(), []
    subject = Subject(backend, device.type, dtype, options.cases, options.seed, multiple)
    for name, check in properties.items():
        cells.append(examine(subject, name, check))
        done()
    cases = {case for case, row in subject.rows.items() if row is not None}
    return Part(dtype, cells, cases, time.perf_counter() - start)


def as_column(backend: Backend, parts: list[Part]) -> Row:
    """One column: its cells of every dtype, and what was tried for them."""
    cases = {(part.dtype, case) for part in parts for case in part.cases}
    cells = [as_json(cell, part.dtype) for part in parts for cell in part.cells]
    multiples = [
        cell["worst_multiple"]
        for cell in cells
        if cell["status"] == "green" and cell["worst_multiple"] is not None
    ]
    return {
        "exact": backend.exact,
        "defect": backend.defect,
        "options": dict(backend.options),
        "tried": {
            "random": sum(case.seed > 0 for _, case in cases),
            "adversarial": sum(case.seed == 0 for _, case in cases),
            "checks": sum(cell["checks"] for cell in cells),
        },
        "worst_multiple_of_naive": max(multiples, default=None),
        "seconds": round(sum(part.seconds for part in parts), 1),
        "cells": cells,
    }


def verify(
    backend: Backend,
    dtypes: list[torch.dtype],
    options: Options,
    device: torch.device,
    properties: Mapping[str, Property | None] | None = None,
) -> Row:
    """A column, in this process."""
    properties = properties or dict.fromkeys(PROPERTIES)
    total = len(dtypes) * len(properties)
    # at a terminal
    with tqdm(total=total, desc=backend.name, unit="property", leave=False, disable=None) as bar:
        parts = [
            examined(backend, dtype, options, device, properties, bar.update) for dtype in dtypes
        ]
    return as_column(backend, parts)


def mark(cells: list[Row]) -> str:
    """One property of one backend, over its dtypes: + green, x red as documented, ! not as
    documented, . not applicable.
    """
    if not all(cell["ok"] for cell in cells):
        return "!"
    statuses = {cell["status"] for cell in cells}
    return "x" if "red" in statuses else "+" if "green" in statuses else "."


def cells_of(column: Row, name: str) -> list[Row]:
    return [cell for cell in column["cells"] if cell["property"] == name]


def matrix(columns: dict[str, Row]) -> str:
    """Properties down, backends across with their names written downwards."""
    rows = dict.fromkeys(cell["property"] for each in columns.values() for cell in each["cells"])
    width = max(map(len, rows)) + 2
    # a target's module would make the heading long
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


def not_verified(column: Row) -> bool:
    return all(cell["status"] == "n/a" for cell in column["cells"])


def write(
    options: Options,
    columns: dict[str, Row],
    dtypes: list[torch.dtype],
    device: torch.device,
    where: Row,
) -> None:
    """`where` is as it was before the file was written, which makes a working tree dirty."""
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
        before["environment"]["dirty"] = where["dirty"]
        if {name: before.get(name) for name in head} == head:
            columns = before["backends"] | columns
    order = list(BACKENDS)

    def place(column: str) -> tuple[int, str]:
        """In the table's order, implementations behind what they implement, your own at the end."""
        name = column.split(" (")[0]
        return order.index(name) if name in order else len(order), column

    backends = {name: columns[name] for name in sorted(columns, key=place)}
    write_json(options.out, head | {"backends": backends})


def verify_here(
    dtypes: list[torch.dtype], options: Options, device: torch.device
) -> Iterator[tuple[str, Row]]:
    """Name and column of each attention."""
    for name, backend in pick_backends(options.attention, device).items():
        yield name, verify(backend, dtypes, options, device)


def verify_side_by_side(
    dtypes: list[torch.dtype], options: Options, device: torch.device
) -> Iterator[tuple[str, Row]]:
    """Name and column of each attention, in processes that examine a part of a column each."""
    context, backends = get_context("spawn"), pick_backends(options.attention, device)
    few = len(backends) * len(dtypes) * PARTS < options.processes
    count = len(PROPERTIES) if few else PARTS
    order = [(SHORT[dtype], name) for dtype in dtypes for name in PROPERTIES]
    # a process a part: what leaves the GPU unusable does not reach another
    with ProcessPoolExecutor(options.processes, context, max_tasks_per_child=1) as pool:
        found = {
            name: [
                pool.submit(examine_part, options, name, dtype, list(PROPERTIES)[part::count])
                for part in range(count)  # the first properties take longest
                for dtype in dtypes
            ]
            for name in backends
        }
        for name, backend in backends.items():
            try:
                parts = [each.result() for each in found[name]]
            except BrokenProcessPool as error:
                raise ValueError(
                    f"a process died, of {name} or of what was examined beside it: find it with "
                    f"attention={name} processes=1"
                ) from error
            column = as_column(backend, parts)
            column["cells"].sort(key=lambda cell: order.index((cell["dtype"], cell["property"])))
            yield name, column


def examine_part(options: Options, column: str, dtype: torch.dtype, names: list[str]) -> Part:
    device = pick_device(options.device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.processes))
    set_up(device)
    backend = pick_backends(options.attention, device)[column]
    return examined(backend, dtype, options, device, dict.fromkeys(names))


def verify_distributed(
    dtypes: list[torch.dtype], options: Options, device: torch.device
) -> Iterator[tuple[str, Row]]:
    """Name and column of each attention, in processes that share every sequence."""
    from conformance.distributed import Processes, Setting

    if device.type == "cuda" and torch.cuda.device_count() < options.context:
        gpus = torch.cuda.device_count()
        raise ValueError(
            f"context={options.context} needs as many GPUs, and there are {gpus}; device=cpu runs "
            "processes on the CPU"
        )
    where = {"world": options.context, "device": device.type}
    if options.target is not None:
        settings = [Setting(**where, target=options.target, layout=options.layout)]
    else:
        heads = options.context if options.how == "heads" else 1
        where |= {"heads": heads, "gather": options.how == "gather"}
        names = RINGS if options.attention == ["all"] else options.attention
        parsed = list(map(parse_backend, names))
        for each in parsed:
            if each.ring is None and options.how != "heads":
                raise ValueError(
                    f"attention={each.name} cannot attend to a part of the keys; these can: "
                    f"{', '.join(RINGS)}; how=heads takes any"
                )
        settings = [
            Setting(**where, attention=each.name, options=tuple(each.options.items()))
            for each in parsed
        ]
    for setting in settings:
        with Processes(setting) as processes:
            backend = processes.backend
            column = verify(backend, dtypes, options, device, processes.properties)
        yield f"{backend.name} on {options.context}", column


@command
def main(options: Options) -> None:
    device = pick_device(options.device)
    dtypes = pick_dtypes(options.dtype, device)
    if options.out is not None:
        check_writable(options.out)
    set_up(device)
    where = measured_on(device)
    columns: dict[str, Row] = {}
    measured = verify_side_by_side if options.processes > 1 else verify_here
    measured = verify_distributed if options.context > 1 else measured
    for name, column in measured(dtypes, options, device):
        columns[name] = column
        print(f"{name}: {columns[name]['seconds']} s", file=sys.stderr, flush=True)
        if options.out is not None:
            write(options, columns, dtypes, device, where)
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
