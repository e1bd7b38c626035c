"""Store keys and values of the tokens read so far, so that the next token costs one query instead
of the whole context.

Dimensions: B batch, H_kv key/value heads, N new tokens, M tokens so far, D head dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention import Backend, attention, attention_with_cache


class Places(NamedTuple):
    """Where new tokens go, for a step whose shapes never change; see model.decoding."""

    positions: Tensor  # (N,) int64, positions of the new tokens
    lengths: Tensor  # (B,) int32, tokens of each sequence, including the new ones


class LayerCache:
    """One layer's keys and values."""

    def __init__(self, max_len: int):
        self.max_len = max_len
        self.length = 0
        self.places: Places | None = None  # None: after the tokens read so far
        self.k: Tensor | None = None  # (B, H_kv, max_len, D)
        self.v: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, backend: Backend, **arguments: Any) -> Any:
        """attention() of q over all keys so far, after k and v are appended."""
        k, v = self.extend(k, v)
        if self.places is None:
            return attention(q, k, v, backend=backend, **arguments)
        taken = ("window", "softcap", "sinks")
        given = {name: arguments[name] for name in taken if name in arguments}
        return attention_with_cache(q, k, v, self.places.lengths, backend=backend, **given)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (B, H_kv, N, D). Return views of all keys and values so far, (B, H_kv, M,
        D), or with `places` of the whole cache.
        """
        if self.k is None:
            batch_size, num_kv_heads, _, head_dim = k.shape
            self.k = k.new_empty(batch_size, num_kv_heads, self.max_len, head_dim)
            self.v = torch.empty_like(self.k)
        if self.places is not None:
            self.k.index_copy_(2, self.places.positions, k)
            self.v.index_copy_(2, self.places.positions, v)
            return self.k, self.v
        start, self.length = self.length, self.length + k.shape[2]
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


class KVCache:
    """Room for `max_len` tokens in every layer.

    A layer allocates its room at its first use, when the dtype (autocast decides it), the device
    and the batch size are known.
    """

    def __init__(self, num_layers: int, *, max_len: int):
        self.max_len = max_len
        self.layers = [LayerCache(max_len) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Tokens read so far."""
        return self.layers[0].length

    @property
    def places(self) -> Places | None:
        return self.layers[0].places

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Positions of `count` new tokens, (count,). Raises ValueError if they do not fit."""
        if self.places is not None:
            return self.places.positions
        if (total := self.length + count) > self.max_len:
            raise ValueError(
                f"{self.length} cached and {count} new tokens are more than the KVCache's "
                f"max_len={self.max_len}"
            )
        return torch.arange(self.length, total, device=device)

    @contextmanager
    def at(self, places: Places) -> Iterator[None]:
        """Inside, new tokens go to these places and are not counted; see advance()."""
        for layer in self.layers:
            layer.places = places
        try:
            yield
        finally:
            for layer in self.layers:
                layer.places = None

    def advance(self) -> None:
        """Count one more token."""
        for layer in self.layers:
            layer.length += 1

    def reset(self) -> None:
        """Forget every token, but keep the memory."""
        for layer in self.layers:
            layer.length = 0
