"""Loads what a run has learned, its settings and its weights, from its directory."""

from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf

from attention import Backend
from config import RunConfig
from data import TrainingData, build_data
from model import GPT
from training.loop.device import autocast_to, pick_device, pick_dtype
from training.loop.schedule import backend_after, chosen_attention
from training.record.checkpoint import load_model_state, read_meta
from training.record.retention import no_run, run_of
from training.record.starts import where_it_began


class Trained(NamedTuple):
    """The model of a run as its latest checkpoint left it."""

    model: GPT  # on its device
    dtype: torch.dtype  # of the matrix products
    autocast: AbstractContextManager  # the context of a forward pass
    step: int


def read_run_config(run: Path) -> RunConfig:
    """The settings in RUN/config.yaml. Raises ValueError where there are none."""
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    run = run_of(run)
    path = run / "config.yaml"
    if not path.is_file():
        raise ValueError(no_run(run, "config.yaml"))
    try:
        known, settings = OmegaConf.structured(RunConfig), OmegaConf.load(path)
        for group in settings:
            if group in known:
                drop_unset(settings[group], known[group])
        return OmegaConf.to_object(OmegaConf.merge(known, settings))
    except (OmegaConfBaseException, YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not the configuration of a run: {reason}") from error


def drop_unset(settings: Any, known: Any) -> None:
    """Take out keys that a group of RunConfig no longer has, if the run did not use them: null or
    false.
    """
    if isinstance(settings, DictConfig) and is_dataclass(OmegaConf.get_type(known)):
        for name in settings.keys() - known.keys():
            if settings[name] in (None, False):
                del settings[name]


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
    try:
        schedule = chosen_attention(config.attention)
    except ValueError as error:
        raise ValueError(f"{error}{where_it_began(error, run_of(run))}") from error
    made = {"backend": backend_after(schedule, step)}
    made |= {"vocab_size": vocab_size, "attention": config.attention}
    model = GPT(config.model, **made).to(device)
    load_model_state(run, model)
    if backend is not None:
        model.backend = backend
    return Trained(model, dtype, autocast_to(dtype, device), step)
