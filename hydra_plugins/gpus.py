"""hydra/launcher=gpus: runs the jobs of a sweep in parallel, each a process with its own GPUs.

    python train.py -m hydra/launcher=gpus attention=triton,sdpa seed=0,1
    python train.py -m hydra/launcher=gpus hydra.launcher.slots=2 attention=tiled,naive

Each job is started by the command that runs it alone, in its folder of the sweep. So it begins with
fresh memory, and a job that crashes ends no other. What a job prints goes to its output.log.

resume=SWEEP starts the jobs that are left in the same way, one at a time unless the sweep had this
launcher.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any, NoReturn

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from yaml import YAMLError

from training.launch.interrupt import Signals

OWN_FILES = {".lock", ".hydra", "train.log", "output.log"}  # of a job before its run begins


@dataclass
class GpusLauncherConf:
    """The options hydra.launcher.*"""

    _target_: str = "hydra_plugins.gpus.GpusLauncher"
    gpus: list[int] | None = None  # by PyTorch's numbers; None: all that it sees
    slots: int | None = None  # how many jobs run at a time on the CPU, without GPUs
    ranks: int = 1  # GPUs per job, each with its own process, which torchrun starts


ConfigStore.instance().store(
    group="hydra/launcher", name="gpus", node=GpusLauncherConf, provider="tilegpt"
)


@dataclass
class Job:
    """One job of the sweep, and where it runs."""

    number: int
    overrides: list[str]
    config: DictConfig | None  # None of a job that goes on
    folder: Path
    ranks: int
    label: str  # the overrides that not all jobs have
    arguments: list[str]  # of train.py
    places: list[str] = field(default_factory=list)  # its GPUs, or slots
    began: float = 0.0


class Noted(Signals):
    """Used around child processes: signals are only noted, so that they can be passed on."""

    came = False

    def __init__(self) -> None:
        self._new: list[signal.Signals] = []

    def new(self) -> list[signal.Signals]:
        """The signals since the last call."""
        new, self._new = self._new, []
        return new

    def _handle(self, number: int, frame: Any) -> None:
        self.came = True
        self._new.append(signal.Signals(number))


class GpusLauncher(Launcher):
    """Each job begins as soon as enough GPUs are free, in the order of the sweep."""

    def __init__(self, gpus: list[int] | None, slots: int | None, ranks: int) -> None:
        self.gpus, self.slots, self.ranks = gpus, slots, ranks

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        from training.launch.sweep import forget_sweep

        self.hydra_context, self.config = hydra_context, config
        self.sweep_dir = Path(config.hydra.sweep.dir).absolute()
        try:
            self.places = self.find_places()
            self.ranks_of()
        except ValueError as error:
            forget_sweep(self.sweep_dir)
            raise SystemExit(f"error: {error}") from None
        if self.slots:  # hide GPUs from this process too, which checks the jobs
            os.environ["CUDA_VISIBLE_DEVICES"] = ""

    def find_places(self) -> list[str]:
        """The GPUs to use, as CUDA_VISIBLE_DEVICES names them; or the slots of the CPU."""
        for key in ("slots", "ranks"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"hydra.launcher.{key}={value} must be at least 1")
        if self.slots:
            if self.gpus is not None:
                raise ValueError(
                    "hydra.launcher.slots is for jobs on the CPU, and hydra.launcher.gpus for "
                    "jobs on GPUs: leave one of them out"
                )
            return [str(slot) for slot in range(self.slots)]
        import torch

        # asks the driver's library, so this process takes no memory of a GPU
        count = torch.cuda.device_count()
        if not count:
            raise ValueError(
                "hydra/launcher=gpus needs a GPU, and PyTorch sees none here; "
                "hydra.launcher.slots=2 runs two jobs at a time on the CPU"
            )
        numbers = list(range(count)) if self.gpus is None else list(self.gpus)
        if not numbers or len(set(numbers)) < len(numbers) or set(numbers) - set(range(count)):
            raise ValueError(
                f"hydra.launcher.gpus={numbers} must name one GPU or more, each once, of 0 to "
                f"{count - 1}, as PyTorch numbers those it sees"
            )
        # the variable may already limit this process to some of the GPUs, by number or UUID
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
        names = names.split(",") if names else [str(number) for number in range(count)]
        return [names[number] for number in numbers]

    def ranks_of(self, config: Any = None) -> int:
        """How many processes train a job together, each on a GPU or slot of its own.

        Raises ValueError if it takes more than there are.
        """
        context = config.parallel.context if config else 1
        ranks = max(self.ranks, context)
        if ranks > len(self.places):
            asked = "hydra.launcher.ranks" if ranks == self.ranks else "parallel.context"
            what = "slots" if self.slots else "GPUs"
            raise ValueError(
                f"{asked}={ranks} takes {ranks} {what} a job, and there are {len(self.places)}"
            )
        return ranks

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        ended = self.run(self.composed(job_overrides, initial_job_idx))
        return [ended[number] for number in sorted(ended)]

    def run(self, waiting: list[Job]) -> dict[int, JobReturn]:
        """How each job ended. A signal ends the program, after the jobs that run have saved."""
        from training.launch.sweep import finish_sweep

        running: dict[Popen, Job] = {}
        ended: dict[int, JobReturn] = {}
        free = list(self.places)
        with Noted() as signals:
            try:
                while running or (waiting and not signals.came):
                    while waiting and not signals.came and waiting[0].ranks <= len(free):
                        job = waiting.pop(0)
                        job.places, free = free[: job.ranks], free[job.ranks :]
                        running[self.start(job)] = job
                    time.sleep(0.1)
                    for number in signals.new():
                        numbers = ", ".join(str(job.number) for job in running.values())
                        print(f"{number.name} goes on to job {numbers}", flush=True)
                        for process in running:
                            process.send_signal(number)
                    for process in [each for each in running if each.poll() is not None]:
                        job = running.pop(process)
                        free = sorted(free + job.places, key=self.places.index)
                        ended[job.number] = self.end(job, process.returncode, signals.came)
            except OSError as error:  # a full disk
                raise SystemExit(f"error: {error}; the jobs that still ran save and end") from None
            finally:  # if this process fails, its jobs end too
                for process in running:
                    process.terminate()
                    process.wait()
        if signals.came:
            finish_sweep(self.sweep_dir, 130)
        return ended

    def composed(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[Job]:
        """The jobs with their settings. `first` is the number of the first one."""
        from training.launch.command_line import as_written, options_first, quoted

        options, _ = options_first(sys.argv[1:])
        options = [option for option in options if option not in ("-m", "--multirun")]
        jobs, shared = [], set.intersection(*map(set, job_overrides))
        for number, overrides in enumerate(map(list, job_overrides), first):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = number
            try:
                ranks = self.ranks_of(config)
            except ValueError as error:  # another sweeper has not checked it
                raise SystemExit(f"error: {error}") from None
            folder = self.sweep_dir / str(config.hydra.sweep.subdir)
            label = labelled(overrides, shared)
            arguments = [
                *options,
                *as_written(self.config.hydra.overrides.hydra),
                *overrides,
                "hydra.mode=RUN",
                f"hydra.run.dir={quoted(str(folder))}",
                f"hydra.job.num={number}",
            ]
            jobs.append(Job(number, overrides, config, folder, ranks, label, arguments))
        return jobs

    def start(self, job: Job) -> Popen:
        """Start the command that runs this job alone, in its folder of the sweep."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.ranks}"]
        before = torchrun if job.ranks > 1 else []
        command = [sys.executable, *before, sys.argv[0], *job.arguments]
        gpus = {} if self.slots else {"CUDA_VISIBLE_DEVICES": ",".join(job.places)}
        place = f"{'slot' if self.slots else 'GPU'} {', '.join(job.places)}"
        print(f"job {job.number} on {place}: {job.label}", flush=True)
        job.folder.mkdir(parents=True, exist_ok=True)
        job.began = time.monotonic()
        with (job.folder / "output.log").open("ab") as log:
            return Popen(
                command,
                env=os.environ | gpus,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # else a terminal's Ctrl-C would reach it too
            )

    def end(self, job: Job, code: int, stopped: bool) -> JobReturn:
        """Record and print how a job ended."""
        from training.launch.sweep import read_run, record_job, remark
        from training.record.outcome import Objective

        seconds, how = time.monotonic() - job.began, {}
        row = read_run(job.folder)
        if stopped and {path.name for path in job.folder.iterdir()} <= OWN_FILES:
            shutil.rmtree(job.folder)  # so the index keeps it, and the command to start it
            row["status"] = "not started"
        else:
            if row["status"] == "unfinished":  # it wrote no summary
                how = {"status": "failed", "error": reason(code, job.folder / "output.log")}
            row = record_job(self.sweep_dir, job.number, job.overrides, job.folder, **how)
        completed = row["status"] == "completed" and row.get("val/loss") is not None
        words = f", val/loss {row['val/loss']:.4f}" if completed else ""
        why = f": {remark(row)}" if not completed and remark(row) else ""
        print(f"job {job.number}: {row['status']}{words}, {seconds:.0f} s{why}", flush=True)
        value = Objective({"stopped": False} | row)
        return JobReturn(job.overrides, job.config, status=JobStatus.COMPLETED, _return_value=value)


def labelled(overrides: list[str], shared: set[str]) -> str:
    """A job's name in what is printed: the overrides that not all jobs share."""
    from training.launch.command_line import key_of
    from training.record.names import unescaped

    own = [each for each in overrides if each not in shared] or overrides
    return unescaped(" ".join(each for each in own if key_of(each) != "left_out"))


def resume_sweep(folder: Path) -> NoReturn:
    """Go on with the jobs of a sweep that did not begin or did not end; exit as the sweep would."""
    from training.launch.command_line import quoted
    from training.launch.sweep import (
        claim,
        exit_code,
        finish_sweep,
        index_rows,
        jobs_left,
        lock,
        read_sweep,
    )

    one_by_one = f"resume its runs one by one, as resume={folder}/0"
    try:
        asked = OmegaConf.load(folder / "multirun.yaml").hydra.launcher
    except (OSError, ValueError, AttributeError, YAMLError) as error:
        reason = " ".join(str(error).split())
        raise SystemExit(
            f"error: resume={folder}: its multirun.yaml cannot be read: {reason}; {one_by_one}"
        ) from None
    launcher = GpusLauncher(gpus=None, slots=1, ranks=1)
    if asked.get("_target_") == GpusLauncherConf._target_:
        launcher = GpusLauncher(asked.get("gpus"), asked.get("slots"), asked.get("ranks", 1))
    launcher.sweep_dir = folder.absolute()
    with claim(folder, None, "hydra.sweep.dir"):
        try:
            launcher.places = launcher.find_places()
        except ValueError as error:
            raise SystemExit(f"error: resume={folder}: {error}; or {one_by_one}") from None
        every, jobs = [set(row["overrides"]) for row in index_rows(folder)], []
        for row, saved in jobs_left(folder):
            number, overrides = row["job"], row["overrides"]
            run_dir = launcher.sweep_dir / row.get("dir", str(number))
            place = quoted(str(run_dir))
            own = [f"resume={place}"]
            if not saved:  # it begins again
                if run_dir.is_dir():
                    lock(run_dir, "stop it").close()  # unless it runs right now
                    shutil.rmtree(run_dir)
                own = [*overrides, "hydra.mode=RUN", f"hydra.run.dir={place}"]
            label, ranks = labelled(overrides, set.intersection(*every)), row.get("ranks", 1)
            jobs.append(Job(number, overrides, None, run_dir, ranks, label, own))
        print(f"{len(jobs)} of {len(every)} jobs are left", flush=True)
        launcher.run(jobs)
        finish_sweep(launcher.sweep_dir, exit_code(read_sweep(launcher.sweep_dir)))


def reason(code: int, log: Path) -> str:
    """Why a process ended without writing a summary."""
    if code < 0:
        return f"killed by signal {-code}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    refusals = [line for line in lines if line.startswith("error: ")]
    return [f"exit code {code}", *lines[-1:], *refusals][-1].removeprefix("error: ")
