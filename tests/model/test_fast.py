"""FastGPT against GPT, its specification: the same loss and the same gradients.

test_compile.py has the same of a compiled one.
"""

import copy

import pytest
import torch
from torch import Tensor

import model.kernels
from attention import get_backend
from model import GPT, KVCache
from model.fast import FastGPT

COMPILED = {"compiled": True, "backend": "aot_eager", "fullgraph": True}


@pytest.fixture
def kernels(monkeypatch):
    """The kernels that a GPU has, here in Triton's interpreter."""
    fits = model.kernels.fits_norm_kernel
    monkeypatch.setattr(
        model.kernels,
        "has_norm_kernel",
        lambda x, branch: torch.is_grad_enabled() and fits(x, branch),
    )


def loss_and_gradients(
    run: GPT, *inputs: Tensor | None, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    torch.manual_seed(4)  # of dropout
    with torch.autocast(inputs[0].device.type, dtype, enabled=dtype != torch.float32):
        loss = run(*inputs).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(run.parameters()))]


PAIRS = [
    ("gpt2", "none", 0.3, torch.bfloat16),
    ("modern", "none", 0.0, torch.float32),
    ("gpt2", "block", 0.3, torch.float32),
    ("modern", "attention", 0.3, torch.bfloat16),
]


@pytest.mark.parametrize(("variant", "keep", "dropout", "dtype"), PAIRS, ids=str)
def test_the_same_bits_without_kernels(build_gpt, random_tokens, variant, keep, dropout, dtype):
    fields = {"variant": variant, "num_layers": 3, "checkpoint": keep, "dropout": dropout}
    network = build_gpt("tiled", noise=0.1, **fields)
    tokens, document_ids = random_tokens(2, 32), (torch.arange(32) // 9).expand(2, -1)
    inputs = tokens, tokens, document_ids
    found = loss_and_gradients(FastGPT(network), *inputs, dtype=dtype)
    expected = loss_and_gradients(network, *inputs, dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("variant", "how"), [("modern", {}), ("gpt2", COMPILED)], ids=["modern", "gpt2-compiled"]
)
def test_kernels_differ_by_rounding_alone(
    build_gpt, random_tokens, kernels, assert_near, variant, how
):
    torch._dynamo.reset()
    network, tokens = build_gpt("sdpa", noise=0.1, variant=variant), random_tokens(2, 32)
    reference = loss_and_gradients(copy.deepcopy(network).double(), tokens, tokens)
    baseline = loss_and_gradients(network, tokens, tokens)
    found = loss_and_gradients(FastGPT(network, **how), tokens, tokens)
    assert not all(torch.equal(a, b) for a, b in zip(found, baseline, strict=True)), "no kernel ran"
    assert_near(found, baseline, reference)


def test_elsewhere_it_is_the_model(build_gpt, random_tokens):
    """Logits, a cache, and another attention, which both follow."""
    network, tokens = build_gpt("tiled", checkpoint="block").eval(), random_tokens(2, 32)
    fast = FastGPT(network)
    assert [*fast.state_dict()] == [*network.state_dict()]
    with torch.no_grad():
        expected = network(tokens).logits
        assert torch.equal(fast(tokens).logits, expected)
        cache = KVCache(2, max_len=32)
        parts = [fast(part, cache=cache).logits for part in tokens.split((20, 1, 11), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    with fast.using(backend=get_backend("no_scale")):
        assert network.backend.name == "no_scale"
        changed = fast(tokens, tokens).loss
        assert torch.equal(changed, network(tokens, tokens).loss)
    assert changed != fast(tokens, tokens).loss and network.backend.name == "tiled"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("attention", "compiled", "keep"),
    [
        ("sdpa", True, "none"),
        ("triton", False, "none"),
        ("sdpa", False, "attention"),
        ("triton", True, "block"),
    ],
)
def test_the_same_training_on_a_gpu(build_gpt, assert_near, attention, compiled, keep):
    """Of a size for which the MLP's products run Hopper's kernel."""
    torch._dynamo.reset()
    shape = {"hidden_size": 256, "max_seq_len": 256, "checkpoint": keep}
    network = build_gpt(attention, std=0.02, noise=0.1, **shape).cuda()
    tokens = torch.randint(61, (64, 256), device="cuda")
    fast = FastGPT(network, compiled=compiled)
    found = loss_and_gradients(fast, tokens, tokens, dtype=torch.bfloat16)
    baseline = loss_and_gradients(network, tokens, tokens, dtype=torch.bfloat16)
    network.backend = get_backend("naive")
    reference = loss_and_gradients(copy.deepcopy(network).double(), tokens, tokens)
    assert_near(found, baseline, reference)
