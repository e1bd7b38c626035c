"""A run as an object, and as a call.

    build_run(config)                         every part of a run, before training
    run("attention=tiled", "steps=50")        what `python train.py attention=tiled steps=50` does
    compose("attention=tiled", "steps=50")    the settings of that command

All three work in a notebook and from any folder, even beside your own config.py or data/.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from training.files import Row
from training.own_modules import own_modules
from training.phases import phase
from training.ranks import ALONE, Ranks, join

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attention import Backend
    from config import RunConfig
    from data.interface import TrainingData
    from data.prefetch import Prefetcher
    from model import GPT
    from training.optimizer import MuonAndAdamW


@dataclass
class Run:
    """The parts of a run, on its device and in its precision, ready for the first step."""

    config: "RunConfig"
    device: "torch.device"
    dtype: "torch.dtype"  # of the matrix products
    schedule: "dict[int, Backend]"  # the attention by the step after which it is used
    data: "TrainingData"
    model: "GPT"
    optimizer: "torch.optim.Optimizer | MuonAndAdamW"
    scaler: "torch.amp.GradScaler"
    ranks: Ranks = ALONE  # the processes that train it together
    # the name and the SHA-256 of the weights of init_from=, once they are loaded
    init_from: Row | None = None

    @cached_property
    def autocast(self) -> AbstractContextManager:
        """The context of every forward pass."""
        from training.device import autocast_to

        return autocast_to(self.dtype, self.device)

    @property
    def state(self) -> Row:
        """What a checkpoint holds, besides the random number generators."""
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}

    @cached_property
    def settings(self) -> Row:
        """The settings as nested dictionaries, for files and loggers."""
        return asdict(self.config)

    @cached_property
    def environment(self) -> Row:
        """Commit, versions, hardware, command and data."""
        from training.environment import environment

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
    def predicted_gib(self) -> float:
        """The calculated peak memory of a step on this rank."""
        from training.memory import GIB
        from training.plan import predict_peak_bytes

        length = self.config.seq_len // self.ranks.context
        own = replace(self.config, batch_size=self.batch_size, seq_len=length)
        where, shares_heads = (self.dtype, self.device), self.ranks.shards is not None
        peak = max(
            predict_peak_bytes(
                own, self.data.vocab_size, backend, *where, shares_heads=shares_heads
            ).peak
            for backend in self.schedule.values()
        )
        return peak / GIB

    @cached_property
    def held_out(self) -> "tuple[Tensor, ...]":
        return self.data.val_batch(self.config.eval_sequences)

    @cached_property
    def bytes_per_token(self) -> float | None:
        """The mean over the held-out targets; None if the tokens are not text."""
        if self.data.tokenizer is None:
            return None
        targets = self.held_out[1].numpy()  # in text, every target counts
        return self.data.tokenizer.count_bytes(targets) / targets.size

    def batches(self, *, whole: bool = False) -> "Prefetcher":
        """The batches of each step, read ahead; a context manager. `whole` gives whole sequences
        where ranks share them, not read ahead.
        """
        from data.prefetch import Prefetcher

        count = self.config.sequences_per_step
        return Prefetcher(
            self.data,
            count,
            self.batch_size,
            self.device,
            rows=self.ranks.rows(count),
            columns=slice(None) if whole else self.ranks.columns(self.config.seq_len),
            ahead=0 if whole else None,
        )

    @phase("evaluating")
    def evaluate(self, also: "Mapping[str, Backend] | None" = None) -> dict[str, float]:
        """val/loss and the like on the held-out sequences; see training.evaluate.evaluate()."""
        from training.evaluate import evaluate

        return evaluate(
            self.model,
            *self.held_out,
            batch_size=self.batch_size,
            autocast=self.autocast,
            accuracy=self.data.metric == "accuracy",
            bytes_per_token=self.bytes_per_token,
            ranks=self.ranks,
            also=also,
        )


def build_run(config: "RunConfig", summary: Row | None = None) -> Run:
    """Build everything that `config` describes.

    `summary` is filled along the way, so that an error loses nothing. Raises ValueError for what
    can be refused before the first step: an unusable device, dtype, attention or data source.
    """
    from training.command_line import where_it_was_typed

    with own_modules(), where_it_was_typed():
        return _build_run(config, {} if summary is None else summary)


def _build_run(config: "RunConfig", summary: Row) -> Run:
    import torch

    from attention import dtype_name
    from data import build_data
    from training.device import pick_dtype, set_deterministic
    from training.optimizer import build_optimizer
    from training.pretrained import find_pretrained
    from training.schedule import attention_schedule, kernel_inputs, schedule_summary
    from training.throughput import count_parameters

    ranks, device = _meet(config)
    if ranks.several:
        summary["ranks"] = ranks.world
    dtype = pick_dtype(config.dtype, device)
    set_deterministic(config.deterministic)
    summary |= {"device": device.type, "dtype": dtype_name(dtype)}

    schedule = attention_schedule(config, dtype=dtype, device=device)
    summary |= schedule_summary(schedule, **kernel_inputs(config, dtype=dtype, device=device))
    if function := config.attention.function():
        summary["function"] = function

    pretrained = None
    if config.init_from and not config.resume:  # a resumed run has the weights of its checkpoint
        with phase("starting", f"finding init_from={config.init_from}"), ranks.first_goes_first():
            pretrained = find_pretrained(config.init_from)
    with phase("starting", f"reading data={config.data.source}"), ranks.first_goes_first():
        data = build_data(config.data, config.tokenizer, seq_len=config.seq_len, seed=config.seed)
    with phase("starting", "building the model"):
        model = _build_model(config, schedule[0], data.vocab_size, device)
        init_from = pretrained.load_into(model, data.tokenizer) if pretrained else None
    summary |= {"parameters": count_parameters(model), "data": data.fingerprint}

    run = Run(
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
    # set now, because a later report of memory that ran out quotes it
    summary["memory/predicted_gib"] = run.predicted_gib
    return run


def _build_model(
    config: "RunConfig", backend: "Backend", vocab_size: int, device: "torch.device"
) -> "GPT":
    """The model of a run on its device, with the first weights of its seed."""
    import torch

    from model import GPT
    from training.compiler import importing_torch_compile
    from training.schedule import run_compiles

    torch.manual_seed(config.seed)
    with importing_torch_compile(run_compiles(config, backend, device.type)):
        made = {"vocab_size": vocab_size, "backend": backend}
        return GPT(config.model, **made, attention=config.attention).to(device)


def _meet(config: "RunConfig") -> "tuple[Ranks, torch.device]":
    """Meet the other ranks, if there are any. Returns them and this rank's device."""
    import torch

    from training.device import pick_device
    from training.sharing import check_context, check_shares, shared_settings

    device = pick_device(config.device)
    check_context(config)
    meeting = {"timeout": config.parallel.timeout, "settings": shared_settings(config)}
    ranks = join(device.type, config.parallel.context, **meeting)
    check_shares(config, ranks)
    if ranks.several and device.type == "cuda":  # plain "cuda" depends on the thread
        device = torch.device("cuda", ranks.local_rank)
    return ranks, device


def compose(*overrides: str) -> "RunConfig":
    """The settings of `python train.py OVERRIDES`. Raises ValueError with the reason."""
    with own_modules():
        from training.command_line import compose

        return compose(*overrides)


def run(*overrides: str) -> Row:
    """Train as `python train.py OVERRIDES` does; returns what summary.json says.

    A run that diverges, runs out of memory or is interrupted returns with that status. The error of
    a run that fails is raised; refused settings raise ValueError. The run directory is below the
    current folder, as on the command line.
    """
    with own_modules():
        from training.job import run_overrides

        return run_overrides(overrides)
