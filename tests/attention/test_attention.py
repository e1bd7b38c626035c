"""What attention() promises whatever the backend: layouts, autocast, the gradient of lse, rows
without a key.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

import pytest
import torch
from torch import Tensor

from attention import BACKENDS, Backend, ScoreMod, attention, get_backend
from attention.sdpa import OneGradientLayout, cudnn_loses_dq
from conformance.cases import SHORT, every_index

TILES = {"block_q": 16, "block_kv": 8}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# PyTorch's FlexAttention has no backward pass on the CPU
DIFFERENTIABLE = [name for name, backend in BACKENDS.items() if backend.exact and name != "flex"]
every_backend = pytest.mark.parametrize("name", DIFFERENTIABLE)


def small_tiles(name: str) -> Backend:
    return get_backend(
        name, **{option: size for option, size in TILES.items() if option in BACKENDS[name].options}
    )


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(DEVICE, dtype)


def results(name: str, q: Tensor, k: Tensor, v: Tensor, **arguments) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of tensors that are leaves or views of one."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, backend=small_tiles(name), **arguments).out
    return out.detach(), *torch.autograd.grad(
        out, (q, k, v), random(*out.shape, dtype=out.dtype, seed=9)
    )


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
@pytest.mark.parametrize(
    "layout", ["packed", "packed-gqa", "expanded", "head-dim-strided", "misaligned", "every-other"]
)
def test_views_equal_their_contiguous_copies(name, layout):
    q, k, v = views(layout)
    assert not (q.is_contiguous() and k.is_contiguous())
    torch.testing.assert_close(
        results(name, q, k, v),
        results(name, *(x.contiguous() for x in (q, k, v))),
        rtol=1e-5,
        atol=1e-5,
    )


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
    [
        pytest.param(name, dtype, id=f"{name}-{SHORT[dtype]}")
        for name in DIFFERENTIABLE
        for dtype in BACKENDS[name].dtypes
    ],
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
    "name",
    [
        name
        for name in DIFFERENTIABLE
        if torch.float64 in BACKENDS[name].dtypes and name not in ("naive", "sdpa", "ring")
    ],
)
def test_gradients_of_out_and_lse_are_derivatives(name, causal, softmax_dtype):
    q, k, v = (
        random(1, heads, n, 4, dtype=torch.float64, seed=heads).requires_grad_()
        for heads, n in ((4, 7), (2, 9), (2, 9))
    )
    backend = get_backend(name, block_q=3, block_kv=4, softmax_dtype=softmax_dtype)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64, device=DEVICE)
    arguments = {
        "backend": backend,
        "causal": causal,
        "softcap": 3.0,
        "alibi_slopes": slopes,
        "window": 4 if causal else None,
    }
    assert torch.autograd.gradcheck(
        lambda *qkv: tuple(attention(*qkv, **arguments)), (q, k, v), fast_mode=True
    )


@pytest.mark.parametrize(
    "name", [name for name in DIFFERENTIABLE if "lse" in BACKENDS[name].features]
)
def test_gradient_of_lse_alone_is_the_softmax(name):
    """d lse_i / d score_ij = p_ij, and attention to the identity shows p. v is not asked."""
    q, k = (random(1, 1, 16, 16, seed=seed).requires_grad_() for seed in (0, 1))
    v = torch.eye(16, device=DEVICE)[None, None].requires_grad_()
    p = attention(q, k, v, backend="naive").out.detach()
    dq, dk, dv = torch.autograd.grad(
        attention(q, k, v, backend=small_tiles(name)).lse.sum(), (q, k, v), materialize_grads=True
    )
    torch.testing.assert_close((dq, dk), (p @ k / 4, p.mT @ q / 4), rtol=1e-5, atol=1e-6)
    assert not dv.any()


@every_backend
def test_rows_without_a_key_are_zero_and_pass_no_gradient_on(name):
    """13 queries for 9 keys, aligned at the end: the first four see nothing. Even through lse =
    -inf nothing becomes NaN.
    """
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
    expected = torch.autograd.grad(
        out.square().sum() + (0 if "lse" not in BACKENDS[name].features else lse.sum()),
        (short, k, v),
    )
    torch.testing.assert_close((dq[:, :, 4:], dk, dv), expected, rtol=1e-4, atol=1e-5)


@every_backend
def test_arguments_have_their_documented_defaults(name):
    q, k, v = (random(1, 2, 20, 16, seed=seed) for seed in range(3))
    backend = small_tiles(name)
    assert torch.equal(
        attention(q, k, v, backend=backend).out,
        attention(q, k, v, backend=backend, causal=True, scale=0.25).out,
    )


@pytest.mark.parametrize(
    "name",
    [name for name in DIFFERENTIABLE if {"window", "alibi_slopes"} <= BACKENDS[name].features],
)
def test_softcap_comes_before_the_bias_and_the_bias_before_the_mask(name):
    """The order of the steps, written out for one query."""
    q, k, v = (random(1, 1, n, 4, seed=seed) for seed, n in enumerate((1, 6, 6)))
    scores = 0.7 * torch.tanh((q @ k.mT)[0, 0, 0] * 3 / 0.7) - 0.5 * torch.arange(
        5.0, -1, -1, device=DEVICE
    )
    expected = scores[-4:].softmax(0) @ v[0, 0, -4:]
    slopes = torch.tensor([0.5], device=DEVICE)
    out, lse = attention(
        q, k, v, backend=small_tiles(name), scale=3.0, softcap=0.7, alibi_slopes=slopes, window=4
    )
    torch.testing.assert_close(out[0, 0, 0], expected)
    torch.testing.assert_close(lse[0, 0, 0], scores[-4:].logsumexp(0))


OWN_SLOPES = [
    name
    for name, backend in BACKENDS.items()
    if backend.exact and "alibi_slopes" in backend.features
]


def in_float64(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str = "naive", **arguments
) -> tuple[Tensor, ...]:
    """out and the gradients of the specification."""
    tensors = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = attention(*tensors, backend=backend, **arguments).out
    return out.detach(), *torch.autograd.grad(
        out, tensors, random(*out.shape, dtype=out.dtype, seed=9)
    )


# many queries, the first of them far from all keys; few keys, so few tiles
LONG = (150, 33, 33)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
@pytest.mark.parametrize("name", OWN_SLOPES)
def test_slopes_of_any_dtype_are_those_of_float32(name, dtype):
    """In bfloat16 the bias of far keys was off by 0.05, and slopes in float64 broke the backward
    pass.
    """
    slopes = torch.tensor([0.5, 0.3], device=DEVICE).to(dtype)
    backward = name in DIFFERENTIABLE
    q, k, v = (
        random(1, 2, n, 16, seed=seed).requires_grad_(backward) for seed, n in enumerate(LONG)
    )
    results = []
    for given in (slopes, slopes.float()):
        out, lse = attention(q, k, v, backend=small_tiles(name), causal=False, alibi_slopes=given)
        results.append(
            [out, lse, *(torch.autograd.grad(out.sum() + lse.sum(), (q, k, v)) if backward else ())]
        )
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert results[0][1].dtype == torch.float32
    # and those are right: a key 150 positions ahead gains 75
    expected = attention(
        *(x.detach().double() for x in (q, k, v)),
        backend="naive",
        causal=False,
        alibi_slopes=slopes.float(),
    ).lse
    torch.testing.assert_close(results[0][1].double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("changed", ["alibi_slopes", "score_mod"])
@pytest.mark.parametrize(
    "name", [name for name in OWN_SLOPES if "softmax_dtype" in BACKENDS[name].options]
)
def test_a_change_of_the_scores_leaves_them_in_their_dtype(name, changed):
    """softmax_dtype=input keeps scores and sums in bfloat16: the float32 of the slopes made float32
    of them, without a word.
    """
    slopes, seen = torch.tensor([0.5, 0.3], device=DEVICE), set()
    optional = (
        {"alibi_slopes": slopes}
        if changed == "alibi_slopes"
        else {"score_mod": ScoreMod(every_index, params=slopes)}
    )
    q, k, v = (
        random(1, 2, 40, 16, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed in range(3)
    )
    backend = get_backend(name, **TILES, softmax_dtype="input")

    def observe(tile, keys, scores, state) -> None:
        seen.update(x.dtype for x in (scores, state.row_max, state.row_sum, state.acc))

    out = backend.fn(
        q, k, v, causal=True, scale=0.25, observer=observe, **optional, **backend.options
    ).out
    torch.autograd.grad(out.sum(), (q, k, v))
    assert seen == {torch.bfloat16}


@every_backend
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("scale", [0.0, -1.5])
def test_a_scale_that_is_not_positive(name, scale, causal):
    """Right, or refused: never NaN."""
    q, k, v = (random(1, 2, 40, 16, seed=seed) for seed in range(3))
    if name == "sdpa" and (causal or DEVICE == "cuda"):
        with pytest.raises(ValueError, match="which is not positive"):
            results(name, q, k, v, causal=causal, scale=scale)
        return
    for found, expected in zip(
        results(name, q, k, v, causal=causal, scale=scale),
        in_float64(q, k, v, causal=causal, scale=scale),
        strict=True,
    ):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [21, 2**31, 2**63, 2**100], ids=["N", "2^31", "2^63", "2^100"])
@pytest.mark.parametrize(
    "name", [name for name, backend in BACKENDS.items() if "window" in backend.features]
)
def test_a_window_wider_than_the_keys_is_none(name, window):
    q, k, v = (random(1, 2, 21, 16, seed=seed) for seed in range(3))
    with torch.no_grad():
        wide, without = (
            attention(q, k, v, backend=small_tiles(name), window=w).out for w in (window, None)
        )
    torch.testing.assert_close(wide, without, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8],
    ids=lambda dtype: str(dtype)[6:],
)
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, backend in BACKENDS.items()
        if backend.exact and "document_ids" in backend.features
    ],
)
def test_documents_whose_ids_come_again(name, dtype):
    """A run of equal ids is a document: the second 1 is not the first one's. In both directions,
    with ids that rise and fall.
    """
    lengths, ids = (5, 9, 1, 17, 8), (1, 0, 100, 1, 0)
    document_ids = (
        torch.tensor(ids, device=DEVICE)
        .repeat_interleave(torch.tensor(lengths, device=DEVICE))
        .to(dtype)[None]
    )
    q, k, v = (random(1, 2, 40, 16, seed=seed) for seed in range(3))
    for causal in (True, False):
        with torch.no_grad():
            found = attention(
                q, k, v, backend=small_tiles(name), causal=causal, document_ids=document_ids
            ).out
        parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
        expected = torch.cat(
            [attention(*part, backend="naive", causal=causal).out for part in parts], 2
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", [name for name, backend in BACKENDS.items() if backend.exact])
def test_scores_past_the_largest_number(name, causal):
    """-inf is the score of a hidden key: a row of nothing else gives 0 and no gradient, and spoils
    no other. inf makes its row NaN.
    """
    backward = name in DIFFERENTIABLE
    q, k, v = (random(1, 1, 6, 16, seed=seed) for seed in range(3))
    q, k = q.abs(), -k.abs()
    q[:, :, 3] = 1e38  # every score below -1e38 * 16 / 4
    k[:, :, :] -= 1
    q, k, v = (x.requires_grad_(backward) for x in (q, k, v))
    backend = small_tiles(name)
    out, lse = attention(q, k, v, backend=backend, causal=causal)
    assert not out[:, :, 3].any() and out[:, :, [0, 1, 2, 4, 5]].all() and out.isfinite().all()
    if lse is not None:
        assert (lse == -torch.inf).tolist() == [[[row == 3 for row in range(6)]]]
    if backward:
        dq, dk, dv = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert not dq[:, :, 3].any() and all(x.isfinite().all() for x in (dq, dk, dv))
    with torch.no_grad():
        out = attention(q, -k, v, backend=backend, causal=causal).out
    assert out[:, :, 3].isnan().all() and out[:, :, [0, 1, 2, 4, 5]].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", OWN_SLOPES)
def test_a_slope_that_is_no_number_spoils_its_own_head(name, bad):
    """Nobody looks at the slopes' values, for which a GPU would have to be waited for: what comes
    out says so.
    """
    q, k, v = (random(1, 2, 40, 16, seed=seed) for seed in range(3))
    with torch.no_grad():
        found, plain = (
            attention(
                q, k, v, backend=small_tiles(name), alibi_slopes=torch.tensor(slopes, device=DEVICE)
            ).out
            for slopes in ((bad, 0.3), (0.3, 0.3))
        )
    assert found[:, 0].isnan().all() and torch.equal(found[:, 1], plain[:, 1])


@pytest.mark.parametrize(
    ("num_keys", "is_causal", "trained", "loses"),
    [
        (192, False, True, True),
        (192, True, True, False),
        (192, False, False, False),
        (256, False, True, False),
        (191, False, True, False),
    ],
)
def test_where_sdpa_takes_no_cudnn(num_keys, is_causal, trained, loses):
    """A regression test: cuDNN made NaN of dq where it fills half a tile up."""
    q, k = random(1, 1, 4, 8), random(1, 1, num_keys, 8)
    assert cudnn_loses_dq(q.requires_grad_(trained), k, k, is_causal=is_causal) == loses


LAYOUTS = {
    "heads outside": lambda x: x.contiguous(),
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}
GRADIENTS = LAYOUTS | {
    "strides of 0": lambda x: x[..., :1, :1].expand_as(x),
    "a wider row": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_sdpa_hands_its_kernel_gradients_of_one_layout(layout, gradient):
    """A regression test: cuDNN's results were wrong after a gradient of another layout."""
    x = LAYOUTS[layout](torch.randn(2, 3, 4, 8)).requires_grad_()
    d_out, arrived = GRADIENTS[gradient](torch.randn(2, 3, 4, 8)), []
    out = x * 2
    out.register_hook(arrived.append)
    OneGradientLayout.apply(out).backward(d_out)
    assert arrived[0].stride() == x.stride() and torch.equal(arrived[0], d_out)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sdpa_is_right_after_a_gradient_of_another_layout(layout, compiled):
    torch._dynamo.reset()
    tensors = [
        LAYOUTS[layout](random(2, 4, 128, 64, dtype=torch.bfloat16, seed=seed)).requires_grad_()
        for seed in range(3)
    ]

    def call(*tensors):
        return attention(*tensors, backend=get_backend("sdpa", backend="cudnn")).out

    function = torch.compile(call, fullgraph=True) if compiled else call
    for change in (*GRADIENTS.values(), *LAYOUTS.values()):
        d_out = change(random(2, 4, 128, 64, dtype=torch.bfloat16, seed=3))
        expected = torch.autograd.grad(attention(*tensors, backend="naive").out, tensors, d_out)
        found = torch.autograd.grad(function(*tensors), tensors, d_out)
        for x, y in zip(found, expected, strict=True):
            assert (x - y).norm() <= 0.02 * y.norm()
