"""Runs one job, from Hydra's composed settings to a summary. Every outcome is a status."""

import logging
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict, read_write

from training.launch.command_line import (
    hydra_config,
    in_a_sweep,
    read_config,
    replay_overrides,
    task_overrides,
)
from training.launch.folders import claim_run
from training.launch.interrupt import Ending
from training.launch.settings import check_settings
from training.loop.ranks import of_environment, report
from training.record.clock import PHASES
from training.record.files import Row
from training.record.outcome import close_run, outcome_of
from training.record.runs import read_run, summary_table

log = logging.getLogger("tilegpt")

Train = Callable[[Any, Path, Row], None]  # train(config, run_dir, summary)


def run_job(
    train: Train, cfg: Any, *, began: float | None = None
) -> tuple[Row, BaseException | None]:
    """Train one Hydra job; returns its summary, and the error that ended it if there was one.

    `began` is when the run began; None means now. A failed job does not stop the other jobs of a
    sweep.
    """
    runtime = HydraConfig.get().runtime
    run_dir = Path(runtime.output_dir)
    summary, failure = {"status": "unfinished", "overrides": task_overrides()}, None
    PHASES.begin(began or time.time())
    with Ending() as ending:
        try:
            # paths start where they were typed, also under hydra.job.chdir=true
            with chdir(runtime.cwd):
                config = read_config(cfg)
                check_settings(config, summary)
                train(config, run_dir, summary)
        except BaseException as error:
            ending.held = True
            failure = error
            summary |= outcome_of(error, run_dir, status=summary["status"])
            report(error)
            # the frames would keep every tensor of this job alive
            traceback.clear_frames(error.__traceback__)
        # no call stands between the training and this line, so no signal can skip the summary
        ending.held = True
        # a sweep ends there, even if the signal came too late to interrupt the run
        summary["stopped"] = ending.requested or summary.get("stopped", False)
        ending.requested = False
        close_run(run_dir, summary)
    return summary, failure


def end_job(summary: Row) -> None:
    """Print the table of a run that was started alone, and end its process by how it went.

    Of a sweep, a signal ends all jobs, not only the one that caught it.
    """
    status = summary["status"]
    stopped = status == "interrupted" or summary["stopped"]
    if in_a_sweep():
        if stopped:
            raise KeyboardInterrupt
        return
    if status == "completed":
        table = summary_table([read_run(Path(HydraConfig.get().runtime.output_dir))])
        log.info(f"\n{table}")  # logged, so that train.log has it too
    if status == "failed" or (status == "oom" and of_environment().several):
        sys.exit(1)  # torchrun ends the other ranks too
    if stopped:
        sys.exit(130)


def run_overrides(train: Train, overrides: tuple[str, ...]) -> Row:
    """Does the work of training.run(), which has made our own modules importable."""
    if options := [each for each in overrides if each.startswith("-")]:
        raise ValueError(
            f"run({options[0]!r}): run() takes settings, such as 'steps=50'; options and sweeps "
            "(-m) belong to python train.py"
        )
    cfg = hydra_config(*replay_overrides(list(overrides)))
    if "MULTIRUN" in str(cfg.hydra.mode):  # a recipe asks for it
        given = shlex.join(overrides)
        raise ValueError(f"{given} is a sweep: run it by `python train.py {given}`")
    try:
        lock = claim_run(cfg)
    except SystemExit as error:
        raise ValueError(str(error).removeprefix("error: ")) from None
    run_dir = Path(cfg.hydra.run.dir)
    with read_write(cfg), open_dict(cfg):
        cfg.hydra.runtime.output_dir = str(run_dir.absolute())
    hydra, before = HydraConfig.instance(), HydraConfig.instance().cfg
    hydra.set_config(cfg)
    try:
        with lock, lines_shown(run_dir / "train.log"):
            summary, error = run_job(train, cfg)
    finally:
        hydra.cfg = before
    if summary["status"] == "failed" and error is not None:
        raise error
    return summary


@contextmanager
def lines_shown(path: Path) -> Iterator[None]:
    """Write a run's log lines to standard output and to a file, as Hydra does for a job."""
    before = log.level, log.propagate
    handlers = [logging.StreamHandler(sys.stdout), logging.FileHandler(path, encoding="utf-8")]
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in handlers:
        log.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()
        log.level, log.propagate = before
