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
    out        write every cell to this JSON file at the end

Triton runs on a CPU if TRITON_INTERPRET=1 is set (minutes). For a function that is no Backend, such
as flash_attn_func, there is `attn-conform`.
"""

import sys
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from tqdm import tqdm

from attention import BACKENDS, Backend, kernel_choice
from conformance.backend_under_test import Subject
from conformance.cases import SHORT
from conformance.properties import PROPERTIES
from conformance.verification import LARGEST_SEED, failure, report, set_up, verify
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
    seed: Annotated[Natural, Field(le=LARGEST_SEED)] = 0
    out: Json | None = None


def pick_backends(names: list[str], device: torch.device) -> dict[str, Backend]:
    """The backends by the names of their columns. The kernels of a defect get a column of their own
    where they run on this device.
    """
    found = {}
    for given in BACKENDS if names == ["all"] else names:
        backend = parse_backend(given)
        column = given if "=" in given else backend.name
        found[column] = backend
        if backend.on_gpu is not None:
            subject = Subject(backend.on_gpu, device.type, torch.float32)
            if subject.takes(subject.case()):
                found[f"{column} (triton)"] = backend.on_gpu
        choice = kernel_choice(backend, device=device, dtype=torch.bfloat16, head_dim=64)
        if choice and choice.kernel == "hopper" and backend.options["kernel"] == "auto":
            found[f"{column} (portable)"] = backend.configured(kernel="portable")
    return found


def pick_dtypes(names: list[str], device: torch.device) -> list[torch.dtype]:
    if "auto" in names:
        names = ["fp32"] if device.type == "cpu" else ["fp32", "bf16", "fp16"]
    return list(dict.fromkeys(pick_dtype(name, device) for name in names))


def column_of(
    backend: Backend, dtypes: list[torch.dtype], options: Options, device: torch.device
) -> Row:
    subjects = [
        Subject(backend, device.type, dtype, options.cases, options.seed) for dtype in dtypes
    ]
    total = len(dtypes) * len(PROPERTIES)
    # shown only at a terminal
    what = {"desc": backend.name, "unit": "property", "leave": False, "disable": None}
    with tqdm(total=total, **what) as bar:
        return verify(subjects, PROPERTIES, seen=lambda *_: bar.update() and None)


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
    columns: dict[str, Row] = {}
    for name, backend in backends.items():
        columns[name] = column_of(backend, dtypes, options, device)
        print(f"{name}: {columns[name]['seconds']} s", file=sys.stderr, flush=True)
    if options.out is not None:
        write_json(options.out, head | {"backends": columns})
    print(report(columns))
    if wrong := failure(columns):
        raise ValueError(wrong)


if __name__ == "__main__":
    main()
