"""A run as an object: its parts on their device, ready for the first step; and how it is built."""

import logging
import math
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from torch import Tensor

from attention import Backend, dtype_name
from config import RunConfig
from data import TrainingData, build_data
from data.prefetch import Prefetcher
from model import GPT, sample_text
from training.loop.compiler import importing_torch_compile
from training.loop.device import autocast_to, pick_device, pick_dtype, set_deterministic
from training.loop.evaluate import evaluate_under, exact_attention
from training.loop.flops import count_parameters
from training.loop.optimizer import MuonAndAdamW, build_optimizer
from training.loop.pretrained import find_pretrained
from training.loop.ranks import ALONE, Ranks, check_shares, join
from training.loop.schedule import (
    attention_schedule,
    needed_features,
    run_compiles,
    schedule_summary,
)
from training.record.clock import phase
from training.record.environment import environment
from training.record.files import Row

log = logging.getLogger("tilegpt")


@dataclass
class Run:
    """The parts of a run, on its device and in its precision, ready for the first step."""

    config: RunConfig
    device: torch.device
    dtype: torch.dtype  # of the matrix products
    schedule: dict[int, Backend]  # the attention by the step after which it is used
    data: TrainingData
    model: GPT
    optimizer: torch.optim.Optimizer | MuonAndAdamW
    scaler: torch.amp.GradScaler
    ranks: Ranks = ALONE  # the processes that train it together
    # the name and the SHA-256 of the weights of init_from=, once they are loaded
    init_from: Row | None = None
    # the model as a step runs it, compiled where it can be; with the same parameters
    step_model: GPT | None = None

    @cached_property
    def autocast(self) -> AbstractContextManager:
        """The context of every forward pass."""
        return autocast_to(self.dtype, self.device)

    @property
    def state(self) -> Row:
        """What a checkpoint holds, besides the random number generators."""
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}

    @property
    def settings(self) -> Row:
        """The settings as nested dictionaries, for files and loggers."""
        return asdict(self.config)

    @cached_property
    def environment(self) -> Row:
        """Commit, versions, hardware, command and data."""
        return environment(self.data.fingerprint, self.device)

    @property
    def tokens_per_step(self) -> int:
        return self.config.sequences_per_step * self.config.seq_len

    @property
    def batch_size(self) -> int:
        """Sequences of one pass on this rank. Without tokens_per_step the ranks divide one pass."""
        size = self.config.batch_size
        return size if self.config.tokens_per_step else size // self.ranks.data

    @cached_property
    def held_out(self) -> tuple[Tensor, ...]:
        return self.data.val_batch(self.config.eval_sequences)

    @cached_property
    def bytes_per_token(self) -> float | None:
        """The mean over the held-out targets; None if the tokens are not text."""
        if self.data.tokenizer is None:
            return None
        targets = self.held_out[1].numpy()  # in text, every target counts
        return self.data.tokenizer.count_bytes(targets) / targets.size

    def batches(self) -> Prefetcher:
        """This rank's part of each step, in passes and read ahead; a context manager."""
        count = self.config.sequences_per_step
        return Prefetcher(
            self.data,
            count,
            self.batch_size,
            self.device,
            rows=self.ranks.rows(count),
            columns=self.ranks.columns(self.config.seq_len),
        )

    def sequences(self, step: int) -> list[tuple[Tensor, ...]]:
        """What all ranks read in this step, once more, batch_size sequences at a time."""
        batch = self.data.train_batch(step - 1, self.config.sequences_per_step)
        return list(zip(*(x.to(self.device).split(self.batch_size) for x in batch), strict=True))

    @phase("evaluating")
    def evaluate(self, switch_to: Backend | None = None) -> dict[str, float]:
        """Returns val/loss in nats of the held-out sequences, and val/loss_exact of the same
        weights under exact attention; with another attention also val/loss_switched.

        Exact attention gets the model's windows, softcap, ... too. One loss curve does not show
        that an attention is broken; the difference of the two does. val/accuracy and val/bpb, the
        loss in bits per byte, are added where the data have them.
        """
        head_dim, needed = self.config.model.head_dim, needed_features(self.config)
        exact = exact_attention(head_dim, self.device, needed)
        attentions = {"": self.model.backend, "_exact": exact}
        if switch_to is not None:
            attentions["_switched"] = switch_to
        how = {"batch_size": self.batch_size, "autocast": self.autocast, "ranks": self.ranks}
        how["accuracy"] = self.data.tokenizer is None
        row = {}
        for suffix, attention in attentions.items():
            loss, accuracy = evaluate_under(self.model, attention, *self.held_out, **how)
            row[f"val/loss{suffix}"] = loss
            if accuracy is not None:
                row[f"val/accuracy{suffix}"] = accuracy
            if self.bytes_per_token is not None:
                row[f"val/bpb{suffix}"] = loss / math.log(2) / self.bytes_per_token
        return row

    def sample(self) -> str | None:
        """A text by the model; None if its tokens are not text, or sample_tokens=0."""
        count, tokenizer = self.config.sample_tokens, self.data.tokenizer
        if not count or tokenizer is None:
            return None
        how = {"max_new_tokens": count, "seed": self.config.seed}
        with self.autocast, phase("sampling"):
            return sample_text(self.model, tokenizer, "def ", **how)


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
