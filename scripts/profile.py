"""Show where the time of a training step goes: torch.profiler's table of N real steps, and a trace.

    python -m scripts.profile device=cpu seq_len=128 batch_size=4 steps=2

It takes train.py's settings (attention=, model=, seq_len=, batch_size=, optim=, dtype=, compile=,
experiment=, ...), and these:

    steps    steps of the table (10)
    warmup   steps before them; the first compiles (5)
    out      a folder for trace.json.gz, which chrome://tracing and ui.perfetto.dev open
             (outputs/profile)

The table shows the 25 rows with the most time inside them: on a GPU the GPU's time, otherwise the
CPU's. "step" is the whole step, and data, forward, backward and optimizer are its ranges. Recording
slows a step down, most of all on a CPU. Under torchrun each rank writes its own trace, and the
first rank prints.
"""

import gzip
import os
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch is loaded; keeps Kineto silent

import torch
import torch._inductor.config
from torch.profiler import ProfilerActivity, profile, record_function

from config import RunConfig
from scripts.arguments import Count, check_out, command, compose_new, default
from training import build_run
from training.loop.optimizer import set_learning_rate
from training.loop.ranks import leave, of_environment
from training.loop.step import Figures, Stepper, gradients, update

ROWS = 25


@dataclass
class Options:
    steps: Count = 10
    warmup: Count = 5
    out: Path = Path("outputs/profile")
    overrides: list[str] = default()  # settings of train.py


def record(config: RunConfig, steps: int, warmup: int) -> profile:
    """The profiler after `steps` steps of a run, without looks, evaluation or saves."""
    # otherwise code compiled for a CPU would not appear in the trace
    torch._inductor.config.cpp.enable_kernel_profile = True
    facts = {}
    run = build_run(replace(config, cuda_graph="false"), facts)
    activities = [ProfilerActivity.CPU]
    if run.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with Stepper(run, 0, facts) as stepper:

        def step() -> None:
            number = stepper.step + 1
            set_learning_rate(run.optimizer, number - 1, config.steps, config.optimizer())
            figures = stepper.queue(gradients, stepper.passes(number))
            stepper.queue(update, Figures(number, *figures))

        for _ in range(warmup):
            step()
        # torch 2.11 warns about a second cycle that does not exist, unless events accumulate
        with profile(activities=activities, acc_events=True) as profiler:
            for _ in range(steps):
                with record_function("step"):
                    step()
            if run.device.type == "cuda":
                torch.cuda.synchronize(run.device)
    return profiler


@command
def main(options: Options) -> None:
    config, ranks = compose_new(*options.overrides, asked=options.overrides), of_environment()
    folder = options.out / f"rank{ranks.rank}" if ranks.several else options.out
    trace = folder / "trace.json.gz"
    check_out(trace, ".gz")
    profiler = record(config, options.steps, options.warmup)
    leave()
    profiler.export_chrome_trace(str(trace))
    with gzip.open(trace) as file:
        if not file.read(1):  # on a full disk it writes an empty one, in silence
            raise OSError(f"{trace} could not be written")
    if ranks.first:
        by = "cuda" if ProfilerActivity.CUDA in profiler.activities else "cpu"
        averages = profiler.key_averages()
        print(averages.table(f"{by}_time_total", ROWS, max_name_column_width=40))
        print(f"written: {trace}")


if __name__ == "__main__":
    main()
