"""One token at a time through a model, in fixed shapes, so that a GPU can replay a CUDA graph.

A step of decoding is many short kernels, and a graph launches them all at once. Its addresses and
shapes never change: the token, its position and the lengths are tensors that the step reads, and
the keys and values go in place into the room of the cache.

Dimensions: B batch.
"""

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from attention import Backend
from model.fused_step import has_kernels, next_logits
from model.kv_cache import KVCache, Places

if TYPE_CHECKING:
    from model.gpt import GPT

# what attention_with_cache() takes; "lse" is what sinks ask for
SUPPORTED = frozenset({"window", "softcap", "lse"})
KEPT = 2  # steps of a model, each with a cache and a graph


def has_steps(model: "GPT") -> bool:
    """Whether the model's attention can decode over a cache of fixed shape."""
    return model.backend.can_decode and model.attention_features <= SUPPORTED


class Prediction(NamedTuple):
    """What follows the last token. All of it is part of a step's graph."""

    logits: Tensor  # (B, vocab_size) float32
    likeliest: Tensor  # (B, 1) int64
    finite: Tensor  # () bool, whether all logits are


def predict(logits: Tensor) -> Prediction:
    """Of logits (B, vocab_size) float32."""
    # NaN if any logit is
    largest = torch.linalg.vector_norm(logits, torch.inf)
    return Prediction(logits, logits.argmax(-1, keepdim=True), largest < torch.inf)


class DecodingStep:
    """Calls that read one token a sequence, after those in the cache, which stores it too.

    The cache has read a prompt of B sequences already. The graph is captured in the first call. One
    captured under autocast reads its copies of the weights: use it inside the same context alone.
    """

    def __init__(self, model: "GPT", cache: KVCache, batch_size: int):
        device = next(model.parameters()).device
        # weakly, as the steps that are kept must not keep their model
        self.model, self.cache = ref(model), cache
        self.backends = backends_of(model)  # alive, so that no other comes to have their id
        self.tokens = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self.places = Places(
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(batch_size, dtype=torch.int32, device=device),
        )
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Tensor) -> Prediction:
        """What follows tokens (B, 1). The next call may overwrite it."""
        length = self.cache.length
        assert length < self.cache.max_len, "the cache is full"
        self.tokens.copy_(tokens)
        self.places.positions.fill_(length)
        self.places.lengths.fill_(length + 1)
        if self.tokens.device.type == "cuda":
            with torch.cuda.device(self.tokens.device):
                if self.graph is None:
                    self.capture()
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

    def capture(self) -> None:
        # compiles kernels and takes workspaces; each run writes the same keys to the same places
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.prediction = self.run()
        self.graph = graph


def backends_of(model: "GPT") -> list[Backend]:
    return [block.attention.backend for block in model.blocks]


kept: WeakKeyDictionary["GPT", dict[Hashable, DecodingStep]] = WeakKeyDictionary()


def tensors_of(model: "GPT") -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def kind_of(model: "GPT", batch_size: int, max_len: int) -> Hashable:
    """All that a graph depends on, but the values of the weights, which it reads where they lie.

    Left out are settings of PyTorch's own, such as the precision of float32 products.
    """
    weights = tuple((x.data_ptr(), x.dtype, x.shape, x.stride()) for x in tensors_of(model))
    backends = tuple(map(id, backends_of(model)))
    return batch_size, max_len, torch.is_inference_mode_enabled(), backends, weights


def take_step(model: "GPT", batch_size: int, max_len: int) -> DecodingStep:
    """A step with an empty cache of max_len tokens: one that keep_step() kept, or a new one."""
    steps, step = kept.get(model, {}), None
    if steps and not under_autocast(model):
        step = steps.pop(kind_of(model, batch_size, max_len), None)
    if step is None:
        while len(steps) >= KEPT:  # now, as a new cache takes memory
            del steps[next(iter(steps))]
        return DecodingStep(model, KVCache(model.config.num_layers, max_len=max_len), batch_size)
    step.cache.reset()
    return step


def keep_step(model: "GPT", step: DecodingStep) -> None:
    """Keep a step that has a graph, with the memory of its cache, for the next take_step() of its
    kind. It is kept as long as the model, or until others need its place. The caller may not use it
    any more.
    """
    # a tensor that wraps others has no address of its own, and shows no exchange of its weights
    placed = all(x.data_ptr() for x in tensors_of(model))
    if step.graph is None or under_autocast(model) or not placed:
        return
    kind = kind_of(model, len(step.tokens), step.cache.max_len)
    kept.setdefault(model, {})[kind] = step


def under_autocast(model: "GPT") -> bool:
    """Whether a graph reads copies of the weights, which are freed when autocast ends."""
    return torch.is_autocast_enabled(next(model.parameters()).device.type)
