"""Where a training step goes: a torch.profiler trace of N real steps, and a table of their parts
that adds up to the step.

    python -m scripts.profile device=cpu seq_len=128 batch_size=4 steps=2

Takes train.py's own settings (attention=, model=, seq_len=, batch_size=, optim=, dtype=, compile=,
experiment=, ...), and of its own:

    steps    steps of the table (10)
    warmup   steps before them, of which the first compiles (5)
    nsys     true: no trace and no table, but every range and operator as an NVTX range, and
             cudaProfilerStart around the steps:
             nsys profile -t cuda,nvtx -c cudaProfilerApi python -m scripts.profile nsys=true ...
             (false)
    out      a folder for trace.json.gz (chrome://tracing, ui.perfetto.dev) and profile.json
             (outputs/profile)

On a GPU the table is of its time: kernels, and between them what it waited for: data, or the host.
On a CPU it is of operators, and between them Python. Recording slows a step down, on a CPU most:
"unrecorded" is the same step without it. Where attention is made of plain operators and compiled
(naive), what it does besides products of stacked matrices is fused with other things and counts
there.
"""

import contextlib
import gzip
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

# read when torch is loaded: threads that wait sleep, as in train.py, and the profiler says no word
# of its own
os.environ |= {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "KINETO_LOG_LEVEL": "6",
} | os.environ

import torch
import torch._inductor.config
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from attention import Backend
from config import RunConfig
from data import build_data
from data.prefetch import Prefetcher
from model import GPT
from scripts.arguments import check_at_least, command
from scripts.plan import compose_config
from scripts.profile_trace import ATTENTION, DATA, OPTIMIZER, PARTS, STEP, parts_of_steps
from scripts.tables import text_table
from training.device import dtype_name, pick_device, pick_dtype, set_deterministic
from training.metrics import check_writable, measured_on, write_json
from training.optimizer import build_optimizer, set_learning_rate
from training.schedule import attention_schedule, describe, prepare_model
from training.step import PendingStep, queue_step


@dataclass
class Options:
    steps: int = 10
    warmup: int = 5
    nsys: bool = False
    out: Path = Path("outputs/profile")
    overrides: list[str] = field(default_factory=list)  # train.py's own settings

    def __post_init__(self) -> None:
        check_at_least(self, 1, "steps", "warmup")


def in_a_range(backend: Backend) -> Backend:
    """The same attention, each call of which is a named range."""

    def attend(*args: Any, **kwargs: Any) -> Any:
        with record_function(ATTENTION):
            return backend.fn(*args, **kwargs)

    return replace(backend, fn=attend)


class Job(NamedTuple):
    config: RunConfig
    device: torch.device
    facts: dict[str, Any]
    step: Callable[[int], None]


@contextlib.contextmanager
def build(config: RunConfig) -> Iterator[Job]:
    """What train.py builds, and its step without what is done only now and then: rows of metrics,
    evaluation, checkpoints.

    As there, a step queues the next one where the optimizer can judge a step for itself, before it
    is looked at.

    Raises ValueError for what has nothing to do with one step.
    """
    if config.resume:
        raise ValueError(
            f"resume={config.resume}: a step of a new model takes as long; leave it out"
        )
    if config.batch_size == "auto":
        raise ValueError(
            "batch_size=auto: name the number that train.py found, it prints it at the start"
        )
    device = pick_device(config.device)
    torch._inductor.config.cpp.enable_kernel_profile = (
        True  # what is compiled for a CPU would not show otherwise
    )
    set_deterministic(config.deterministic)
    dtype = pick_dtype(config.dtype, device)
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
    backends = attention_schedule(config, dtype=dtype, device=device)
    data = build_data(config.data, config.tokenizer, seq_len=config.seq_len, seed=config.seed)
    torch.manual_seed(config.seed)
    model = GPT(config.model, vocab_size=data.vocab_size, backend=backends[0]).to(device)
    optim = config.optimizer()
    optimizer = build_optimizer(model, optim)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    step_model = prepare_model(model, backends[0], compile_mode=config.compile)
    compiled = step_model is not model
    if not compiled:  # a range would break the graph
        model.backend = in_a_range(backends[0])
    facts = {
        "device": device.type,
        "dtype": dtype_name(dtype),
        "compiled": compiled,
    }
    facts |= describe(backends, device=device, dtype=dtype, head_dim=config.model.head_dim)

    with Prefetcher(data, config.sequences_per_step, config.batch_size, device) as batches:
        how = {
            "optimizer": optimizer,
            "scaler": scaler,
            "autocast": autocast,
            "grad_clip": optim.grad_clip,
        }
        ahead: PendingStep | None = None

        def queue(number: int, before: PendingStep | None = None) -> PendingStep:
            set_learning_rate(optimizer, number, config.steps, optim)
            with record_function(DATA):
                passes = batches.passes(number)
            return queue_step(step_model, passes, **how, update=True, before=before)

        def step(number: int) -> None:
            nonlocal ahead
            now = ahead or queue(number)
            ahead = queue(number + 1, before=now) if now.updated else None
            with record_function(OPTIMIZER):
                loss, grad_norm = now.figures()
                if not (math.isfinite(loss) and (scaler.is_enabled() or math.isfinite(grad_norm))):
                    raise ValueError(
                        f"step {number}: the loss is {loss} and the gradient's norm {grad_norm}: "
                        "nothing to measure"
                    )
                if not now.updated:
                    scaler.step(optimizer)
                    scaler.update()

        yield Job(config, device, facts, step)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def unrecorded_ms(job: Job, first: int, steps: int) -> list[float]:
    """Milliseconds of each of `steps` steps without the profiler: between the ends of what they
    queue on a GPU, by the clock on a CPU.
    """
    on_gpu = job.device.type == "cuda"
    wait(job.device)

    def stamp() -> Any:
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    stamps = [stamp()]
    for number in range(first, first + steps):
        job.step(number)
        stamps.append(stamp())
    wait(job.device)
    return [
        start.elapsed_time(stop) if on_gpu else 1000 * (stop - start)
        for start, stop in itertools.pairwise(stamps)
    ]


def record(job: Job, first: int, steps: int, path: Path) -> None:
    """Write the trace of `steps` steps, each a range. Two are lost: the profiler starts up in the
    first, the last ends the one before.
    """
    activities = [ProfilerActivity.CPU] + (
        [ProfilerActivity.CUDA] if job.device.type == "cuda" else []
    )
    plan = schedule(wait=0, warmup=1, active=steps + 1, repeat=1)

    def write(profiler: profile) -> None:
        profiler.export_chrome_trace(str(path))

    # without acc_events torch 2.11 warns of a second cycle, which there is not
    with profile(
        activities=activities, schedule=plan, on_trace_ready=write, acc_events=True
    ) as profiler:
        for number in range(first, first + steps + 2):
            with record_function(STEP):
                job.step(number)
            if number == first + steps + 1:
                wait(job.device)
            profiler.step()


def for_nsys(job: Job, first: int, steps: int) -> None:
    with torch.cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx():
        for number in range(first, first + steps):
            with record_function(STEP):
                job.step(number)
        wait(job.device)


def summarise(parts: list[dict[str, float]]) -> list[dict[str, Any]]:
    """One row a part, and the step last: mean and standard deviation over the steps in ms, and its
    share of the step.
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


def table(rows: list[dict[str, Any]], on_gpu: bool) -> str:
    cells = [["time of the GPU" if on_gpu else "time of the CPU", "ms", "stdev", "share"]]
    for row in rows:
        stdev = "" if row["stdev_ms"] is None else f"{row['stdev_ms']:,.3f}"
        cells.append([row["part"], f"{row['ms']:,.3f}", stdev, f"{row['share']:.1%}"])
    return text_table(cells)


@command("profile", Options)
def main(options: Options) -> None:
    config = compose_config(options.overrides)
    if options.nsys and pick_device(config.device).type == "cpu":
        raise ValueError("nsys=true needs a GPU; without it the trace works on a CPU too")
    trace, summary = options.out / "trace.json.gz", options.out / "profile.json"
    check_writable(summary)
    with build(config) as job:
        print(
            f"model={config.model.name}, attention={job.facts['attention']}, {job.facts['dtype']} "
            f"on {job.device.type}, {config.sequences_per_step} x {config.seq_len} tokens a "
            f"step{', compiled' if job.facts['compiled'] else ''}\n"
        )
        for number in range(options.warmup):
            job.step(number)
        if options.nsys:
            for_nsys(job, options.warmup, options.steps)
            return
        unrecorded = unrecorded_ms(job, options.warmup, options.steps)
        record(job, options.warmup + options.steps, options.steps, trace)
    parts, on_gpu = parts_of_steps(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
    rows = summarise(parts[: options.steps])
    print(table(rows, on_gpu))
    mean = statistics.fmean(unrecorded)
    step_tokens_per_sec = 1000 * config.sequences_per_step * config.seq_len / mean
    print(f"\nunrecorded: {mean:,.3f} ms a step, {step_tokens_per_sec:,.0f} tokens/s")
    shape = {key: getattr(config, key) for key in ("seq_len", "batch_size", "accumulation_steps")}
    write_json(
        summary,
        {
            "environment": measured_on(job.device),
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
    print(f"written: {summary} and {trace}")


if __name__ == "__main__":
    main()
