"""The Triton kernels as an operator: what torch.compile, autograd and long tensors ask of it.

Without a GPU the kernels run in Triton's interpreter. test_conformance.py checks their numbers.
Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import opcheck

from attention import Backend, ScoreMod, attention, get_backend, kernels
from attention.kernels.launch import Settings, readable
from attention.kernels.op import flash_attention, flash_attention_backward
from attention.kernels.score_mods import tanh
from attention.mask import visible_keys
from conformance.cases import Case, distance, every_index, expect
from conformance.cases import run as run_case

pytestmark = pytest.mark.anywhere
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PORTABLE = get_backend("triton", kernel="portable")  # test_hopper.py tests the Hopper kernels
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0], device=DEVICE)
MOD = ScoreMod(every_index, "conformance.every_index_kernel:every_index", SLOPES)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def parts(projected: Tensor, num_kv_heads: int) -> tuple[Tensor, ...]:
    """q (B, H, N, D) and k, v (B, H_kv, N, D) as views of one projection (B, N, H + 2 H_kv, D)."""
    sizes = (projected.shape[2] - 2 * num_kv_heads, num_kv_heads, num_kv_heads)
    return tuple(x.transpose(1, 2) for x in projected.split(sizes, dim=2))


def test_the_operator_keeps_pytorchs_contract():
    """8 s, of PyTorch's tracing: schema, shapes, strides and dtypes promised to torch.compile, and
    the registered gradient.
    """
    q, k, v = (x.detach().requires_grad_() for x in parts(random(1, 9, 4, 16), 1))
    visible, cap = visible_keys(q, k, causal=True, window=5), torch.tensor([3.0], device=DEVICE)
    masks = visible.lo, visible.hi, cap, None
    settings = Settings(True, 0.25, "attention.kernels.score_mods:softcap")
    look = torch.ones((), dtype=torch.bool)
    opcheck(flash_attention, (q, k, v, *masks, look, *settings))
    with torch.no_grad():
        out, lse, state, _ = flash_attention(q, k, v, *masks, look, *settings)
        results = random(*out.shape), torch.ones_like(lse), q, k, v, out, lse, state
        for packed in (False, True):
            inputs = (*results, *masks, packed, *settings)
            opcheck(flash_attention_backward, inputs, test_utils=("test_schema", "test_faketensor"))


@triton.jit
def tanh_kernel(x_ptr, y_ptr, derivative_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y, derivative = tanh(tl.load(x_ptr + at))
    tl.store(y_ptr + at, y)
    tl.store(derivative_ptr + at, derivative)


def test_tanh_and_its_derivative_are_precise_everywhere():
    """To a few roundings of their own size. A regression test: 2 sigmoid(2 x) - 1 has no digit left
    where x is 1e-8.
    """
    x = torch.logspace(-37, 1.5, 4096, dtype=torch.float64).float()
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf]).repeat(1024)
    x = torch.cat((x, -x, torch.linspace(-1, 1, 4096), special)).to(DEVICE)
    y, derivative = torch.empty_like(x), torch.empty_like(x)
    tanh_kernel[(len(x) // 1024,)](x, y, derivative, BLOCK=1024)
    torch.testing.assert_close(y.double(), x.double().tanh(), rtol=8 * 2**-24, atol=0)
    small = x.abs() < 40  # beyond, the derivative is below float32
    exact = 1 / x[small].double().cosh() ** 2
    torch.testing.assert_close(derivative[small].double(), exact, rtol=100 * 2**-24, atol=0)
    assert not derivative[x.isinf()].any()


@pytest.mark.slow
def test_inductor_lowers_the_operators():
    """Inductor passes arguments that stand at their defaults by name, to a function with argument
    names of its own.
    """

    def function(packed: Tensor) -> Tensor:
        return attention(*parts(packed, 2), backend=PORTABLE).out

    packed, results = random(1, 40, 6, 16).requires_grad_(), []
    # Inductor does not lower a graph from the cache again
    with torch._inductor.config.patch(force_disable_caches=True):
        for run_once in (torch.compile(function, fullgraph=True), function):
            out = run_once(packed)
            results.append((out, *torch.autograd.grad(out.square().sum(), packed)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.gpu
def test_cuda_graph_capture():
    """Both passes: nothing waits for the device, with a window and documents too."""
    packed = random(2, 300, 12, 64, dtype=torch.bfloat16).requires_grad_()
    d_out = random(2, 4, 300, 64, dtype=torch.bfloat16, seed=3)
    documents = torch.arange(300, device=DEVICE).expand(2, -1) // 77

    def step() -> tuple[Tensor, ...]:
        tensors = parts(packed, 4)
        out = attention(*tensors, backend=PORTABLE, window=50, document_ids=documents).out
        return out, *torch.autograd.grad(out, tensors, d_out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True))


# q, k and v whose gradients are one tensor, or look as if they could be
VIEWS = {
    "packed": lambda: parts(random(2, 40, 6, 16, dtype=torch.bfloat16), 2),
    "q-apart": lambda: (random(2, 2, 9, 16), *parts(random(2, 9, 6, 16), 2)[1:]),
    "fewer-keys": lambda: tuple(
        x[:, :, : 9 - i] for i, x in zip((0, 1, 1), parts(random(2, 9, 6, 16), 2), strict=True)
    ),
    "every-other-token": lambda: tuple(x[:, :, ::2] for x in parts(random(2, 18, 6, 16), 2)),
    "padded": lambda: tuple(x[..., :16] for x in parts(random(2, 9, 6, 20), 2)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_one_projection_have_the_gradients_of_copies(name):
    """To the bit. Those of the whole projection share one memory, so that nobody has to copy."""
    given, results = VIEWS[name](), []
    for tensors in (given, [x.contiguous() for x in given]):
        inputs = [x.detach().requires_grad_() for x in tensors]
        out, lse = attention(*inputs, backend=PORTABLE, window=25, softcap=2.0)
        total = (out * random(*out.shape, dtype=out.dtype, seed=1)).sum() + lse.sum()
        results.append([out.detach(), *torch.autograd.grad(total, inputs)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    memories = {x.untyped_storage().data_ptr() for x in results[0][1:]}
    assert len(memories) == (1 if name == "packed" else 3)


AWKWARD = {
    "odd-head-dim": lambda: random(2, 2, 9, 17),
    "starts-between-granules": lambda: random(2, 2, 9, 32)[..., 1:17],
    "odd-row-stride": lambda: random(2, 2, 9, 18)[..., :16],
    "one-sequence-read-twice": lambda: random(1, 2, 9, 16).expand(2, -1, -1, -1),
    "head-dim-strided": lambda: random(2, 2, 16, 9).mT,
    "odd-head-dim-bf16": lambda: random(2, 2, 9, 20, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_tensors_that_suit_no_descriptor_are_copied(name):
    x = AWKWARD[name]()
    y = readable(x)
    assert torch.equal(y.to(x.dtype), x)
    assert y.stride(-1) == 1 and y.data_ptr() % 16 == 0
    assert all(stride > 0 and stride * y.element_size() % 16 == 0 for stride in y.stride()[:3])


@pytest.mark.parametrize(
    ("name", "block_kv", "optional"),
    [("no_max", 32, {"window": 25}), ("no_rescale", 16, {"score_mod": MOD})],
)
def test_a_defect_is_the_tile_loops(name, block_kv, optional):
    """Result and true gradient with the same tiles of keys; the tiles of queries may differ."""
    q, k, v = 2 * random(1, 4, 70, 16), random(1, 2, 70, 16, seed=1), random(1, 2, 70, 16, seed=2)
    tensors = [x.requires_grad_() for x in (q, k, v)]
    d_out = random(1, 4, 70, 16, seed=3)

    def results(backend: Backend, block_q: int) -> list[Tensor]:
        backend = backend.configured(block_q=block_q, block_kv=block_kv)
        out = attention(*tensors, backend=backend, **optional).out
        return [out.detach(), *torch.autograd.grad(out, tensors, d_out)]

    loop = get_backend(name)
    pairs = zip(results(loop.on_gpu, 32), results(loop, 64), strict=True)
    for found, expected in pairs:
        assert (found - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize(
    ("options", "named"), [({"block_kv": 24}, "block_kv=24"), ({"softmax_dtype": "input"}, "dtype")]
)
def test_a_defect_in_triton_names_the_option_that_it_does_not_take(options, named):
    q = torch.zeros(1, 1, 4, 16, device=DEVICE)
    with pytest.raises(ValueError, match=named):
        attention(q, q, q, backend=get_backend("no_rescale").on_gpu.configured(**options))


@pytest.mark.parametrize(
    ("installed", "hint"), [(True, "TRITON_INTERPRET=1"), (False, "pip install triton")]
)
def test_a_refusal_names_the_way_out(installed, hint, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(kernels, "INSTALLED", installed)
    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError) as refused:
        attention(q, q, q, backend="triton")
    for text in ("q (1, 1, 4, 16)", "float32 on cpu", "attention=tiled", hint):
        assert text in str(refused.value)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_in_keys_and_their_gradients():
    """Against the last 64 keys alone, which weigh all. k and v are views of one projection."""
    num_keys, dtype = 2**31 // 128 + 200, torch.bfloat16
    kv = torch.zeros(1, num_keys, 2, 1, 128, dtype=dtype, device=DEVICE)
    kv[:, -64:] = 6 * random(1, 64, 2, 1, 128, dtype=dtype)
    k, v = kv.permute(2, 0, 3, 1, 4).unbind()
    q = 6 * random(1, 1, 64, 128, dtype=dtype, seed=1)
    d_out = random(1, 1, 64, 128, dtype=dtype, seed=2)
    results = []
    for keys in (slice(None), slice(-64, None)):
        inputs = [x.detach().requires_grad_() for x in (q, k[:, :, keys], v[:, :, keys])]
        out = attention(*inputs, backend=PORTABLE, causal=False).out
        results.append((out.detach(), *torch.autograd.grad(out, inputs, d_out)))
    (out, dq, dk, dv), expected = results
    # no mass outside the last keys, so no gradient either
    assert all(abs(extreme) < 1e-3 for x in (dk, dv) for extreme in x[:, :, :-64].aminmax())
    for x, alone in zip((out, dq, dk[:, :, -64:], dv[:, :, -64:]), expected, strict=True):
        assert (x - alone).float().norm() <= 0.02 * alone.float().norm()


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_in_queries():
    """The last rows of the last head, against the same rows alone."""
    length = 2**31 // 256 + 200
    q = torch.zeros(1, length, 2, 128, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2)
    q[:, :, -64:] = random(1, 2, 64, 128, dtype=torch.bfloat16)
    k, v = (random(1, 2, 100, 128, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    with torch.no_grad():
        long, short = (
            attention(x, k, v, backend=PORTABLE, causal=False) for x in (q, q[:, :, -64:])
        )
    torch.testing.assert_close(long.out[:, :, -64:], short.out)
    torch.testing.assert_close(long.lse[:, :, -64:], short.lse)


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 6, 2, 201, 235, 64, inputs="steep", seed=755330),
        Case(3, 6, 2, 215, 289, 64, inputs="steep", seed=556886),
        Case(2, 6, 2, 189, 189, 64, inputs="steep", seed=162519),
        Case(2, 2, 2, 323, 1024, 16, inputs="steep", seed=795844, optional={"alibi_slopes": True}),
        Case(3, 2, 2, 43, 43, 16, inputs="steep", seed=324435),
    ],
    ids=str,
)
@pytest.mark.gpu
def test_both_passes_agree_on_large_scores_in_float32(case):
    """A regression test: tiles under a mask rounded a score that tiles without one did not, so the
    p of a key that takes all weight was not 1. dv was 2.5 to 5 times this budget.
    """
    expected = expect(case, torch.float32, DEVICE)
    found = run_case(PORTABLE, *expected.inputs)
    rounding = torch.finfo(torch.float32).eps * expected.d_out.abs().max().item()
    groups = case.num_heads // case.num_kv_heads
    error = distance(found["dv"], expected.reference["dv"])
    assert error <= 2 * expected.own["dv"] + groups * rounding
