"""The kernel for a residual sum and the norm after it, against PyTorch's operators.

The GPU's kernel runs here in Triton's interpreter.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.library import opcheck

import model.kernels
from model.kernels import add_norm, fits_norm_kernel, has_norm_kernel

NORMS = {
    "layernorm": nn.LayerNorm,
    "layernorm-nobias": lambda width, eps: nn.LayerNorm(width, eps, bias=False),
    "rmsnorm": nn.RMSNorm,
}
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# of the residual stream, and of the branches and the norm's result
DTYPES = {
    "fp32": (FP32, FP32),
    "fp32-bf16": (FP32, BF16),
    "fp32-fp16": (FP32, FP16),
    "bf16": (BF16, BF16),
}


@pytest.fixture
def kernel(monkeypatch):
    def fits(x: Tensor, branch: Tensor) -> bool:
        return torch.is_grad_enabled() and fits_norm_kernel(x, branch)

    monkeypatch.setattr(model.kernels, "has_norm_kernel", fits)


def plain(x: Tensor, branch: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    return x + branch, norm(x + branch)


def example(
    width: int, tokens: int, norm: str, dtypes: str = "fp32", device: str = "cpu"
) -> tuple[Tensor, Tensor, nn.Module]:
    """x and branch (2, tokens, width) and a norm.

    The mean is as large as the deviation, so it must be subtracted before squaring.
    """
    generator = torch.Generator().manual_seed(0)
    x, branch = (torch.randn(2, tokens, width, generator=generator) for _ in range(2))
    stream, narrow = DTYPES[dtypes]
    module = NORMS[norm](width, eps=1e-5)
    with torch.no_grad():
        for parameter in module.parameters():  # so that nobody could leave them out unnoticed
            parameter.add_(0.3 * torch.randn(width, generator=generator))
    return (2 + 2 * x).to(device, stream), branch.to(device, narrow), module.to(device, stream)


def results(
    function: Callable,
    x: Tensor,
    branch: Tensor,
    norm: nn.Module,
    *,
    narrow: torch.dtype,
    sum_used: bool = True,
) -> list[Tensor]:
    """x + branch, its norm in `narrow`, and the gradients of x, branch, weight and bias."""
    inputs = [x.detach().requires_grad_(), branch.detach().requires_grad_()]
    autocast = narrow.itemsize < x.dtype.itemsize and x.dtype == FP32
    with torch.autocast(x.device.type, narrow, enabled=autocast):
        total, y = function(*inputs, norm)
    y = y.to(narrow)
    generator = torch.Generator().manual_seed(2)
    d_total, d_y = (torch.randn(x.shape, generator=generator).to(x.device) for _ in range(2))
    loss = (y * d_y).sum() + (total * d_total).sum() * sum_used
    leaves = [*inputs, *norm.parameters()]
    return [total.detach(), y.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.fixture
def check(assert_near):
    """check(function, x, branch, norm): errors against those of PyTorch's operators."""

    def check(function: Callable, x: Tensor, branch: Tensor, norm: nn.Module, **settings) -> None:
        found, baseline = (
            results(each, x, branch, norm, narrow=branch.dtype, **settings)
            for each in (function, plain)
        )
        wide = x.double(), branch.double(), copy.deepcopy(norm).double()
        assert_near(found, baseline, results(plain, *wide, narrow=torch.float64, **settings))

    return check


# several rows a program, a short last program, a wide row; each dtype, each norm
EXAMPLES = [
    (64, 37, "layernorm", "fp32"),
    (96, 40, "rmsnorm", "fp32-bf16"),
    (96, 5, "layernorm-nobias", "fp32-fp16"),
    (768, 9, "layernorm", "bf16"),
]


@pytest.mark.parametrize("shown", EXAMPLES, ids=lambda shown: "-".join(map(str, shown)))
def test_kernel_gives_sum_norm_and_gradients(kernel, check, shown):
    check(add_norm, *example(*shown))


def test_kernel_reads_rows_that_lie_apart_and_no_gradient_of_a_sum_that_nobody_uses(kernel, check):
    """As behind the last norm."""
    x, branch, norm = example(96, 6, "layernorm", "fp32-bf16")
    apart = x.mT.contiguous().mT, branch.transpose(0, 1).contiguous().transpose(0, 1)
    check(add_norm, *apart, norm, sum_used=False)


def test_a_norm_that_nobody_uses_has_no_gradient(kernel):
    x, branch, norm = example(64, 3, "layernorm")
    leaves = [x.requires_grad_(), branch.requires_grad_(), norm.weight]
    of_x, of_branch, of_weight = torch.autograd.grad(add_norm(x, branch, norm)[0].sum(), leaves)
    assert of_x.eq(1).all() and of_branch.eq(1).all() and of_weight.eq(0).all()


def test_without_a_branch_and_in_float64_it_is_pytorchs(kernel):
    x, branch, norm = example(64, 3, "layernorm")
    total, y = add_norm(x, None, norm)
    assert total is x and torch.equal(y, norm(x))
    wide = x.double(), branch.double(), norm.double()
    assert all(torch.equal(*pair) for pair in zip(add_norm(*wide), plain(*wide), strict=True))


@pytest.mark.parametrize(("norm", "dtypes"), [("layernorm", "fp32-bf16"), ("rmsnorm", "fp32")])
def test_lawful_operators(norm, dtypes):
    from model.kernels.norm import add_norm_backward, add_norm_forward

    x, branch, module = example(64, 3, norm, dtypes)
    narrow, bias = DTYPES[dtypes][1], getattr(module, "bias", None)
    centred = norm == "layernorm"
    inputs = x.requires_grad_(), branch.requires_grad_(), module.weight, bias, 1e-5, centred, narrow
    opcheck(add_norm_forward, inputs)
    total, y, statistics = (x.detach() for x in add_norm_forward(*inputs))
    given = torch.randn_like(y), total, module.weight.detach(), statistics, narrow, centred
    for d_total in (torch.randn_like(total), None):
        opcheck(add_norm_backward, (d_total, *given))


def test_in_one_graph_with_the_kernel(kernel):
    torch._dynamo.reset()
    compiled = torch.compile(add_norm, backend="aot_eager", fullgraph=True)
    inputs = example(64, 6, "layernorm")
    found, expected = (results(each, *inputs, narrow=FP32) for each in (compiled, add_norm))
    torch.testing.assert_close(found, expected)


ON_A_GPU = [
    ((64, 37), "layernorm", "fp32", False),
    ((96, 1000), "rmsnorm", "fp32-bf16", True),
    ((768, 4099), "layernorm-nobias", "fp32-fp16", False),
    ((768, 4099), "layernorm", "fp32-bf16", True),
    ((1600, 515), "layernorm", "bf16", True),
    ((8192, 70), "rmsnorm", "bf16", False),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "norm", "dtypes", "compiled"), ON_A_GPU, ids=str)
def test_kernel_on_a_gpu(check, size, norm, dtypes, compiled):
    torch._dynamo.reset()
    x, branch, module = example(*size, norm, dtypes, "cuda")
    assert has_norm_kernel(x, branch)
    check(torch.compile(add_norm, fullgraph=True) if compiled else add_norm, x, branch, module)


@pytest.mark.gpu
def test_gradients_are_the_same_bits_every_time():
    inputs = example(768, 20_000, "layernorm", "fp32-bf16", "cuda")
    first, second = (results(add_norm, *inputs, narrow=BF16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
