"""Does conformance ever call exact attention wrong? Random calls of every exact backend, compared
with the budgets of their cases.

    python -m lab.false_alarms calls=5000 out=results/false_alarms_cpu.json
    python -m lab.false_alarms calls=2000 seconds=280 device=cuda seeds=3 processes=15 \
        attention=triton:kernel=hopper,triton:kernel=portable

calls= is the number of calls of one process, which has one attention, one dtype and one seed. Every
ten calls it writes its totals into the folder OUT.parts. On a GPU, CALLS_OF_A_KIND calls in a row
(see conformance.fuzz) are of one kind and share compiled kernels. The other arguments are

    attention  several, separated by commas, or all: the exact ones (all)
    seconds    after which a process makes no more calls (86400)
    seeds      number of seeds for each attention in each dtype (1)
    device     auto, cpu or cuda (auto); processes are spread over the GPUs that PyTorch sees
    dtype      several, separated by commas (fp32,bf16,fp16)
    processes  number of processes at the same time (1)
    seed       of the calls; the same seed repeats them, different ones for each process (0)
    out        the JSON file (false_alarms.json)
"""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import torch

from attention import BACKENDS
from conformance.backend_under_test import Subject
from conformance.command import DTYPES, set_up
from conformance.fuzz import CALLS_OF_A_KIND, Tally, fuzz
from lab.side_by_side import measured, take_gpu
from scripts.arguments import Count, Device, Json, command, default, parse_backend
from scripts.tables import Row
from training.device import pick_device
from training.environment import measured_on
from training.files import write_json


@dataclass
class Options:
    calls: Count
    seconds: Count = 86400
    seeds: Count = 1
    attention: list[str] = default("all")
    device: Device = "auto"
    dtype: list[Literal["fp32", "bf16", "fp16"]] = default("fp32", "bf16", "fp16")
    processes: Count = 1
    seed: int = 0
    out: Json = Json("false_alarms.json")

    def __post_init__(self) -> None:
        if self.attention == ["all"]:
            self.attention = [name for name, backend in BACKENDS.items() if backend.exact]
        for text in self.attention:
            parse_backend(text)


def measure(attention: str, dtype: str, seed: int, device: str, options: Options, part: Path):
    """Make the calls and write their totals to `part`."""
    set_up(torch.device(device))
    take_gpu(device, seed)
    subject = Subject(parse_backend(attention), device, DTYPES[dtype])
    tally, start = Tally(), time.monotonic()
    for i, trial in enumerate(fuzz(subject, calls=options.calls, seed=seed), start=1):
        tally.add(trial)
        over = time.monotonic() - start > options.seconds or tally.refused == i == 100
        if over or i % 10 == 0 or i == options.calls:
            figures = tally.figures() | {"seconds": round(time.monotonic() - start, 1)}
            write_json(part, {"attention": attention, "dtype": dtype, "seed": seed} | figures)
        if over:
            break
    print(f"{attention} {dtype}: {tally}", flush=True)


def row_of(attention: str, dtype: str, seed: int, device: str, options: Options) -> Row:
    empty = {"attention": attention, "dtype": dtype, "seed": seed} | Tally().figures()
    # a call may take long, because its kernel is compiled
    limit = {"seconds": options.seconds + 60}
    named = {"name": f"{attention} {dtype} {seed}", "out": options.out, "empty": empty}
    return measured(measure, attention, dtype, seed, device, options, **named, **limit)


@command
def main(options: Options) -> None:
    device = pick_device(options.device)
    where = measured_on(device)
    pairs = list(product(options.attention, options.dtype))
    jobs = pairs * options.seeds
    seeds = range(options.seed * len(jobs), (options.seed + 1) * len(jobs))
    with ThreadPoolExecutor(options.processes) as pool:
        common = ([x] * len(jobs) for x in (device.type, options))
        rows = list(pool.map(row_of, *zip(*jobs, strict=True), seeds, *common))
    rows.sort(key=lambda row: pairs.index((row["attention"], row["dtype"])))
    head = {"environment": where, "calls": options.calls, "seed": options.seed}
    if device.type == "cuda":
        head |= {"calls_of_a_kind": CALLS_OF_A_KIND}
    write_json(options.out, head | {"totals": totals(rows), "rows": rows})


def totals(rows: list[Row]) -> Row:
    """Counts for each attention."""
    sums: dict[str, Counter] = {}
    for row in rows:
        counts = {name: row[name] for name in ("calls", "distinct", "refused", "checks")}
        of_one = sums.setdefault(row["attention"], Counter())
        of_one.update(counts | {"failures": len(row["failures"])})
    return {attention: dict(counts) for attention, counts in sums.items()}


if __name__ == "__main__":
    main()
