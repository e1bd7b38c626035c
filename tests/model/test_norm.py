"""The kernel for a residual sum and the norm after it, against PyTorch's operators.

The GPU's kernel runs here in Triton's interpreter.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import model.norm
from config import ModelConfig
from model.gpt import build_norm
from model.norm import add_norm, add_norm_backward, add_norm_operator

NORMS = {"layernorm": {}, "layernorm-nobias": {"bias": False}, "rmsnorm": {"norm": "rmsnorm"}}
every_norm = pytest.mark.parametrize("fields", NORMS.values(), ids=NORMS)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# of the residual stream, and of the branches and the norm's result
DTYPES = {
    "fp32": (FP32, FP32),
    "fp32-bf16": (FP32, BF16),
    "fp32-fp16": (FP32, FP16),
    "bf16": (BF16, BF16),
}
every_dtype = pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)


def fits(x: Tensor, branch: Tensor) -> bool:
    return torch.is_grad_enabled() and model.norm.fits_kernel(x, branch)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(model.norm, "has_kernel", fits)


def plain(
    x: Tensor, branch: Tensor, norm: nn.Module, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    x = x + branch
    if bias is not None:  # the branch contains it: only its gradient is left
        x = x + (bias - bias.detach())
    return x, norm(x)


def perturb(module: nn.Module) -> nn.Module:
    """Gains and biases that nobody could leave out unnoticed. Matrices stay small: with large ones
    half of a gradient in bfloat16 is rounding.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                continue
            parameter.add_((0.3 * torch.randn(parameter.shape, generator=generator)).to(parameter))
    return module


def example(
    width: int,
    tokens: int,
    fields: dict,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: str = "cpu",
) -> tuple[Tensor, Tensor, nn.Module]:
    """x and branch (2, tokens, width) and a norm.

    The mean is as large as the deviation, so it must be subtracted before squaring.
    """
    generator = torch.Generator().manual_seed(0)
    x, branch = (torch.randn(2, tokens, width, generator=generator) for _ in range(2))
    norm = perturb(build_norm(ModelConfig(hidden_size=width, num_heads=1, **fields)))
    stream, narrow = dtypes
    return (2 + 2 * x).to(device, stream), branch.to(device, narrow), norm.to(device, stream)


def results(
    function: Callable,
    x: Tensor,
    branch: Tensor,
    norm: nn.Module,
    *,
    narrow: torch.dtype,
    sum_used: bool = True,
    with_bias: bool = False,
) -> list[Tensor]:
    """x + branch, its norm in `narrow`, and the gradients of x, branch, weight and bias. with_bias:
    and of a bias that the branch contains.
    """
    inputs = [x.detach().requires_grad_(), branch.detach().requires_grad_()]
    bias = [torch.ones_like(x[0, 0]).requires_grad_()] * with_bias
    with torch.autocast(
        x.device.type, narrow, enabled=narrow.itemsize < x.dtype.itemsize and x.dtype == FP32
    ):
        total, y = function(*inputs, norm, *bias)
    y = y.to(narrow)
    generator = torch.Generator().manual_seed(2)
    d_total, d_y = (torch.randn(x.shape, generator=generator).to(x.device) for _ in range(2))
    loss = (y * d_y).sum() + (total * d_total).sum() * sum_used
    leaves = [*inputs, *norm.parameters(), *bias]
    return [total.detach(), y.detach(), *torch.autograd.grad(loss, leaves)]


def assert_near(found: list[Tensor], baseline: list[Tensor], reference: list[Tensor]) -> None:
    for i, (x, own, exact) in enumerate(zip(found, baseline, reference, strict=True)):
        assert x.dtype == own.dtype and x.shape == own.shape
        error, budget = ((each.double() - exact).norm() / exact.norm() for each in (x, own))
        assert error <= 1.5 * budget + torch.finfo(x.dtype).eps, (i, error, budget)


def check(function: Callable, x: Tensor, branch: Tensor, norm: nn.Module, **settings: bool) -> None:
    narrow = branch.dtype
    found, baseline = (
        results(each, x, branch, norm, narrow=narrow, **settings) for each in (function, plain)
    )
    wide = x.double(), branch.double(), copy.deepcopy(norm).double()
    assert_near(found, baseline, results(plain, *wide, narrow=torch.float64, **settings))


# the paths of a program (several rows, a short last program, a wide row), each dtype, each norm
PAIRS = [
    (64, 37, "fp32", "layernorm"),
    (96, 5, "fp32-bf16", "rmsnorm"),
    (96, 5, "fp32-fp16", "layernorm-nobias"),
    (768, 9, "bf16", "layernorm"),
    (768, 9, "fp32", "rmsnorm"),
]


@pytest.mark.parametrize(("width", "tokens", "dtypes", "fields"), PAIRS)
def test_kernel_gives_sum_norm_and_gradients(kernel, width, tokens, dtypes, fields):
    """One row per program and several; widths that are not powers of two; a short last program."""
    check(add_norm, *example(width, tokens, NORMS[fields], DTYPES[dtypes]))


@every_norm
def test_behind_the_last_norm_nobody_uses_the_sum(kernel, fields):
    check(add_norm, *example(96, 40, fields, DTYPES["fp32-bf16"]), sum_used=False)


@pytest.mark.parametrize(
    ("dtypes", "fields"), [("fp32", "rmsnorm"), ("fp32-bf16", "layernorm"), ("bf16", "layernorm")]
)
def test_gradient_of_a_bias_in_the_branch(kernel, dtypes, fields):
    """Of fewer rows than the sum of the programs' shares takes at once, and of more columns."""
    check(add_norm, *example(96, 40, NORMS[fields], DTYPES[dtypes]), with_bias=True)


def test_nor_anybody_the_norm(kernel):
    x, branch, norm = example(64, 3, {}, DTYPES["fp32"])
    leaves = [x.requires_grad_(), branch.requires_grad_(), norm.weight]
    of_x, of_branch, of_weight = torch.autograd.grad(add_norm(x, branch, norm)[0].sum(), leaves)
    assert of_x.eq(1).all() and of_branch.eq(1).all() and of_weight.eq(0).all()


def test_without_a_branch_and_in_float64_it_is_pytorchs(kernel):
    x, branch, norm = example(64, 3, {}, DTYPES["fp32"])
    total, y = add_norm(x, None, norm)
    assert total is x and torch.equal(y, norm(x))
    wide = x.double(), branch.double(), norm.double()
    assert all(torch.equal(*pair) for pair in zip(add_norm(*wide), plain(*wide), strict=True))


def test_rows_that_lie_apart_in_memory(kernel):
    x, branch, norm = example(64, 6, {}, DTYPES["fp32"])
    check(add_norm, x.mT.contiguous().mT, branch.transpose(0, 1).contiguous().transpose(0, 1), norm)


@pytest.mark.parametrize(("fields", "dtypes"), [("layernorm", "fp32-bf16"), ("rmsnorm", "fp32")])
def test_lawful_operators(fields, dtypes):
    x, branch, norm = example(64, 3, NORMS[fields], DTYPES[dtypes])
    stream, narrow = DTYPES[dtypes]
    weight, bias, centred = norm.weight, getattr(norm, "bias", None), fields == "layernorm"
    branch_bias = torch.ones(64, requires_grad=True)
    inputs = [x.requires_grad_(), branch.requires_grad_(), weight, bias, 1e-5, centred, narrow]
    torch.library.opcheck(add_norm_operator, [*inputs, branch_bias, 0])
    total, y, statistics = (x.detach() for x in add_norm_operator(*inputs, branch_bias, 0))
    weight, bias = (None if each is None else each.detach() for each in (weight, bias))
    given = torch.randn_like(y), total, weight, bias, statistics, narrow
    torch.library.opcheck(add_norm_backward, (torch.randn_like(total), *given, True, False, 0))
    torch.library.opcheck(add_norm_backward, (None, *given, False, True, 16))


@pytest.mark.gpu
@every_norm
@every_dtype
@pytest.mark.parametrize(
    "width, tokens", [(64, 37), (96, 1000), (768, 4099), (1600, 515), (8192, 70)]
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_kernel_on_a_gpu(width, tokens, dtypes, fields, compiled):
    torch._dynamo.reset()
    x, branch, norm = example(width, tokens, fields, dtypes, "cuda")
    assert model.norm.has_kernel(x, branch)
    run = torch.compile(add_norm, fullgraph=True) if compiled else add_norm
    check(run, x, branch, norm, with_bias=True)


@pytest.mark.gpu
def test_gradients_are_the_same_bits_every_time():
    inputs = example(768, 20_000, {}, DTYPES["fp32-bf16"], "cuda")
    first, second = (results(add_norm, *inputs, narrow=BF16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
