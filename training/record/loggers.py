"""Where metrics go besides metrics.jsonl: wandb, TensorBoard, or nowhere.

A logger mirrors what is already on disk, so it never stops a training: its first failure becomes
one warning, and then it is off. Tokens are the x axis everywhere, because the runs of a sweep
differ in batch size and sequence length.

A killed run may have logged rows after its last checkpoint, which the resumed run writes again. It
may also have lost rows from before the checkpoint. So a resumed logger first catches up with
metrics.jsonl, and then has every row once.
"""

import functools
import importlib.util
import logging
import math
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from config import LoggerConfig
from data.network import answers
from training.record.files import Row, read_metrics

log = logging.getLogger("tilegpt")

# seconds to connect to wandb's server, to start an online run, and to upload the rest at the end
PROBE_TIMEOUT, INIT_TIMEOUT, FINISH_TIMEOUT = 2.0, 20, 120.0


class LoggedRun(NamedTuple):
    """What a logger is told about a run."""

    config: LoggerConfig
    run_dir: Path
    wandb_dir: Path  # wandb creates `wandb/` in it; the runs of a sweep share it
    name: str
    group: str | None
    tags: list[str]
    run_config: Row
    resume: bool


def build_logger(config: LoggerConfig, *, run_dir: Path, resume: bool, **names: Any) -> "Logger":
    """Build and start the logger that `config` names. names: the other fields of LoggedRun.

    Raises ValueError if logger=tensorboard is not installed; any other failure is a warning.
    """
    check_logger(config)
    logger = LOGGERS[config.name]()
    # the rows that the resumed run continues
    rows = read_metrics(run_dir / "metrics.jsonl") if resume else []
    logger.start(LoggedRun(config, run_dir, resume=resume, **names), rows)
    return logger


def numbers(metrics: Row) -> dict[str, float]:
    """The numbers in a row of metrics: no None, and not attention/max_score_by_head, of which a
    logger would draw a line per head. The picture max_scores.png shows those.
    """
    return {key: value for key, value in metrics.items() if isinstance(value, (int, float))}


def quietly(method: Callable) -> Callable:
    """Turn the first failure of a logger into one warning and switch the logger off."""

    @functools.wraps(method)
    def wrapper(self: "Logger", *args: Any, **kwargs: Any) -> None:
        if not self.active:
            return
        try:
            method(self, *args, **kwargs)
        # a network, a server or a library may raise anything, and must not cost the run
        except Exception as error:
            self.active = False
            log.warning(
                "%s stopped logging (%s); metrics.jsonl goes on",
                type(self).__name__,
                _first_line(error),
            )

    return wrapper


class Logger:
    """Logs nowhere; the base of the others."""

    active = True
    url_or_hint: str | None = None  # where the user sees the run, once it is logged

    def start(self, run: LoggedRun, rows: list[Row]) -> None:
        """Begin to log. `rows` are those that a resumed run has in metrics.jsonl."""

    def log(self, metrics: dict[str, float | None], tokens: int, *, last: bool = False) -> None:
        """Log the numbers of a row of metrics after `tokens` training tokens.

        No row follows the one with `last`; media() then adds to its step.
        """

    def summary(self, values: Row) -> None:
        """Log the run's result."""

    def media(self, step: int, tokens: int, pictures: list[Path], *, sample: str | None) -> None:
        """Log pictures of the run, and the sample of text if there is one."""

    def finish(self, exit_code: int) -> None:
        """End the run."""

    def _replay(self, rows: list[Row]) -> None:
        """Log rows of metrics.jsonl, with NaN for every value that was NaN or infinite."""
        for row in rows:
            values = {key: value for key, value in row.items() if key != "nonfinite"}
            self.log(values | dict.fromkeys(row.get("nonfinite", ()), math.nan), row["tokens"])


# metrics whose lowest value wandb's summary keeps beside the last
BEST = ("val/loss", "val/loss_exact")
# wandb's default workspace and `wandb leet` sort metrics by name, capital letters first. These
# copies put what a comparison looks at on their first page
COMPARED = {
    "val/loss": "Compare/loss",
    "val/loss_exact": "Compare/loss_exact",
    "memory/peak_gib": "Compare/memory_gib",
    "step_tokens_per_sec": "Compare/tokens_per_sec",
}


class WandbLogger(Logger):
    """Weights & Biases: online where a key is configured and the server answers, else offline.

    Never prompts, never waits long. wandb's step is the step of the run. A resumed online run skips
    the rows that the server has. A resumed offline run is written again as a whole, and its former
    folder is deleted unless it was uploaded. Under `wandb agent` the agent chooses the run's id.
    """

    @quietly
    def start(self, run: LoggedRun, rows: list[Row]) -> None:
        if not installed("wandb"):
            raise ModuleNotFoundError("wandb is not installed: pip install wandb, or logger=none")
        self._keys: set[str] = set()
        self._result: Row = {}
        id_file = run.run_dir / "wandb_id.txt"
        run_id = id_file.read_text().strip() if run.resume and id_file.exists() else _new_id()
        prepare_environment()
        mode = _wandb_mode(run.config)
        try:
            self._run = _wandb_run(run, mode, run_id)
        except Exception as error:
            if mode != "online":
                raise
            log.warning(
                "wandb refused an online run (%s); this run is logged offline", _first_line(error)
            )
            # the failed start has used the id, and left a folder that wandb would upload empty
            for leftover in run.wandb_dir.glob(f"wandb/run-*-{run_id}"):
                shutil.rmtree(leftover, ignore_errors=True)
            mode, run_id = "offline", _new_id()
            self._run = _wandb_run(run, mode, run_id)
        run_id = self._run.id
        id_file.write_text(run_id + "\n")
        self._run.define_metric("tokens", hidden=True)
        self._replay(rows)
        current = Path(self._run.dir).parent
        # wandb adds -1, -2, ... to the name of a folder that another run of the same second took
        for folder in run.wandb_dir.glob(f"wandb/offline-run-*-{run_id}*"):
            # wandb marks an uploaded run by a file *.synced
            uploaded = any(folder.glob("*.synced"))
            if self.active and folder.name != current.name and not uploaded:
                shutil.rmtree(folder, ignore_errors=True)
        if mode == "online":
            self.url_or_hint = self._run.url
        elif mode == "offline":
            self.url_or_hint = f"wandb sync {current}"

    @quietly
    def log(self, metrics: dict[str, float | None], tokens: int, *, last: bool = False) -> None:
        row = numbers(metrics)
        step = row.pop("step")
        if step < self._run.starting_step:
            return
        row |= {name: row[key] for key, name in COMPARED.items() if key in row}
        for key in row.keys() - self._keys - {"tokens"}:
            summary = "min,last" if key in BEST else None
            self._run.define_metric(key, step_metric="tokens", summary=summary)
            self._keys.add(key)
        # what is logged after the last row belongs to the same step
        self._run.log(row | {"tokens": tokens}, step=step, commit=not last)

    @quietly
    def summary(self, values: Row) -> None:
        values = values | {name: values[key] for key, name in COMPARED.items() if key in values}
        # wandb itself keeps the lowest and the last value of the metrics in BEST
        self._result = {key: values[key] for key in values if key not in BEST}
        self._run.summary.update(self._result)
        if values["status"] != "completed":
            self._run.tags = (*self._run.tags, values["status"])
            reason = values.get("oom") or values.get("diagnosis") or {"message": None}
            self._run.notes = values.get("error") or reason["message"]

    @quietly
    def media(self, step: int, tokens: int, pictures: list[Path], *, sample: str | None) -> None:
        import wandb

        media: Row = {picture.stem: wandb.Image(str(picture)) for picture in pictures}
        if sample is not None:
            media["sample"] = wandb.Table(columns=["run", "text"], data=[[self._run.name, sample]])
        self._run.log(media | {"tokens": tokens}, step=step, commit=True)

    @quietly
    def finish(self, exit_code: int) -> None:
        # the last row of metrics has overwritten the whole run's speeds with its own
        self._run.summary.update(self._result)
        self._run.finish(exit_code=exit_code)


class TensorboardLogger(Logger):
    """TensorBoard event files in RUN/tensorboard, with tokens as the step."""

    @quietly
    def start(self, run: LoggedRun, rows: list[Row]) -> None:
        folder = str(run.run_dir / "tensorboard")
        self.url_or_hint = f"tensorboard --logdir {folder}"
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard then hides what was logged after these rows
        purge_step = rows[-1]["tokens"] + 1 if rows else None
        self._writer = SummaryWriter(log_dir=folder, purge_step=purge_step)

    @quietly
    def log(self, metrics: dict[str, float | None], tokens: int, *, last: bool = False) -> None:
        for key, value in numbers(metrics).items():
            self._writer.add_scalar(key, value, global_step=tokens)
        # TensorBoard's own thread writes every two minutes, too late for a killed run
        self._writer.flush()

    @quietly
    def summary(self, values: Row) -> None:
        lines = [f"    {key}: {value}" for key, value in values.items()]
        self._writer.add_text("summary", "\n".join(lines))

    @quietly
    def finish(self, exit_code: int) -> None:
        self._writer.close()


LOGGERS = {
    "wandb": WandbLogger,
    "tensorboard": TensorboardLogger,
    "none": Logger,
}


def installed(package: str) -> bool:
    # a folder of that name in the working directory, such as ./wandb with earlier runs, can also be
    # imported, but its spec has no origin
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def check_logger(config: LoggerConfig) -> None:
    """Raise ValueError for a logger that is not installed, or an invalid WANDB_MODE or project.

    wandb is the default, so a run without it only warns, later.
    """
    if config.name == "tensorboard" and not installed("tensorboard"):
        raise ValueError("logger=tensorboard needs pip install -e '.[tensorboard]'")
    if config.name == "wandb":
        _requested_mode(config)
        if len(config.project) > 128 or set(config.project) & {*"/\\#?%:"}:
            raise ValueError(
                f"logger.project={config.project}: wandb takes at most 128 characters, and none of "
                "/ \\ # ? % :; choose another name"
            )


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


MODES = ("online", "offline", "disabled")
# names that wandb no longer uses
FORMER_MODES = {"dryrun": "offline", "run": "online"}


def _requested_mode(config: LoggerConfig) -> str:
    """auto, online, offline or disabled, by the config or else by WANDB_MODE.

    Raises ValueError for any other WANDB_MODE.
    """
    variable = os.environ.get("WANDB_MODE", "")
    if config.mode != "auto" or not variable:
        return config.mode
    mode = FORMER_MODES.get(variable, variable)
    if mode == "shared":
        raise ValueError(
            "WANDB_MODE=shared lets several processes write one run, and a run here is one "
            "process; set WANDB_MODE=online"
        )
    if mode not in MODES:
        raise ValueError(
            f"WANDB_MODE={variable} is not one of: {', '.join(MODES)}; set one of these, or unset "
            "it"
        )
    return mode


def prepare_environment() -> None:
    # wandb reports its own errors and prints only if the user wants it
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    # wandb would not start with an empty or invalid mode, even where logger.mode overrules it
    if os.environ.get("WANDB_MODE") not in (*MODES, *FORMER_MODES):
        os.environ.pop("WANDB_MODE", None)


def _wandb_run(run: LoggedRun, mode: str, run_id: str) -> Any:
    import wandb

    # wandb.init() would prompt for a missing key at a terminal; this never prompts
    if mode == "online" and not wandb.login(prompt=False):
        raise ValueError("no API key")
    return wandb.init(
        project=run.config.project,
        entity=run.config.entity,
        dir=str(run.wandb_dir),
        id=run_id,
        # an offline run has no server that knows whether it exists
        resume="allow" if run.resume and mode == "online" else None,
        name=run.name,
        group=run.group,
        job_type="train",
        tags=run.tags,
        config=run.run_config,
        mode=mode,
        # without this, a second run of the same process would continue the first
        reinit="finish_previous",
        settings=wandb.Settings(
            init_timeout=INIT_TIMEOUT,
            finish_timeout=FINISH_TIMEOUT,
            console="off",
            silent=True,
        ),
    )


def _wandb_mode(config: LoggerConfig) -> str:
    """online, offline or disabled: the requested mode, or for auto, online where it can be."""
    import wandb

    mode = _requested_mode(config)
    if mode in ("offline", "disabled"):
        return mode
    # an environment variable, the settings or netrc may hold the key; the server is not asked
    if not wandb.login(prompt=False, verify=False):
        if mode != "auto":
            log.warning(
                "wandb has no API key (wandb login, or WANDB_API_KEY); this run is logged offline"
            )
        return "offline"
    base_url = wandb.setup().settings.base_url
    if not answers(base_url, PROBE_TIMEOUT):
        log.warning("wandb's server %s does not answer; this run is logged offline", base_url)
        return "offline"
    return "online"


def _new_id() -> str:
    """A run id of 8 characters, as wandb's own have."""
    return secrets.token_hex(4)
