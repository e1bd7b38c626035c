"""Does reading through a cache equal one pass? The question bites: each mistake in the cache, or in
the steps of fixed shape, gives other logits.
"""

import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import model as package
from model import GPT

FOLDER = Path(package.__file__).parent
MODULES = ("kv_cache", "decoding")

# by what is wrong: the module, the line, and the line instead
MISTAKES = {
    "keys are written a place late": (
        "kv_cache",
        "self.k[:, :, start : self.length] = k",
        "self.k[:, :, start + 1 : self.length + 1] = k",
    ),
    "values are written at the front": (
        "kv_cache",
        "self.v[:, :, start : self.length] = v",
        "self.v[:, :, : v.shape[2]] = v",
    ),
    "values of a step are written at the front": (
        "kv_cache",
        "self.v.index_copy_(2, self.places.positions, v)",
        "self.v.index_copy_(2, 0 * self.places.positions, v)",
    ),
    "the new keys are not shown": (
        "kv_cache",
        "return self.k[:, :, : self.length], self.v[:, :, : self.length]",
        "return self.k[:, :, : start or self.length], self.v[:, :, : start or self.length]",
    ),
    "a length counts the last chunk alone": (
        "kv_cache",
        "self.length, self.length + k.shape[2]",
        "self.length, k.shape[2]",
    ),
    "positions are not offset": ("kv_cache", "return self.layers[0].length", "return 0"),
    "one layer counts a step": (
        "kv_cache",
        "layer.length += 1",
        "layer.length += layer is self.layers[0]",
    ),
    "one layer forgets": (
        "kv_cache",
        "layer.length = 0",
        "layer.length *= layer is not self.layers[0]",
    ),
    "the places of the last step stay": (
        "kv_cache",
        "finally:\n            for layer in self.layers:\n                layer.places = None",
        "finally:\n            pass",
    ),
    "a step stands where the token before it does": (
        "decoding",
        "self.places.positions.fill_(length)",
        "self.places.positions.fill_(length - 1)",
    ),
    "a step does not see its own key": (
        "decoding",
        "self.places.lengths.fill_(length + 1)",
        "self.places.lengths.fill_(length)",
    ),
    "a step sees room that nobody wrote": (
        "decoding",
        "self.places.lengths.fill_(length + 1)",
        "self.places.lengths.fill_(length + 2)",
    ),
    "the lengths of the first step stay": (
        "decoding",
        "self.places.lengths.fill_(length + 1)",
        "self.places.lengths.masked_fill_(self.places.lengths == 0, length + 1)",
    ),
    "a step is not counted": ("decoding", "self.cache.advance()", "pass"),
    "the first step's token stays": (
        "decoding",
        "self.tokens.copy_(tokens)",
        "self.tokens.any() or self.tokens.copy_(tokens)",
    ),
}


def loaded(edited: str = "", before: str = "", after: str = "") -> dict[str, Any]:
    """The two modules, one of them with an edit."""
    modules = {}
    with mock.patch.dict(sys.modules):
        for name in MODULES:
            source = (FOLDER / f"{name}.py").read_text()
            if name == edited:
                assert source.count(before) == 1, before
                source = source.replace(before, after)
            module = types.ModuleType(f"model.{name}")
            exec(compile(source, f"model/{name}.py edited", "exec"), module.__dict__)
            sys.modules[module.__name__] = modules[name] = module
    return modules


def worst_logit(model: GPT, tokens: Tensor, modules: dict[str, Any]) -> float:
    """The largest error of any logit, where a cache is read in chunks, then in steps, then in a
    chunk, and once more after a reset. What nobody wrote is NaN.
    """
    cache = modules["kv_cache"].KVCache(model.config.num_layers, max_len=tokens.shape[1])
    step = modules["decoding"].DecodingStep(model, cache, len(tokens))
    worst = 0.0
    for given in (tokens, tokens.flip(1)):
        cache.reset()
        parts = [model(given[:, :3], cache=cache).logits]
        for layer in cache.layers:
            layer.k[:, :, 3:], layer.v[:, :, 3:] = torch.nan, torch.nan
        parts.append(model(given[:, 3:5], cache=cache).logits)
        parts += [step(given[:, [i]]).logits.unsqueeze(1) for i in range(5, 9)]
        parts.append(model(given[:, 9:], cache=cache).logits)
        error = (torch.cat(parts, 1) - model(given).logits).abs().max()
        worst = max(worst, error.nan_to_num(nan=torch.inf).item())
    return worst


@pytest.fixture
def read(build_gpt, random_tokens):
    """worst_logit() of two layers that step, with positions of either kind."""

    def errors(modules: dict[str, Any]) -> float:
        kinds = {"rope": {"positions": "rope", "num_kv_heads": 2}, "learned": {}}
        with torch.no_grad():
            tokens = random_tokens(2, 12)
            return max(
                worst_logit(build_gpt("tiled", **x), tokens, modules) for x in kinds.values()
            )

    return errors


def test_a_cache_equals_one_pass(read):
    assert read(loaded()) < 1e-4


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_cache_is_caught(read, name):
    try:
        error = read(loaded(*MISTAKES[name]))
    except (RuntimeError, ValueError, IndexError):
        return  # PyTorch saw it
    assert error > 1e-2
