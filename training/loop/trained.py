"""Loads what a run has learned, its settings and its weights, from its directory."""

from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attention import Backend
from config import RunConfig
from data import TrainingData, build_data
from model import GPT
from training.loop.device import autocast_to, pick_device, pick_dtype
from training.loop.schedule import backend_after, chosen_attention
from training.record.checkpoint import load_model_state
from training.record.files import (
    Row,
    commit_of,
    newest_first,
    no_run,
    read_mapping,
    read_meta,
    run_of,
)
from training.record.foreign_code import run_no_code_of
from training.record.starts import differences, warn_of_edits

# settings that say what the weights compute, and on which data
MEANING = ("attention.", "model.", "data.", "tokenizer.")
# former settings among these that never said that
SILENT = ("attention.splits", "attention.impl", "attention.detach_max", "model.init_std")
SILENT += ("data.streaming", "data.fingerprint", "data.cache_dir")


class Trained(NamedTuple):
    """The model of a run as its latest checkpoint left it."""

    model: GPT  # on its device
    dtype: torch.dtype  # of the matrix products
    autocast: AbstractContextManager  # the context of a forward pass
    step: int


def read_run_config(run: Path) -> RunConfig:
    """The settings in a run's checkpoint, under which its weights were trained.

    A config.yaml beside it that says otherwise is named in a warning. Raises ValueError where there
    is no checkpoint, and for a setting of an older version that this one cannot follow. From now on
    no code is imported from the run's folder.
    """
    if not newest_first(run):
        raise ValueError(no_run(run, "checkpoint"))
    meta, run_dir = read_meta(run), run_of(run)
    try:
        settings = _still_there(meta["config"], RunConfig())
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), settings))
    except (ValueError, OmegaConfBaseException) as error:
        raise ValueError(
            f"{run} is a run of commit {commit_of(meta)}, whose settings this version "
            f"does not take: {str(error).splitlines()[0]}"
        ) from error
    warn_of_edits(run_dir, differences(read_mapping(run_dir / "config.yaml"), meta["config"]))
    chosen = config.attention
    named = (chosen.name, chosen.switch_to, chosen.score_mod)
    run_no_code_of(run_dir, filter(None, named))
    return config


def _still_there(settings: Row, known: Any, group: str = "") -> Row:
    """The settings without those that RunConfig no longer has. Raises ValueError for one that was
    in use and says what the weights compute, or on which data.
    """
    kept = {}
    for name, value in settings.items():
        key = f"{group}{name}"
        if hasattr(known, name):
            inner = getattr(known, name)
            kept[name] = _still_there(value, inner, f"{key}.") if is_dataclass(inner) else value
        elif key.startswith(MEANING) and value and key not in SILENT:
            raise ValueError(f"there is no {key} any more, and it was {value}")
    return kept


def data_of(config: RunConfig) -> TrainingData:
    """The data of a run; see build_data()."""
    return build_data(config.data, config.tokenizer, seq_len=config.seq_len, seed=config.seed)


def load_trained(
    run: Path, config: RunConfig, vocab_size: int, backend: Backend | None = None
) -> Trained:
    """Build the model of `config` with the weights of a run.

    backend: an attention to use instead of the one that the run last used. Raises ValueError for a
    device or dtype that this machine lacks, and for a checkpoint that cannot be used.
    """
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    step = read_meta(run)["step"]
    # built with the run's own attention, whose parameters are among the weights
    own = backend_after(chosen_attention(config), step)
    made = {"vocab_size": vocab_size, "attention": config.attention}
    model = GPT(config.model, backend=own, **made).to(device)
    load_model_state(run, model)
    model.backend = backend or own
    return Trained(model, dtype, autocast_to(dtype, device), step)
