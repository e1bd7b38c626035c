"""What a run is called: one name in the terminal, in reports and figures, and in wandb.

variant   the attention with its options that are not at their defaults (no_rescale block_kv=16),
          and every other setting in which the runs of a sweep differ (optim.lr as lr=0.01)
run       the variant, and seq_len and seed where they differ: no two runs of a sweep share it

Nothing here imports torch.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from config import (
    BACKEND_OPTIONS,
    FUNCTION_SETTINGS,
    SHORT_DTYPES,
    AttentionConfig,
    parse_attention,
)
from training.launch.command_line import unescaped
from training.record.files import Row
from training.record.retention import are_starts

# settings that change what is reported of a run, not what it learns
WATCHING = (
    "logger.",
    "eval_",
    "diagnose_every",
    "log_every",
    "checkpoint_every",
    "sample_tokens",
)


class Names(NamedTuple):
    """What one of several runs is called."""

    variant: str
    run: str


def attention_names(chosen: AttentionConfig) -> list[tuple[int, str]]:
    """Each attention that these settings ask for, with the step after which it is used."""
    # a switch changes the backend; the layers still compute the same function
    function = chosen.function()
    names = [(0, attention_name(chosen.name, chosen.backend_options() | function))]
    if chosen.switch_at is not None:
        name, options = parse_attention(chosen.switch_to)
        names.append((chosen.switch_at, attention_name(name, options | function)))
    return names


def attention_name(name: str, options: Mapping[str, Any]) -> str:
    """no_rescale block_kv=16: without the options that are at their defaults."""
    # an attention of the user's own may have other defaults
    defaults = {} if ":" in name else BACKEND_OPTIONS
    words = [name]
    for key, value in options.items():
        text = as_typed(value)
        # an override is text: false, where the default is False
        if text != "null" and text.lower() != str(defaults.get(key)).lower():
            words.append(f"{key}={text}")
    return " ".join(words)


def as_typed(value: Any) -> str:
    """[16,null] for [16, None], and 50 for 50.0, as a command line has them."""
    if isinstance(value, list):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def name_runs(rows: Sequence[Mapping[str, Any]]) -> list[Names]:
    """The names of runs that are shown together, given their summaries or index lines."""
    dropped = {"attention", "seq_len", "seed"}
    # a run that was resumed for more steps stays with its variant
    given = [_overrides(row) for row in rows]
    fresh = [overrides for overrides in given if not overrides.get("resume")]
    if len(fresh) < len(rows) and len({overrides.get("steps") for overrides in fresh}) < 2:
        dropped.add("steps")
    names = []
    for row, setting in zip(rows, differing_settings(rows), strict=True):
        words = [attention_in_words(row) if row.get("attention") else _folder(row)]
        words += [
            f"{key.rpartition('.')[2]}={value}"
            for key, value in setting.items()
            if key not in dropped
        ]
        variant = " ".join(words)
        sizes = [f"{key}={setting[key]}" for key in ("seq_len", "seed") if key in setting]
        names.append(Names(variant, " ".join([variant, *sizes])))
    runs = [name.run for name in names]
    return [
        name if runs.count(name.run) == 1 else Names(name.variant, f"{name.run} ({_folder(row)})")
        for name, row in zip(names, rows, strict=True)
    ]


def name_run(row: Mapping[str, Any]) -> Names:
    """The names of a run outside a sweep, with all its settings that change what it learns."""
    beside = (*WATCHING, "logger", "device")
    asked = [each for each in row.get("overrides") or [] if not each.startswith(beside)]
    names, _ = name_runs([{**row, "overrides": asked}, {}])
    return Names(attention_in_words(row), names.run)


def differing_settings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """For each run its attention, seq_len, seed and overrides, without those that all runs share.

    The options of an attention count as part of its name.
    """
    settings = []
    for row in rows:
        keys = [key for key in ("seq_len", "seed") if row.get(key) is not None]
        setting = {"attention": attention_in_words(row)} if row.get("attention") else {}
        setting |= {key: str(row[key]) for key in keys}
        unread = {"attention", "resume", "left_out", *(row.get("left_out") or {})}
        for key, value in _overrides(row).items():
            # no name shows a switch to the same attention, or one that was never reached
            unnamed = key == "attention.switch_at" and value not in ("null", "None")
            unnamed = unnamed and len(attention_steps(row)) == 1
            if unnamed or not (key in unread or key.startswith("attention.")):
                setting[key] = value
        settings.append(setting)
    shared = {
        key
        for setting in settings
        for key in setting
        if len({other.get(key) for other in settings}) == 1
    }
    return [
        {key: value for key, value in setting.items() if key not in shared} for setting in settings
    ]


def attention_steps(row: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Each attention that a run has used, by its summary.json, with the step where it began."""
    starts, done = recorded_starts(row), row.get("steps_done")
    done = done if isinstance(done, int) else math.inf
    used: list[tuple[int, str]] = []
    for start, following in zip_longest(starts, starts[1:]):
        until = min(done, following["step"]) if following else done
        for step, name in start["attention"]:
            if not used or (step < until and name != used[-1][1]):
                used.append((step, name))
    return used


def attention_in_words(row: Mapping[str, Any]) -> str:
    """tiled block_kv=16, or for a run that switched: no_rescale, tiled after step 400."""
    return ", ".join(
        name + (f" after step {step}" if step else "") for step, name in attention_steps(row)
    )


def recorded_starts(row: Mapping[str, Any]) -> list[Row]:
    """The starts of a run; see training.record.starts. A run that never trained has one, too."""
    starts = row.get("starts")
    if starts and are_starts(starts):
        return starts
    attention = [[0, str(row.get("variant") or _with_its_options(row))]]
    if isinstance(row.get("switch_at"), int):
        attention.append([row["switch_at"], str(row.get("switch_to"))])
    return [{"step": 0, "attention": attention, "changed": {}}]


def _with_its_options(row: Mapping[str, Any]) -> str:
    """The attention of a run without starts, with the options that it used or was given."""
    options: Row = {}
    for given in (row.get("options"), row.get("function")):
        options |= given if isinstance(given, dict) else {}
    left_out = row.get("left_out") or {}
    for key, value in _overrides(row).items():
        option = key.removeprefix("attention.").removeprefix("options.")
        is_option = option in (*BACKEND_OPTIONS, *FUNCTION_SETTINGS)
        is_option |= key.startswith("attention.options.")
        if key.startswith("attention.") and is_option and key not in left_out:
            options[option] = value
    return attention_name(str(row.get("attention")), options)


def _overrides(row: Mapping[str, Any]) -> dict[str, str]:
    given = [each for each in row.get("overrides") or [] if isinstance(each, str)]
    pairs = [override.lstrip("+").partition("=") for override in given]
    found = {key: unescaped(value) for key, _, value in pairs}
    return {key: SHORT_DTYPES.get(x, x) if key == "dtype" else x for key, x in found.items()}


def _folder(row: Mapping[str, Any]) -> str:
    return Path(str(row.get("dir", row.get("job", "")))).name
