"""Does the judge ever call exact attention wrong? Random calls of every exact backend, each held to
the budget of its case.

    python -m lab.false_alarms calls=5000 out=results/false_alarms_cpu.json

calls are those of one attention in one dtype; the other arguments are

    attention  several with commas between, or all: the exact ones (all)
    device     auto, cpu or cuda (auto)
    dtype      several with commas between (fp32,bf16,fp16)
    processes  side by side (1)
    seed       of the calls; a seed gives the same ones again, to each attention others (0)
    out        the JSON file (false_alarms.json)
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

from attention import BACKENDS, get_backend
from conformance.backend_under_test import Subject
from conformance.command import DTYPES, set_up
from conformance.fuzz import Tally, fuzz
from scripts.arguments import Device, check_at_least, command, default
from scripts.tables import Row
from training.device import pick_device
from training.environment import measured_on
from training.files import check_writable, write_json


@dataclass
class Options:
    calls: int
    attention: list[str] = default("all")
    device: Device = "auto"
    dtype: list[Literal["fp32", "bf16", "fp16"]] = default("fp32", "bf16", "fp16")
    processes: int = 1
    seed: int = 0
    out: Path = Path("false_alarms.json")

    def __post_init__(self) -> None:
        check_at_least(self, 1, "calls", "processes")
        if self.attention == ["all"]:
            self.attention = [name for name, backend in BACKENDS.items() if backend.exact]


def measure(attention: str, dtype: str, device: str, calls: int, seed: int) -> Row:
    import torch

    set_up(torch.device(device))
    subject = Subject(get_backend(attention), device, DTYPES[dtype], random_cases=0, seed=0)
    tally = Tally()
    for trial in fuzz(subject, calls=calls, seed=seed):
        tally.add(trial)
    print(f"{attention} {dtype}: {tally}", flush=True)
    return {"attention": attention, "dtype": dtype, "seed": seed, **tally.figures()}


@command("false_alarms", Options)
def main(options: Options) -> None:
    check_writable(options.out)
    device = pick_device(options.device)
    where = measured_on(device)
    jobs = list(product(options.attention, options.dtype))
    # a GPU's driver does not survive a fork
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        common = ([x] * len(jobs) for x in (device.type, options.calls))
        seeds = range(options.seed * len(jobs), (options.seed + 1) * len(jobs))
        rows = pool.map(measure, *zip(*jobs, strict=True), *common, seeds)
        head = {"environment": where, "calls": options.calls, "seed": options.seed}
        write_json(options.out, head | {"rows": list(rows)})


if __name__ == "__main__":
    main()
