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
    tokenizer    fingerprint of the tokenizer alone; null if the data are no text
    commit, on   of this program, and the GPU or CPU
    init_from    name and SHA-256 of the weights it began with, if they are not random

Steps taken after the checkpoint that a later start resumed from are not recorded.
"""

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from config import BACKEND_OPTIONS, AttentionConfig, RunConfig
from data.interface import TrainingData
from training.record.clock import PHASES
from training.record.files import CheckpointError, Row, newest_meta
from training.record.names import as_typed, attention_names

log = logging.getLogger("tilegpt")

# settings of the model that do not change what its weights mean; max_seq_len may change the shape
# of learned positions, which is refused when they are loaded
FREE_SETTINGS = ("model.name", "model.dropout", "model.checkpoint", "model.max_seq_len")


def check_resume(config: RunConfig, *, asked: set[str]) -> None:
    """Raise ValueError for a resume under settings that do not fit the checkpoint, or that nobody
    asked for: conf/ was edited since.

    `asked` are the keys of this command line.
    """
    if config.resume is None:
        return
    run_dir = Path(config.resume)
    if "init_from" in asked:
        raise ValueError(
            f"init_from={config.init_from} begins a run, and resume={run_dir} goes on with the "
            "weights of one; leave one of them out"
        )
    if "seq_len" in asked:
        asked = asked | {"model.max_seq_len"}  # which follows it
    changed = differences(newest_meta(run_dir)["config"], asdict(config))
    # weights that would mean another model, or state of another optimizer
    for key, (before, present) in changed.items():
        if key == "optim.name" or (key.startswith("model.") and key not in FREE_SETTINGS):
            raise CheckpointError(
                f"resume={run_dir}: {key} is {before} in the checkpoint and {present} now; keep "
                f"{key.removesuffix('.name')}={as_typed(before)}, or start a new run"
            )
    unasked = {key: pair for key, pair in changed.items() if not _asked_for(key, asked)}
    if unasked:
        raise ValueError(
            f"resume={run_dir}: {in_words(unasked)}, which nobody asked for: conf/ has changed "
            "since; name each on the command line with the value to go on with"
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
    if "tokenizer.name" not in changed:
        check_tokenizer(run_dir, meta, start["tokenizer"])
    data, data_before = start["data"], meta["starts"][-1]["data"]
    changes_data = any(key.startswith(("data.", "tokenizer.")) for key in changed)
    if data != data_before and not changes_data:
        raise ValueError(
            f"resume={run_dir}: the data have changed since: data={config['data']['source']} had "
            f"the fingerprint {data_before} and has {data} now; put the former data back, or name "
            "other data to go on with, such as data=text data.path=A_COPY_OF_THE_PRESENT_ONES"
        )
    *_, current = (name for begins, name in start["attention"] if begins <= step)
    later = [[begins, name] for begins, name in start["attention"] if begins > step]
    start |= {"step": step, "attention": [[step, current], *later], "changed": changed}
    if words := in_words(changed):
        log.info(f"going on at step {step} with {words}")
    return [*meta["starts"], start]


def check_tokenizer(run_dir: Path, meta: Row, fingerprint: str | None) -> None:
    """Raise ValueError unless the checkpoint with this meta.json was trained with the tokenizer of
    this fingerprint: another gives the same numbers to other words.
    """
    trained_with = meta["starts"][-1]["tokenizer"]
    if fingerprint != trained_with:
        raise ValueError(
            f"{run_dir}: tokenizer={meta['config']['tokenizer']['name']} has changed since: it had "
            f"the fingerprint {trained_with} and has {fingerprint} now; put the former vocabulary "
            "back"
        )


class Start(NamedTuple):
    """Where the newest start of a run begins."""

    step: int  # steps that are done
    tokens: int  # of those steps


def new_start(
    chosen: AttentionConfig, data: TrainingData, environment: Row, init_from: Row | None
) -> Row:
    """The entry of a first start; for a resume, resumed_starts() completes it."""
    hardware = environment["hardware"]
    entry = {
        "step": 0,
        "started": PHASES.began,
        "attention": [list(each) for each in attention_names(chosen)],
        "changed": {},
        "data": data.fingerprint,
        "tokenizer": data.tokenizer and data.tokenizer.fingerprint,
        "commit": environment["commit"],
        "on": hardware["gpu"] or hardware["cpu"],
    }
    return entry | ({"init_from": init_from} if init_from else {})


def stop_clock(starts: list[Row]) -> float:
    """Record how long the newest start has run; returns the seconds of all starts."""
    starts[-1]["seconds"] = time.time() - starts[-1]["started"]
    return sum(start.get("seconds", 0) for start in starts)


def changes_in_words(summary: Row) -> str:
    """The settings that resumes of a run changed."""
    return "; ".join(
        f"resumed at step {start['step']} with {in_words(start['changed'])}"
        for start in summary.get("starts") or []
        if start["changed"]
    )


def in_words(changed: dict[str, list[Any]]) -> str:
    """attention.name=sdpa (tiled before), steps=600 (500 before)"""
    pairs = changed.items()
    return ", ".join(
        f"{key}={as_typed(now)} ({as_typed(then)} before)" for key, (then, now) in pairs
    )


def differences(then: Row, now: Row) -> dict[str, list[Any]]:
    """{key: [then, now]} of nested settings, with keys such as attention.name.

    An option of an attention that is at its default does not differ from None, nor resume= at all.
    """
    before = flat(then)
    return {
        key: [before[key], value]
        for key, value in flat(now).items()
        # as strings: a NaN does not differ from itself
        if key != "resume" and repr(before[key]) != repr(value)
    }


def flat(settings: Row, prefix: str = "") -> Row:
    """Nested settings by keys such as attention.name; None for an option at its default."""
    found = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        # the options of an attention have no fixed names, so they count as one value
        if isinstance(value, dict) and not key.endswith("options"):
            found |= flat(value, f"{key}.")
        else:
            is_default = prefix == "attention." and value == BACKEND_OPTIONS.get(name)
            found[key] = None if is_default else value
    return found


def _asked_for(key: str, asked: set[str]) -> bool:
    """Whether the keys `asked` name this one, its group or a part of it."""
    # an experiment may set anything
    return "experiment" in asked or any(
        f"{key}.".startswith(f"{each}.") or each.startswith(f"{key}.") for each in asked
    )
