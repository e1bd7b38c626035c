"""Settings that a run does not read: refused if a user set them, else left out with a message.

Many settings belong to some choices only: block_kv to the tile loops, data.path to data=text. If
such a setting were ignored silently, two runs that differ only in it would look different.
"""

import logging
import os
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from attention import get_backend
from config import BACKEND_OPTIONS, SYNTHETIC_SOURCES, TEXT_SOURCES, RunConfig
from training.launch.command_line import cli_overrides, in_a_sweep, key_of
from training.record.loggers import check_logger
from training.record.names import as_typed, identity
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
    "tokenizer.vocab_size": ("data.source", TEXT_SOURCES),
    "optim.min_lr": ("optim.schedule", ("cosine",)),
    "logger.project": ("logger.name", ("wandb",)),
}
# {setting: (the setting that decides, its one value under which this one is not read)}
NOT_READ_UNDER = {
    "attention.switch_to": ("attention.switch_at", None),
    "eval_sequences": ("eval_every", 0),
}


def check_settings(config: RunConfig, summary: dict[str, Any]) -> None:
    """Leave out the settings that this run does not read; note them, and its name, in `summary`.

    Raises ValueError for those that were typed for it, for a logger that is not installed, and for
    a resume under settings that nobody asked for.
    """
    typed = asked_keys(cli_overrides())
    # a sweep combines settings without knowing which of them each choice reads
    combined = in_a_sweep() or "WANDB_SWEEP_ID" in os.environ
    left_out = settle(config, asked=() if combined else typed)
    summary |= identity(config)
    if left_out:
        summary["left_out"] = left_out
        log.info("\n".join(f"without {key}: {why}" for key, why in left_out.items()))
    check_logger(config.logger)
    # whoever types what decides whether a setting is read asks for that change of it too
    deciders = READ_UNDER | NOT_READ_UNDER
    follow = {key for key, (decider, _) in deciders.items() if decider in typed}
    check_resume(config, asked=typed | follow)


def asked_keys(overrides: Iterable[str]) -> set[str]:
    """The keys that overrides set; tokenizer=gpt2 sets tokenizer.name."""
    keys = set(map(key_of, overrides))
    return keys | {"tokenizer.name"} if "tokenizer" in keys else keys


def settle(config: RunConfig, *, asked: Iterable[str]) -> dict[str, str]:
    """Put the settings that this run does not read back to their defaults; returns {setting: why}.

    Raises ValueError for those in `asked`, the keys or overrides that a user gave.
    """
    left_out, keys, defaults = unread_settings(config), asked_keys(asked), RunConfig()
    for key, why in left_out.items():
        group, _, name = key.rpartition(".")
        settings = attrgetter(group)(config) if group else config
        values = settings if isinstance(settings, dict) else vars(settings)
        if key in keys:
            raise ValueError(f"{key}={values[name]} has no effect: {why}; leave it out")
        if settings is values:  # attention.options
            del values[name]
        else:
            values[name] = attrgetter(key)(defaults)
    return left_out


def unread_settings(config: RunConfig) -> dict[str, str]:
    """The changed settings that this run does not read, each with the reason."""
    reasons, defaults = {}, RunConfig()
    for key, (decider, readers) in READ_UNDER.items():
        if (chosen := attrgetter(decider)(config)) not in readers:
            choice = decider.removesuffix(".name").removesuffix(".source")
            others = " or ".join(f"{choice}={reader}" for reader in readers)
            reasons[key] = f"{choice}={chosen} does not read it, {others} would"
    for key, (decider, value) in NOT_READ_UNDER.items():
        if attrgetter(decider)(config) == value:
            reasons[key] = f"{decider}={as_typed(value)} does not read it, another value would"
    unread = {
        key: why
        for key, why in reasons.items()
        if attrgetter(key)(config) != attrgetter(key)(defaults)
    }
    options = get_backend(config.attention.name).options
    for name in config.attention.backend_options():
        if name not in options:
            key = f"attention.{name}" if name in BACKEND_OPTIONS else f"attention.options.{name}"
            own = ", ".join(options) or "none"
            unread[key] = f"attention={config.attention.name} has the options: {own}"
    return unread
