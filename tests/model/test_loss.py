"""Cross-entropy: what counts, what does not, and in which dtype."""

import importlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import model.loss
from conformance.memory_growth import LiveTensors
from model import cross_entropy, linear_cross_entropy


def test_is_the_mean_over_the_targets_that_count_in_float32():
    """Nothing is rounded to bfloat16 on the way. Ignored positions get no gradient."""
    logits = torch.randn(1, 64, 300).bfloat16().requires_grad_()
    targets = torch.arange(64)[None].masked_fill(torch.arange(64) % 3 == 0, -100)
    loss = cross_entropy(logits, targets)
    log_p = logits.detach().double().log_softmax(-1)[0]
    exact = -torch.stack([log_p[n, n] for n in range(64) if n % 3]).mean()
    torch.testing.assert_close(loss, exact.float(), rtol=1e-6, atol=0)
    loss.backward()
    assert torch.equal(logits.grad.ne(0).any(-1), targets != -100)


def test_no_target_at_all_is_a_loss_of_zero_with_zero_gradients(several_chunks):
    def whole(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(F.linear(x, weight), targets)

    for function in (whole, linear_cross_entropy):
        assert all(each.eq(0).all() for each in step(function, *example(ignored=slice(None))))


def test_a_target_that_is_no_token_is_refused():
    x, weight = torch.randn(1, 3, 8), torch.randn(5, 8)
    for target in (-5, 5):
        with pytest.raises((IndexError, RuntimeError), match="bounds"):
            linear_cross_entropy(x, weight, torch.tensor([[1, target, 2]]))


def example(
    *, tokens: int = 90, ignored: slice = slice(5, 40), device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """x (2, tokens, 32), weight (97, 32) and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, tokens, 32, generator=generator)
    weight = 0.3 * torch.randn(97, 32, generator=generator)
    targets = torch.randint(97, (2, tokens), generator=generator)
    targets[:, ignored] = -100
    return x.to(device).requires_grad_(), weight.to(device).requires_grad_(), targets.to(device)


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Of all logits at once; the softmax of float64 is float64."""
    logits = F.linear(x, weight)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


def step(
    function: Callable,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    autocast: torch.dtype | None = None,
) -> list[Tensor]:
    """The loss and its gradients by x and weight."""
    with torch.autocast(x.device.type, autocast or torch.bfloat16, autocast is not None):
        loss = function(x, weight, targets)
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight))]


def exact_step(x: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    """step() of plain() in float64."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    return step(plain, x, weight, targets)


@pytest.fixture
def several_chunks(monkeypatch):
    """180 tokens of 97 words in chunks of 128, the last of them shorter."""
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(model.loss.CHUNK_LOGITS, device, 100 * 97)
        assert model.loss.chunk_rows(180, 97, 32, device) == 128


@pytest.fixture
def padded(monkeypatch):
    monkeypatch.setattr(model.loss, "padded_vocab", lambda vocab_size, device: 128)


@pytest.fixture
def kernel(monkeypatch):
    """The GPU's kernel in Triton's interpreter, on a row of several blocks and a part of one."""
    monkeypatch.setattr(model.loss, "has_kernel", lambda logits: logits.dtype != torch.float64)
    monkeypatch.setattr(importlib.import_module("model.kernels.loss"), "BLOCK", 32)


# fixtures, the dtype of autocast, the device, and who compiles
PAIRS = [
    ("", None, "cpu", None),
    ("several_chunks padded", torch.float16, "cpu", None),
    ("several_chunks padded", torch.bfloat16, "cpu", "aot_eager"),
    ("kernel", torch.bfloat16, "cpu", None),
    ("kernel several_chunks padded", None, "cpu", None),
    pytest.param("several_chunks", torch.float16, "cuda", None, marks=pytest.mark.gpu),
    pytest.param("several_chunks", torch.bfloat16, "cuda", "inductor", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("settings", "dtype", "device", "by"), PAIRS)
def test_loss_and_gradients_are_those_of_all_logits(
    settings, dtype, device, by, request, assert_near
):
    for setting in settings.split():
        request.getfixturevalue(setting)
    function, inputs = linear_cross_entropy, example(device=device)
    if by:
        torch._dynamo.reset()
        function = torch.compile(function, backend=by, fullgraph=True)
    found, baseline = (step(each, *inputs, autocast=dtype) for each in (function, plain))
    assert found[0].dtype == torch.float32
    assert found[1][:, 5:40].eq(0).all()
    exact, rounding = exact_step(*inputs), torch.finfo(dtype or torch.float32).eps
    assert_near(found, baseline, exact, rounding=rounding)


def test_loss_and_its_gradients_in_float64(several_chunks, padded):
    x, weight, targets = example(tokens=99)
    # 128 targets count: the mean is a float32, which holds 1/128 exactly
    wide = (t.detach().double().requires_grad_() for t in (x, weight))
    loss, *gradients = step(linear_cross_entropy, *wide, targets)
    exact, *expected = exact_step(x, weight, targets)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)


def test_the_kernel_where_a_row_is_sure_of_its_target_or_hopeless(kernel, padded):
    """With scores in the hundreds, the gradient is 1 - p for a sure row, -1 for a hopeless one.

    A target outside the vocabulary gives NaN.
    """
    logits = torch.randn(1, 6, 97, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[3, 90, -100, 70, 71, 7]])
    logits[0, 0, 3], logits[0, 1, 9], logits[0, 5, 7] = 400.0, 300.0, 20.0
    inputs = logits.requires_grad_(), torch.eye(97).requires_grad_(), targets
    loss, gradient, _ = step(linear_cross_entropy, *inputs)
    exact, expected, _ = exact_step(*inputs)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=1e-6)
    # float32 has steps of 1.2e-7 above 1, where the sum of a sure row lies
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-7)
    targets[0, 1] = 97
    assert linear_cross_entropy(*inputs).isnan()


def test_the_kernel_is_a_lawful_operator(kernel):
    from model.kernels.loss import cross_entropy_in_place

    logits, targets = torch.randn(8, 64).bfloat16(), torch.arange(8)
    torch.library.opcheck(cross_entropy_in_place, (logits, targets, 60, -100, True))


def test_gradients_of_one_alone_or_of_none(several_chunks):
    x, weight, targets = example()
    loss, *expected = step(linear_cross_entropy, x, weight, targets)
    of_x = torch.autograd.grad(linear_cross_entropy(x, weight.detach(), targets), x)
    of_weight = torch.autograd.grad(linear_cross_entropy(x.detach(), weight, targets), weight)
    assert all(torch.equal(*pair) for pair in zip((*of_x, *of_weight), expected, strict=True))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        assert torch.equal(linear_cross_entropy(x, weight, targets), loss)
    assert counter.get_total_flops() == 2 * 180 * 97 * 32  # of the logits


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
    inputs = (x.detach() + 8).requires_grad_(), weight, torch.full_like(targets, 3)
    _, *found = step(linear_cross_entropy, *inputs, autocast=torch.float16)
    _, *exact = exact_step(*inputs)
    assert exact[1].abs().max() * targets.numel() > torch.finfo(torch.float16).max
    for gradient, reference in zip(found, exact, strict=True):
        assert (gradient.double() - reference).norm() < 2e-3 * reference.norm()


def test_never_makes_the_logits_of_all_tokens(monkeypatch, build_gpt):
    monkeypatch.setitem(model.loss.CHUNK_LOGITS, "cpu", 128 * 2000)
    gpt, tokens = build_gpt("sdpa", vocab_size=2000), torch.randint(2000, (16, 32))
    with LiveTensors() as whole:
        cross_entropy(gpt(tokens).logits, tokens).backward()
    with LiveTensors() as chunked:
        gpt(tokens, tokens).loss.backward()
    with LiveTensors() as evaluated, torch.no_grad():
        gpt(tokens, tokens)
    logits = 512 * 2000 * 4  # bytes
    assert whole.largest == logits and chunked.largest == evaluated.largest == logits / 4


def test_chunks_of_gpt2_on_a_gpu():
    """512 MiB of 16-bit logits each, but not too many to compile."""
    rows = [model.loss.chunk_rows(tokens, 50_257, 768, "cuda") for tokens in (2**15, 2**20)]
    assert rows == [4736, 16_000]


# GPT-2's vocabulary with its padding; less than a block
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "vocab_size", "width"),
    [(torch.bfloat16, 50_257, 50_304), (torch.float16, 1000, 1024)],
    ids=["bf16-gpt2", "fp16-1000"],
)
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
    gradient = torch.autograd.grad(expected.sum(), wide)[0]
    found, again = logits.clone(), logits.clone()
    loss, repeated = (
        cross_entropy_in_place(each, targets, vocab_size, -100, True) for each in (found, again)
    )
    assert torch.equal(loss, repeated) and torch.equal(found, again)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=2e-6)
    error = (found[:, :vocab_size].double() - gradient).norm(dim=1)
    assert (error <= torch.finfo(dtype).eps * gradient.norm(dim=1) + 1e-6).all()
    assert found[3].eq(0).all() and found[:, vocab_size:].eq(0).all()
    alone = cross_entropy_in_place(logits, targets, vocab_size, -100, False)
    torch.testing.assert_close(alone, loss)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_mean_does_not_round_gradients_twice(device):
    """1 / 230 has an error of 0.3% in bfloat16, which all gradients would share."""
    x, weight, targets = example(tokens=150, device=device)
    assert (targets != -100).sum() == 230
    leaves = [t.detach().bfloat16().requires_grad_() for t in (x, weight)]
    found = step(linear_cross_entropy, *leaves, targets)
    exact = exact_step(*leaves, targets)
    for ours, reference in zip(found[1:], exact[1:], strict=True):
        scale = (ours.double() * reference).sum() / reference.square().sum()
        assert abs(scale - 1) < 1e-3
