"""What attention() promises whatever the backend: layouts, autocast, the gradient of lse, rows without a key.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

import pytest
import torch
from torch import Tensor

from attention import BACKENDS, Backend, attention, get_backend
from attention.conformance import SHORT

TILES = {"block_q": 16, "block_kv": 8}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# PyTorch's FlexAttention has no backward pass on the CPU
DIFFERENTIABLE = [name for name, backend in BACKENDS.items() if backend.exact and name != "flex"]
every_backend = pytest.mark.parametrize("name", DIFFERENTIABLE)


def small_tiles(name: str) -> Backend:
    return get_backend(name, **{option: size for option, size in TILES.items() if option in BACKENDS[name].options})


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def results(name: str, q: Tensor, k: Tensor, v: Tensor, **arguments) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of tensors that are leaves or views of one."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, backend=small_tiles(name), **arguments).out
    return out.detach(), *torch.autograd.grad(out, (q, k, v), random(*out.shape, dtype=out.dtype, seed=9))


def views(layout: str) -> tuple[Tensor, Tensor, Tensor]:
    if layout == "packed":  # the three of a model's one projection: (B, N, 3, H, D)
        return random(2, 21, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind()
    if layout == "packed-gqa":  # (B, N, H + 2 H_kv, D)
        return random(2, 21, 8, 16).transpose(1, 2).split((4, 2, 2), 1)
    if layout == "expanded":  # one sequence, read as a batch of three
        return tuple(random(1, 2, 21, 16, seed=seed).expand(3, -1, -1, -1) for seed in range(3))
    if layout == "head-dim-strided":  # neighbours along D are not neighbours in memory
        return tuple(random(2, 2, 16, 21, seed=seed).mT for seed in range(3))
    if layout == "misaligned":  # neither the start nor the rows fall on 16 bytes
        return tuple(random(2, 2, 21, 19, seed=seed)[..., 1:18] for seed in range(3))
    assert layout == "every-other"
    return tuple(random(2, 2, 42, 32, seed=seed)[:, :, ::2, ::2] for seed in range(3))


@every_backend
@pytest.mark.parametrize("layout", ["packed", "packed-gqa", "expanded", "head-dim-strided", "misaligned", "every-other"])
def test_views_equal_their_contiguous_copies(name, layout):
    q, k, v = views(layout)
    assert not (q.is_contiguous() and k.is_contiguous())
    torch.testing.assert_close(results(name, q, k, v), results(name, *(x.contiguous() for x in (q, k, v))), rtol=1e-5, atol=1e-5)


@every_backend
def test_gradient_reaches_the_packed_projection(name):
    """Through views, into the one tensor they share."""
    packed = random(1, 21, 3, 2, 16).requires_grad_()
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind()
    d_out = random(1, 2, 21, 16, seed=9)
    (found,) = torch.autograd.grad(attention(q, k, v, backend=small_tiles(name)).out, packed, d_out)
    expected = torch.stack(results("naive", q, k, v)[1:])
    torch.testing.assert_close(found, expected.permute(1, 3, 0, 2, 4), rtol=1e-4, atol=1e-5)


@every_backend
def test_autocast_has_no_say_inside(name):
    q, k, v = (random(1, 2, 40, 16, seed=seed) for seed in range(3))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert (q @ k.mT).dtype == torch.bfloat16  # it is on
        inside = attention(q, k, v, backend=small_tiles(name)).out
    assert inside.dtype == torch.float32
    assert torch.equal(inside, attention(q, k, v, backend=small_tiles(name)).out)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(name, dtype, id=f"{name}-{SHORT[dtype]}") for name in DIFFERENTIABLE for dtype in BACKENDS[name].dtypes],
)
def test_dtypes_of_what_comes_back(name, dtype):
    backend = small_tiles(name)
    out, lse = attention(*(random(1, 2, 9, 16, dtype=dtype) for _ in range(3)), backend=backend)
    assert out.dtype == dtype
    assert (lse is None) == ("lse" not in backend.features)
    assert lse is None or lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("softmax_dtype", ["float32", "input"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    "name", [name for name in DIFFERENTIABLE if torch.float64 in BACKENDS[name].dtypes and name not in ("naive", "sdpa")]
)
def test_gradients_of_out_and_lse_are_derivatives(name, causal, softmax_dtype):
    q, k, v = (random(1, heads, n, 4, dtype=torch.float64, seed=heads).requires_grad_() for heads, n in ((4, 7), (2, 9), (2, 9)))
    backend = get_backend(name, block_q=3, block_kv=4, softmax_dtype=softmax_dtype)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64, device=DEVICE)
    arguments = {"backend": backend, "causal": causal, "softcap": 3.0, "alibi_slopes": slopes, "window": 4 if causal else None}
    assert torch.autograd.gradcheck(lambda *qkv: tuple(attention(*qkv, **arguments)), (q, k, v), fast_mode=True)


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if "lse" in BACKENDS[name].features])
def test_gradient_of_lse_alone_is_the_softmax(name):
    """d lse_i / d score_ij = p_ij, and attention to the identity shows p. v is not asked."""
    q, k = (random(1, 1, 16, 16, seed=seed).requires_grad_() for seed in (0, 1))
    v = torch.eye(16, device=DEVICE)[None, None].requires_grad_()
    p = attention(q, k, v, backend="naive").out.detach()
    dq, dk, dv = torch.autograd.grad(attention(q, k, v, backend=small_tiles(name)).lse.sum(), (q, k, v), materialize_grads=True)
    torch.testing.assert_close((dq, dk), (p @ k / 4, p.mT @ q / 4), rtol=1e-5, atol=1e-6)
    assert not dv.any()


@every_backend
def test_rows_without_a_key_are_zero_and_pass_no_gradient_on(name):
    """13 queries for 9 keys, aligned at the end: the first four see nothing. Even through lse = -inf nothing becomes NaN."""
    q, k, v = (random(2, 2, n, 16, seed=seed).requires_grad_() for seed, n in enumerate((13, 9, 9)))
    out, lse = attention(q, k, v, backend=small_tiles(name))
    assert not out[:, :, :4].any() and out[:, :, 4:].all()
    loss = out.square().sum()
    if lse is not None:
        assert (lse[:, :, :4] == -torch.inf).all() and lse[:, :, 4:].isfinite().all()
        loss = loss + lse[:, :, 4:].sum()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v))
    assert not dq[:, :, :4].any()
    # what the other rows pass on is what they would without the four
    short = q.detach()[:, :, 4:].requires_grad_()
    out, lse = attention(short, k, v, backend="naive")
    expected = torch.autograd.grad(out.square().sum() + (0 if "lse" not in BACKENDS[name].features else lse.sum()), (short, k, v))
    torch.testing.assert_close((dq[:, :, 4:], dk, dv), expected, rtol=1e-4, atol=1e-5)


@every_backend
def test_arguments_have_their_documented_defaults(name):
    q, k, v = (random(1, 2, 20, 16, seed=seed) for seed in range(3))
    backend = small_tiles(name)
    assert torch.equal(attention(q, k, v, backend=backend).out, attention(q, k, v, backend=backend, causal=True, scale=0.25).out)


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if "window" in BACKENDS[name].features])
def test_softcap_comes_before_the_bias_and_the_bias_before_the_mask(name):
    """The order of the steps, written out for one query."""
    q, k, v = (random(1, 1, n, 4, seed=seed) for seed, n in enumerate((1, 6, 6)))
    scores = 0.7 * torch.tanh((q @ k.mT)[0, 0, 0] * 3 / 0.7) - 0.5 * torch.arange(5.0, -1, -1, device=DEVICE)
    expected = scores[-4:].softmax(0) @ v[0, 0, -4:]
    slopes = torch.tensor([0.5], device=DEVICE)
    out, lse = attention(q, k, v, backend=small_tiles(name), scale=3.0, softcap=0.7, alibi_slopes=slopes, window=4)
    torch.testing.assert_close(out[0, 0, 0], expected)
    torch.testing.assert_close(lse[0, 0, 0], scores[-4:].logsumexp(0))
