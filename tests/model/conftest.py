"""What the model's tests share: a small GPT of any shape, and the error budget."""

import pytest
import torch

from attention import Backend, get_backend
from config import AttentionConfig, ModelConfig
from model import GPT
from tests.weights import with_weights

VOCAB_SIZE = 61


@pytest.fixture
def build_gpt(modern):
    """build_gpt(backend="naive", **fields of ModelConfig), the same weights every time; attention=
    as of GPT, variant= gpt2 or modern. Two layers, four heads of eight, 32 positions. With noise no
    bias or gain is 0 or 1, so that leaving one out is noticed.
    """

    def build(
        backend: Backend | str = "naive",
        *,
        vocab_size: int = VOCAB_SIZE,
        attention: AttentionConfig | None = None,
        std: float = 0.1,
        noise: float = 0.0,
        variant: str = "gpt2",
        **fields,
    ) -> GPT:
        torch.manual_seed(0)
        # weights five times the usual: with 0.02 a model this small gives nearly uniform attention,
        # which hides mistakes in it
        shape = {"num_layers": 2, "num_heads": 4, "hidden_size": 32, "max_seq_len": 32}
        config = ModelConfig(**shape | (modern if variant == "modern" else {}) | fields)
        backend = get_backend(backend) if isinstance(backend, str) else backend
        model = GPT(config, vocab_size=vocab_size, backend=backend, attention=attention)
        for parameter in with_weights(model, std).parameters():
            parameter.data += noise * torch.randn_like(parameter)
        return model

    return build


@pytest.fixture
def random_tokens():
    """random_tokens(batch_size, seq_len): the same tokens every time."""

    def build(batch_size: int, seq_len: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(VOCAB_SIZE, (batch_size, seq_len), generator=generator)

    return build


@pytest.fixture
def assert_near():
    """The error of each tensor in `found` is at most twice that of `baseline`, plus one rounding.

    `baseline` is an independent computation in the same dtype, `reference` one in float64.
    rounding: relative, if it is not that of the tensor's dtype.
    """

    def check(found, baseline, reference, *, rounding: float | None = None) -> None:
        for i, (x, own, exact) in enumerate(zip(found, baseline, reference, strict=True)):
            assert x.dtype == own.dtype and x.shape == own.shape
            error, budget = ((each.double() - exact).norm() / exact.norm() for each in (x, own))
            one = torch.finfo(x.dtype).eps if rounding is None else rounding
            assert error <= 2 * budget + one, (i, error, budget)

    return check


@pytest.fixture
def modern():
    """The fields of ModelConfig that make model=modern."""
    return {
        "positions": "rope",
        "norm": "rmsnorm",
        "qk_norm": True,
        "activation": "swiglu",
        "bias": False,
        "tie_embeddings": False,
        "num_kv_heads": 2,
    }
