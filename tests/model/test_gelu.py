"""GELU by sigmoid, the kernel of its backward pass, and the MLP with GELU in its products, against
PyTorch's operators.

The portable kernel runs here in Triton's interpreter. The one for Hopper runs on a GPU only; here
its operators are plain PyTorch.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model.gelu
from model.gelu import (
    fits_product_kernel,
    gelu_backward,
    gelu_by_sigmoid,
    gelu_mlp,
    linear_gelu,
    product_gelu_backward,
)

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
        near = {"rtol": 0.01 if dtype == BF16 else 1e-5, "atol": 2e-6}
        torch.testing.assert_close(ours, theirs, **near)


@pytest.fixture
def products(monkeypatch):
    """Takes the path of a Hopper GPU, whose operators are plain PyTorch here. Returns a list of the
    sizes that took it.
    """
    taken = []

    def fits(x: Tensor, up: nn.Linear, down: nn.Linear) -> bool:
        found = fits_product_kernel(x, up, down, multiprocessors=1)
        if found:
            taken.append((up.in_features, up.out_features))
        return found

    monkeypatch.setattr(model.gelu, "has_product_kernel", fits)
    return taken


@pytest.fixture
def kernel(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(model.gelu, "has_kernel", model.gelu.fits_kernel)


class Layers(nn.Module):
    """x -> hidden -> width, whose biases count."""

    def __init__(self, width: int, hidden: int, **where):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, **where), nn.Linear(hidden, width, **where)
        for linear in (self.up, self.down):
            nn.init.normal_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """With the kernels, where they can run."""
        return gelu_mlp(x, self.up, self.down)

    def plain(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def example(shape: tuple[int, int, int], width: int = 16, **where) -> tuple[Tensor, Layers, Tensor]:
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


def exact(x: Tensor, layers: Layers, d_y: Tensor, dtype: torch.dtype) -> list[Tensor]:
    wide = copy.deepcopy(layers).double()
    x = (x.to(dtype) if dtype in (BF16, FP16) else x).double()
    return step(wide.plain, x, wide, d_y.double(), FP32)


def assert_near(
    found: list[Tensor], own: list[Tensor], exact: list[Tensor], *, times: float
) -> None:
    """Compare errors with PyTorch's own."""
    for ours, theirs, reference in zip(found, own, exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        error, budget = ((y.double() - reference).norm() / reference.norm() for y in (ours, theirs))
        assert error <= times * budget + 1e-6


@pytest.mark.parametrize(
    ("dtype", "shape"), [("fp32", SHAPES[0]), ("bf16", SHAPES[0]), ("fp16", SHAPES[1])]
)
def test_the_kernel_differs_by_rounding_alone(dtype, shape, kernel):
    x, layers, d_y = example(shape)
    dtype = DTYPES[dtype]
    found, own = (step(each, x, layers, d_y, dtype) for each in (layers, layers.plain))
    # Triton's interpreter rounds to bfloat16 towards zero
    assert_near(found, own, exact(x, layers, d_y, dtype), times=1.5)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gelu_in_the_products_differs_by_rounding_alone(dtype, products):
    x, layers, d_y = example((2, 90, 256), width=256)
    found, own = (step(each, x, layers, d_y, dtype) for each in (layers, layers.plain))
    assert_near(found, own, exact(x, layers, d_y, dtype), times=1.5)
    assert products == [(256, 256)]


def test_which_layers_have_gelu_in_their_products():
    x = torch.zeros(1, 300, 320, dtype=BF16)
    sizes = {"in_features": 320, "out_features": 512, "dtype": BF16}

    def fits(x: Tensor = x, down_bias: bool = True, multiprocessors: int = 4, **changes) -> bool:
        up = nn.Linear(**sizes | changes)
        down = nn.Linear(up.out_features, up.in_features, bias=down_bias, dtype=up.weight.dtype)
        return fits_product_kernel(x, up, down, multiprocessors)

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


def test_a_bias_is_needed(kernel):
    x, layers, d_y = example(SHAPES[1])
    layers.up = nn.Linear(16, 20, bias=False)
    found, expected = (step(each, x, layers, d_y, FP32) for each in (layers, layers.plain))
    torch.testing.assert_close(found, expected)


def test_it_compiles_in_one_graph(kernel):
    compare_compiled(*example(SHAPES[1]), BF16)


def test_gelu_in_the_products_compiles_in_one_graph(products):
    compare_compiled(*example((1, 130, 256), width=256), BF16)
    assert set(products) == {(256, 256)}


def test_frozen_weights_get_no_gradient(products):
    x, layers, d_y = example((1, 130, 256), width=256)
    expected = step(layers.plain, x, layers, d_y, BF16)
    layers.up.weight.requires_grad_(False)
    layers.down.requires_grad_(False)
    with torch.autocast("cpu", BF16):
        layers(x.bfloat16()).backward(d_y.bfloat16())
    assert products and layers.up.weight.grad is None and layers.down.bias.grad is None
    torch.testing.assert_close(layers.up.bias.grad, expected[3], rtol=0.02, atol=0.2)


class PlainKernel:
    """Stands for the kernel: computes in PyTorch what it would."""

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, BACKWARD: bool, **constants) -> None:
        x, weight, hidden, out = (each.base for each in arguments[:4])
        bias, partial = arguments[4:6]
        assert x.dim() == 2 and all(t.is_contiguous() for t in (x, weight, hidden, out))
        assert not any(t.data_ptr() % 16 for t in (x, weight, hidden, out))
        if BACKWARD:
            d_hidden, sums = product_gelu_backward(x, weight, hidden)
            partial.zero_()[0] = sums
            return out.copy_(d_hidden)
        for result, plain in zip((hidden, out), linear_gelu(x, weight, bias), strict=True):
            result.copy_(plain)


def test_what_surrounds_the_kernel_for_hopper(monkeypatch):
    """Shapes, copies and sums; the kernel itself runs on a GPU only."""
    from model import mlp_kernel

    monkeypatch.setattr(mlp_kernel, "mlp_kernel", PlainKernel())
    monkeypatch.setattr(mlp_kernel, "multiprocessors", lambda device: 4)
    odd = torch.randn(2 * 33 * 256 + 1).bfloat16()[1:].view(2, 33, 256)  # not aligned
    x, d_y = odd, torch.randn(33, 2, 256).bfloat16().transpose(0, 1)
    weight, bias = torch.randn(512, 256).bfloat16(), torch.randn(512)
    expected = linear_gelu(x, weight, bias)
    found = mlp_kernel.forward(x, weight, bias)
    torch.testing.assert_close(found, expected)
    assert [t.shape for t in found] == [(2, 33, 512)] * 2
    again = mlp_kernel.backward(d_y, weight.mT, found[0])
    expected = product_gelu_backward(d_y, weight.mT, found[0])
    torch.testing.assert_close(again, expected, rtol=0.02, atol=0.05)


def compare_compiled(x: Tensor, layers: Layers, d_y: Tensor, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)
    found, expected = (step(each, x, layers, d_y, dtype) for each in (compiled, layers))
    torch.testing.assert_close(found, expected)
    plain = step(layers.plain, x, layers, d_y, dtype)
    for ours, theirs in zip(found, plain, strict=True):
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()


# the second suits the kernel for Hopper: tokens that fill no tile, a program with several tiles
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("shape", "width"), [((3, 1111, 1000), 256), ((3, 7777, 768), 320)])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_on_a_gpu(dtype, shape, width, compiled):
    x, layers, d_y = example(shape, width, device="cuda")
    torch._dynamo.reset()
    function = torch.compile(layers, fullgraph=True) if compiled else layers
    found, own = (step(each, x, layers, d_y, dtype) for each in (function, layers.plain))
    assert_near(found, own, exact(x, layers, d_y, dtype), times=1.5)
    if model.gelu.hopper_multiprocessors(x.device):  # else this is the portable kernel's test alone
        with torch.autocast("cuda", BF16):
            taken = model.gelu.has_product_kernel(x.bfloat16(), layers.up, layers.down)
        assert taken == (width == 320)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("rows", "width", "hidden"), [(1, 256, 256), (129, 320, 512), (70_000, 768, 3072)]
)
def test_the_products_on_a_gpu(dtype, rows, width, hidden):
    """The kernel for Hopper alone, against float32; and its bits, repeated."""
    from model import mlp_kernel

    if not model.gelu.hopper_multiprocessors(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")
    torch.manual_seed(0)
    x, d_y = torch.randn(2, rows, width, device="cuda", dtype=dtype)
    up, down = torch.randn(2, hidden, width, device="cuda", dtype=dtype) / width**0.5
    down, bias = down.mT.contiguous(), torch.randn(hidden, device="cuda")
    before, activated = mlp_kernel.forward(x, up, bias)
    d_before, d_bias = mlp_kernel.backward(d_y, down, before)
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
        again = (*mlp_kernel.forward(x, up, bias), *mlp_kernel.backward(d_y, down, before))
        first = (before, activated, d_before, d_bias)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_repeats_have_the_same_bits():
    d_out, hidden = torch.randn(2, 50, 300).bfloat16()
    first, again = (gelu_backward(d_out, hidden) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_a_fake_result_is_like_a_real_one():
    hidden, x = torch.randn(2, 5, 20).bfloat16(), torch.randn(2, 5, 8).bfloat16()
    torch.library.opcheck(gelu_backward, (torch.randn_like(hidden), hidden))
    weight, bias = torch.randn(20, 8).bfloat16(), torch.randn(20)
    torch.library.opcheck(linear_gelu, (x, weight, bias))
    torch.library.opcheck(product_gelu_backward, (x, weight.mT.contiguous(), hidden))
