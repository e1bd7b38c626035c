"""Builds a run from its settings: device, attention by step, data, model, optimizer and ranks."""

import logging

import torch

from attention import dtype_name
from config import RunConfig
from data import build_data
from model import GPT
from training.loop.compiler import importing_torch_compile
from training.loop.device import pick_device, pick_dtype, set_deterministic
from training.loop.flops import count_parameters
from training.loop.optimizer import build_optimizer
from training.loop.pretrained import find_pretrained
from training.loop.ranks import check_shares, join
from training.loop.run import Run
from training.loop.schedule import attention_schedule, run_compiles, schedule_summary
from training.record.files import Row

log = logging.getLogger("tilegpt")


def build_run(config: RunConfig, summary: Row | None = None) -> Run:
    """Build everything that `config` describes.

    `summary` is filled along the way, so that an error loses nothing. Raises ValueError for what
    can be refused before the first step: an unusable device, dtype, attention or data source.
    """
    summary = {} if summary is None else summary
    device = pick_device(config.device)
    ranks = join(device.type, config.parallel.context)
    if ranks.several:
        summary["ranks"] = ranks.world
        if device.type == "cuda":  # plain "cuda" depends on the thread
            device = torch.device("cuda", ranks.local_rank)
    dtype = pick_dtype(config.dtype, device)
    set_deterministic(config.deterministic)
    summary |= {"device": device.type, "dtype": dtype_name(dtype)}

    where = {"dtype": dtype, "device": device}
    schedule = attention_schedule(config, **where)
    check_shares(config, ranks, schedule.values())
    summary |= schedule_summary(config, schedule, **where)

    pretrained = None
    with ranks.first_goes_first():
        if config.init_from and not config.resume:  # resumed, it has the weights of its checkpoint
            pretrained = find_pretrained(config.init_from)
        data = build_data(config.data, config.tokenizer, seq_len=config.seq_len, seed=config.seed)
    log.info(data.description)
    ranks.check_same(config, data.fingerprint)
    torch.manual_seed(config.seed)
    with importing_torch_compile(run_compiles(config, schedule[0], device.type)):
        made = {"vocab_size": data.vocab_size, "backend": schedule[0]}
        model = GPT(config.model, **made, attention=config.attention).to(device)
    init_from = pretrained.load_into(model, data.tokenizer) if pretrained else None
    summary |= {"parameters": count_parameters(model), "data": data.fingerprint}

    return Run(
        config,
        device,
        dtype,
        schedule,
        data,
        model,
        optimizer=build_optimizer(model, config.optimizer()),
        scaler=torch.amp.GradScaler(device.type, enabled=dtype == torch.float16),
        ranks=ranks,
        init_from=init_from,
    )
