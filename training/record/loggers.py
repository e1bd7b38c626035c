"""Where metrics go besides metrics.jsonl: wandb, TensorBoard, or nowhere.

A logger mirrors what is already on disk, so it never stops a training: its first failure becomes
one warning, and then it is off. Tokens are the x axis everywhere, because the runs of a sweep
differ in batch size and sequence length.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

from config import LoggerConfig, RunConfig
from data.network import answers
from training.record.files import Row, read_metrics
from training.record.names import name_runs
from training.record.runs import planned_jobs, sweep_of
from training.record.text_table import first_line

log = logging.getLogger("tilegpt")

# seconds to connect to wandb's server, to start an online run, and to upload the rest at the end
PROBE_TIMEOUT, INIT_TIMEOUT, FINISH_TIMEOUT = 2.0, 20, 120.0
# most characters that wandb takes
LONGEST_NAME, LONGEST_TAG = 128, 64
MODES = ("online", "offline", "disabled")


class LoggedRun(NamedTuple):
    """What a logger is told about a run, besides its metrics."""

    project: str
    run_dir: Path
    shared_dir: Path  # the runs of a sweep log below it; of a run outside a sweep, its own folder
    name: str
    group: str | None
    tags: list[str]
    settings: Row


def start_logger(config: RunConfig, run_dir: Path, summary: Row, *, writes: bool) -> "Logger":
    """Start the logger of a run, or none on a rank that does not write.

    Writes the run's variant to `summary`. Runs with the same `curve` differ only in their seed; a
    chart shows their mean as one line.
    """
    sweep = sweep_of(run_dir)
    others = planned_jobs(sweep) if sweep else {}
    # a resume may have changed the attention
    own = others.pop(run_dir, {}) | summary
    rows = [own, *others.values()]
    summary["variant"] = variant = name_runs(rows)[0].variant
    curve = f"{variant} seq_len={config.seq_len}"
    tags = (config.attention.name, config.attention.switch_to, config.model.name)
    logger = LOGGERS[config.logger.name if writes else "none"]()
    logger.start(
        LoggedRun(
            config.logger.project,
            run_dir,
            shared_dir=sweep or run_dir,
            # outside a sweep, it has all that was typed
            name=name_runs(rows if others else [own, {}])[0].run,
            group=group_name(sweep, summary["overrides"]) if sweep else None,
            tags=[*filter(None, tags), config.data.source, f"seq{config.seq_len}"],
            settings=asdict(config) | {"variant": variant, "curve": curve},
        )
    )
    return logger


def group_name(sweep: Path, overrides: list[str]) -> str:
    """2026-11-22_21-09-10 break_it: the folder of a sweep, and its recipe."""
    recipes = [each.partition("=")[2] for each in overrides if each.startswith("experiment=")]
    return " ".join([f"{sweep.parent.name}_{sweep.name}", *recipes])


def check_logger(config: LoggerConfig) -> None:
    """Raise ValueError for a logger that is not installed, or an invalid WANDB_MODE or project.

    wandb is the default, so a run without it only warns, later.
    """
    if config.name == "tensorboard" and find_spec("tensorboard") is None:
        raise ValueError("logger=tensorboard needs pip install -e '.[tensorboard]'")
    mode = os.environ.get("WANDB_MODE", "online")
    if config.name == "wandb" and mode not in MODES:
        raise ValueError(
            f"WANDB_MODE={mode} is not one of: {', '.join(MODES)}; set one of these, or unset it"
        )
    if len(config.project) > LONGEST_NAME or set(config.project) & {*"/\\#?%:"}:
        raise ValueError(
            f"logger.project={config.project}: wandb takes at most {LONGEST_NAME} characters, and "
            "none of / \\ # ? % :; choose another name"
        )


def numbers(metrics: Row) -> dict[str, float]:
    """The numbers in a row of metrics: no None, and not attention/max_score_by_head, of which a
    logger would draw a line per head.
    """
    return {key: value for key, value in metrics.items() if isinstance(value, (int, float))}


def shortened(name: str) -> str:
    """The name without its middle if it is too long for wandb. Its end tells the seeds apart."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:80]}...{name[83 - LONGEST_NAME :]}"


def quietly(method: Callable) -> Callable:
    """Turn the first failure of a logger into one warning and switch the logger off."""

    def wrapper(self: "Logger", *args: Any, **kwargs: Any) -> None:
        if not self.active:
            return
        try:
            method(self, *args, **kwargs)
        # a network, a server or a library may raise anything, and must not cost the run
        except Exception as error:
            self.active = False
            name = type(self).__name__
            log.warning(f"{name} stopped logging ({first_line(error)}); metrics.jsonl goes on")

    return wrapper


class Logger:
    """Logs nowhere; the base of the others."""

    active = True
    url_or_hint: str | None = None  # where the user sees the run, once it is logged

    def start(self, run: LoggedRun) -> None:
        """Begin to log."""

    def log(self, row: Row) -> None:
        """Log the numbers of a row of metrics."""

    def finish(self, summary: Row) -> None:
        """Log how the run ended, and end the logging."""


# metrics whose lowest value wandb's summary keeps beside the last
BEST = {"val/loss", "val/loss_exact"}


class WandbLogger(Logger):
    """Weights & Biases: online where a key is configured and the server answers, else offline.

    WANDB_MODE and WANDB_ENTITY are read by wandb itself. Never prompts, never waits long. wandb's
    step is the step of the run. A resumed run keeps its id, so that wandb joins its parts. Under
    `wandb agent` the agent chooses the id.
    """

    @quietly
    def start(self, run: LoggedRun) -> None:
        import wandb

        id_file = run.run_dir / "wandb_id.txt"  # of an earlier start
        run_id = id_file.read_text().strip() if id_file.exists() else None
        prepare_environment()
        mode = os.environ.get("WANDB_MODE", "online")
        begin = partial(
            wandb.init,
            project=run.project,
            dir=str(run.shared_dir),
            id=run_id,
            resume="allow" if run_id else None,
            name=shortened(run.name),
            group=run.group and shortened(run.group),
            job_type="train",
            tags=[tag[:LONGEST_TAG] for tag in run.tags],
            config=run.settings,
            # without this, a second run of the same process would continue the first
            reinit="finish_previous",
            settings=wandb.Settings(
                init_timeout=INIT_TIMEOUT, finish_timeout=FINISH_TIMEOUT, console="off"
            ),
        )
        try:
            if mode == "online":
                check_server()
            self._run = begin(mode=mode)
        except Exception as error:
            if mode != "online":
                raise
            log.warning(f"wandb: {first_line(error)}; this run is logged offline")
            wandb.teardown()  # else the id would still be in use
            self._run = begin(mode="offline")
        id_file.write_text(self._run.id + "\n")
        self._run.define_metric("tokens", hidden=True)
        self._run.define_metric("*", step_metric="tokens")
        for name in BEST:
            self._run.define_metric(name, step_metric="tokens", summary="min,last")
        offline = f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else None
        self.url_or_hint = self._run.url or offline

    @quietly
    def log(self, row: Row) -> None:
        values = numbers(row)
        step = values.pop("step")
        for name in BEST & values.keys():
            if isnan(values[name]):  # which wandb would take for the lowest
                del values[name]
        self._run.log(values, step=step, commit=True)  # at once, so before the summary

    @quietly
    def finish(self, summary: Row) -> None:
        # last, as the last row of metrics overwrites the whole run's speeds with its own. wandb
        # itself keeps the lowest and the last value of the metrics in BEST
        self._run.summary.update({key: x for key, x in summary.items() if key not in BEST})
        failed = summary["status"] != "completed"
        if failed:
            self._run.tags = (*self._run.tags, summary["status"])
        self._run.finish(exit_code=int(failed))


def prepare_environment() -> None:
    # wandb reports its own errors and prints only if the user wants it
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")


def check_server() -> None:
    """Raise ConnectionError, within seconds, if wandb has no key or its server does not answer."""
    import wandb

    # an environment variable, the settings or netrc may hold the key; wandb.init() would ask for it
    if not wandb.login(prompt=False, verify=False):
        raise ConnectionError("no API key (wandb login, or WANDB_API_KEY)")
    base_url = wandb.setup().settings.base_url
    if not answers(base_url, PROBE_TIMEOUT):
        raise ConnectionError(f"the server {base_url} does not answer")


class TensorboardLogger(Logger):
    """TensorBoard event files in tensorboard/NAME of the sweep or the run, with tokens as the step.

    TensorBoard calls a run what its folder is called.
    """

    @quietly
    def start(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.shared_dir / "tensorboard"
        self.url_or_hint = f"tensorboard --logdir {folder}"
        # TensorBoard then hides what a killed run had logged after the rows that a resume continues
        rows = read_metrics(run.run_dir / "metrics.jsonl")
        purge_step = rows[-1]["tokens"] + 1 if rows else None
        name = shortened(run.name).replace("/", "_")
        self._writer = SummaryWriter(str(folder / name), purge_step=purge_step)

    @quietly
    def log(self, row: Row) -> None:
        for key, value in numbers(row).items():
            self._writer.add_scalar(key, value, global_step=row["tokens"])
        # TensorBoard's own thread writes every two minutes, too late for a killed run
        self._writer.flush()

    @quietly
    def finish(self, summary: Row) -> None:
        self._writer.close()


LOGGERS = {
    "wandb": WandbLogger,
    "tensorboard": TensorboardLogger,
    "none": Logger,
}
