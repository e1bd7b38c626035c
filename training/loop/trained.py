"""Loads what a run has learned, its settings and its weights, from its directory."""

import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import OmegaConf

from attention import Backend
from config import TEXT_SOURCES, RunConfig
from data import Tokenizer, TrainingData, build_data, build_tokenizer
from model import GPT
from training.loop.device import autocast_to, pick_device, pick_dtype
from training.loop.schedule import backend_after, chosen_attention
from training.record.checkpoint import load_model_state
from training.record.files import read_meta, run_of
from training.record.foreign_code import run_no_code_of
from training.record.starts import check_tokenizer

log = logging.getLogger("tilegpt")


class Trained(NamedTuple):
    """The model of a run as its latest checkpoint left it."""

    model: GPT  # on its device
    dtype: torch.dtype  # of the matrix products
    autocast: AbstractContextManager  # the context of a forward pass
    step: int


def read_run_config(run: Path) -> RunConfig:
    """The settings in a run's checkpoint, under which its weights were trained.

    Raises ValueError if there is no checkpoint, or if another version wrote it. From now on no code
    is imported from the run's folder.
    """
    settings = read_meta(run)["config"]
    run_no_code_of(run_of(run), settings["attention"])
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), settings))


def data_of(config: RunConfig) -> TrainingData:
    """The data that settings name; see build_data()."""
    return build_data(config.data, config.tokenizer, seq_len=config.seq_len, seed=config.seed)


def trained_tokenizer(run: Path, config: RunConfig) -> Tokenizer:
    """The tokenizer of a run on text. Raises ValueError if this machine has another by its name."""
    tokenizer = build_tokenizer(config.tokenizer)
    check_tokenizer(run, read_meta(run), tokenizer.fingerprint)
    return tokenizer


def trained_data(run: Path, config: RunConfig) -> TrainingData:
    """The data of a run; see build_data(). Raises ValueError for another tokenizer than the run's,
    and logs a warning for other data.
    """
    if config.data.source in TEXT_SOURCES:
        trained_tokenizer(run, config)  # first: another one may have no token store yet
    data, trained_on = data_of(config), read_meta(run)["starts"][-1]["data"]
    if data.fingerprint != trained_on:
        log.warning(
            f"{run}: the data here are not the run's: they had the fingerprint {trained_on} and "
            f"have {data.fingerprint} now, so figures do not compare with those of its training"
        )
    return data


def load_trained(run: Path, config: RunConfig, backend: Backend | None = None) -> Trained:
    """Build the model of `config` with the weights of a run.

    backend: an attention to use instead of the one that the run last used. Raises ValueError for a
    device or dtype that this machine lacks, and for a checkpoint that cannot be used.
    """
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    meta = read_meta(run)
    # built with the run's own attention, whose parameters are among the weights
    own = backend_after(chosen_attention(config), meta["step"])
    made = {"vocab_size": meta["vocab_size"], "attention": config.attention}
    model = GPT(config.model, backend=own, **made).to(device)
    load_model_state(run, model)
    model.backend = backend or own
    return Trained(model, dtype, autocast_to(dtype, device), meta["step"])
