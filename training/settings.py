"""Settings that a run does not read: refused if a user set them, else left out with a message.

Many settings belong to some choices only: block_kv to the tile loops, data.path to data=text. If
such a setting were ignored silently, two runs that differ only in it would look different.
"""

import logging
from collections.abc import Iterable
from typing import Any

from attention import BACKENDS, Backend, get_backend
from config import BACKEND_OPTIONS, READ_UNDER, AttentionConfig, RunConfig, Unread
from training.command_line import asked_keys, cli_overrides
from training.loggers import check_logger
from training.resume import check_resume

log = logging.getLogger("tilegpt")


def conditional_settings(config: RunConfig) -> dict[str, Unread | None]:
    """The changed settings that only some choices read: None if this run reads it, else why not."""
    settings = config.conditional_settings()
    options = option_names(config.attention)
    for name in config.attention.backend_options():
        key = f"attention.{name}" if name in BACKEND_OPTIONS else f"attention.options.{name}"
        is_read = name in options
        settings[key] = None if is_read else _unread_option(name, config.attention, options)
    return settings


def check_settings(config: RunConfig, summary: dict[str, Any]) -> None:
    """Leave out the settings that this run does not read, and note them in `summary`.

    Raises ValueError for those on this command line, for a logger that is not installed, and for a
    resume under settings that nobody asked for.
    """
    if left_out := settle(config, asked=asked_keys()):
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
                f"{key}={config.value_of(key)} has no effect: {reason.why}; leave it out, or "
                f"{reason.instead}"
            )
    for key in left_out:
        config.leave_out(key)
    return {key: reason.why for key, reason in left_out.items()}


def unread(settings: dict[str, Unread | None]) -> dict[str, Unread]:
    return {key: reason for key, reason in settings.items() if reason is not None}


def is_asked(key: str, asked: set[str]) -> bool:
    """Whether the keys `asked` include this setting; tokenizer=gpt2 sets tokenizer.name."""
    return key in asked or (key == "tokenizer.name" and "tokenizer" in asked)


def option_names(chosen: AttentionConfig) -> list[str]:
    """The options of an attention, in the implementation that is chosen."""
    options, backend = chosen.backend_options(), get_backend(chosen.backend_name)
    if "impl" in options and backend.implementations:
        return ["impl", *backend.configured(impl=options["impl"]).options]
    return _options_of(backend)


def _options_of(backend: Backend) -> list[str]:
    return [*(["impl"] if backend.implementations else []), *backend.options]


def _unread_option(name: str, attention: AttentionConfig, options: list[str]) -> Unread:
    own = f"its options: {', '.join(options)}" if options else "it has no options"
    others = [other for other, backend in BACKENDS.items() if name in _options_of(backend)]
    instead = "name an option that it has"
    if others:
        instead = f"choose an attention that has it: {', '.join(others)}"
    return Unread(f"attention={attention.backend_name} has no option {name} ({own})", instead)
