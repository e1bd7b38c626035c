"""Store keys and values of the tokens read so far, so that the next token costs one query instead
of the whole context.

Dimensions: B batch, H query heads, H_kv key/value heads, N new tokens, M tokens so far, D head dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attention import AttentionOutput, Backend, ScoredOutput, attention, attention_with_cache


class LayerCache:
    """One layer's keys and values."""

    def __init__(self, max_len: int):
        self.max_len = max_len
        self.length = 0
        # positions (1,) and lengths (B,) inside KVCache.fixed(), elsewhere None
        self.places: tuple[Tensor, Tensor] | None = None
        self.k: Tensor | None = None  # (B, H_kv, max_len, D)
        self.v: Tensor | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, backend: str | Backend, **arguments: Any
    ) -> AttentionOutput | ScoredOutput:
        """Store k and v (B, H_kv, N, D), then let q (B, H, N, D) attend to all keys so far.

        The arguments and the result are those of attention(). Inside KVCache.fixed() they are those
        of attention_with_cache(), which raises TypeError for an argument that it does not have;
        None and return_max_score are left out.
        """
        if self.k is None or self.v is None:
            room = (*k.shape[:2], self.max_len, k.shape[3])
            self.k, self.v = k.new_empty(room), v.new_empty(room)
        if self.places is not None:
            positions, lengths = self.places
            self.k.index_copy_(2, positions, k)
            self.v.index_copy_(2, positions, v)
            arguments.pop("return_max_score", None)
            given = {name: value for name, value in arguments.items() if value is not None}
            return attention_with_cache(q, self.k, self.v, lengths, backend=backend, **given)
        start, self.length = self.length, self.length + k.shape[2]
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        k, v = self.k[:, :, : self.length], self.v[:, :, : self.length]  # (B, H_kv, M, D)
        return attention(q, k, v, backend=backend, **arguments)


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
        """Tokens read so far; 0 forgets them and keeps the memory."""
        return self.layers[0].length

    @length.setter
    def length(self, length: int) -> None:
        for layer in self.layers:
            layer.length = length

    def positions(self, count: int, device: torch.device) -> Tensor:
        """The positions of the next `count` tokens, (count,) int64. Raises ValueError if there is
        no room for them.
        """
        end = self.length + count
        if end > self.max_len:
            raise ValueError(
                f"{self.length} cached and {count} new tokens are more than the KVCache's "
                f"max_len={self.max_len}"
            )
        if (places := self.layers[0].places) is not None:
            return places[0]
        return torch.arange(self.length, end, device=device)

    @contextmanager
    def fixed(self, lengths: Tensor) -> Iterator[None]:
        """Inside, a pass has one new token in each sequence, the last of its `lengths` (B,) int64
        tokens, which are equal. No shape and no address depends on them, so a CUDA graph of the
        pass serves all lengths. The pass does not count its tokens: add 1 to `length` after it.
        """
        places = lengths[:1] - 1, lengths
        for layer in self.layers:
            layer.places = places
        try:
            yield
        finally:
            for layer in self.layers:
                layer.places = None
