"""Calculates what a step costs on many ranks: bytes sent, seconds and memory.

    plan = plan_ranks(config, vocab_size, backend, dtype, world=64, speed=..., hosts=...)

Each rank computes 1 / world of a step's tokens. Its seconds are the sum of

    outside attention    per token, in proportion to the parameters that multiply it
    attention            per query and visible key, in proportion to layers x hidden_size
    optimizer            the same on every rank, because every rank keeps all weights
    exchange             messages around or in the attention, if several ranks share a sequence
    gradients            one float32 all-reduce, as if all of it came after the last pass; a run
                         hides a part behind the backward pass

The constants come from measured steps of one GPU (fit_speed). Attention is causal over the whole
sequence; documents would make it cheaper.

The table has the bytes that a rank sends for one attention call, if W ranks share a sequence. q is
the bytes of this rank's queries (and of its output), k those of its keys (and of its values), e the
bytes of an element. W = 1 sends nothing.

                    forward               backward
    heads           (2q + 2k)(W - 1)/W    the same, of the gradients
    ring, gather    2k (W - 1)            that again, and dk, dv in float32: 2k (4/e)(W - 1)

checkpoint=attention repeats the output's exchange in the backward pass, and under torch.compile
that of q, k and v.

With H query heads and H_kv key/value heads, k = q H_kv / H. Under parallel.how=auto, h ranks share
the heads, and W / h ranks form a ring for the same heads. Then both rows count: the first with h in
place of W, the second with W / h.

Jacobs et al., "DeepSpeed Ulysses" (2023, arXiv:2309.14509) for heads; Liu et al., "Ring Attention"
(2023, arXiv:2310.01889) for the ring; Llama 3 (2024, arXiv:2407.21783), section 3.3.2, for gather.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from attention import Backend
from attention.context import Group, Shards
from config import ModelConfig, RunConfig
from model.gpt import visible_keys_twice
from training.plan import (
    matrix_elements,
    mlp_widths,
    parameter_count,
    predict_step,
)
from training.ranks import Ranks
from training.schedule import will_compile
from training.sharing import check_shares, way_to_share

# the forward pass's share of attention's FLOPs: 2 of 7 matrix products
FORWARD = 2 / 7


@dataclass(frozen=True)
class Link:
    """How long a rank takes to send. It can receive as much at the same time."""

    name: str
    gb_per_s: float = 0.0  # speed at any size, for a link that was not measured
    # {name of the call: ((bytes sent, seconds), ...)}, beginning with (0, latency)
    measured: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)

    def seconds(self, call: str, sent: float) -> float:
        """Seconds of one call in which a rank sends `sent` bytes: linear between measured sizes,
        and beyond the largest at its speed.
        """
        if not sent:
            return 0.0
        if not self.measured:
            return sent / (1e9 * self.gb_per_s)
        sizes, seconds = zip(*self.measured[call], strict=True)
        return float(np.interp(sent, sizes, seconds)) * max(1.0, sent / sizes[-1])


@dataclass(frozen=True)
class Hosts:
    """GPUs in hosts: the links inside a host and between hosts."""

    link: Link
    network: Link
    per_host: int

    def reaching(self, span: int, world: int) -> Link:
        """The slowest link between `span` consecutive ranks."""
        inside = world <= self.per_host or self.per_host % span == 0
        return self.link if inside else self.network

    def all_reduce_seconds(self, size: float, world: int) -> float:
        """Seconds to add up `size` bytes over all ranks, as NCCL does it. A reduce-scatter in each
        host leaves every GPU a share of the host's sum, the hosts add up these shares, and each
        host gathers the result. A rank sends 2 (W - 1) / W of the size in all.
        """
        inside = min(world, self.per_host)
        hosts = math.ceil(world / inside)
        return self.link.seconds("all_reduce", ring_sum(size, inside)) + self.network.seconds(
            "all_reduce", ring_sum(size / inside, hosts)
        )


def ring_sum(size: float, world: int) -> float:
    """Bytes that a rank sends when `world` ranks add up `size` bytes by a reduce-scatter and an
    all-gather (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms").
    """
    return 2 * (world - 1) / world * size


class Message(NamedTuple):
    call: str  # whose measured speed counts
    sent: float  # bytes that a rank sends in one
    times: int = 1


class Exchange(NamedTuple):
    """What a rank sends around and in one attention call."""

    heads: list[Message]  # forward, and once more backward: nothing hides them
    repeated: list[Message]  # those of heads that the backward pass repeats, beside `forwards`
    forward: list[Message]  # of a ring or a gather
    backward: list[Message]

    def sent(self, forwards: int = 1) -> float:
        """Bytes sent in `forwards` forward passes and a backward pass."""
        every = [*self.heads, *self.forward] * forwards
        every += [*self.heads, *self.repeated, *self.backward]
        return sum(each.sent * each.times for each in every)

    def exposed_seconds(
        self, forward: float, backward: float, *, to_heads: Link, to_keys: Link, forwards: int = 1
    ) -> float:
        """Seconds of messages that attention does not hide, in `forwards` forward passes and a
        backward pass. Attention computes for `forward` and `backward` seconds while the messages of
        the same names are under way.
        """
        swaps = seconds_of(self.heads, to_heads)
        hops = max(0.0, seconds_of(self.forward, to_keys) - forward)
        back = max(0.0, seconds_of(self.backward, to_keys) - backward)
        repeated = seconds_of(self.repeated, to_heads)
        return forwards * (swaps + hops) + swaps + repeated + back


def seconds_of(messages: list[Message], link: Link) -> float:
    return sum(each.times * link.seconds(each.call, each.sent) for each in messages)


def exchange(
    q: float, k: float, element: int, *, heads: int, keys: int, repeated: int = 0
) -> Exchange:
    """The messages of one attention call: `heads` ranks exchange heads, and `keys` ranks share the
    keys. q, k: bytes of a rank's queries and of its keys; element: bytes of an element. repeated: 1
    if the backward pass repeats the output's exchange, 2 if also that of q, k and v. See the
    module's docstring.
    """
    swaps = []
    if heads > 1:  # the output, and q, k and v together
        swaps = [Message("all_to_all", size * (heads - 1) / heads) for size in (q, q + 2 * k)]
    pair, gradients = (
        Message("send_receive", size, keys - 1) for size in (2 * k, 2 * k * 4 / element)
    )
    return Exchange(swaps, swaps[:repeated], [pair], [pair, gradients])


@dataclass(frozen=True)
class Seconds:
    """Computing one rank's share of a step."""

    rest: float  # outside attention
    attention: float  # forward, backward and recomputation
    optimizer: float

    @property
    def all(self) -> float:
        return self.rest + self.attention + self.optimizer


@dataclass(frozen=True)
class Speed:
    """The speed of one GPU, by measured steps of one model."""

    matrices: float  # seconds per token and per parameter that multiplies it
    pairs: float  # seconds / (tokens * seq_len * num_layers * hidden_size)
    optimizer: float  # seconds per parameter
    error: float = 0.0  # the largest relative error of the fit on a measured step
    tokens: int = 0  # of a measured step, in one pass
    parameters: int = 0  # of the measured model

    def seconds(
        self, config: ModelConfig, vocab_size: int, tokens: float, seq_len: float
    ) -> Seconds:
        """Seconds for `tokens` in sequences of seq_len. Recomputation costs its share of FLOPs."""
        multiplied, size = multiplied_parameters(config, vocab_size), config.hidden_size
        blocks = config.num_layers * matrix_elements(config)
        if config.checkpoint == "attention":
            # proj and `down` need not run again: their inputs are kept or recomputed
            blocks -= config.num_layers * size * (size + mlp_widths(config)[1])
        again = blocks / 3 if config.checkpoint in ("attention", "block") else 0
        attention = 1 + FORWARD if config.checkpoint == "block" else 1
        return Seconds(
            self.matrices * tokens * (multiplied + again),
            self.pairs * tokens * seq_len * config.num_layers * size * attention,
            self.optimizer * parameter_count(config, vocab_size),
        )


def multiplied_parameters(config: ModelConfig, vocab_size: int) -> int:
    """Number of parameters that multiply every token: all but the embeddings, which are looked up;
    see GPT.flops_per_token().
    """
    looked_up = config.max_seq_len if config.positions == "learned" else 0
    looked_up += 0 if config.tie_embeddings else vocab_size
    return parameter_count(config, vocab_size) - looked_up * config.hidden_size


def fit_speed(
    config: ModelConfig,
    vocab_size: int,
    measured: Iterable[tuple[int, float]],
    *,
    tokens: int,
    optimizer: float,
) -> Speed:
    """Fit `matrices` and `pairs` to measured steps, by least squares of relative errors.

    measured: (sequence length, tokens/s) of steps of `tokens`. optimizer: its seconds per step.
    """
    lengths, rates = np.array(list(measured), dtype=float).T
    seconds = tokens / rates
    unit = Speed(1.0, 1.0, 0.0)
    parts = [unit.seconds(config, vocab_size, tokens, length) for length in lengths]
    matrix = np.array([[part.rest, part.attention] for part in parts]) / seconds[:, None]
    found = np.linalg.lstsq(matrix, 1 - optimizer / seconds, rcond=None)[0]
    error = float(np.abs(matrix @ found + optimizer / seconds - 1).max())
    matrices, pairs = map(float, found)
    count = parameter_count(config, vocab_size)
    return Speed(matrices, pairs, optimizer / count, error, tokens, count)


@dataclass(frozen=True)
class RanksPlan:
    """A step of a run on `world` GPUs."""

    world: int
    data: int  # into how many parts the sequences of a step are divided
    context: int  # ranks that share each sequence
    heads: int  # ... and of these, those that share its heads
    passes: int  # of a rank, in one step
    pass_tokens: int  # of a rank, in one pass
    step_seconds: float
    tokens_per_sec: float
    speedup: float  # over one GPU that takes the same step
    exchange_seconds: float  # of attention's messages, without what attention hides
    gradient_seconds: float
    exchange_bytes: float  # that a rank sends in a step
    gradient_bytes: float
    peak_bytes: int  # of a rank

    @property
    def sent_bytes(self) -> float:
        return self.exchange_bytes + self.gradient_bytes

    @property
    def efficiency(self) -> float:
        return self.speedup / self.world


def plan_ranks(
    config: RunConfig,
    vocab_size: int,
    backend: Backend,
    dtype: torch.dtype,
    *,
    world: int,
    speed: Speed,
    merging: float,
    hosts: Hosts,
) -> RanksPlan:
    """Plan one step of config on `world` GPUs. world=1 ignores config.parallel. merging: seconds
    that a ring takes to merge, per layer, hop and feature of a token's queries.

    Raises ValueError if the step does not divide among the ranks.
    """
    model, length, element = config.model, config.seq_len, dtype.itemsize
    context, how = (config.parallel.context if world > 1 else 1), config.parallel.how
    heads = way_to_share(config)["heads"] if context > 1 else 1
    keys = context // heads
    data, sequences, passes = share_step(config, world, context, keys)
    calls = passes * model.num_layers

    own = sequences * length // context  # tokens of a rank in one pass
    q, k = (element * own * n * model.head_dim for n in (model.num_heads, model.kv_heads))
    compiled = will_compile(model, backend, "cuda", compile_mode=config.compile)
    repeated = model.recomputes_halves + (compiled and model.checkpoint == "attention")
    messages = exchange(q, k, element, heads=heads, keys=keys, repeated=repeated)
    tokens = config.sequences_per_step * length
    windows = config.attention.layer_windows(model.num_layers)
    # the length at which causal attention without windows sees as many keys
    attended = sum(visible_keys_twice(length, window) for window in windows) / len(windows) - 1
    compute = speed.seconds(model, vocab_size, tokens / world, attended)
    # under checkpoint=block the backward pass begins with attention's forward pass
    forwards = 2 if model.checkpoint == "block" else 1
    # while a ring computes with its last block of keys, no message is under way
    beside = 0.0 if how == "gather" else (keys - 1) / keys * compute.attention / calls
    share = FORWARD / (1 + FORWARD * (forwards - 1))  # a forward pass's share of attention's time
    exposed = calls * messages.exposed_seconds(
        share * beside,
        (1 - forwards * share) * beside,
        to_heads=hosts.reaching(heads, world),
        to_keys=hosts.reaching(context, world),
        forwards=forwards,
    )
    if keys > 1 and how != "gather":
        exposed += calls * q / element * keys * merging

    count = parameter_count(model, vocab_size)
    gradients = 4 * (count + 1)  # and the loss, in float32
    summing = hosts.all_reduce_seconds(gradients, world)
    seconds = compute.all + exposed + summing
    memory = predict_step(
        model,
        vocab_size=vocab_size,
        batch_size=sequences,
        seq_len=length // context,
        backend=backend,
        dtype=dtype,
        compiled=compiled,
        accumulates=passes > 1,
        shares_heads=heads > 1,
        keys=keys,
        gather=how == "gather",
    )
    return RanksPlan(
        world,
        data,
        context,
        heads,
        passes,
        own,
        step_seconds=seconds,
        tokens_per_sec=tokens / seconds,
        speedup=speed.seconds(model, vocab_size, tokens, attended).all / seconds,
        exchange_seconds=exposed,
        gradient_seconds=summing,
        exchange_bytes=calls * messages.sent(forwards),
        gradient_bytes=ring_sum(gradients, world),
        peak_bytes=memory.peak,
    )


def share_step(config: RunConfig, world: int, context: int, keys: int) -> tuple[int, int, int]:
    """Into how many parts the ranks divide a step's sequences, how many sequences a rank has in a
    pass, and its number of passes. Raises ValueError for sizes that do not divide.
    """
    if world % context:
        below = world - world % context
        raise ValueError(
            f"ranks={world} is not a multiple of parallel.context={context}; take "
            f"ranks={below or context} or another parallel.context"
        )
    data = world // context
    check_shares(config, Ranks(world=world, context=context, shards=Shards(ring=Group(size=keys))))
    # without tokens_per_step the ranks share one pass
    sequences = int(config.batch_size) // (1 if config.tokens_per_step else data)
    return data, sequences, config.sequences_per_step // data // sequences
