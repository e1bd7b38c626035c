"""Runs with several starts: what a resume must not change, and what each start records.

Every checkpoint and summary.json hold the list "starts", one entry for each time that training
began:

    step         where it began: 0, or the step of the checkpoint that it resumed from
    started      when, in seconds since 1970
    seconds      how long it ran, up to its end or the checkpoint that the next start resumed from
    attention    [step, name] of each attention that it used or planned to use, the first at `step`;
                 a name includes the options that are not at their defaults
    changed      {setting: [before, now]} against the checkpoint that it resumed from
    data         fingerprint of the data
    commit, on   of this program, and the GPU or CPU
    init_from    name and SHA-256 of the weights it began with, if they are not random
    code         {module: SHA-256} of the user's attention and score_mod, if there are any

Steps taken after the checkpoint that a later start resumed from are not recorded.
"""

import dataclasses
import logging
import math
import re
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from attention import BACKENDS
from config import AttentionConfig, RunConfig
from data.token_file import sha256_of
from training.launch.command_line import key_of, quoted
from training.record.files import Row, write_file
from training.record.names import WATCHING, as_typed, attention_names, recorded_starts
from training.record.retention import meta_of, newest_first

if TYPE_CHECKING:
    from training.loop.run import Run

log = logging.getLogger("tilegpt")

# settings that say where a run's files lie
PLACES = ("resume",)


def check_resume(config: RunConfig, *, asked: Iterable[str]) -> None:
    """Raise ValueError for a resume under settings that nobody asked for.

    They would change silently if overrides.yaml has lost a line, or conf/ was edited since.
    `asked` are the overrides of this command line.
    """
    if config.resume is None:
        return
    run_dir = Path(config.resume)
    keys = {key_of(override) for override in asked}
    if "init_from" in keys:
        raise ValueError(
            f"init_from={config.init_from} begins a run, and resume={run_dir} goes on with the "
            "weights of one; leave one of them out"
        )
    changed = differences(_settings_before(run_dir), dataclasses.asdict(config))
    if "seq_len" in changed:
        changed.pop("model.max_seq_len", None)  # it follows seq_len
    changed = {key: pair for key, pair in changed.items() if not _asked_for(key, keys)}
    if not changed:
        return
    changes = ", ".join(
        f"{key} was {_literal(then)} and is {_literal(now)}" for key, (then, now) in changed.items()
    )
    before, now = (
        shlex.join(f"{key}={_literal(pair[i])}" for key, pair in changed.items()) for i in (0, 1)
    )
    raise ValueError(
        f"resume={run_dir}: {changes} now, which nobody asked for: overrides.yaml there or conf/ "
        f"here has changed since; to go on as before add {before}, or else {now}"
    )


def resumed_starts(meta: Row, config: Row, start: Row) -> list[Row]:
    """All starts of a run that resumes from the checkpoint with this meta.json.

    `start` is the newest; its step, attention and changes are filled in. Raises ValueError if no
    step is left, if the data differ under the same settings, or if the attention would be changed
    at a step in the past.
    """
    step, run_dir = meta["step"], config["resume"]
    if step >= config["steps"]:
        raise ValueError(
            f"resume={run_dir} has done {step} steps of steps={config['steps']}; ask for more "
            "with steps=N"
        )
    changed = differences(meta["config"], config)
    switch_at = config["attention"]["switch_at"]
    changes_attention = any(key.startswith("attention.") for key in changed)
    if switch_at is not None and switch_at <= step and changes_attention:
        raise ValueError(
            f"attention.switch_at={switch_at} lies behind step {step}, from which "
            f"resume={run_dir} goes on, and past steps cannot be changed; add "
            "attention.switch_at=null to go on with attention=NAME at once, or name a later step"
        )
    earlier = meta["starts"]
    data, data_before = start["data"], earlier[-1]["data"]
    changes_data = any(key.startswith(("data.", "tokenizer.")) for key in changed)
    if data != data_before and not changes_data:
        raise ValueError(
            f"resume={run_dir}: the data have changed since: data={config['data']['source']} had "
            f"the fingerprint {data_before} and has {data} now; put the former data back, or "
            "start a new run"
        )
    known = {name: code for each in earlier for name, code in each.get("code", {}).items()}
    for name, code in start.get("code", {}).items():
        if known.get(name, code) != code:
            changed[f"the code of {name}"] = [known[name], code]
            log.warning("the code of %s has changed since this run's last start", name)
    *_, current = (name for begins, name in start["attention"] if begins <= step)
    later = [[begins, name] for begins, name in start["attention"] if begins > step]
    attention = [[step, current], *later]
    return [*earlier, start | {"step": step, "attention": attention, "changed": changed}]


class Start(NamedTuple):
    """Where the newest start of a run begins."""

    step: int  # steps that are done
    tokens: int  # of those steps
    starts: list[Row]  # the entries of all starts, this one last


FIRST_START = Start(0, 0, [])


def new_start(run: "Run", started: float) -> Row:
    """The entry of a first start; for a resume, resumed_starts() completes it."""
    hardware = run.environment["hardware"]
    optional = {"init_from": run.init_from, "code": code_of(run.config.attention)}
    return {
        "step": 0,
        "started": started,
        "attention": [list(each) for each in attention_names(run.config.attention)],
        "changed": {},
        "data": run.data.fingerprint,
        "commit": run.environment["commit"],
        "on": hardware["gpu"] or hardware["cpu"],
    } | {name: x for name, x in optional.items() if x}


def code_of(chosen: AttentionConfig) -> dict[str, str]:
    """The first digits of the SHA-256 of the file of each module in which the user's attention or
    score_mod is, by the module's name. Modules that these import are not looked at.
    """
    names = (chosen.name, chosen.switch_to, chosen.score_mod)
    modules = {name.partition(":")[0] for name in names if name and ":" in name}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(modules)}
    return {name: sha256_of(Path(file))[:16] for name, file in files.items() if file}


def where_it_began(error: BaseException, run_dir: Path) -> str:
    """What to add to an error if a module that Python did not find lies where the run began."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ModuleNotFoundError):
        cause = cause.__cause__
    if cause is None or not cause.name:
        return ""
    try:  # Hydra's file, which only the first start writes
        recorded = yaml.safe_load((run_dir / ".hydra/hydra.yaml").read_bytes())
        folder = Path(recorded["hydra"]["runtime"]["cwd"])
    except (OSError, yaml.YAMLError, LookupError, TypeError):
        return ""
    top = cause.name.partition(".")[0]
    if not (folder / f"{top}.py").is_file() and not (folder / top).is_dir():
        return ""
    return f"; the run began in {folder}, which has it"


def stop_clock(starts: list[Row]) -> float:
    """Record how long the newest start has run; returns the seconds of all starts."""
    starts[-1]["seconds"] = time.time() - starts[-1]["started"]
    return sum(start.get("seconds", 0) for start in starts)


def write_settings(run_dir: Path, config: Row, overrides: list[str]) -> None:
    """Write RUN/config.yaml and overrides.yaml. A reader sees the old or the new file, whole."""
    for name, content in (("config.yaml", config), ("overrides.yaml", overrides)):
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=math.inf)
        write_file(run_dir / name, text)


def changes_in_words(summary: Row) -> str:
    """The settings that resumes of a run changed, if they change what the run learns."""
    resumes = []
    for start in recorded_starts(summary):
        settings = ", ".join(
            f"{key}={_literal(now)} ({_literal(then)} before)"
            for key, (then, now) in start["changed"].items()
            if not key.startswith(WATCHING)
        )
        if settings:
            resumes.append(f"resumed at step {start['step']} with {settings}")
    return "; ".join(resumes)


def differences(then: Row, now: Row) -> dict[str, list[Any]]:
    """{key: [then, now]} of nested settings, with keys such as attention.name.

    Leaves out settings that only one version of the program has, and options of an attention that
    are at their defaults.
    """
    before = dict(_flat(_without_defaults(then)))
    return {
        key: [before[key], value]
        for key, value in _flat(_without_defaults(now))
        # as strings: a NaN does not differ from itself
        if key in before and key not in PLACES and repr(before[key]) != repr(value)
    }


def _without_defaults(settings: Row) -> Row:
    """The settings with None for each option of the attention that is at its default."""
    chosen = settings.get("attention", {})
    backend = BACKENDS.get(chosen.get("name"))
    if backend is None:
        return settings
    defaults = {name: None for name, value in backend.options.items() if chosen.get(name) == value}
    return settings | {"attention": chosen | defaults}


def _flat(settings: Row, prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in settings.items():
        # the options of an attention have no fixed names, so they count as one value
        if isinstance(value, dict) and not key.endswith("options"):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _asked_for(key: str, asked: set[str]) -> bool:
    # an experiment may set anything
    return bool({key, key.partition(".")[0], "experiment"} & asked) or any(
        each.startswith(f"{key}.") for each in asked
    )


def _settings_before(run_dir: Path) -> Row:
    """The settings of the last start, or if config.yaml is damaged, of the last checkpoint."""
    return load_yaml(run_dir / "config.yaml") or next(
        (meta_of(folder).get("config", {}) for folder in newest_first(run_dir)), {}
    )


def load_yaml(path: Path) -> Row:
    """The mapping in a YAML file; {} if there is none."""
    try:
        value = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def _literal(value: Any) -> str:
    """The value as Hydra reads it on a command line."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_literal, value)) + "]"
    if isinstance(value, str) and not re.fullmatch(r"[\w./+-]+", value):
        return quoted(value)
    return as_typed(value)
