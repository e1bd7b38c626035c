"""A model whose attention has parameters: it builds, trains, names and counts them.

Dimensions: B batch, N tokens.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attention import AttentionOutput, Backend, attention, get_backend
from config import AttentionConfig, ModelConfig, OptimConfig
from examples import differential_attention, learnable_sinks
from model import GPT, KVCache
from model.fast import FastGPT
from training.loop.health import diagnose
from training.loop.optimizer import build_optimizer

DIFFERENTIAL = differential_attention.BACKEND


class Mixed(nn.Module):
    """A parameter of each kind that optimizers tell apart."""

    def __init__(self, *, head_dim: int, layer: int, **_: int):
        super().__init__()
        self.proj = nn.Linear(head_dim, head_dim)
        nn.init.eye_(self.proj.weight)
        self.table = nn.Parameter(torch.full((2, head_dim), float(layer)))
        self.bias = nn.Parameter(torch.zeros(head_dim))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
        q = self.proj(q) + self.table.sum(0) + self.bias
        return attention(q.to(v.dtype), k, v, backend=get_backend("naive"), **arguments)


MIXED = Backend("mixed", module=Mixed, exact=False)


def build(backend: Backend, *, attention: AttentionConfig | None = None, **fields) -> GPT:
    torch.manual_seed(0)
    config = ModelConfig(
        **{"num_layers": 2, "num_heads": 2, "hidden_size": 32, "max_seq_len": 16} | fields
    )
    return GPT(config, vocab_size=61, backend=backend, attention=attention)


def tokens() -> Tensor:
    return torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(1))


def test_parameters_live_in_their_layer_and_the_rest_starts_as_ever():
    own, plain = build(MIXED).state_dict(), build(get_backend("naive")).state_dict()
    first, second = (f"blocks.{layer}.attention.own." for layer in (0, 1))
    names = {name.removeprefix(second) for name in own if name.startswith(second)}
    assert names == {"proj.weight", "proj.bias", "table", "bias"}
    # the module's own start, not the model's
    assert torch.equal(own[second + "proj.weight"], torch.eye(16))
    assert own[second + "table"].eq(1).all() and own[first + "table"].eq(0).all()
    assert all(torch.equal(own[name], x) for name, x in plain.items())


def test_optimizers_take_them_as_they_take_others():
    """Weight decay on what has two dimensions; Muon for the weights of linear layers."""
    for name in ("adamw", "muon"):
        model = build(MIXED)
        optimizer = build_optimizer(model, OptimConfig(name=name, lr=1e-3, weight_decay=0.1))
        groups = {
            id(p): ("muon" if "rows" in group else "adamw", group["weight_decay"])
            for group in optimizer.param_groups
            for p in group["params"]
        }
        own = {key: groups[id(p)] for key, p in model.blocks[0].attention.own.named_parameters()}
        assert own == {
            "table": ("adamw", 0.1),
            "bias": ("adamw", 0.0),
            "proj.weight": (name, 0.1),
            "proj.bias": ("adamw", 0.0),
        }


COMPILED = {"compiled": True, "backend": "aot_eager", "fullgraph": True}


@pytest.mark.parametrize(
    ("checkpoint", "how"),
    [("attention", {}), pytest.param("block", COMPILED, marks=pytest.mark.slow)],
    ids=["eager", "compiled"],
)
def test_the_fast_model_gives_them_the_gradient_of_the_plain_one(checkpoint, how):
    torch.compiler.reset()
    results = []
    for fast in (False, True):
        model = build(DIFFERENTIAL, checkpoint=checkpoint)
        run = FastGPT(model, **how) if fast else model
        run(tokens(), tokens()).loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    plain, fast = results
    assert all(grad.any() for name, grad in plain.items() if "own" in name)
    torch.testing.assert_close(fast, plain)


def test_a_prompt_and_its_continuation_are_read_alike():
    model, cache = build(DIFFERENTIAL).eval(), KVCache(2, max_len=16)
    with torch.no_grad():
        whole = model(tokens()).logits
        parts = [model(part, cache=cache).logits for part in tokens().split((9, 1, 6), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_sinks_of_ones_own_are_those_of_the_model():
    """examples/learnable_sinks.py against attention.sinks=true: the output and all gradients."""
    own = build(learnable_sinks.BACKEND)
    model = build(get_backend("tiled"), attention=AttentionConfig(sinks=True))
    for a, b in zip(own.blocks, model.blocks, strict=True):
        a.attention.own.sinks.data = torch.tensor([-1.0, 2.0])
        b.attention.sinks.data = torch.tensor([-1.0, 2.0])
    losses = [each(tokens(), tokens()).loss for each in (own, model)]
    torch.testing.assert_close(*losses)
    sum(losses).backward()
    for a, b in zip(own.blocks, model.blocks, strict=True):
        assert b.attention.sinks.grad.all()
        torch.testing.assert_close(a.attention.own.sinks.grad, b.attention.sinks.grad)
        torch.testing.assert_close(a.attention.qkv.weight.grad, b.attention.qkv.weight.grad)


def test_only_the_attention_that_brought_them_uses_them():
    model = build(DIFFERENTIAL)
    own = model(tokens(), tokens()).loss
    with model.using(backend=get_backend("naive")):
        exact = model(tokens(), tokens()).loss
    assert torch.equal(exact, build(get_backend("naive"))(tokens(), tokens()).loss)
    assert exact != own
    with pytest.raises(ValueError, match="attention=mixed"), model.using(backend=MIXED):
        model(tokens())


def test_a_step_that_diverged_by_them_is_diagnosed():
    """With a softcap too, under which the search for the largest score runs the tile loop."""
    capped = replace(MIXED, features=frozenset({"softcap"}))
    model = build(capped, attention=AttentionConfig(softcap=5.0))
    nn.init.constant_(model.blocks[1].attention.own.bias, torch.nan)
    found, _ = diagnose(model, [(tokens(), tokens())])
    assert found["layer"] == 1 and "out" in found["message"]
