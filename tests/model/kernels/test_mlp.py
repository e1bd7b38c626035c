"""GELU by sigmoid, and the MLP with GELU in its products, against PyTorch's operators.

The kernel runs on a Hopper GPU only. Here PyTorch computes in its place what it would.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import opcheck

import model.kernels
from model.device import hopper_multiprocessors
from model.kernels import fits_mlp_kernel, gelu_by_sigmoid, gelu_mlp, has_mlp_kernel

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


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
        near = {"rtol": 0.01 if dtype == BF16 else 1e-5, "atol": 2e-6}
        torch.testing.assert_close(ours, theirs, **near)


class PlainKernel:
    """Stands for the kernel."""

    runs = 0

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, BACKWARD: bool, **constants) -> None:
        self.runs += 1
        x, weight, hidden, out = (each.base for each in arguments[:4])
        bias, partial = arguments[4:6]
        assert x.dim() == 2 and all(t.is_contiguous() for t in (x, weight, hidden, out))
        assert not any(t.data_ptr() % 16 for t in (x, weight, hidden, out))
        if BACKWARD:
            d_out = torch.ops.aten.gelu_backward(x @ weight, hidden, approximate="tanh")
            partial.zero_()[0] = d_out.sum(0, dtype=FP32)
            out.copy_(d_out)
        else:
            hidden.copy_(F.linear(x, weight, bias.to(x.dtype)))
            out.copy_(F.gelu(hidden, approximate="tanh"))


@pytest.fixture
def kernel(monkeypatch):
    """The path of a Hopper GPU with one multiprocessor."""
    from model.kernels import mlp

    plain = PlainKernel()
    monkeypatch.setattr(
        model.kernels, "has_mlp_kernel", partial(fits_mlp_kernel, multiprocessors=1)
    )
    monkeypatch.setattr(mlp, "mlp_kernel", plain)
    monkeypatch.setattr(mlp, "multiprocessors", lambda device: 1)
    return plain


class Layers(nn.Module):
    """x -> hidden -> width, whose biases count."""

    def __init__(self, width: int, hidden: int, **where):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, **where), nn.Linear(hidden, width, **where)
        for linear in (self.up, self.down):
            nn.init.normal_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return gelu_mlp(x, self.up, self.down)

    def plain(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def example(
    shape: tuple[int, int, int] = (2, 90, 256), width: int = 256, **where
) -> tuple[Tensor, Layers, Tensor]:
    """x (B, N, width), layers, and a gradient of the result. shape: B, N, hidden."""
    torch.manual_seed(0)
    layers = Layers(width, shape[-1], **where)
    x, d_y = torch.randn(2, *shape[:2], width, **where)
    return 2 * x, layers, d_y


def step(function, x: Tensor, layers: Layers, d_y: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The result, and the gradients of x, weights and biases, in autocast to dtype."""
    narrow = dtype in (BF16, FP16)
    # the norm before an MLP returns the dtype of autocast
    x = (x.to(dtype) if narrow else x).detach().requires_grad_()
    with torch.autocast(x.device.type, dtype if narrow else None, enabled=narrow):
        y = function(x)
    loss = (y.to(d_y.dtype) * d_y).sum()
    return [y.detach(), *torch.autograd.grad(loss, [x, *layers.parameters()])]


@pytest.fixture
def check(assert_near):
    """check(function, x, layers, d_y, dtype): errors against those of PyTorch's operators."""

    def check(function, x: Tensor, layers: Layers, d_y: Tensor, dtype: torch.dtype) -> None:
        found, own = (step(each, x, layers, d_y, dtype) for each in (function, layers.plain))
        wide = copy.deepcopy(layers).double()
        x = (x.to(dtype) if dtype in (BF16, FP16) else x).double()
        assert_near(found, own, step(wide.plain, x, wide, d_y.double(), FP32), rounding=1e-6)

    return check


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gelu_in_the_products_differs_by_rounding_alone(kernel, check, dtype):
    x, layers, d_y = example()
    check(layers, x, layers, d_y, dtype)
    assert kernel.runs == 2


def test_tensors_that_a_copy_engine_cannot_address_are_copied(kernel, check):
    """The weights are transposed, and x starts between two multiples of 16 bytes."""
    x, layers, d_y = example()
    with torch.no_grad():
        for linear in (layers.up, layers.down):
            linear.weight.set_(linear.weight.mT.contiguous().mT)
    x = torch.cat((x.flatten()[:1], x.flatten())).bfloat16()[1:].view_as(x)
    check(layers, x, layers, d_y.transpose(0, 1).contiguous().transpose(0, 1), BF16)
    assert kernel.runs == 2


def test_which_layers_have_gelu_in_their_products():
    x = torch.zeros(1, 300, 320, dtype=BF16)
    sizes = {"in_features": 320, "out_features": 512, "dtype": BF16}

    def fits(x: Tensor = x, down_bias: bool = True, multiprocessors: int = 4, **changes) -> bool:
        up = nn.Linear(**sizes | changes)
        down = nn.Linear(up.out_features, up.in_features, bias=down_bias, dtype=up.weight.dtype)
        return fits_mlp_kernel(x, up, down, multiprocessors)

    assert fits()
    assert not fits(multiprocessors=0)
    assert not fits(bias=False) and not fits(down_bias=False)
    assert not fits(in_features=300) and not fits(in_features=192)  # 300 is no multiple of 64
    assert not fits(out_features=500)
    assert not fits(x.float(), dtype=FP32)
    assert not fits(dtype=FP32)  # outside autocast, products would be in float32
    with torch.autocast("cpu", BF16):
        assert fits(dtype=FP32)
        assert not fits(x.half(), dtype=FP32)
    # two blocks of tokens by two of columns, and no more
    assert not fits(multiprocessors=6) and not fits(x[:, :200])
    assert not fits(out_features=768)  # of 4 multiprocessors, 3 would have work
    # a step of GPT-2 on an H200
    step = torch.empty(16, 1024, 768, dtype=BF16)
    assert fits(step, multiprocessors=132, in_features=768, out_features=3072)


def test_gelu_in_the_products_compiles_in_one_graph(kernel):
    x, layers, d_y = example((1, 130, 256))
    torch._dynamo.reset()
    compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)
    found, expected = (step(each, x, layers, d_y, BF16) for each in (compiled, layers))
    torch.testing.assert_close(found, expected)
    assert kernel.runs == 4


def test_a_fake_result_is_like_a_real_one(kernel):
    from model.kernels.mlp import linear_gelu, product_gelu_backward

    x, weight = torch.randn(2, 5, 256).bfloat16(), torch.randn(512, 256).bfloat16()
    opcheck(linear_gelu, (x, weight, torch.randn(512)))
    hidden = torch.randn(2, 5, 512).bfloat16()
    opcheck(product_gelu_backward, (x, weight.mT.contiguous(), hidden))


PLAIN = (3, 1111, 1000), 256
PRODUCTS = (3, 7777, 768), 320  # suits the kernel: tokens that fill no tile, several tiles each


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "case", "compiled"),
    [
        (FP32, PLAIN, True),
        (BF16, PLAIN, False),
        (FP16, PRODUCTS, False),
        (BF16, PRODUCTS, True),
    ],
    ids=str,
)
def test_on_a_gpu(check, dtype, case, compiled):
    x, layers, d_y = example(*case, device="cuda")
    with torch.autocast("cuda", dtype, enabled=dtype != FP32):
        taken = has_mlp_kernel(x.to(dtype), layers.up, layers.down)
    assert taken == (case is PRODUCTS and hopper_multiprocessors(x.device) > 0)
    torch._dynamo.reset()
    check(torch.compile(layers, fullgraph=True) if compiled else layers, x, layers, d_y, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "rows", "width", "hidden"),
    [(BF16, 1, 256, 256), (FP16, 129, 320, 512), (BF16, 70_000, 768, 3072)],
)
def test_the_products_on_a_gpu(dtype, rows, width, hidden):
    """The kernel alone, against float64; and its bits, repeated."""
    from model.kernels.mlp import linear_gelu, product_gelu_backward

    if not hopper_multiprocessors(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")
    torch.manual_seed(0)
    x, d_y = torch.randn(2, rows, width, device="cuda", dtype=dtype)
    up, down = torch.randn(2, hidden, width, device="cuda", dtype=dtype) / width**0.5
    down, bias = down.mT.contiguous(), torch.randn(hidden, device="cuda")
    before, activated = linear_gelu(x, up, bias)
    d_before, d_bias = product_gelu_backward(d_y, down, before)
    wide = before.double().requires_grad_()
    expected = F.gelu(wide, approximate="tanh")
    expected.backward((d_y.double() @ down.double()).to(dtype).double())
    rounding = torch.finfo(dtype).eps
    for found, exact in (
        (before, x.double() @ up.double().mT + bias),
        (activated, expected.detach()),
        (d_before, wide.grad),
        (d_bias, wide.grad.sum(0)),
    ):
        assert (found.double() - exact).norm() <= 0.5 * rounding * exact.norm()
    for _ in range(50):
        again = (*linear_gelu(x, up, bias), *product_gelu_backward(d_y, down, before))
        first = (before, activated, d_before, d_bias)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
