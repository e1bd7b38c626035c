"""Decode one token at a time in fixed shapes, so that a GPU can replay a CUDA graph.

A decoding step is many short kernels, and a graph launches them all at once. Its addresses and
shapes never change. The step reads the tokens and the lengths from tensors, and writes keys and
values in place into the cache.

Dimensions: B batch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from model.kv_cache import KVCache

if TYPE_CHECKING:
    from model.gpt import GPT

# features that attention_with_cache() takes; sinks need "lse"
SUPPORTED = frozenset({"window", "softcap", "lse"})


def has_steps(model: "GPT") -> bool:
    """Whether the model's attention can decode over a cache of fixed shape."""
    return model.backend.can_decode and model.attention_features <= SUPPORTED


class DecodingStep:
    """Each call reads one token per sequence, after those in the cache, and stores it there.

    The cache must already hold a prompt of B sequences. On a GPU the first call captures the graph.
    It reads the weights in place, or autocast's copies of them, so use a step only inside one
    autocast context.
    """

    def __init__(self, model: "GPT", cache: KVCache, batch_size: int):
        device = next(model.parameters()).device
        self.model, self.cache = model, cache
        self.tokens = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """The logits (B, 1, vocab_size) after tokens (B, 1). The next call may overwrite them."""
        assert self.cache.length < self.cache.max_len, "the cache is full"
        self.tokens.copy_(tokens)
        self.lengths.fill_(self.cache.length + 1)
        if self.tokens.is_cuda:
            with torch.cuda.device(self.tokens.device):
                if self.graph is None:
                    # each run writes the same keys to the same places
                    self.graph, self.logits = captured(self.run)
                self.graph.replay()
        else:
            self.logits = self.run()
        self.cache.length += 1
        return self.logits

    def run(self) -> Tensor:
        with self.cache.fixed(self.lengths):
            return self.model(self.tokens, cache=self.cache).logits


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of run(), and its result, which each replay overwrites."""
    run()  # compiles kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, run()
