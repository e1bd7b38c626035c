"""Runs one job, from Hydra's composed settings to a summary. Every outcome is a status."""

import contextlib
import copy
import logging
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from config import RunConfig
from training.launch.command_line import (
    as_written,
    check_readable,
    hydra_config,
    options_first,
    read_config,
    replay_overrides,
    task_overrides,
)
from training.launch.interrupt import Ending
from training.loop.ranks import report
from training.record.clock import PHASES
from training.record.files import Row
from training.record.outcome import close_run, outcome_outside_training

Train = Callable[[Any, Path, Row], None]  # train(config, run_dir, summary)


def run_job(
    train: Train, cfg: Any, *, began: float | None = None
) -> tuple[Row, BaseException | None]:
    """Train one Hydra job; returns its summary, and the error that ended it if there was one.

    `began` is when the run began; None means now. A failed job does not stop the other jobs of a
    sweep.
    """
    from hydra.core.hydra_config import HydraConfig

    run_dir = Path(HydraConfig.get().runtime.output_dir)
    written, began = as_written(cfg), began or time.time()
    PHASES.begin(began)
    summary = {
        "status": "running",
        "attention": written["attention"]["name"],
        "seq_len": written["seq_len"],
        "seed": written["seed"],
        "overrides": task_overrides(),
        "started": began,
    }
    failure = config = None
    with Ending() as ending:
        try:
            config = read_config(cfg)
            train(config, run_dir, summary)
        except BaseException as error:
            ending.held = True
            failure = error
            summary |= outcome_outside_training(error, summary["status"], run_dir)
            report(error)
            # the frames would keep every tensor of this job alive
            traceback.clear_frames(error.__traceback__)
        # no call stands between the training and this line, so no signal can skip the summary
        ending.held = True
        close_run(run_dir, summary, ending)
        # the terminal shows that a single run was refused; a sweep's logger must show it too
        refused = "steps_done" not in summary and summary["status"] in ("failed", "oom")
        if refused and config is not None and config.resume is None:
            log_refused(run_dir, summary, config)
    return summary, failure


def log_refused(run_dir: Path, summary: Row, config: RunConfig) -> None:
    """Send a sweep's job to its logger even if it ended before its training."""
    from training.record.loggers import build_logger
    from training.record.runs import job_names

    names = job_names(run_dir, summary, config)
    if names["group"] is None:
        return
    with contextlib.suppress(ValueError):  # the logger may be what was refused
        logger = build_logger(config.logger, run_dir=run_dir, **names)
        logger.summary(summary)
        logger.finish(exit_code=1)


def run_overrides(train: Train, overrides: tuple[str, ...]) -> Row:
    """Does the work of training.run(), which has made our own modules importable."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict, read_write

    from training.launch.sweep import SweepSummary

    for override in overrides:
        if not isinstance(override, str):
            raise ValueError(f"run({override!r}): write each setting as text, such as 'steps=50'")
    options, settings = options_first(overrides)
    if options:
        raise ValueError(
            f"{options[0]}: run() takes settings, such as steps=50; options and sweeps (-m) belong "
            "to python train.py"
        )
    try:
        check_readable(settings)
        cfg = hydra_config(*replay_overrides(settings), with_hydra=True)
        if "MULTIRUN" in str(cfg.hydra.mode):  # a recipe asks for it
            given = shlex.join(settings)
            raise ValueError(f"{given} is a sweep: run it by `python train.py {given}`")
        folders = SweepSummary()
        folders.on_run_start(cfg)  # locks the run's folder
    except SystemExit as error:  # a refused command line exits
        raise ValueError(str(error).removeprefix("error: ")) from None
    run_dir = Path(cfg.hydra.run.dir)
    before = HydraConfig.instance().cfg
    with read_write(cfg.hydra.runtime), open_dict(cfg.hydra.runtime):
        cfg.hydra.runtime.output_dir = str(run_dir.absolute())
    HydraConfig.instance().set_config(cfg)
    task = copy.deepcopy(cfg)
    with open_dict(task):
        del task["hydra"]
    try:
        with lines_shown(run_dir / "train.log"):
            summary, error = run_job(train, task)
    finally:
        HydraConfig.instance().cfg = before
        folders.release()
    if summary["status"] == "failed" and error is not None:
        raise error
    return summary


@contextlib.contextmanager
def lines_shown(path: Path) -> Iterator[None]:
    """Write a run's log lines to standard output and to a file, as Hydra does for a job."""
    log = logging.getLogger("tilegpt")
    before = log.level, log.propagate
    handlers = [logging.StreamHandler(sys.stdout), logging.FileHandler(path)]
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
