"""Decode one token at a time in fixed shapes, so that a GPU can replay a CUDA graph.

A decoding step is many short kernels, and a graph launches them all at once. Its addresses and
shapes never change. The step reads the token, its position and the lengths from tensors, and writes
keys and values in place into the cache.

Dimensions: B batch.
"""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from attention import Backend
from model.fused_step import has_kernels, next_logits
from model.kv_cache import KVCache, Places

if TYPE_CHECKING:
    from model.gpt import GPT

# features that attention_with_cache() takes; sinks need "lse"
SUPPORTED = frozenset({"window", "softcap", "lse"})
KEPT = 2  # steps kept per model, each with a cache and a graph


def has_steps(model: "GPT") -> bool:
    """Whether the model's attention can decode over a cache of fixed shape."""
    return model.backend.can_decode and model.attention_features <= SUPPORTED


class Prediction(NamedTuple):
    """The prediction after the last token, computed inside a step's graph."""

    logits: Tensor  # (B, vocab_size) float32
    likeliest: Tensor  # (B, 1) int64
    finite: Tensor  # () bool, whether all logits are finite


def predict(logits: Tensor) -> Prediction:
    """The Prediction from logits (B, vocab_size) float32."""
    # NaN if any logit is
    largest = torch.linalg.vector_norm(logits, torch.inf)
    return Prediction(logits, logits.argmax(-1, keepdim=True), largest < torch.inf)


class DecodingStep:
    """Each call reads one token per sequence, after those in the cache, and stores it there.

    The cache must already hold a prompt of B sequences. The first call captures the graph. A graph
    captured under autocast reads autocast's copies of the weights: use it only inside the same
    context.
    """

    def __init__(self, model: "GPT", cache: KVCache, batch_size: int):
        device = next(model.parameters()).device
        # weak, because kept steps must not keep their model alive
        self.model, self.cache = ref(model), cache
        self.backends = backends_of(model)  # kept alive, so that no other backend gets their id
        self.tokens = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self.places = Places(
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(batch_size, dtype=torch.int32, device=device),
        )
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Tensor) -> Prediction:
        """The prediction after tokens (B, 1). The next call may overwrite it."""
        length = self.cache.length
        assert length < self.cache.max_len, "the cache is full"
        self.tokens.copy_(tokens)
        self.places.positions.fill_(length)
        self.places.lengths.fill_(length + 1)
        if self.tokens.device.type == "cuda":
            with torch.cuda.device(self.tokens.device):
                if self.graph is None:
                    # each run writes the same keys to the same places
                    self.graph, self.prediction = captured(self.run)
                self.graph.replay()
        else:
            self.prediction = self.run()
        self.cache.advance()
        return self.prediction

    def run(self) -> Prediction:
        model = self.model()
        assert model is not None
        with self.cache.at(self.places):
            if has_kernels(model, self.tokens):
                return predict(next_logits(model, self.tokens, self.cache))
            return predict(model(self.tokens, cache=self.cache).logits[:, -1].float())


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of run(), and its result, which each replay overwrites."""
    # warm up: compile kernels and allocate workspaces
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, run()


def backends_of(model: "GPT") -> list[Backend]:
    return [model.backend]


kept: WeakKeyDictionary["GPT", dict[Hashable, DecodingStep]] = WeakKeyDictionary()


def tensors_of(model: "GPT") -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def kind_of(model: "GPT", batch_size: int, max_len: int) -> Hashable:
    """Everything that a graph depends on, except the values of the weights, which it reads in
    place.

    PyTorch's own settings are left out, such as the precision of float32 products.
    """
    weights = tuple((x.data_ptr(), x.dtype, x.shape, x.stride()) for x in tensors_of(model))
    backends = tuple(map(id, backends_of(model)))
    return batch_size, max_len, torch.is_inference_mode_enabled(), backends, weights


def take_step(model: "GPT", batch_size: int, max_len: int) -> DecodingStep:
    """A step with an empty cache of max_len tokens: one from keep_step(), or a new one."""
    steps, step = kept.get(model, {}), None
    if steps and not under_autocast(model):
        step = steps.pop(kind_of(model, batch_size, max_len), None)
    if step is None:
        while len(steps) >= KEPT:  # free them before a new cache takes memory
            del steps[next(iter(steps))]
        return DecodingStep(model, KVCache(model.config.num_layers, max_len=max_len), batch_size)
    step.cache.reset()
    return step


def keep_step(model: "GPT", step: DecodingStep) -> None:
    """Keep a step that has a graph, with its cache's memory, for the next take_step() of its kind.
    It stays until the model is freed or other steps take its place. The caller must no longer use
    it.
    """
    # a tensor that wraps others has no address, so replacing its weights would go unnoticed
    placed = all(x.data_ptr() for x in tensors_of(model))
    if step.graph is None or under_autocast(model) or not placed:
        return
    kind = kind_of(model, len(step.tokens), step.cache.max_len)
    kept.setdefault(model, {})[kind] = step


def under_autocast(model: "GPT") -> bool:
    """Whether a graph would read autocast's copies of the weights, which are freed when autocast
    ends.
    """
    return torch.is_autocast_enabled(next(model.parameters()).device.type)
