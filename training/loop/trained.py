"""Loads what a run has learned, its settings and its weights, from its directory."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import OmegaConf

from attention import Backend
from config import RunConfig
from data import TrainingData, build_data
from model import GPT
from training.loop.device import autocast_to, pick_device, pick_dtype
from training.loop.schedule import backend_after, chosen_attention
from training.record.checkpoint import load_model_state
from training.record.files import (
    read_meta,
    run_of,
)
from training.record.foreign_code import run_no_code_of


class Trained(NamedTuple):
    """The model of a run as its latest checkpoint left it."""

    model: GPT  # on its device
    dtype: torch.dtype  # of the matrix products
    autocast: AbstractContextManager  # the context of a forward pass
    step: int


def read_run_config(run: Path) -> RunConfig:
    """The settings in a run's checkpoint, under which its weights were trained.

    Raises ValueError where there is no checkpoint, and for one of another version. From now on no
    code is imported from the run's folder.
    """
    settings = read_meta(run)["config"]
    run_no_code_of(run_of(run), settings["attention"])
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), settings))


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
