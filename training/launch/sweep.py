"""A sweep as a whole: its plan, its table, its exit code.

`SweepSummary` is a Hydra callback, named in conf/config.yaml under hydra.callbacks. Diverged and
out-of-memory runs are results and leave the exit code at 0. A failed run makes it 1.
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

from hydra.experimental.callback import Callback

from training.launch.command_line import as_written, quoted
from training.launch.folders import check_names, claim, claim_run
from training.loop.ranks import of_environment
from training.record.files import Row, newest_first, read_mapping, write_file
from training.record.names import name_runs
from training.record.runs import INDEX, not_started, planned_jobs, read_sweep, summary_table

RESULTS = ("completed", "diverged", "oom")  # what needs no second try


class SweepSummary(Callback):
    """Claims the folders of runs and sweeps, and prints the table of a sweep.

    It ends the program by SystemExit, because Hydra turns every ordinary exception of a callback
    into a warning.
    """

    folder: Path | None = None  # of the sweep; None in a single run
    # files that lock the folders while they are open
    sweep_lock: IO | None = None
    run_lock: IO | None = None

    def __getstate__(self) -> Row:
        # a launcher pickles the callback for its jobs; locks stay with the first process
        return {"folder": self.folder}

    def on_run_start(self, config: Any, **kwargs: Any) -> None:
        self.run_lock = claim_run(config)

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        if of_environment().several:
            raise SystemExit(
                "error: torchrun starts the ranks of one run, and -m asks for several: start each "
                "by its own torchrun, or all by python train.py -m"
            )
        self.folder = Path(config.hydra.sweep.dir).absolute()
        if not config.hydra.sweeper._target_.endswith(".CheckedSweeper"):
            # another sweeper plans its jobs as it goes
            check_names([as_written(config.hydra.sweep)["subdir"]])
            self.sweep_lock = claim(self.folder, "hydra.sweep.dir")
            (self.folder / INDEX).touch()

    def on_job_start(self, config: Any, **kwargs: Any) -> None:
        if self.folder is None:
            return
        folder = Path(config.hydra.runtime.output_dir)
        check_names([os.path.relpath(folder, self.folder)])
        if (folder / "metrics.jsonl").exists() and not config.resume:
            raise SystemExit(f"error: hydra.sweep.subdir: {folder} is the folder of another job")
        self.run_lock = claim(folder, "hydra.sweep.subdir", goes_on=True)

    def on_job_end(self, config: Any, job_return: Any, **kwargs: Any) -> None:
        self.run_lock.close()

    def on_multirun_end(self, config: Any, **kwargs: Any) -> None:
        finish_sweep(self.folder)


@contextmanager
def begun(folder: Path, jobs: list[Row]) -> Iterator[list[list[str]]]:
    """Claims the folder of a sweep, writes its plan to index.jsonl, and yields the overrides of the
    jobs to launch. If Ctrl-C comes, finishes the sweep.

    A job has its "overrides", the name "dir" of its folder, and what names it. If the folder holds
    a sweep of the same jobs, that goes on: jobs with a result are left out, and others resume.
    """
    before = [(row.get("dir"), row.get("overrides")) for row in planned_jobs(folder).values()]
    # in other folders there may be files of the user's
    goes_on = before == [(job["dir"], job["overrides"]) for job in jobs]
    with claim(folder, "hydra.sweep.dir", goes_on=goes_on):
        named = enumerate(zip(jobs, name_runs(jobs), strict=True))
        rows = ({"job": n} | job | {"variant": names.variant} for n, (job, names) in named)
        write_file(folder / INDEX, "".join(f"{json.dumps(row)}\n" for row in rows))
        left = [[*in_place, *job["overrides"]] for job in jobs if (in_place := start(folder, job))]
        if goes_on:
            print(f"{len(left)} of {len(jobs)} jobs are left", flush=True)
        try:
            yield left
        except KeyboardInterrupt:
            finish_sweep(folder, 130)


def start(sweep: Path, job: Row) -> list[str]:
    """The overrides by which a job starts or resumes in its folder; none if it has a result."""
    run_dir = sweep / job["dir"]
    if read_mapping(run_dir / "summary.json").get("status") in RESULTS:
        return []
    own = [f"hydra.sweep.subdir={quoted(job['dir'])}"]
    if run_dir.is_dir():
        claim(run_dir, "hydra.sweep.dir", goes_on=True).close()  # unless it runs right now
        if newest_first(run_dir):
            return [*own, f"resume={quoted(str(run_dir))}"]
        shutil.rmtree(run_dir)  # it saved nothing
    return own


def finish_sweep(folder: Path, code: int | None = None) -> NoReturn:
    """Print the table of a sweep and write it to its file; exit with `code`, or by the runs."""
    rows, missing = read_sweep(folder), not_started(folder)
    table = summary_table(rows)
    write_file(folder / "table.txt", f"{table}\n")  # first: printing may fail
    print(f"\n{table}")
    if missing:
        print(f"{len(missing)} of {len(rows) + len(missing)} jobs not started")
    if missing or any(row["status"] not in RESULTS for row in rows):
        again = ["python", "train.py", *sys.argv[1:]]
        if not any(each.startswith("hydra.sweep.dir=") for each in again):
            again.append(f"hydra.sweep.dir={os.path.relpath(folder)}")
        print(f"go on: {shlex.join(again)}")
    place = shlex.quote(str(folder))
    print(f"{folder}\nreport: python -m scripts.report {place}")
    if any((folder / "wandb").glob("offline-run-*")):
        print(f"wandb: wandb sync {place}/wandb/offline-run-*")
    if (folder / "tensorboard").is_dir():
        print(f"tensorboard: tensorboard --logdir {place}/tensorboard")
    raise SystemExit(exit_code(rows) if code is None else code)


def exit_code(rows: list[Row]) -> int:
    """1 if a run failed or died, else 130 if a signal stopped one, else 0: a sweep may well look
    for divergence and lack of memory.
    """
    statuses = {row["status"] for row in rows}
    return 1 if statuses & {"failed", "unfinished"} else 130 if "interrupted" in statuses else 0
