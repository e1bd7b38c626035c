"""How ranks share a step, and what they cannot share."""

from dataclasses import is_dataclass
from math import gcd
from operator import attrgetter
from typing import Any

from config import RunConfig, setting_keys
from training.loop.ranks import Ranks
from training.loop.schedule import chosen_attention


def check_context(config: RunConfig) -> None:
    """Raise ValueError for a model or attention whose sequences ranks cannot share."""
    context, model = config.parallel.context, config.model
    if context == 1:
        return
    for backend in chosen_attention(config.attention).values():
        if backend.module is not None:
            raise ValueError(
                f"attention={backend.name} has parameters for all heads and tokens, and ranks that "
                f"share a sequence have a part of them; leave out parallel.context={context}"
            )
    shared = gcd(model.num_heads, model.kv_heads)  # their divisors divide both
    if shared % context:
        numbers = ", ".join(str(n) for n in range(2, shared + 1) if shared % n == 0) or "only 1"
        raise ValueError(
            f"parallel.context={context} cannot give {context} ranks the same number of "
            f"{model.num_heads} query heads and {model.kv_heads} key/value heads; "
            f"parallel.context can be {numbers}"
        )


def shared_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that all ranks must share: all but the places of files and the logger."""
    own = ("resume", "init_from", "logger", "data.path")
    # seq_len first: an error then names it, and not model.max_seq_len, which follows it
    keys = sorted(setting_keys(RunConfig), key=lambda key: "." in key)
    values = {key: attrgetter(key)(config) for key in keys if not key.startswith(own)}
    return {key: value for key, value in values.items() if not is_dataclass(value)}


def check_shares(config: RunConfig, ranks: Ranks) -> None:
    """Raise ValueError for a step that the ranks cannot share equally."""
    if not ranks.several:
        return
    context, world = ranks.context, ranks.data
    if over := config.seq_len % context:
        raise ValueError(
            f"seq_len={config.seq_len} does not divide among the {context} ranks of "
            f"parallel.context={context}; take seq_len={config.seq_len + context - over}"
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
