"""fused_block against Block.forward, its specification: the same results and the same gradients."""

import copy

import pytest
import torch
from torch import Tensor

import model.kernels
from model.fused_block import fused_block, is_fused
from model.gpt import GPT, Block
from model.kv_cache import LayerCache
from model.rope import rope_tables

TOKENS = 24
CHUNKED = {"chunk_tokens": 10}  # the last chunk is shorter
MODES = {"none": {}} | {
    name: {"checkpoint": name} for name in ("elementwise", "attention", "block")
}
CHUNKED_MODES = {
    "attention-chunks": MODES["attention"] | CHUNKED,
    "block-chunks": MODES["block"] | CHUNKED,
    "block-chunks-offload": MODES["block"] | CHUNKED | {"offload": True},
}
FIELDS = {"positions": "rope", "norm": "rmsnorm", "qk_norm": True, "activation": "swiglu"}
SHAPES = {name: {name: value} for name, value in FIELDS.items()}
SHAPES |= {"gpt2": {}, "modern": FIELDS | {"bias": False, "num_kv_heads": 2}}
SHAPES["dropout"] = {"dropout": 0.3}


@pytest.fixture
def kernel(monkeypatch):
    """The kernels that a GPU has, here in Triton's interpreter."""
    if torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(
        model.kernels,
        "has_norm_kernel",
        lambda x, branch: torch.is_grad_enabled() and model.kernels.fits_norm_kernel(x, branch),
    )


@pytest.fixture
def build_block(build_gpt):
    """A block whose gains and biases are not 1 and 0, so that leaving one out is noticed."""

    def build(**fields) -> Block:
        block = build_gpt("naive", num_layers=1, **fields).blocks[0]
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        return block

    return build


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, the branch that is still to be added to it, and a gradient of the result."""
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(2, TOKENS, 32, generator=generator).to(dtype) for _ in range(3))


def context(block: Block, *, documents: bool) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
    """What both take besides x: the tables of RoPE and the document ids."""
    rope = None
    if block.config.positions == "rope":
        rope = rope_tables(torch.arange(TOKENS), head_dim=block.config.head_dim, theta=1e4)
    return rope, (torch.arange(TOKENS) // 9).expand(2, -1) if documents else None


def run(
    block: Block, *, fused: bool, documents: bool = False, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The result, and the gradients of x, of the branch and of every parameter."""
    x, branch, d_out = inputs(next(block.parameters()).dtype)
    leaves = [x.requires_grad_(), branch.requires_grad_(), *block.parameters()]
    torch.manual_seed(4)  # of dropout
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        if fused:
            x, left = fused_block(block, x, branch, *context(block, documents=documents), None)
            out = x if left is None else x + left
        else:
            out = block(x + branch, *context(block, documents=documents), None)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


PAIRS = [
    ("gpt2", "none", None, False),
    ("gpt2", "attention", torch.bfloat16, True),
    ("modern", "none", torch.bfloat16, True),
    ("modern", "elementwise", None, False),
    ("positions", "block", None, True),
    ("norm", "attention", None, False),
    ("qk_norm", "elementwise", torch.bfloat16, False),
    ("activation", "block", torch.bfloat16, True),
    ("dropout", "attention", None, False),
    ("dropout", "block", torch.bfloat16, False),
]


@pytest.mark.parametrize(("shape", "keeps", "dtype", "documents"), PAIRS, ids=str)
def test_the_same_bits(build_block, shape, keeps, dtype, documents):
    block = build_block(**SHAPES[shape], **MODES[keeps])
    settings = {"dtype": dtype, "documents": documents}
    expected, actual = (run(block, fused=fused, **settings) for fused in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("shape", "keeps"),
    [
        ("gpt2", MODES["none"]),
        ("gpt2", MODES["attention"]),
        ("gpt2", CHUNKED_MODES["block-chunks"]),
        ("modern", MODES["elementwise"]),
        ("modern", MODES["block"]),
        ("modern", CHUNKED_MODES["attention-chunks"]),
    ],
    ids=str,
)
def test_the_kernel_differs_by_rounding_alone(
    build_block, assert_within_budget, kernel, shape, keeps
):
    assert_equal_but_for_rounding(build_block(**SHAPES[shape], **keeps), assert_within_budget)


def assert_equal_but_for_rounding(block: Block, assert_within_budget) -> None:
    reference = run(copy.deepcopy(block).double(), fused=False, documents=True)
    baseline, actual = (run(block, fused=fused, documents=True) for fused in (False, True))
    for ours, theirs, exact in zip(actual, baseline, reference, strict=True):
        assert_within_budget(ours, baseline=theirs, reference=exact)


def test_the_kernel_leaves_dropout_the_same_random_numbers(build_block, kernel):
    block = build_block(**SHAPES["dropout"])
    expected, actual = (run(block, fused=fused) for fused in (False, True))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("keeps", [MODES["none"], CHUNKED_MODES["block-chunks"]])
@torch.no_grad()
def test_through_a_cache(build_block, keeps):
    block = build_block(**SHAPES["modern"], **keeps)
    caches = [LayerCache(TOKENS) for _ in range(2)]
    (cos, sin), _ = context(block, documents=False)
    x = inputs()[0]
    for first, last in ((0, 13), (13, 14), (14, TOKENS)):
        rope = cos[first:last], sin[first:last]
        expected = block(x[:, first:last], rope, None, caches[0])
        actual, branch = fused_block(block, x[:, first:last], None, rope, None, caches[1])
        torch.testing.assert_close(actual if branch is None else actual + branch, expected)
    torch.testing.assert_close(caches[1].k, caches[0].k)


@pytest.mark.parametrize("keeps", [{}, MODES["elementwise"], MODES["block"]], ids=str)
def test_a_model_without_kernels_is_fused_where_it_checkpoints(build_gpt, random_tokens, keeps):
    network: GPT = build_gpt(**keeps)
    x = network.token_embedding(random_tokens(1, 8))
    assert is_fused(network.config, x) == bool(keeps)


def test_where_the_kernel_is_a_model_runs_it_while_training(build_gpt, random_tokens, kernel):
    network: GPT = build_gpt()
    x = network.token_embedding(random_tokens(1, 8))
    assert is_fused(network.config, x)
    with torch.no_grad():
        assert not is_fused(network.config, x)
