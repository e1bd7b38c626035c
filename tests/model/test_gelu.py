"""GELU by sigmoid, and the kernel of its backward pass, against PyTorch's operators.

The GPU's kernel runs here in Triton's interpreter.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model.gelu
from model.gelu import gelu_backward, gelu_by_sigmoid, linear_gelu
from tests.selection import diagonal

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
# several tiles of rows and features, the last ones not whole; one tile alone
SHAPES = [(2, 33, 300), (1, 3, 20)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gelu_is_the_same_by_sigmoid(dtype):
    """And so is its gradient, far out on both sides too. Compiled models on a GPU use this form."""
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e4, 1e4])]).to(dtype)
    results = []
    for function in (gelu_by_sigmoid, partial(F.gelu, approximate="tanh")):
        leaf = x.clone().requires_grad_()
        out = function(leaf)
        results.append((out.detach(), *torch.autograd.grad(out, leaf, torch.ones_like(out))))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == dtype
        # far out on the left 1 + tanh(u) cancels, not the sigmoid
        torch.testing.assert_close(
            ours, theirs, rtol=0.01 if dtype == torch.bfloat16 else 1e-5, atol=2e-6
        )


@pytest.fixture
def kernel(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(model.gelu, "has_kernel", model.gelu.fits_kernel)


def example(shape: tuple[int, int, int]) -> tuple[Tensor, nn.Linear, Tensor]:
    """x, a layer with a bias that counts, and a gradient of the result."""
    torch.manual_seed(0)
    linear = nn.Linear(16, shape[-1])
    nn.init.normal_(linear.bias)
    return 2 * torch.randn(*shape[:2], 16), linear, torch.randn(shape)


def step(function, x: Tensor, linear: nn.Linear, d_out: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The result, and the gradients of x, weight and bias, in autocast to dtype."""
    x = x.detach().requires_grad_()
    narrow = dtype in (BF16, FP16)
    with torch.autocast(x.device.type, dtype if narrow else None, enabled=narrow):
        out = function(x, linear)
    loss = (out.to(d_out.dtype) * d_out).sum()
    return [out.detach(), *torch.autograd.grad(loss, [x, *linear.parameters()])]


def plain(x: Tensor, linear: nn.Linear) -> Tensor:
    return F.gelu(linear(x), approximate="tanh")


def assert_near(
    found: list[Tensor], own: list[Tensor], exact: list[Tensor], *, times: float
) -> None:
    """Compare errors with PyTorch's own."""
    for ours, theirs, reference in zip(found, own, exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        error, budget = ((y.double() - reference).norm() / reference.norm() for y in (ours, theirs))
        assert error <= times * budget + 1e-6


@pytest.mark.parametrize(("dtype", "shape"), diagonal(DTYPES, SHAPES))
def test_the_kernel_differs_by_rounding_alone(dtype, shape, kernel):
    x, linear, d_out = example(shape)
    found, own = (step(each, x, linear, d_out, dtype) for each in (linear_gelu, plain))
    exact = step(plain, x.double(), copy.deepcopy(linear).double(), d_out.double(), FP32)
    # Triton's interpreter rounds to bfloat16 towards zero
    assert_near(found, own, exact, times=1.5)


def test_a_bias_is_needed(kernel):
    x, _, d_out = example(SHAPES[1])
    linear = nn.Linear(16, 20, bias=False)
    found, expected = (step(each, x, linear, d_out, FP32) for each in (linear_gelu, plain))
    torch.testing.assert_close(found, expected)


def test_it_compiles_in_one_graph(kernel):
    x, linear, d_out = example(SHAPES[1])
    torch._dynamo.reset()
    compiled = torch.compile(linear_gelu, backend="aot_eager", fullgraph=True)
    found, expected = (step(each, x, linear, d_out, BF16) for each in (compiled, linear_gelu))
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_on_a_gpu(dtype, compiled):
    torch.manual_seed(0)
    linear = nn.Linear(256, 1000, device="cuda")
    x, d_out = torch.randn(3, 1111, 256, device="cuda"), torch.randn(3, 1111, 1000, device="cuda")
    function = torch.compile(linear_gelu, fullgraph=True) if compiled else linear_gelu
    found, own = (step(each, x, linear, d_out, dtype) for each in (function, plain))
    exact = step(plain, x.double(), copy.deepcopy(linear).double(), d_out.double(), FP32)
    assert_near(found, own, exact, times=1.5)


def test_repeats_have_the_same_bits():
    d_out, hidden = torch.randn(2, 50, 300).bfloat16()
    first, again = (gelu_backward(d_out, hidden) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_a_fake_result_is_like_a_real_one():
    hidden = torch.randn(2, 5, 20).bfloat16()
    torch.library.opcheck(gelu_backward, (torch.randn_like(hidden), hidden))
