"""A run in several starts: what a resumed one must share with what came before, and what is
recorded of each.

Every checkpoint and summary.json hold the list "starts", one entry for each time that training
began:

    step         after which it began: 0, or that of the checkpoint it went on from
    started      when, in seconds since 1970
    seconds      how long it ran, to its end or to the checkpoint that the next one went on from
    attention    [step, name] of each attention it used or was to use, the first from its own step
                 on
    changed      {setting: [before, now]} against the checkpoint it went on from
    data         fingerprint of the data
    commit, on   of this program, and the GPU or CPU

What a start did after the checkpoint that the next one went on from is no part of the run, and not
here.
"""

import dataclasses
import math
import re
import shlex
import time
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from attention import BACKENDS
from config import RunConfig
from training.command_line import key_of, quoted
from training.metrics import write_file
from training.retention import meta_of, newest_first

if TYPE_CHECKING:
    from training.run import Run

# where a run lies on the disk
PLACES = ("resume", "data.cache_dir")
# how it is watched
WATCHING = (
    "logger.",
    "eval_",
    "diagnose_every",
    "log_every",
    "checkpoint_every",
    "keep",
    "sample_tokens",
)


def check_resume(config: RunConfig, *, asked: Iterable[str]) -> None:
    """Raise ValueError for a resume under settings that nobody asked for.

    Where overrides.yaml has lost a line, or conf/ has changed since, a run would go on as another
    one without a word. `asked` are the overrides of this command line.
    """
    if config.resume is None:
        return
    run_dir = Path(config.resume)
    keys = {key_of(override) for override in asked}
    changed = differences(_settings_before(run_dir), dataclasses.asdict(config))
    if "seq_len" in changed:
        changed.pop("model.max_seq_len", None)  # which follows it
    changed = {key: pair for key, pair in changed.items() if not _asked_for(key, keys)}
    if changed:
        told = ", ".join(
            f"{key} was {_word(then)} and is {_word(now)}" for key, (then, now) in changed.items()
        )
        before, now = (
            shlex.join(f"{key}={_word(pair[i])}" for key, pair in changed.items()) for i in (0, 1)
        )
        raise ValueError(
            f"resume={run_dir}: {told} now, which nobody asked for: overrides.yaml there or conf/ "
            "here has changed since; "
            f"to go on as before add {before}, or else {now}"
        )


def resumed_starts(
    meta: dict[str, Any], config: dict[str, Any], start: dict[str, Any]
) -> list[dict[str, Any]]:
    """The starts of a run that `start`, its newest, takes over from a checkpoint with this
    meta.json; fills in its step and changes.

    Raises ValueError where the run would not be the one it says it is: no step left to do, other
    data under the same settings, a switch of the attention in the past.
    """
    step, run_dir = meta["step"], config["resume"]
    if step >= config["steps"]:
        raise ValueError(
            f"resume={run_dir} has done {step} steps of steps={config['steps']}; ask for more "
            "with steps=N"
        )
    changed = differences(meta["config"], config)
    switch_at = config["attention"]["switch_at"]
    if (
        switch_at is not None
        and switch_at <= step
        and any(key.startswith("attention.") for key in changed)
    ):
        raise ValueError(
            f"attention.switch_at={switch_at} lies behind step {step}, from which "
            f"resume={run_dir} goes on, and what was done before "
            "cannot be changed; add attention.switch_at=null to go on with attention=NAME at "
            "once, or name a later step"
        )
    earlier = meta.get("starts") or [_only_start(meta["config"])]
    read = earlier[-1].get("data", start["data"])
    if read != start["data"] and not any(
        key.startswith(("data.", "tokenizer.")) for key in changed
    ):
        raise ValueError(
            f"resume={run_dir}: the data have changed since: data={config['data']['source']} had "
            f"the fingerprint {read} and has "
            f"{start['data']} now; put back what the run has read, or add "
            f"data.fingerprint={start['data']} to go on with what is there now"
        )
    *_, current = (name for begins, name in start["attention"] if begins <= step)
    later = [[begins, name] for begins, name in start["attention"] if begins > step]
    return [
        *earlier,
        start | {"step": step, "attention": [[step, current], *later], "changed": changed},
    ]


def new_start(run: "Run", started: float) -> dict[str, Any]:
    """The entry of a run's first start, or of a resume before resumed_starts() completes it."""
    hardware = run.environment["hardware"]
    return {
        "step": 0,
        "started": started,
        "attention": [[step, backend.name] for step, backend in run.schedule.items()],
        "changed": {},
        "data": run.data.fingerprint,
        "commit": run.environment["commit"],
        "on": hardware["gpu"] or hardware["cpu"],
    }


def stop_clock(starts: list[dict[str, Any]]) -> float:
    """Write into the newest start how long it has run; returns the seconds of all of them."""
    starts[-1]["seconds"] = time.time() - starts[-1]["started"]
    return sum(start.get("seconds", 0) for start in starts)


def write_settings(run_dir: Path, config: dict[str, Any], overrides: list[str]) -> None:
    """RUN/config.yaml and overrides.yaml, each the old one or the new one, whole."""
    for name, content in (("config.yaml", config), ("overrides.yaml", overrides)):
        write_file(
            run_dir / name,
            yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=math.inf),
        )


def attention_steps(row: dict[str, Any]) -> list[tuple[int, str]]:
    """Each attention that a run has used, by its summary.json, with the step after which it
    began.
    """
    starts, done = _starts(row), row.get("steps_done")
    done = done if isinstance(done, int) else math.inf
    used: list[tuple[int, str]] = []
    for start, following in zip_longest(starts, starts[1:]):
        until = min(done, following["step"]) if following else done
        for step, name in start["attention"]:
            if not used or (step < until and name != used[-1][1]):
                used.append((step, name))
    if not used:  # of an earlier version, or never new_start
        used.append((0, str(row.get("attention"))))
        if isinstance(row.get("switch_at"), int) and row["switch_at"] < done:
            used.append((row["switch_at"], str(row.get("switch_to"))))
    return used


def attention_in_words(row: dict[str, Any]) -> str:
    """tiled, or where it changed on the way: no_rescale, tiled after step 400."""
    return ", ".join(
        name + (f" after step {step}" if step else "") for step, name in attention_steps(row)
    )


def changes_in_words(row: dict[str, Any]) -> str:
    """With what other settings a run was resumed, by its summary.json; empty where there were none
    that change what it learns.
    """
    told = []
    for start in _starts(row):
        changed = {
            key: pair for key, pair in start["changed"].items() if not key.startswith(WATCHING)
        }
        if changed:
            settings = ", ".join(
                f"{key}={_word(now)} ({_word(then)} before)" for key, (then, now) in changed.items()
            )
            told.append(f"resumed at step {start['step']} with {settings}")
    return "; ".join(told)


def differences(then: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """{key: [then, now]} of nested settings, as attention.name. Left out are settings that only one
    version of the program has, and an attention's options where they have their defaults.
    """
    flat_then, flat_now = (dict(_flat(_without_defaults(settings))) for settings in (then, now))
    keys = [key for key in flat_now if key in flat_then and key not in PLACES]
    # a NaN is no other than itself
    return {
        key: [flat_then[key], flat_now[key]]
        for key in keys
        if repr(flat_then[key]) != repr(flat_now[key])
    }


def _without_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with None for an option of the attention that has its default: earlier versions
    recorded None.
    """
    chosen = settings.get("attention", {})
    backend = BACKENDS.get(chosen.get("name"))
    if backend is None:
        return settings
    defaults = {name: None for name, value in backend.options.items() if chosen.get(name) == value}
    return settings | {"attention": chosen | defaults}


def _only_start(config: dict[str, Any]) -> dict[str, Any]:
    """What can be known of a run by an earlier version of this program, whose checkpoints have no
    "starts".
    """
    chosen = config.get("attention", {})
    switch = (
        [] if chosen.get("switch_at") is None else [[chosen["switch_at"], chosen.get("switch_to")]]
    )
    return {"step": 0, "attention": [[0, chosen.get("name")], *switch], "changed": {}}


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in settings.items():
        # the options of an attention have no fixed names: one value
        if isinstance(value, dict) and not key.endswith("options"):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _asked_for(key: str, asked: set[str]) -> bool:
    # an experiment may set anything
    return bool({key, key.partition(".")[0], "experiment"} & asked) or any(
        each.startswith(f"{key}.") for each in asked
    )


def _settings_before(run_dir: Path) -> dict[str, Any]:
    """Those of the last start; where its config.yaml is damaged, those of the last checkpoint."""
    return load_yaml(run_dir / "config.yaml") or next(
        (meta_of(folder).get("config", {}) for folder in newest_first(run_dir)), {}
    )


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; empty where there is none."""
    try:
        value = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def _starts(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a summary.json; none where it has none, or others than this program writes."""
    try:
        return [
            {
                "step": int(start["step"]),
                "attention": [(int(step), str(name)) for step, name in start["attention"]],
                "changed": {key: (then, now) for key, (then, now) in start["changed"].items()},
            }
            for start in row["starts"]
        ]
    except (TypeError, ValueError, KeyError, AttributeError):
        return []


def _word(value: Any) -> str:
    """As Hydra reads it on a command line."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_word(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_word, value)) + "]"
    if isinstance(value, str) and not re.fullmatch(r"[\w./+-]+", value):
        return quoted(value)
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
