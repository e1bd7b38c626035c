"""Settings that a run does not read: refused if a user set them, else left out with a message.

Many settings belong to some choices only: block_kv to the tile loops, data.path to data=text. If
such a setting were ignored silently, two runs that differ only in it would look different.
"""

import logging
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from attention import BACKENDS, get_backend
from config import BACKEND_OPTIONS, SYNTHETIC_SOURCES, TEXT_SOURCES, AttentionConfig, RunConfig
from training.launch.command_line import asked_keys, cli_overrides, where_it_was_typed
from training.record.loggers import check_logger
from training.record.names import attention_names
from training.record.starts import check_resume

log = logging.getLogger("tilegpt")

# {setting: (the setting that decides, its values under which this one is read)}
READ_UNDER = {
    "model.rope_theta": ("model.positions", ("rope",)),
    "data.path": ("data.source", ("text",)),
    "data.name": ("data.source", ("hub",)),
    "data.subset": ("data.source", ("hub",)),
    "data.split": ("data.source", ("hub",)),
    "data.field": ("data.source", ("text", "hub")),
    "data.val_fraction": ("data.source", TEXT_SOURCES),
    "data.num_keys": ("data.source", SYNTHETIC_SOURCES),
    "data.num_values": ("data.source", SYNTHETIC_SOURCES),
    "data.num_pairs": ("data.source", ("recall",)),
    "tokenizer.name": ("data.source", TEXT_SOURCES),
    "optim.min_lr": ("optim.schedule", ("cosine",)),
    "logger.mode": ("logger.name", ("wandb",)),
    "logger.entity": ("logger.name", ("wandb",)),
    "logger.project": ("logger.name", ("wandb",)),
}


class Unread(NamedTuple):
    """Why a run does not read a setting, and what to do instead."""

    why: str  # attention=naive has no option block_kv (it has no options)
    instead: str  # choose an attention that has it: tiled, no_max


def conditional_settings(config: RunConfig) -> dict[str, Unread | None]:
    """The changed settings that only some choices read: None if this run reads it, else why not."""
    settings: dict[str, Unread | None] = {}
    defaults = RunConfig()
    for key, (decider, readers) in READ_UNDER.items():
        chosen = value_of(config, decider)
        if value_of(config, key) != value_of(defaults, key):
            choice = decider.removesuffix(".name").removesuffix(".source")
            instead = "add " + " or ".join(f"{choice}={value}" for value in readers)
            why = f"{choice}={chosen} does not read it"
            settings[key] = None if chosen in readers else Unread(why, instead)
    options = get_backend(config.attention.name).options
    for name in config.attention.backend_options():
        key = f"attention.{name}" if name in BACKEND_OPTIONS else f"attention.options.{name}"
        is_read = name in options
        settings[key] = None if is_read else _unread_option(name, config.attention, options)
    return settings


def value_of(config: RunConfig, key: str) -> Any:
    """The value of a setting in a group, such as attention.options.NAME."""
    group, _, name = key.rpartition(".")
    parent = attrgetter(group)(config)
    return parent[name] if isinstance(parent, dict) else getattr(parent, name)


def reset(config: RunConfig, key: str) -> None:
    """Put a setting in a group back to its default."""
    group, _, name = key.rpartition(".")
    parent = attrgetter(group)(config)
    if isinstance(parent, dict):
        del parent[name]
    else:
        setattr(parent, name, value_of(RunConfig(), key))


def check_settings(config: RunConfig, summary: dict[str, Any]) -> None:
    """Leave out the settings that this run does not read, and note them in `summary`.

    Raises ValueError for those on this command line, for a logger that is not installed, and for a
    resume under settings that nobody asked for.
    """
    with where_it_was_typed():  # an own attention's module may lie there
        left_out = settle(config, asked=asked_keys())
        summary["variant"] = attention_names(config.attention)[0][1]
    if left_out:
        summary["left_out"] = left_out
        log.info("\n".join(f"without {key}: {why}" for key, why in left_out.items()))
    check_logger(config.logger)
    check_resume(config, asked=cli_overrides())


def settle(config: RunConfig, *, asked: Iterable[str]) -> dict[str, str]:
    """Reset the settings that this run does not read; returns {setting: why}.

    Raises ValueError for those in `asked`, the keys of the command line, unless config.left_out
    allows them.
    """
    asked = set(asked)
    for key in config.left_out:
        if key not in READ_UNDER and not key.startswith("attention."):
            raise ValueError(
                f"left_out=[{key}]: every run reads {key}, or there is no such setting; take it "
                "out of left_out"
            )
    left_out = unread(conditional_settings(config))
    for key, reason in left_out.items():
        if is_asked(key, asked) and key not in config.left_out:
            raise ValueError(
                f"{key}={value_of(config, key)} has no effect: {reason.why}; leave it out, or "
                f"{reason.instead}"
            )
    for key in left_out:
        reset(config, key)
    return {key: reason.why for key, reason in left_out.items()}


def unread(settings: dict[str, Unread | None]) -> dict[str, Unread]:
    return {key: reason for key, reason in settings.items() if reason is not None}


def is_asked(key: str, asked: set[str]) -> bool:
    """Whether the keys `asked` include this setting; tokenizer=gpt2 sets tokenizer.name."""
    return key in asked or (key == "tokenizer.name" and "tokenizer" in asked)


def _unread_option(name: str, attention: AttentionConfig, options: Iterable[str]) -> Unread:
    own = f"its options: {', '.join(options)}" if options else "it has no options"
    others = [other for other, backend in BACKENDS.items() if name in backend.options]
    instead = "name an option that it has"
    if ":" in attention.name:
        instead = f"declare it in your Backend(..., options={{{name!r}: DEFAULT}})"
    elif others:
        instead = f"choose an attention that has it: {', '.join(others)}"
    return Unread(f"attention={attention.name} has no option {name} ({own})", instead)
