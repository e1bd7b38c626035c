"""Cross-entropy: what counts, what does not, and in which dtype."""

import importlib
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import model.loss
from model import cross_entropy, linear_cross_entropy
from tests.selection import diagonal


def test_is_the_mean_over_the_targets_that_count():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, -100, 4], [-100, 0, -100]])
    log_p = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    expected = -(log_p[0, 0, 1] + log_p[0, 2, 4] + log_p[1, 1, 0]) / 3
    assert math.isclose(cross_entropy(logits, targets).item(), expected.item(), rel_tol=1e-6)


def test_ignored_positions_get_no_gradient():
    logits = torch.randn(1, 3, 5).requires_grad_()
    cross_entropy(logits, torch.tensor([[2, -100, 3]])).backward()
    assert logits.grad[0].ne(0).any(1).tolist() == [True, False, True]


@pytest.mark.parametrize("chunked", [False, True])
def test_no_target_at_all_is_a_loss_of_zero_with_zero_gradients(chunked, several_chunks):
    run = linear_cross_entropy if chunked else plain
    loss, *gradients = step(run, *example(ignored=slice(None)))
    assert loss.item() == 0.0
    assert all(gradient.eq(0).all() for gradient in gradients)


def test_is_float32_for_narrow_logits():
    """Nothing is rounded to bfloat16 on the way."""
    logits, targets = torch.randn(1, 64, 300).bfloat16(), torch.arange(64)[None]
    loss = cross_entropy(logits, targets)
    expected = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
    assert loss.dtype == torch.float32
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-6)


def test_a_target_that_is_no_token_is_refused():
    x, weight = torch.randn(1, 3, 8), torch.randn(5, 8)
    for target in (-5, 5):
        with pytest.raises((IndexError, RuntimeError), match="bounds"):
            linear_cross_entropy(x, weight, torch.tensor([[1, target, 2]]))


def example(
    *, tokens: int = 90, vocab_size: int = 97, width: int = 32, ignored: slice = slice(5, 40)
) -> tuple[Tensor, Tensor, Tensor]:
    """x (2, tokens, width), weight (vocab_size, width) and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, tokens, width, generator=generator).requires_grad_()
    weight = (0.3 * torch.randn(vocab_size, width, generator=generator)).requires_grad_()
    targets = torch.randint(vocab_size, (2, tokens), generator=generator)
    targets[:, ignored] = -100
    return x, weight, targets


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(torch.nn.functional.linear(x, weight), targets)


def step(
    function: Callable,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    autocast: torch.dtype | None = None,
) -> list[Tensor]:
    """The loss and its gradients by x and weight."""
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = function(x, weight, targets)
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight))]


def assert_near(
    found: list[Tensor], baseline: list[Tensor], reference: list[Tensor], dtype: torch.dtype
) -> None:
    for x, own, exact in zip(found, baseline, reference, strict=True):
        assert x.dtype == own.dtype
        error, budget = ((y.double() - exact).norm() / exact.norm() for y in (x, own))
        assert error <= 2 * budget + torch.finfo(dtype).eps


@pytest.fixture
def several_chunks(monkeypatch):
    """180 tokens of 97 words in chunks of 128, the last of them shorter."""
    monkeypatch.setitem(model.loss.CHUNK_LOGITS, "cpu", 100 * 97)
    assert model.loss.chunk_rows(180, 97, 32, "cpu") == 128


@pytest.fixture
def padded(monkeypatch):
    monkeypatch.setattr(model.loss, "padded_vocab", lambda vocab_size, device: 128)


@pytest.fixture
def kernel(monkeypatch):
    """The GPU's kernel in Triton's interpreter, on a row of several blocks and a part of one."""
    monkeypatch.setattr(model.loss, "has_kernel", lambda logits: logits.dtype != torch.float64)
    monkeypatch.setattr(importlib.import_module("model.kernels.loss"), "BLOCK", 32)


SETTINGS = [
    (),
    ("several_chunks",),
    ("padded",),
    ("kernel",),
    ("kernel", "several_chunks", "padded"),
]


DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize(
    ("dtype", "settings"), diagonal(DTYPES, {"-".join(each): each for each in SETTINGS})
)
def test_chunked_loss_and_gradients_are_those_of_the_whole_logits(dtype, settings, request):
    for setting in settings:
        request.getfixturevalue(setting)
    x, weight, targets = example()
    reference = step(plain, *(t.detach().double().requires_grad_() for t in (x, weight)), targets)
    found, baseline = (
        step(function, x, weight, targets, autocast=dtype)
        for function in (linear_cross_entropy, plain)
    )
    assert found[0].dtype == torch.float32
    assert found[1][:, 5:40].eq(0).all()
    assert_near(found, baseline, reference, dtype or torch.float32)


@pytest.mark.parametrize("settings", [(), ("several_chunks", "padded")], ids=["one", "chunks"])
def test_z_loss_and_its_gradients_in_float64(settings, request):
    for setting in settings:
        request.getfixturevalue(setting)
    x, weight, targets = example(tokens=99)
    # 128 targets count: the mean is a float32, which holds 1/128 exactly
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    loss, *gradients = step(partial(linear_cross_entropy, z_loss=0.1), x, weight, targets)
    exact, *expected = step(plain_z_loss, x, weight, targets)
    torch.testing.assert_close(loss.double(), exact.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)
    without = step(partial(linear_cross_entropy, z_loss=0.0), x, weight, targets)
    for ours, plain_loss in zip(
        without, step(linear_cross_entropy, x, weight, targets), strict=True
    ):
        assert torch.equal(ours, plain_loss)


def plain_z_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """In the dtype of x, unlike cross_entropy()."""
    logits = torch.nn.functional.linear(x, weight)
    counted = logits.logsumexp(-1)[targets != -100]
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return mean + 0.1 * counted.square().mean()


def test_z_loss_of_the_kernel(kernel, several_chunks, padded):
    x, weight, targets = example()
    found = step(partial(linear_cross_entropy, z_loss=0.1), x, weight, targets)
    wide = (t.detach().double().requires_grad_() for t in (x, weight))
    baseline = step(plain_z_loss, x, weight, targets)
    assert_near(found, baseline, step(plain_z_loss, *wide, targets), torch.float32)


def test_chunked_loss_compiles_in_one_graph(kernel, several_chunks, padded):
    """10 s: the kernel is interpreted four times, and two chunks take 128 rows or more."""
    torch._dynamo.reset()
    eager = partial(linear_cross_entropy, z_loss=0.1)
    compiled = torch.compile(eager, backend="aot_eager", fullgraph=True)
    found, expected = (step(run, *example(), autocast=torch.bfloat16) for run in (compiled, eager))
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*example()), eager(*example()))


def test_the_kernel_where_a_row_is_sure_of_its_target_or_hopeless(kernel):
    """With scores in the hundreds, the gradient is 1 - p for a sure row, -1 for a hopeless one.

    A target outside the vocabulary gives NaN.
    """
    logits = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([3, 250, -100, 199, 200, 7])
    logits[0, 3], logits[1, 9], logits[5, 7] = 400.0, 300.0, 20.0
    wide = logits[:, :251].double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(wide, targets, reduction="none", ignore_index=-100)
    gradient = torch.autograd.grad(expected.sum(), wide)[0]
    found = logits.clone()
    cross_entropy = importlib.import_module("model.kernels.loss").cross_entropy_in_place
    loss = cross_entropy(found, targets, 251, -100, True, 0.0)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    # float32 has steps of 1.2e-7 above 1, where the sum of a sure row lies
    torch.testing.assert_close(found[:, :251].double(), gradient, rtol=1e-5, atol=2e-7)
    assert found[:, 251:].eq(0).all() and found[2].eq(0).all() and loss[2] == 0
    beyond = cross_entropy(logits, targets + 10, 251, -100, False, 0.0)
    assert beyond.isnan().nonzero().flatten().tolist() == [1, 2]


def test_the_kernel_is_a_lawful_operator(kernel):
    from model.kernels.loss import cross_entropy_in_place

    logits, targets = torch.randn(8, 64).bfloat16(), torch.arange(8)
    torch.library.opcheck(cross_entropy_in_place, (logits, targets, 60, -100, True, 0.1))


def test_gradients_of_one_alone(several_chunks):
    x, weight, targets = example()
    _, *expected = step(linear_cross_entropy, x, weight, targets)
    of_x = torch.autograd.grad(linear_cross_entropy(x, weight.detach(), targets), x)
    of_weight = torch.autograd.grad(linear_cross_entropy(x.detach(), weight, targets), weight)
    for found, gradient in zip((*of_x, *of_weight), expected, strict=True):
        assert torch.equal(found, gradient)


def test_without_gradients_the_same_loss_and_none_of_their_work(several_chunks):
    x, weight, targets = example()
    with FlopCounterMode(display=False) as with_gradients:
        loss = linear_cross_entropy(x, weight, targets)
    with FlopCounterMode(display=False) as without, torch.no_grad():
        alone = linear_cross_entropy(x, weight, targets)
    assert torch.equal(loss, alone)
    # the logits; beside them the gradients of x and of weight
    assert without.get_total_flops() == 2 * 180 * 97 * 32 == with_gradients.get_total_flops() // 3


def test_backward_twice_over_the_same_graph_but_not_through_itself(several_chunks):
    x, weight, targets = example()
    loss = linear_cross_entropy(x, weight, targets)
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    second = torch.autograd.grad(3 * loss, (x, weight), retain_graph=True)
    assert all(torch.allclose(b, 3 * a) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="once differentiable"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_float16_gradients_neither_overflow_nor_vanish():
    """16,384 tokens that all ask for one word sum up beyond float16's largest number.

    A loss scaler multiplies only afterwards.
    """
    x, weight, targets = example(tokens=8192, ignored=slice(0))
    x = (x.detach() + 8).requires_grad_()
    targets = torch.full_like(targets, 3)
    _, d_x, d_weight = step(linear_cross_entropy, x, weight, targets, autocast=torch.float16)
    reference = step(plain, *(t.detach().double().requires_grad_() for t in (x, weight)), targets)
    assert reference[2].abs().max() * targets.numel() > torch.finfo(torch.float16).max
    for found, exact in ((d_x, reference[1]), (d_weight, reference[2])):
        assert (found.double() - exact).norm() < 2e-3 * exact.norm()


class Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.elements = max(self.elements, *made, 0)
        return result


def test_never_makes_the_logits_of_all_tokens(monkeypatch, build_gpt):
    monkeypatch.setitem(model.loss.CHUNK_LOGITS, "cpu", 128 * 2000)
    gpt, tokens = build_gpt("sdpa", vocab_size=2000), torch.randint(2000, (16, 32))
    with Largest() as whole:
        logits = gpt(tokens).logits
        cross_entropy(logits, tokens).backward()
    assert whole.elements == 512 * 2000
    with Largest() as chunked:
        gpt(tokens, tokens).loss.backward()
    assert chunked.elements == 128 * 2000
    with Largest() as evaluated, torch.no_grad():
        gpt(tokens, tokens)
    assert evaluated.elements == 128 * 2000


CHUNKS = [
    ("cpu", 4096, 257, 128, 4096),
    ("cuda", 32_768, 50_257, 768, 4736),
    ("cuda", 2**20, 50_257, 768, 16_000),
]


@pytest.mark.parametrize("device, tokens, vocab_size, width, rows", CHUNKS)
def test_chunks(device, tokens, vocab_size, width, rows):
    """One chunk for few tokens; else 512 MiB of 16-bit logits each, but not too many to compile."""
    assert model.loss.chunk_rows(tokens, vocab_size, width, device) == rows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_chunked_loss_on_a_gpu(dtype, compiled, monkeypatch):
    monkeypatch.setitem(model.loss.CHUNK_LOGITS, "cuda", 1024 * 5003)
    x, weight, targets = (
        t.detach().cuda() for t in example(tokens=1500, vocab_size=5003, width=64)
    )
    reference = step(plain, *(t.double().requires_grad_() for t in (x, weight)), targets)
    torch._dynamo.reset()
    function = (
        torch.compile(linear_cross_entropy, fullgraph=True) if compiled else linear_cross_entropy
    )
    x, weight = x.requires_grad_(), weight.requires_grad_()
    results = []
    for each in (function, plain):
        with torch.autocast("cuda", dtype=dtype):
            loss = each(x, weight, targets)
        # as a loss scaler does: float16's gradients of the whole logits would vanish
        gradients = torch.autograd.grad(loss * 2**12, (x, weight))
        results.append([loss.detach(), *(gradient / 2**12 for gradient in gradients)])
    assert_near(*results, reference, dtype)


# GPT-2's vocabulary with its padding; less than a block
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("vocab_size", "width"), [(50_257, 50_304), (1000, 1024)])
def test_the_kernel_on_a_gpu(dtype, vocab_size, width):
    """Against float64, with the error of one rounding; and its bits, repeated."""
    from model.kernels.loss import cross_entropy_in_place

    torch.manual_seed(0)
    logits = 2 * torch.randn(1500, width, device="cuda", dtype=dtype)
    targets = torch.randint(vocab_size, (1500,), device="cuda")
    targets[3], targets[5] = -100, vocab_size - 1
    logits[7, targets[7]] = 60.0  # a row that is sure of its target
    wide = logits[:, :vocab_size].double().requires_grad_()
    expected = F.cross_entropy(wide, targets, reduction="none")
    expected = expected + 1e-4 * (wide.logsumexp(-1).square() * (targets != -100))
    gradient = torch.autograd.grad(expected.sum(), wide)[0]
    found, again = logits.clone(), logits.clone()
    loss, repeated = (
        cross_entropy_in_place(each, targets, vocab_size, -100, True, 1e-4)
        for each in (found, again)
    )
    assert torch.equal(loss, repeated) and torch.equal(found, again)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=2e-6)
    error = (found[:, :vocab_size].double() - gradient).norm(dim=1)
    assert (error <= torch.finfo(dtype).eps * gradient.norm(dim=1) + 1e-6).all()
    assert found[3].eq(0).all() and found[:, vocab_size:].eq(0).all()
    alone = cross_entropy_in_place(logits, targets, vocab_size, -100, False, 1e-4)
    torch.testing.assert_close(alone, loss)


@pytest.mark.gpu
def test_the_mean_does_not_round_gradients_twice():
    """1 / 230 has an error of 0.3% in bfloat16, which all gradients would share."""
    x, weight, targets = (t.detach().cuda() for t in example(tokens=150))
    assert (targets != -100).sum() == 230
    leaves = [t.bfloat16().requires_grad_() for t in (x, weight)]
    found = step(linear_cross_entropy, *leaves, targets)
    exact = step(plain, *(t.detach().double().requires_grad_() for t in leaves), targets)
    for ours, reference in zip(found[1:], exact[1:], strict=True):
        scale = (ours.double() * reference).sum() / reference.square().sum()
        assert abs(scale - 1) < 1e-3
