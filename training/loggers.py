"""Where metrics go besides metrics.jsonl: wandb, TensorBoard, Trackio, or nowhere.

A logger mirrors what is already on disk, so it never stops a training: the first failure becomes
one warning, and from then on the logger is silent. Tokens are the x axis everywhere, since runs of
a sweep differ in batch size and sequence length.

A run that was killed may have logged rows after its last checkpoint, which the resumed run writes
again, and may have lost some before it. So a resumed logger is brought in line with metrics.jsonl,
and then has every row once.
"""

import contextlib
import functools
import importlib.util
import logging
import math
import netrc
import os
import secrets
import shutil
import socket
import string
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from config import LoggerConfig
from training.metrics import read_metrics

log = logging.getLogger("tilegpt")

# seconds: to reach wandb's server at all, to start an online run there, and to upload what is left
# at the end
PROBE_TIMEOUT, INIT_TIMEOUT, FINISH_TIMEOUT = 2.0, 20, 120.0


def build_logger(
    config: LoggerConfig,
    *,
    run_dir: Path,
    wandb_dir: Path,
    name: str,
    group: str | None,
    tags: list[str],
    run_config: dict[str, Any],
    resume: bool,
) -> "Logger":
    """The logger that `config` names.

    `wandb_dir` is the folder that gets wandb's own `wandb/` folder: one for all runs of a sweep.
    Raises ValueError where logger=tensorboard or logger=trackio is not installed; whatever else
    goes wrong is a warning.
    """
    check_logger(config)
    # the rows that the run goes on after
    rows = read_metrics(run_dir / "metrics.jsonl") if resume else []
    if config.name == "wandb":
        return WandbLogger(
            config,
            rows,
            run_dir=run_dir,
            wandb_dir=wandb_dir,
            name=name,
            group=group,
            tags=tags,
            run_config=run_config,
            resume=resume,
        )
    if config.name == "tensorboard":
        return TensorboardLogger(rows, run_dir=run_dir)
    if config.name == "trackio":
        return TrackioLogger(
            config, rows, name=name, group=group, run_config=run_config, resume=resume
        )
    return Logger()


def quietly(method: Callable) -> Callable:
    """Turn the first failure of a logger into one warning and switch the logger off."""

    @functools.wraps(method)
    def wrapper(self: "Logger", *args: Any, **kwargs: Any) -> None:
        if not self.active:
            return
        try:
            method(self, *args, **kwargs)
        # a logger may fail in any way a network, a server or a library can, and none of them may
        # cost the run
        except Exception as error:
            self.active = False
            log.warning(
                "%s stopped logging (%s); metrics.jsonl goes on",
                type(self).__name__,
                _first_line(error),
            )

    return wrapper


class Logger:
    """Logs nowhere; the base of those that do."""

    active = True
    url_or_hint: str | None = None  # where a person finds the run, once it is logged

    def log(self, metrics: dict[str, float | None], tokens: int) -> None:
        """One row of metrics after `tokens` training tokens. Values that are None are left out."""

    def summary(self, values: dict[str, Any]) -> None:
        """The run's result."""

    def finish(self, exit_code: int) -> None:
        """End the run."""

    def _replay(self, rows: list[dict[str, Any]]) -> None:
        """Log what metrics.jsonl has. The file says of a NaN or an infinity only that it was
        one.
        """
        for row in rows:
            values = {key: value for key, value in row.items() if key != "nonfinite"}
            self.log(values | dict.fromkeys(row.get("nonfinite", ()), math.nan), row["tokens"])


class WandbLogger(Logger):
    """Weights & Biases: online where a key is configured and the server answers, else offline.
    Never prompts, never waits long.

    wandb's step is the number of the row in metrics.jsonl. A resumed online run leaves out the rows
    that the server has. A resumed offline run is written anew, whole, and takes the place of its
    folder that was not uploaded yet.
    """

    def __init__(self, config: LoggerConfig, rows: list[dict[str, Any]], **run: Any):
        self._run: Any = None
        self._keys: set[str] = set()
        self._rows = 0  # of metrics.jsonl that came by
        self._start(config, rows, **run)

    @quietly
    def _start(
        self,
        config: LoggerConfig,
        rows: list[dict[str, Any]],
        *,
        run_dir: Path,
        wandb_dir: Path,
        name: str,
        group: str | None,
        tags: list[str],
        run_config: dict[str, Any],
        resume: bool,
    ) -> None:
        if not installed("wandb"):
            raise ModuleNotFoundError("wandb is not installed: pip install wandb, or logger=none")
        # no reports of its own errors and no chatter, unless the user asks for them
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        if os.environ.get("WANDB_MODE") not in (*MODES, *FORMER_MODES):
            os.environ.pop(
                "WANDB_MODE", None
            )  # an empty one, or one that logger.mode overrules: wandb would not start
        import wandb

        id_file = Path(run_dir) / "wandb_id.txt"
        run_id = id_file.read_text().strip() if resume and id_file.exists() else _new_id()

        def start(mode: str, run_id: str) -> Any:
            # wandb.init() would ask for a missing key at a terminal; this look-up never asks
            if mode == "online" and not wandb.login(prompt=False):
                raise ValueError("no API key")
            return wandb.init(
                project=config.project,
                entity=config.entity,
                dir=str(wandb_dir),
                id=run_id,
                # an offline run has no server to ask whether it exists
                resume="allow" if resume and mode == "online" else None,
                name=name,
                group=group,
                job_type="train",
                tags=tags,
                config=run_config,
                mode=mode,
                # without this a second run of the same process would be the first one
                reinit="finish_previous",
                settings=wandb.Settings(
                    init_timeout=INIT_TIMEOUT,
                    finish_timeout=FINISH_TIMEOUT,
                    console="off",
                    silent=True,
                ),
            )

        mode = _wandb_mode(config)
        try:
            self._run = start(mode, run_id)
        except Exception as error:
            if mode != "online":
                raise
            log.warning(
                "wandb refused an online run (%s); this run is logged offline", _first_line(error)
            )
            # the failed start keeps its id, and leaves a folder that would be uploaded as an empty
            # run
            for leftover in (Path(wandb_dir) / "wandb").glob(f"run-*-{run_id}"):
                shutil.rmtree(leftover, ignore_errors=True)
            mode, run_id = "offline", _new_id()
            self._run = start(mode, run_id)
        id_file.write_text(run_id + "\n")
        self._run.define_metric("tokens", hidden=True)
        self._replay(rows)
        for folder in (Path(wandb_dir) / "wandb").glob(f"offline-run-*-{run_id}"):
            # *.synced is wandb's mark of what was uploaded
            if (
                self.active
                and folder.name != Path(self._run.dir).parent.name
                and not list(folder.glob("*.synced"))
            ):
                shutil.rmtree(folder, ignore_errors=True)
        if mode != "disabled":
            self.url_or_hint = (
                self._run.url if mode == "online" else f"wandb sync {Path(self._run.dir).parent}"
            )

    @quietly
    def log(self, metrics: dict[str, float | None], tokens: int) -> None:
        step, self._rows = self._rows, self._rows + 1
        if step < self._run.starting_step:
            return
        row = {key: value for key, value in metrics.items() if value is not None}
        for key in row.keys() - self._keys - {"tokens"}:
            self._run.define_metric(key, step_metric="tokens")
            self._keys.add(key)
        self._run.log(row | {"tokens": tokens}, step=step, commit=True)

    @quietly
    def summary(self, values: dict[str, Any]) -> None:
        self._run.summary.update(values)

    @quietly
    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class TensorboardLogger(Logger):
    """TensorBoard event files in RUN/tensorboard, with tokens as the step."""

    def __init__(self, rows: list[dict[str, Any]], *, run_dir: Path):
        self._folder = Path(run_dir) / "tensorboard"
        self.url_or_hint = f"tensorboard --logdir {self._folder}"
        # what was logged after these rows, TensorBoard then shows no more
        self._start(rows[-1]["tokens"] + 1 if rows else None)

    @quietly
    def _start(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(self._folder), purge_step=purge_step)

    @quietly
    def log(self, metrics: dict[str, float | None], tokens: int) -> None:
        for key, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(key, value, global_step=tokens)
        # its own thread would write within two minutes, which a killed run may not have
        self._writer.flush()

    @quietly
    def summary(self, values: dict[str, Any]) -> None:
        self._writer.add_text(
            "summary", "\n".join(f"    {key}: {value}" for key, value in values.items())
        )

    @quietly
    def finish(self, exit_code: int) -> None:
        self._writer.close()


class TrackioLogger(Logger):
    """Trackio, a local dashboard: `trackio show`."""

    def __init__(self, config: LoggerConfig, rows: list[dict[str, Any]], **run: Any):
        self.url_or_hint = f"trackio show --project {config.project}"
        self._start(config, rows, **run)

    @quietly
    def _start(
        self,
        config: LoggerConfig,
        rows: list[dict[str, Any]],
        *,
        name: str,
        group: str | None,
        run_config: dict[str, Any],
        resume: bool,
    ) -> None:
        import trackio

        self._run = trackio.init(
            project=config.project,
            name=name,
            group=group,
            config=run_config,
            resume="allow" if resume else "never",
        )
        # Trackio has no other way to tell how far a run has come
        self._next_tokens = self._run._next_step
        self._replay(rows)

    @quietly
    def log(self, metrics: dict[str, float | None], tokens: int) -> None:
        if tokens < self._next_tokens:
            return
        row = {
            key: value
            for key, value in metrics.items()
            if value is not None and math.isfinite(value)
        }
        self._run.log(row | {"tokens": tokens}, step=tokens)

    @quietly
    def finish(self, exit_code: int) -> None:
        self._run.finish()


def installed(package: str) -> bool:
    # a folder of that name in the working directory, such as ./wandb with earlier runs, imports
    # too, but has no file of its own
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def check_logger(config: LoggerConfig) -> None:
    """Raise ValueError for a logger that was asked for and is not there (wandb, the default, is a
    warning later), or for a WANDB_MODE that no run has.
    """
    if config.name in ("tensorboard", "trackio") and not installed(config.name):
        raise ValueError(f"logger={config.name} needs pip install -e '.[{config.name}]'")
    if config.name == "wandb":
        _asked_mode(config)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


MODES = ("online", "offline", "disabled")
# wandb's former words
FORMER_MODES = {"dryrun": "offline", "run": "online"}


def _asked_mode(config: LoggerConfig) -> str:
    """auto, online, offline or disabled: what the config says, else what WANDB_MODE says. Raises
    ValueError for another one.
    """
    told = os.environ.get("WANDB_MODE", "")
    if config.mode != "auto" or not told:
        return config.mode
    wanted = FORMER_MODES.get(told, told)
    if wanted == "shared":
        raise ValueError(
            "WANDB_MODE=shared lets several processes write one run, and a run here is one "
            "process; set WANDB_MODE=online"
        )
    if wanted not in MODES:
        raise ValueError(
            f"WANDB_MODE={told} is not one of: {', '.join(MODES)}; set one of these, or unset it"
        )
    return wanted


def _wandb_mode(config: LoggerConfig) -> str:
    """online, offline or disabled: what was asked for, else online where that is possible."""
    import wandb

    wanted = _asked_mode(config)
    if wanted in ("offline", "disabled"):
        return wanted
    settings = wandb.setup().settings
    if not (settings.api_key or has_key(settings.base_url)):
        if wanted != "auto":
            log.warning(
                "wandb has no API key (wandb login, or WANDB_API_KEY); this run is logged offline"
            )
        return "offline"
    if not reachable(settings.base_url):
        log.warning(
            "wandb's server %s does not answer; this run is logged offline", settings.base_url
        )
        return "offline"
    return "online"


def _new_id() -> str:
    """A run id of the form wandb makes: 8 characters, none of which its paths forbid."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def has_key(base_url: str) -> bool:
    """Whether wandb would find a key without asking for one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    # the default server accepts the keys of its former address too
    hosts = (urlsplit(base_url).netloc, "api.wandb.ai")
    paths = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for path in paths:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            entries = netrc.netrc(Path(path).expanduser())
            if any(host in entries.hosts for host in hosts):
                return True
    return False


def reachable(base_url: str) -> bool:
    """Whether a connection to the server, or to the proxy in front of it, opens within
    PROBE_TIMEOUT seconds.

    wandb itself retries a dead network for as long as init_timeout allows.
    """
    url = urlsplit(base_url)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and url.hostname and not urllib.request.proxy_bypass(url.hostname):
        url = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    address = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
    opened = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError):
            socket.create_connection(address, timeout=PROBE_TIMEOUT).close()
            opened.set()

    # in a thread of its own because the look-up of a name takes no timeout
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT)
    return opened.is_set()
