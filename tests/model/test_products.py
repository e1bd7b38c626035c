"""Linear layers whose weight's gradient is not rounded to 16 bits."""

import pytest
import torch
from torch import Tensor, nn

import model.products
from model.products import WideGradientLinear, linear, weight_gradient, wide_product

BF16, FP16 = torch.bfloat16, torch.float16


def example(device: str = "cpu", **fields) -> tuple[Tensor, nn.Linear, Tensor]:
    """x (3, 50, 64), a layer from 64 to 96 features, and a gradient of its result."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, **fields)
    x, d_y = torch.randn(3, 50, 64), torch.randn(3, 50, 96)
    return x.to(device), layer.to(device), d_y.to(device)


def gradients(y: Tensor, d_y: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, leaves, d_y.to(y.dtype))]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_gives_the_layer_and_its_gradients(assert_within_budget, dtype, bias):
    x, layer, d_y = example(bias=bias)
    x = x.to(dtype).requires_grad_()
    leaves = [x, *layer.parameters()]
    found = gradients(WideGradientLinear.apply(x, layer.weight, layer.bias), d_y, *leaves)
    with torch.autocast("cpu", dtype):
        baseline = gradients(layer(x), d_y, *leaves)
    wide = x.detach().double().requires_grad_()
    layer = layer.double()
    reference = gradients(layer(wide), d_y.double(), wide, *layer.parameters())
    for ours, theirs, exact in zip(found, baseline, reference, strict=True):
        assert ours.dtype == theirs.dtype
        assert_within_budget(ours, baseline=theirs, reference=exact)


def test_frozen_parameters_get_no_gradient_and_cost_no_product(monkeypatch):
    x, layer, d_y = example()
    layer.requires_grad_(False)
    monkeypatch.setattr(model.products, "weight_gradient", None)  # a call would fail
    x = x.bfloat16().requires_grad_()
    WideGradientLinear.apply(x, layer.weight, layer.bias).backward(d_y.bfloat16())
    assert x.grad is not None and layer.weight.grad is None and layer.bias.grad is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("repeated", [False, True])
def test_when_the_function_takes_the_place_of_the_layer(device, repeated):
    x, layer, _ = example(device)
    with torch.autocast(device, BF16):
        name = type(linear(layer, x, layer.bias, repeated=repeated).grad_fn).__name__
    assert name.startswith("WideGradientLinear") == (device == "cuda" and not repeated)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_gradients_of_weights_are_not_rounded_on_a_gpu(dtype, compiled):
    torch._dynamo.reset()
    x, layer, d_y = example("cuda")
    run = torch.compile(linear, fullgraph=True) if compiled else linear
    with torch.autocast("cuda", dtype):
        y = run(layer, x, layer.bias)
    d_weight, d_bias = torch.autograd.grad(y, [layer.weight, layer.bias], d_y.to(dtype))
    narrow_x, narrow_d_y = (t.to(dtype).double().flatten(0, 1) for t in (x, d_y))
    # float32 rounds far less than 16 bits
    torch.testing.assert_close(d_weight.double(), narrow_d_y.mT @ narrow_x, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(d_bias.double(), narrow_d_y.sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
def test_lawful_operator():
    a, b = (torch.randn(64, 32, device="cuda", dtype=BF16) for _ in range(2))
    torch.library.opcheck(wide_product, (a.mT, b))
    assert weight_gradient(a, b, torch.float32).dtype == torch.float32
