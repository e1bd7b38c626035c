"""A run as an object: its parts on their device, ready for the first step."""

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property
from math import log

import torch
from torch import Tensor

from attention import Backend
from config import RunConfig
from data.interface import TrainingData
from data.prefetch import Pass, Prefetcher
from model import GPT, sample_text
from training.loop.device import autocast_to
from training.loop.evaluate import evaluate_under, exact_attention
from training.loop.optimizer import MuonAndAdamW
from training.loop.ranks import ALONE, Ranks
from training.loop.schedule import needed_features
from training.record.clock import phase
from training.record.environment import environment
from training.record.files import Row


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

    def batches(self, *, whole: bool = False) -> Prefetcher:
        """The batches of each step, read ahead; a context manager. `whole` gives whole sequences
        where ranks share them, not read ahead.
        """
        count, length = self.config.sequences_per_step, self.config.seq_len
        return Prefetcher(
            self.data,
            count,
            self.batch_size,
            self.device,
            rows=self.ranks.rows(count),
            columns=slice(None) if whole else self.ranks.columns(length),
            ahead=0 if whole else None,
        )

    def sequences(self, step: int) -> list[Pass]:
        """The batch of a step again, in whole sequences: it is a function of seed and step."""
        with self.batches(whole=True) as batches:
            return batches.passes(step - 1)

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
        how["accuracy"] = self.data.metric == "accuracy"
        row = {}
        for suffix, attention in attentions.items():
            loss, accuracy = evaluate_under(self.model, attention, *self.held_out, **how)
            row[f"val/loss{suffix}"] = loss
            if accuracy is not None:
                row[f"val/accuracy{suffix}"] = accuracy
            if self.bytes_per_token is not None:
                row[f"val/bpb{suffix}"] = loss / log(2) / self.bytes_per_token
        return row

    def sample(self) -> str | None:
        """A text by the model; None if its tokens are not text, or sample_tokens=0."""
        count, tokenizer = self.config.sample_tokens, self.data.tokenizer
        if not count or tokenizer is None:
            return None
        how = {"max_new_tokens": count, "seed": self.config.seed}
        with self.autocast, phase("sampling"):
            return sample_text(self.model, tokenizer, "def ", **how)
