"""How ranks share a step, and what they cannot share."""

from dataclasses import is_dataclass
from math import gcd
from operator import attrgetter
from typing import Any

from attention import BACKENDS, Backend
from attention.context import register_ring
from attention.played_ring import PlayedRing
from config import BACKEND_OPTIONS, RunConfig, setting_keys
from training.ranks import Ranks
from training.schedule import chosen_attention, needed_features

RINGS = [name for name, backend in BACKENDS.items() if backend.ring is not None]


def way_to_share(config: RunConfig) -> dict[str, Any]:
    """How `parallel.context` ranks share a sequence, for training.ranks.join().

    Raises ValueError for a way that this model or attention does not have.
    """
    context, how = config.parallel.context, config.parallel.how
    if context == 1:
        return {}
    backends = list(chosen_attention(config.attention).values())
    for backend in backends:
        if backend.module is not None:
            raise ValueError(
                f"attention={backend.name} has parameters for all heads and tokens, and ranks that "
                f"share a sequence have a part of them; leave out parallel.context={context}"
            )
    on_a_ring = any(isinstance(backend.fn, PlayedRing) for backend in backends)
    shared = gcd(config.model.num_heads, config.model.kv_heads)  # their divisors divide both
    heads = gcd(context, shared)
    numbers = ", ".join(str(n) for n in range(2, shared + 1) if shared % n == 0) or "only 1"
    if how in ("ring", "gather") or (how == "auto" and on_a_ring):
        heads = 1
    if how == "heads" and heads != context:
        raise ValueError(
            f"parallel.how=heads cannot give {context} ranks the same number of "
            f"{config.model.num_heads} query heads and {config.model.kv_heads} key/value heads; "
            f"parallel.context can be {numbers}; parallel.how=ring takes any number"
        )
    if heads < context:
        for backend in backends:
            _check_on_a_ring(config, backend, numbers)
    return {"heads": heads, "gather": how == "gather"}


def _check_on_a_ring(config: RunConfig, backend: Backend, numbers: str) -> None:
    context, name = config.parallel.context, f"attention={backend.name}"
    needed, reason = needed_features(config), None
    if by_position := needed.get("alibi_slopes") or needed.get("score_mod"):
        reason = (
            f"{by_position} needs the positions of keys, which it does not send; take "
            f"parallel.how=heads, where parallel.context can be {numbers}"
        )
    elif backend.ring is None:
        reason = (
            f"{name} cannot attend to a part of the keys; these can: {', '.join(RINGS)}; "
            f"parallel.how=heads takes any attention, and parallel.context can be {numbers} there"
        )
    elif config.parallel.how == "gather" and not backend.ring.exact:
        reason = f"{name} breaks the merge, of which parallel.how=gather has none; take ring"
    elif backend.options.get("softmax_dtype") == "input":
        reason = "a ring keeps its sums in float32: leave out attention.softmax_dtype=input"
    elif config.attention.ranks not in (None, BACKEND_OPTIONS["ranks"], context):
        reason = (
            f"attention.ranks={config.attention.ranks} are ranks that one process plays: leave it "
            "out, the processes are the ranks"
        )
    if reason is not None:
        raise ValueError(f"parallel.context={context} is a ring here: {reason}")


def shared_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that all ranks must share: all but the places of files and the logger."""
    own = ("resume", "init_from", "logger", "data.path", "data.cache_dir")
    # seq_len first: an error then names it, and not model.max_seq_len, which follows it
    keys = sorted(setting_keys(RunConfig), key=lambda key: "." in key)
    values = {key: attrgetter(key)(config) for key in keys if not key.startswith(own)}
    return {key: value for key, value in values.items() if not is_dataclass(value)}


def on_ranks(backend: Backend, ranks: Ranks) -> Backend:
    """The attention of a run, made known to the ring's operators if its ranks form a ring. One that
    plays a ring in a single process then plays as many ranks, for whole sequences.
    """
    if not ranks.on_a_ring:
        return backend
    if isinstance(backend.fn, PlayedRing):
        backend = backend.configured(ranks=ranks.shards.ring.size)
    register_ring(backend)
    return backend


def check_shares(config: RunConfig, ranks: Ranks) -> None:
    """Raise ValueError for a step that the ranks cannot share equally."""
    if not ranks.several:
        return
    context, world = ranks.context, ranks.data
    # a ring of R ranks cuts a sequence into 2 R chunks; ranks that exchange heads divide these
    parts = 2 * context if ranks.on_a_ring else context
    if over := config.seq_len % parts:
        raise ValueError(
            f"seq_len={config.seq_len} does not divide into {parts} parts for the {context} ranks "
            f"of parallel.context={context}; take seq_len={config.seq_len + parts - over}"
        )
    size = config.batch_size
    if config.tokens_per_step is None:
        if size % world:
            raise ValueError(
                f"batch_size={size} does not divide among {world} ranks; take "
                f"batch_size={size + world - size % world}"
            )
        return
    of_all = world * size * config.seq_len
    if over := config.tokens_per_step % of_all:
        raise ValueError(
            f"tokens_per_step={config.tokens_per_step} is not a multiple of ranks * batch_size * "
            f"seq_len = {world} * {size} * {config.seq_len} = {of_all}; take "
            f"tokens_per_step={config.tokens_per_step - over + of_all}"
        )
