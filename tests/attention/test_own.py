"""A backend that brings a module: what it must be, and the one sentence for each that it cannot be.

Dimensions: B batch, H heads, N queries, D head dim.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attention import AttentionOutput, Backend, attention, build_module
from attention.look.try_out import try_out
from conformance.backend_under_test import standalone
from examples.learnable_temperature import BACKEND, LearnableTemperature

SHAPE = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16}


def own(**methods: Callable) -> Backend:
    """LearnableTemperature with other methods."""
    return Backend("mine", module=type("Mine", (LearnableTemperature,), methods), exact=False)


def made(change: Callable[[nn.Module], object]) -> Backend:
    """LearnableTemperature, changed once it is made."""

    def make(**shape: int) -> nn.Module:
        module = LearnableTemperature(**shape)
        change(module)
        return module

    return Backend("mine", module=make, exact=False)


def try_in_a_model(backend: Backend) -> None:
    module = build_module(backend, **SHAPE, max_seq_len=150, layer=0)
    try_out(backend, *torch.randn(3, 1, 2, 150, 16, requires_grad=True).unbind(), module=module)


def one_query_less(self, q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    return AttentionOutput(q[:, :, 1:] * self.log_temperature[:, None, None])


def of_another_device(self, q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    """A tensor that is no buffer stays where it was made."""
    q = q * torch.ones(2, 1, 1, device="meta")
    return LearnableTemperature.forward(self, q, k, v, **arguments)


def add_in_float64(module: nn.Module) -> None:
    module.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))


def add_elsewhere(module: nn.Module) -> None:
    module.far = nn.Parameter(torch.ones(3, device="meta"))


def add_unused(module: nn.Module) -> None:
    module.idle = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("backend", "named"),
    [
        (own(forward=one_query_less), ["out", "(1, 2, 150, 16)"]),
        (own(forward=of_another_device), ["Error", "meta"]),
        (own(__init__=lambda self: None), ["layer 0", "TypeError"]),
        (Backend("mine", module=dict, exact=False), ["nn.Module", "dict"]),
        (made(add_in_float64), ["own.wide", "float64"]),
        (made(add_elsewhere), ["own.far", "meta"]),
        (made(add_unused), ["gradient", "own.idle (3,)"]),
    ],
    ids=["shape", "device", "init", "no-module", "float64", "elsewhere", "unused"],
)
def test_what_no_run_could_train_is_refused_before_it_begins(backend, named):
    with pytest.raises(ValueError) as refused:
        try_in_a_model(backend)
    assert all(name in str(refused.value) for name in ["attention=mine", *named])


def test_a_parameter_may_be_frozen():
    def freeze(module: nn.Module) -> None:
        add_unused(module)
        module.idle.requires_grad_(False)

    try_in_a_model(made(freeze))


OWN = {"module": LearnableTemperature}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "fn= or module="),
        ({"fn": attention, "features": frozenset({"dropout", "gqa"})}, r"\['dropout'\].*window"),
        (OWN, "module=.*exact=False"),
        ({"fn": attention, "reference": attention}, "reference=.*exact=False"),
        (OWN | {"exact": False, "defect": "too sharp"}, "module=.*exact=False.*defect"),
    ],
)
def test_declarations_that_mean_nothing(fields, named):
    with pytest.raises(ValueError, match=f"'mine' .*{named}"):
        Backend("mine", **fields)


def test_a_module_and_its_backend_go_together():
    q = k = v = torch.randn(1, 2, 5, 16)
    with pytest.raises(ValueError, match=f"attention={BACKEND.name} .*module=build_module"):
        attention(q, k, v, backend=BACKEND)
    module = build_module(BACKEND, **SHAPE, max_seq_len=8, layer=0)
    with pytest.raises(ValueError, match="attention=tiled .*module=.*LearnableTemperature"):
        attention(q, k, v, backend="tiled", module=module)
    nn.init.constant_(module.log_temperature, 0.5)
    out = attention(q, k, v, backend=BACKEND, module=module).out
    sharper = attention(q, k, v, backend="tiled", scale=0.25 * torch.tensor(0.5).exp().item())
    torch.testing.assert_close(out, sharper.out)


def test_standalone_makes_the_same_module_again_and_moves_parameters_by_noise():
    q, k, v = torch.randn(3, 1, 2, 5, 16).unbind()
    state = torch.get_rng_state()
    first, again, noisy = (
        attention(q, k, v, backend=standalone(BACKEND, noise=noise)).out for noise in (0, 0, 0.1)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again) and not torch.allclose(first, noisy)
    torch.testing.assert_close(first, attention(q, k, v, backend="tiled").out)
