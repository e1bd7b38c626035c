"""Show where the time of a training step goes: a torch.profiler trace of N real steps, and a table
of parts that adds up to the step.

    python -m scripts.profile device=cpu seq_len=128 batch_size=4 steps=2

It takes train.py's settings (attention=, model=, seq_len=, batch_size=, optim=, dtype=, compile=,
experiment=, ...), and these:

    steps    steps of the table (10)
    warmup   steps before them; the first compiles (5)
    out      a folder for trace.json.gz (chrome://tracing, ui.perfetto.dev) and profile.json
             (outputs/profile)

On a GPU the table shows the GPU's time: kernels, and what it waits for between them, which is
messages of other ranks, data, or the host. Under torchrun each rank writes its own files, and the
first rank prints. On a CPU the table shows operators, and Python between them. Recording slows a
step down, most of all on a CPU: "unrecorded" is the same step without it. If attention consists of
plain operators and is compiled (naive), everything but its batched products is fused with other
operators and counts there.
"""

import contextlib
import gzip
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch is loaded; keeps Kineto silent

import torch
import torch._inductor.config
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from attention import Backend
from config import RunConfig
from scripts.arguments import Count, command, compose_new, default
from scripts.profile_trace import ATTENTION, PARTS, STEP, parts_of_steps
from scripts.tables import Row, text_table
from training.environment import measured_on
from training.files import check_writable, write_json
from training.ranks import leave, of_environment
from training.run import Run, build_run
from training.step import Stepper
from training.throughput import seconds_between, stamp

NEVER = 2**62  # an interval longer than any run


@dataclass
class Options:
    steps: Count = 10
    warmup: Count = 5
    out: Path = Path("outputs/profile")
    overrides: list[str] = default()  # settings of train.py


def in_a_range(backend: Backend) -> Backend:
    """The same attention, with each call in a named range."""

    def attend(*args: Any, **kwargs: Any) -> Any:
        with record_function(ATTENTION):
            return backend.fn(*args, **kwargs)

    return replace(backend, fn=attend)


class Job(NamedTuple):
    run: Run
    facts: Row
    step: Callable[[], None]  # runs the next step


@contextlib.contextmanager
def build(config: RunConfig, steps: int) -> Iterator[Job]:
    """A run of train.py with only its steps: no metrics, evaluation or saves.

    Raises ValueError for settings that do not affect a single step.
    """
    if config.batch_size == "auto":
        raise ValueError(
            "batch_size=auto: name the number that train.py chose, it prints it at the start"
        )
    # otherwise code compiled for a CPU would not appear in the trace
    torch._inductor.config.cpp.enable_kernel_profile = True
    never = {"log_every": NEVER, "checkpoint_every": NEVER, "eval_every": 0, "diagnose_every": 0}
    never |= {"cuda_graph": "false"}
    facts: Row = {}
    run = build_run(replace(config, steps=max(config.steps, steps + 1), **never), facts)
    with Stepper(run) as stepper:
        facts["compiled"] = stepper.compiled
        if not stepper.compiled:  # a range would break the graph
            run.model.backend = in_a_range(run.model.backend)
        results = stepper.steps()

        def step() -> None:
            result = next(results)
            if result.diverged:
                raise ValueError(
                    f"step {result.step}: the loss is {result.loss} and the gradient's norm "
                    f"{result.grad_norm}: nothing to measure"
                )
            stepper.update(result)

        yield Job(run, facts, step)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def unrecorded_ms(job: Job, steps: int) -> list[float]:
    """Milliseconds of each of `steps` steps without the profiler. On a GPU, between the ends of the
    steps' queued work; on a CPU, by the clock.
    """
    wait(job.run.device)
    stamps = [stamp(job.run.device)]
    for _ in range(steps):
        job.step()
        stamps.append(stamp(job.run.device))
    return [1000 * seconds_between(*pair) for pair in itertools.pairwise(stamps)]


def record(job: Job, steps: int, path: Path) -> None:
    """Write the trace of `steps` steps, each in a range. Two more steps run: the profiler starts up
    in the first, and the last one marks the end of the one before.
    """
    activities = [ProfilerActivity.CPU]
    if job.run.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    settings = {
        "activities": activities,
        "schedule": schedule(wait=0, warmup=1, active=steps + 1, repeat=1),
        "on_trace_ready": lambda profiler: profiler.export_chrome_trace(str(path)),
        # without it, torch 2.11 warns about a second cycle that does not exist
        "acc_events": True,
    }
    with profile(**settings) as profiler:
        for number in range(steps + 2):
            with record_function(STEP):
                job.step()
            if number == steps + 1:
                wait(job.run.device)
            profiler.step()


def summarise(parts: list[dict[str, float]]) -> list[Row]:
    """One row per part, and one for the step at the end: mean and standard deviation over the steps
    in ms, and the share of the step.
    """
    columns = {part: [each[part] for each in parts] for part in PARTS}
    columns["step"] = [sum(each.values()) for each in parts]
    total = statistics.fmean(columns["step"])
    rows = []
    for part, ms in columns.items():
        mean = statistics.fmean(ms)
        rows.append({"part": part, "ms": mean, "stdev_ms": deviation(ms), "share": mean / total})
    return rows


def deviation(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def table(rows: list[Row], on_gpu: bool) -> str:
    cells = [["time of the GPU" if on_gpu else "time of the CPU", "ms", "stdev", "share"]]
    for row in rows:
        stdev = "" if row["stdev_ms"] is None else f"{row['stdev_ms']:,.3f}"
        cells.append([row["part"], f"{row['ms']:,.3f}", stdev, f"{row['share']:.1%}"])
    return text_table(cells)


@command
def main(options: Options) -> None:
    config, ranks = compose_new(*options.overrides, asked=options.overrides), of_environment()
    folder = options.out / f"rank{ranks.rank}" if ranks.several else options.out
    trace, summary = folder / "trace.json.gz", folder / "profile.json"
    check_writable(summary)
    with build(config, options.warmup + 2 * options.steps + 2) as job:
        for _ in range(options.warmup):
            job.step()
        unrecorded = unrecorded_ms(job, options.steps)
        record(job, options.steps, trace)
    leave()
    parts, on_gpu = parts_of_steps(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
    rows = summarise(parts[: options.steps])
    mean = statistics.fmean(unrecorded)
    step_tokens_per_sec = 1000 * config.sequences_per_step * config.seq_len / mean
    if ranks.first:
        print(
            f"model={config.model.name}, attention={job.facts['attention']}, {job.facts['dtype']} "
            f"on {job.run.device.type}, {config.sequences_per_step} x {config.seq_len} tokens a "
            f"step{', compiled' if job.facts['compiled'] else ''}\n\n{table(rows, on_gpu)}\n\n"
            f"unrecorded: {mean:,.3f} ms a step, {step_tokens_per_sec:,.0f} tokens/s"
        )
    shape = {key: getattr(config, key) for key in ("seq_len", "batch_size", "accumulation_steps")}
    write_json(
        summary,
        {
            "environment": measured_on(job.run.device),
            "overrides": options.overrides,
            "model": asdict(config.model),
            **shape,
            "optim": config.optim.name,
            **job.facts,
            "n": options.steps,
            "unrecorded_ms": mean,
            "unrecorded_stdev_ms": deviation(unrecorded),
            "step_tokens_per_sec": step_tokens_per_sec,
            "parts": rows,
        },
    )
    if ranks.first:
        print(f"written: {summary} and {trace}")


if __name__ == "__main__":
    main()
