"""One token at a time through a model, in fixed shapes, so that a GPU can replay a CUDA graph.

A step of decoding is some two hundred short kernels, and a graph launches them all at once. Its
addresses and shapes never change: the token, its position and the lengths are tensors that the step
reads, and the keys and values go in place into the room of the cache.

Dimensions: B batch.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.kv_cache import KVCache, Places

if TYPE_CHECKING:
    from model.gpt import GPT

# what attention_with_cache() takes; "lse" is what sinks ask for
SUPPORTED = frozenset({"window", "softcap", "lse"})


def has_steps(model: "GPT") -> bool:
    """Whether the model's attention can decode over a cache of fixed shape."""
    return model.backend.can_decode and model.attention_features <= SUPPORTED


class DecodingStep:
    """Calls that read one token a sequence, after those in the cache, which stores it too.

    The cache has read a prompt of B sequences already. The graph is captured in the first call. One
    captured under autocast reads its copies of the weights: use it inside the same context alone.
    """

    def __init__(self, model: "GPT", cache: KVCache, batch_size: int):
        device = next(model.parameters()).device
        self.model, self.cache = model, cache
        self.tokens = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self.places = Places(
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(batch_size, dtype=torch.int32, device=device),
        )
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """The logits (B, vocab_size) float32 after tokens (B, 1). The next call may overwrite
        them.
        """
        length = self.cache.length
        assert length < self.cache.max_len, "the cache is full"
        self.tokens.copy_(tokens)
        self.places.positions.fill_(length)
        self.places.lengths.fill_(length + 1)
        if self.tokens.device.type == "cuda":
            if self.graph is None:
                self.capture()
            self.graph.replay()
        else:
            self.logits = self.run()
        self.cache.advance()
        return self.logits

    def run(self) -> Tensor:
        with self.cache.at(self.places):
            return self.model(self.tokens, cache=self.cache).logits[:, -1].float()

    def capture(self) -> None:
        # compiles kernels and takes workspaces; each run writes the same keys to the same places
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.run()
