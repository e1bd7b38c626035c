"""Settings that a run does not read: refused where somebody asked for them, else left out and said
so.

Many settings belong to some choices alone: block_kv to the tile loops, data.path to data=text. One
that nothing reads would be ignored in silence, and two runs that differ in it alone would pass for
two.
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
    """The settings that only some choices read and that were changed: None where this run reads it,
    else why not.
    """
    told = config.conditional_settings()
    has = option_names(config.attention)
    for name in config.attention.backend_options():
        key = f"attention.{name}" if name in BACKEND_OPTIONS else f"attention.options.{name}"
        told[key] = (
            None if name in has else _unread_option(name, config.attention.backend_name, has)
        )
    return told


def check_settings(config: RunConfig, summary: dict[str, Any]) -> None:
    """Leave out the settings that this run does not read, and note why in `summary`.

    Raises ValueError for those of this command line, for a logger that is not there, and for a
    resume under settings that nobody asked for.
    """
    if left_out := settle(config, asked=asked_keys()):
        summary["left_out"] = left_out
        log.info("\n".join(f"without {key}: {why}" for key, why in left_out.items()))
    check_logger(config.logger)
    check_resume(config, asked=cli_overrides())


def settle(config: RunConfig, *, asked: Iterable[str]) -> dict[str, str]:
    """Put the settings that nothing reads back to their defaults: {setting: why}.

    Raises ValueError for those in `asked`, the keys of the command line, unless config.left_out
    excuses them.
    """
    asked = set(asked)
    for key in config.left_out:
        if key not in READ_UNDER and not key.startswith("attention."):
            raise ValueError(
                f"left_out=[{key}]: every run reads {key}, or there is no such setting; take it "
                "out of left_out"
            )
    left_out = unread(conditional_settings(config))
    for key, found in left_out.items():
        if is_asked(key, asked) and key not in config.left_out:
            raise ValueError(
                f"{key}={config.value_of(key)} has no effect: {found.why}; leave it out, or "
                f"{found.instead}"
            )
    for key in left_out:
        config.leave_out(key)
    return {key: found.why for key, found in left_out.items()}


def unread(settings: dict[str, Unread | None]) -> dict[str, Unread]:
    return {key: found for key, found in settings.items() if found is not None}


def is_asked(key: str, asked: set[str]) -> bool:
    """Whether a command line with the keys `asked` gives this setting; tokenizer=gpt2 gives
    tokenizer.name.
    """
    return key in asked or (key == "tokenizer.name" and "tokenizer" in asked)


def option_names(chosen: AttentionConfig) -> list[str]:
    """The options that an attention has, in the implementation that `chosen` picks."""
    options, backend = chosen.backend_options(), get_backend(chosen.backend_name)
    if "impl" in options and backend.implementations:
        return ["impl", *backend.configured(impl=options["impl"]).options]
    return _options_of(backend)


def _options_of(backend: Backend) -> list[str]:
    return [*(["impl"] if backend.implementations else []), *backend.options]


def _unread_option(name: str, attention: str, has: list[str]) -> Unread:
    own = f"its options: {', '.join(has)}" if has else "it has no options"
    others = [other for other, backend in BACKENDS.items() if name in _options_of(backend)]
    instead = (
        f"choose an attention that has it: {', '.join(others)}"
        if others
        else "name an option that it has"
    )
    return Unread(f"attention={attention} has no option {name} ({own})", instead)
