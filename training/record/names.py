"""What a run is called: one name in the terminal, in reports and figures, and in wandb.

variant   the attention with its options that are not at their defaults (no_rescale block_kv=16),
          and every other setting in which the runs of a sweep differ (optim.lr as lr=0.01)
run       the variant, and seq_len and seed where they differ: no two runs of a sweep share it

index.jsonl has the variant of a job from the beginning of its sweep, and summary.json that of a
run. Where runs of several sweeps are shown together, the settings in which these differ follow it.
Nothing here imports torch.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config import BACKEND_OPTIONS, AttentionConfig, RunConfig, parse_attention
from training.record.files import Row

# nats: this project's exact attentions differed by at most 0.00008, in bfloat16
SAME_LOSS = 0.001


class Names(NamedTuple):
    """What one of several runs is called."""

    variant: str
    run: str


def identity(config: RunConfig) -> Row:
    """What names a run before it begins, in index.jsonl and in summary.json."""
    return {
        "attention": config.attention.name,
        "variant": _in_words(attention_names(config.attention)),
        "seq_len": config.seq_len,
        "seed": config.seed,
    }


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
        if value is not None and value != defaults.get(key):
            words.append(f"{key}={as_typed(value)}")
    return " ".join(words)


def as_typed(value: Any) -> str:
    """[16,null] for [16, None], and 50 for 50.0, as a command line has them."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return json.dumps(value, separators=(",", ":"))


def unescaped(text: str) -> str:
    """A value as a person would write it: sweepers put a backslash before colons, commas etc."""
    return re.sub(r"\\([\\()\[\]{}:=, \t])", r"\1", text)


def name_runs(rows: Sequence[Row]) -> list[Names]:
    """The names of runs that are shown together, given their summaries or index lines."""
    names = list(map(_named, rows, differing_settings(rows)))
    often = Counter(name.run for name in names)
    return [
        name if often[name.run] == 1 else Names(name.variant, f"{name.run} ({_folder(row)})")
        for name, row in zip(names, rows, strict=True)
    ]


def differing_settings(rows: Sequence[Row]) -> list[dict[str, str]]:
    """For each run its seq_len, seed and overrides, without those that all runs share.

    The options of an attention are no settings here, but part of its name.
    """
    settings = list(map(_settings, rows))
    shared = set.intersection(*(set(each.items()) for each in settings)) if settings else set()
    return [dict(pair for pair in each.items() if pair not in shared) for each in settings]


def attention_in_words(row: Row) -> str:
    """tiled block_kv=16, or for a run that switches: no_rescale, tiled after step 400.

    By the starts in its summary, see training.record.starts; "" for a run that never trained.
    """
    used: list[tuple[int, str]] = []
    for start in row.get("starts") or []:
        # it resumed from this step, so what was planned for later did not happen
        used = [(step, name) for step, name in used if step < start["step"]]
        for step, name in start["attention"]:
            goes_on = step == start["step"] and used and used[-1][1] == name
            if not goes_on:
                used.append((step, name))
    return _in_words(used)


def _in_words(used: Iterable[tuple[int, str]]) -> str:
    return ", ".join(name + (f" after step {step}" if step else "") for step, name in used)


def belies_exact(summary: Row) -> bool:
    """Whether a run's attention is labelled exact, and its loss says otherwise."""
    own, exact = summary.get("val/loss"), summary.get("val/loss_exact")
    if summary.get("defect") or summary.get("exact") is False or None in (own, exact):
        return False
    return abs(exact - own) > SAME_LOSS


def _named(row: Row, setting: Mapping[str, str]) -> Names:
    written = str(row.get("variant") or row.get("attention") or _folder(row))
    attention = attention_in_words(row)
    # a resume may have changed what was planned
    variant = written if written.startswith(attention) else attention
    sizes = [f"{key}={setting[key]}" for key in ("seq_len", "seed") if key in setting]
    for key, value in setting.items():
        word = f"{key.rpartition('.')[2]}={value}"
        if word not in sizes and f" {word} " not in f"{variant} ":
            variant += f" {word}"
    return Names(variant, " ".join([variant, *sizes]))


def _settings(row: Row) -> dict[str, str]:
    """seq_len, seed, and the settings that were typed, without those of the attention."""
    settings: Row = {}
    for override in row.get("overrides") or []:
        key, _, value = override.lstrip("+").partition("=")
        if key.partition(".")[0] not in ("attention", "resume"):
            settings[key] = unescaped(value)
    return settings | {key: str(row[key]) for key in ("seq_len", "seed") if key in row}


def _folder(row: Row) -> str:
    return Path(str(row.get("dir", ""))).name
