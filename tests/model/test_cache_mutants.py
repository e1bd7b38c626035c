"""Does reading through a cache equal one pass? The question bites: each mistake of
conformance/gallery/caches.txt, in the cache or in the steps of fixed shape, gives other logits.
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
from tests.conformance.edits import Package
from tests.conformance.gallery import mutants_of

FOLDER = Path(package.__file__).parent
MODULES = ("kv_cache", "decoding")
MISTAKES = mutants_of("caches")


@pytest.fixture(scope="module")
def sources():
    return Package(FOLDER)


def loaded(edited: dict[str, str]) -> dict[str, Any]:
    """The two modules, some with an edited source."""
    modules = {}
    with mock.patch.dict(sys.modules):
        for name in MODULES:
            source = edited.get(name) or (FOLDER / f"{name}.py").read_text()
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
    assert read(loaded({})) < 1e-4


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_in_the_cache_is_caught(read, sources, mistake):
    modules = loaded(sources.edited(mistake.edits, mistake.name))
    try:
        error = read(modules)
    except (RuntimeError, ValueError, IndexError):
        return  # PyTorch saw it
    assert error > 1e-2
