"""hydra/launcher=gpus: runs the jobs of a sweep in parallel, each a process with its own GPU.

    python train.py -m hydra/launcher=gpus attention=triton,sdpa seed=0,1
    python train.py -m hydra/launcher=gpus hydra.launcher.slots=2 attention=tiled,naive

Each job is started by the command that runs it alone, in its folder of the sweep. So it begins with
fresh memory, and a job that crashes ends no other. What a job prints goes to its output.log.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, Popen

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict


class GpusLauncher(Launcher):
    """Each job begins as soon as a GPU is free, in the order of the sweep."""

    def __init__(self, slots: int | None) -> None:
        self.slots = slots

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context, self.config = hydra_context, config
        slots = self.slots
        if slots is not None and not (isinstance(slots, int) and slots >= 1):
            raise ValueError(f"hydra.launcher.slots={slots} must be a whole number, at least 1")
        self.gpus = visible_gpus() if slots is None else [""] * slots
        if not self.gpus:
            raise ValueError(
                "hydra/launcher=gpus finds no GPU; hydra.launcher.slots=2 runs two jobs at a time "
                "on the CPU"
            )

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        waiting, free = list(enumerate(job_overrides, initial_job_idx)), list(self.gpus)
        running, ended = {}, {}
        try:
            while waiting or running:
                while waiting and free:
                    number, overrides = waiting.pop(0)
                    process, folder = self.start(number, overrides, free[0])
                    running[process] = number, folder, free.pop(0)
                time.sleep(0.1)
                for process in [each for each in running if each.poll() is not None]:
                    number, folder, gpu = running.pop(process)
                    free.append(gpu)
                    ended[number] = end(folder, process.returncode)
        finally:  # by Ctrl-C, SIGTERM or an error: the jobs that still run save and end
            for process in running:
                process.terminate()
            for process in running:
                process.wait()
        return [ended[number] for number in sorted(ended)]

    def start(self, number: int, overrides: Sequence[str], gpu: str) -> tuple[Popen, Path]:
        """Start the command that runs this job alone, in its folder, where it sees this GPU alone.
        `gpu` is as CUDA_VISIBLE_DEVICES names it, and empty for a job on the CPU.
        """
        from training.launch.command_line import as_written, options_first, quoted

        cfg = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(cfg):
            cfg.hydra.job.id = cfg.hydra.job.num = number
        folder = Path(cfg.hydra.sweep.dir, str(cfg.hydra.sweep.subdir)).absolute()
        written = as_written(cfg.hydra.overrides)
        place = f"GPU {gpu}" if gpu else "the CPU"
        print(f"job {folder.name} on {place}: {' '.join(written['task'])}", flush=True)
        options, _ = options_first(sys.argv[1:])
        command = [
            sys.executable,
            sys.argv[0],
            *(option for option in options if option not in ("-m", "--multirun")),
            *written["hydra"],
            *written["task"],
            "hydra.mode=RUN",
            f"hydra.run.dir={quoted(str(folder))}",
            f"hydra.job.num={number}",
        ]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "output.log").open("ab") as log:
            process = Popen(
                command,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # else a terminal's Ctrl-C would reach it too
            )
        return process, folder


def end(folder: Path, code: int) -> JobReturn:
    """Print how a job ended, and write it to its summary if its process could not."""
    from training.record.files import write_json
    from training.record.outcome import objective
    from training.record.runs import read_run, remark

    row = read_run(folder)
    # a job that was killed may have the summary of an earlier start
    if row["status"] in ("unfinished", "interrupted") and code != 130:
        how = f"killed by signal {-code}" if code < 0 else f"it ended with exit code {code}"
        row |= {"status": "failed", "error": f"{how}; see {folder / 'output.log'}"}
        write_json(folder / "summary.json", row)
    print(f"job {folder.name}: {row['status']} {remark(row)}", flush=True)
    return JobReturn(status=JobStatus.COMPLETED, _return_value=objective(row))


def visible_gpus() -> list[str]:
    """The GPUs that PyTorch sees, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    # asks the driver's library, so this process takes no memory of a GPU
    count = torch.cuda.device_count()
    # the variable may already limit this process to some of the GPUs, by number or UUID
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return names.replace(" ", "").split(",")[:count]
