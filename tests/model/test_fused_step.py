"""A decoding step in few kernels gives what GPT.forward gives, which is its specification.

On a CPU the kernels run in Triton's interpreter.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model.decoding
from attention import get_backend
from config import AttentionConfig, ModelConfig
from model import GPT, KVCache, generate, step_kernel
from model.decoding import DecodingStep
from model.fused_step import MOST_SEQUENCES, fits_kernels, norm_arguments
from model.gpt import build_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter computes bfloat16 on raw bits
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
SHARED = {"hidden_size": 48, "num_layers": 2, "max_seq_len": 32}
VARIANTS = {
    "gpt2": {},
    "gpt2-no-bias": {"bias": False, "tie_embeddings": False},
    "modern": {"modern": True},
    "rope-layernorm-grouped": {"positions": "rope", "num_kv_heads": 1},
    "qk-norm-rmsnorm": {"qk_norm": True, "norm": "rmsnorm", "num_heads": 3},
    "swiglu-bias": {"activation": "swiglu"},
}


@pytest.fixture
def fused(monkeypatch):
    """Steps take the kernels wherever these can run, and note it."""
    calls = []

    def has_kernels(*arguments) -> bool:
        calls.append(fits_kernels(*arguments))
        return calls[-1]

    monkeypatch.setattr(model.decoding, "has_kernels", has_kernels)
    return calls


def perturbed(module: nn.Module) -> Any:
    """With gains and biases that nobody could leave out unnoticed."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return module.to(DEVICE).eval()


def step_after(gpt: GPT, tokens: Tensor) -> Tensor:
    """The logits (B, 2, vocab_size) after the last two tokens, each read in a step."""
    cache = KVCache(gpt.config.num_layers, max_len=tokens.shape[1] + 3)
    gpt(tokens[:, :-2], cache=cache)
    step = DecodingStep(gpt, cache, len(tokens))
    return torch.stack([step(x).logits.clone() for x in tokens[:, -2:].split(1, 1)], 1)


@pytest.mark.parametrize(
    ("variant", "batch_size"), [(name, (1, 2)[i % 2]) for i, name in enumerate(VARIANTS)]
)
def test_a_step_equals_one_pass(build_gpt, modern, random_tokens, fused, variant, batch_size):
    fields = dict(VARIANTS[variant])
    fields = SHARED | (modern if fields.pop("modern", False) else {}) | fields
    gpt, tokens = perturbed(build_gpt("tiled", **fields)), random_tokens(batch_size, 9).to(DEVICE)
    with torch.no_grad():
        expected = gpt(tokens).logits[:, -2:]
        torch.testing.assert_close(step_after(gpt, tokens), expected, rtol=1e-4, atol=1e-4)
    assert fused and all(fused)


def test_generation_in_steps_of_few_kernels_changes_no_token(build_gpt, random_tokens, fused):
    """With windows, a cap and sinks, which the attention alone sees; past the last position too."""
    function = AttentionConfig(windows=[4, None], softcap=6.0, sinks=True)
    fields = {"num_kv_heads": 2, "max_seq_len": 8, "tie_embeddings": False}
    gpt = perturbed(build_gpt(attention=function, **fields))
    prompt = random_tokens(2, 3).to(DEVICE)
    plain = generate(gpt, prompt, max_new_tokens=8, temperature=0.0, use_cache=False)
    with gpt.using(backend=get_backend("triton")):
        assert torch.equal(generate(gpt, prompt, max_new_tokens=8, temperature=0.0), plain)
    assert len(fused) >= 6 or DEVICE == "cuda"
    assert all(fused) and plain.unique().numel() > 5


class Adapted(nn.Linear):
    """As a LoRA puts in a layer's place."""


class Quantised(Tensor):
    """As torchao puts in a weight's place."""


def test_what_the_kernels_do_not_take(build_gpt, random_tokens):
    gpt, token = build_gpt("tiled").to(DEVICE), random_tokens(1, 1).to(DEVICE)
    assert not fits_kernels(gpt, token)  # a gradient would be lost
    with torch.no_grad():
        assert fits_kernels(gpt, token)
        assert not fits_kernels(gpt, token.expand(MOST_SEQUENCES + 1, 1))
        assert not fits_kernels(gpt, token.expand(1, 2))
        gpt.blocks[1].mlp.up = Adapted(*gpt.blocks[1].mlp.up.weight.T.shape)
        assert not fits_kernels(gpt, token)
        gpt = build_gpt("tiled").to(DEVICE)
        quantised = gpt.blocks[1].mlp.down.weight.data.as_subclass(Quantised)
        gpt.blocks[1].mlp.down.weight = nn.Parameter(quantised)
        assert not fits_kernels(gpt, token)
        gpt = build_gpt("tiled", dropout=0.1).to(DEVICE)
        assert not fits_kernels(gpt.train(), token) and fits_kernels(gpt.eval(), token)
        assert not fits_kernels(gpt.double(), token)
        with torch.autocast(DEVICE, torch.bfloat16):
            assert not fits_kernels(gpt.float(), token)
        wide = build_gpt("tiled", num_layers=1, hidden_size=2056, num_heads=1).to(DEVICE)
        assert not fits_kernels(wide, token) and fits_kernels(wide.bfloat16(), token)


PRODUCTS = {
    "B1-K48-F7": (1, 48, 7, {}),
    "B3-K100-F40-layernorm-gelu": (3, 100, 40, {"norm": "layernorm", "activation": "gelu"}),
    "B2-K33-F130-rmsnorm-swiglu": (2, 33, 130, {"norm": "rmsnorm", "activation": "swiglu"}),
    "B2-K2000-F9-residual": (2, 2000, 9, {"residual": True}),
    "B1-K16384-F3": (1, 16384, 3, {}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "bias"), [(name, i % 2 > 0) for i, name in enumerate(PRODUCTS)])
def test_a_product_keeps_the_budget(assert_within_budget, name, bias, dtype):
    """Twice the error that PyTorch's operators make in the same dtype."""
    rows, width, features, options = PRODUCTS[name]
    kind, activation = options.get("norm"), options.get("activation", "")
    torch.manual_seed(0)
    gates = 2 if activation == "swiglu" else 1
    x = 2 + torch.randn(rows, width)
    linear = nn.Linear(width, gates * features, bias=bias)
    config = ModelConfig(hidden_size=width, num_heads=1, norm=kind or "layernorm")
    norm = perturbed(build_norm(config)) if kind else None
    residual = torch.randn(rows, features) if options.get("residual") else None

    def by_pytorch(dtype: torch.dtype) -> Tensor:
        y = x.to(DEVICE, dtype)
        y = y if norm is None else norm.to(DEVICE, dtype)(y)
        y = linear.to(DEVICE, dtype)(y)
        if activation == "gelu":
            y = F.gelu(y, approximate="tanh")
        if activation == "swiglu":
            y = F.silu(y[:, :features]) * y[:, features:]
        return y if residual is None else y + residual.to(DEVICE, dtype)

    with torch.no_grad():
        reference, baseline = by_pytorch(torch.float64), by_pytorch(dtype)
        found = step_kernel.product(
            x.to(DEVICE, dtype),
            linear.weight,
            linear.bias,
            norm=None if norm is None else norm_arguments(norm),
            activation=activation,
            residual=None if residual is None else residual.to(DEVICE, dtype),
        )
    assert_within_budget(found, baseline=baseline, reference=reference)


@pytest.mark.parametrize(
    ("bytes_of_a_feature", "features", "number"),
    [(2 * 768, 50304, 16), (2 * 768, 768, 4), (4 * 3072, 50304, 2), (2 * 16384, 7, 1), (96, 7, 1)],
)
def test_a_program_fills_its_registers_and_each_processor_has_one(
    bytes_of_a_feature, features, number
):
    assert step_kernel.features_of_a_program(bytes_of_a_feature, features, 132) == number
