"""What attention() promises beside the right numbers, which test_conformance.py holds: autocast,
finite differences, scores and sinks past all others, masks that change, PyTorch's mistakes.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

import pytest
import torch
from torch import Tensor

from attention import BACKENDS, Backend, ScoreMod, attention, get_backend
from attention.sdpa import OneGradientLayout, cudnn_loses_dq
from conformance.cases import every_index

TILES = {"block_q": 16, "block_kv": 8}
pytestmark = pytest.mark.anywhere
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = [name for name, backend in BACKENDS.items() if backend.exact]


def small_tiles(name: str) -> Backend:
    tiles = {option: size for option, size in TILES.items() if option in BACKENDS[name].options}
    return get_backend(name, **tiles)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


@pytest.mark.parametrize("name", ["tiled", "sdpa"])
def test_autocast_has_no_say_inside(name):
    q, k, v = (random(1, 2, 40, 16, seed=seed) for seed in range(3))
    plain = attention(q, k, v, backend=small_tiles(name)).out
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert (q @ k.mT).dtype == torch.bfloat16  # it is on
        inside = attention(q, k, v, backend=small_tiles(name)).out
    assert inside.dtype == torch.float32 and inside.equal(plain)


@pytest.mark.parametrize(
    ("name", "softmax_dtype", "causal"),
    [
        ("tiled", "float32", True),
        ("normalized_acc", "input", True),
        ("lazy_rescale", "input", False),
        ("kv_outer", "float32", False),
    ],
)
def test_gradients_of_out_and_lse_are_derivatives(name, softmax_dtype, causal):
    """By finite differences, which share nothing with the reference. "input" runs tiles again."""
    q, k, v = (
        random(1, heads, n, 4, dtype=torch.float64, seed=heads).requires_grad_()
        for heads, n in ((4, 7), (2, 9), (2, 9))
    )
    arguments = {
        "backend": get_backend(name, block_q=3, block_kv=4, softmax_dtype=softmax_dtype),
        "causal": causal,
        "softcap": 3.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0], device=DEVICE),
        "window": 4 if causal else None,
    }
    assert torch.autograd.gradcheck(
        lambda *qkv: tuple(attention(*qkv, **arguments)), (q, k, v), fast_mode=True
    )


def test_softcap_comes_before_the_bias_and_the_bias_before_the_mask():
    """The order of the steps in the specification, written out for one query."""
    q, k, v = (random(1, 1, n, 4, seed=seed) for seed, n in enumerate((1, 6, 6)))
    capped = 0.7 * torch.tanh((q @ k.mT)[0, 0, 0] * 3 / 0.7)
    scores = capped - 0.5 * torch.arange(5.0, -1, -1, device=DEVICE)
    slopes = torch.tensor([0.5], device=DEVICE)
    changes = {"scale": 3.0, "softcap": 0.7, "alibi_slopes": slopes, "window": 4}
    out, lse = attention(q, k, v, backend="naive", **changes)
    torch.testing.assert_close(out[0, 0, 0], scores[-4:].softmax(0) @ v[0, 0, -4:])
    torch.testing.assert_close(lse[0, 0, 0], scores[-4:].logsumexp(0))


@pytest.mark.parametrize("changed", ["alibi_slopes", "score_mod"])
def test_a_change_of_the_scores_leaves_them_in_their_dtype(changed):
    """softmax_dtype=input keeps scores and sums in bfloat16: the float32 of the slopes made float32
    of them, without a word.
    """
    slopes, seen = torch.tensor([0.5, 0.3]), set()
    change = slopes if changed == "alibi_slopes" else ScoreMod(every_index, params=slopes)
    q, k, v = (random(1, 2, 40, 16, seed=seed).bfloat16().cpu() for seed in range(3))
    backend = get_backend("tiled", **TILES, softmax_dtype="input")

    def observe(tile, keys, scores, state) -> None:
        seen.update(x.dtype for x in (scores, state.row_max, state.row_sum, state.acc))

    settings = {"causal": True, "scale": 0.25, "observer": observe, **backend.options}
    backend.fn(q, k, v, **settings, **{changed: change})
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "causal"), [(name, True) for name in EXACT] + [("tiled", False), ("triton", False)]
)
def test_scores_past_the_largest_number(name, causal):
    """-inf is the score of a hidden key: a row of nothing else gives 0 and no gradient, and spoils
    no other. inf makes its row NaN.
    """
    backward = name != "flex" or DEVICE == "cuda"
    q, k, v = (random(1, 1, 6, 16, seed=seed) for seed in range(3))
    q, k = q.abs(), -k.abs() - 1
    q[:, :, 3] = 1e38  # every score below -1e38 * 16 / 4
    q, k, v = (x.requires_grad_(backward) for x in (q, k, v))
    others = [0, 1, 2, 4, 5]
    backend = small_tiles(name)
    out, lse = attention(q, k, v, backend=backend, causal=causal)
    assert not out[:, :, 3].any() and out[:, :, others].all() and out.isfinite().all()
    if lse is not None:
        assert (lse == -torch.inf).tolist() == [[[row == 3 for row in range(6)]]]
    if backward:
        dq, dk, dv = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert not dq[:, :, 3].any() and all(x.isfinite().all() for x in (dq, dk, dv))
    with torch.no_grad():
        out = attention(q, -k, v, backend=backend, causal=causal).out
    assert out[:, :, 3].isnan().all() and out[:, :, others].isfinite().all()


@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_a_large_sink_takes_all_and_a_small_one_nothing(name):
    # 12 queries, 8 keys: the first four rows see none
    q, k, v = (random(1, 2, n, 4, seed=n) for n in (12, 8, 8))
    plain = attention(q.requires_grad_(), k, v, backend=name)
    sinks = torch.full((2,), -torch.inf, device=DEVICE, requires_grad=True)
    none = attention(q, k, v, backend=name, sinks=sinks)
    torch.testing.assert_close(none.out, plain.out)
    of_q, of_sinks = torch.autograd.grad(none.out.square().sum(), (q, sinks))
    (expected,) = torch.autograd.grad(plain.out.square().sum(), q)
    torch.testing.assert_close(of_q, expected)
    assert not of_sinks.any()
    whole = attention(q, k, v, backend=name, sinks=torch.full((2,), 1e4, device=DEVICE))
    assert not whole.out.any() and (whole.lse == 1e4).all()


@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_a_second_derivative_is_refused(name):
    """Autograd would take the loop's for zero."""
    q = random(1, 1, 6, 16).requires_grad_()
    out = attention(q, q, q, backend=name).out
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dq.sum().backward()


@pytest.mark.skipif(DEVICE == "cuda", reason="only a tensor on a CPU shares memory with NumPy")
def test_masks_may_change_in_place():
    """Their values are read anew in each call, whether PyTorch notices a change or not."""
    tensors = [random(1, 1, 40, 16, seed=seed) for seed in range(3)]
    portable = get_backend("triton", kernel="portable")
    ids, lengths = (torch.arange(40) // 13)[None].contiguous(), torch.tensor([30])

    def check(**mask: Tensor) -> None:
        found, exact = (attention(*tensors, backend=x, **mask).out for x in (portable, "naive"))
        torch.testing.assert_close(found, exact)

    for change in (lambda: None, lambda: ids.fill_(1), lambda: ids.numpy()[:, 20:].fill(7)):
        change()
        check(document_ids=ids)
    for change in (lambda: None, lambda: lengths.fill_(9), lambda: lengths.numpy().fill(40)):
        change()
        check(key_lengths=lengths)
    lengths.numpy().fill(41)
    with pytest.raises(ValueError, match="key_lengths .* 40"):
        attention(*tensors, backend=portable, key_lengths=lengths)


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
    torch.compiler.reset()
    shape = {"dtype": torch.bfloat16}
    tensors = [
        LAYOUTS[layout](random(2, 4, 128, 64, seed=seed, **shape)).requires_grad_()
        for seed in range(3)
    ]

    def call(*tensors):
        return attention(*tensors, backend=get_backend("sdpa", backend="cudnn")).out

    function = torch.compile(call, fullgraph=True) if compiled else call
    for change in (*GRADIENTS.values(), *LAYOUTS.values()):
        d_out = change(random(2, 4, 128, 64, seed=3, **shape))
        expected = torch.autograd.grad(attention(*tensors, backend="naive").out, tensors, d_out)
        found = torch.autograd.grad(function(*tensors), tensors, d_out)
        for x, y in zip(found, expected, strict=True):
            assert (x - y).norm() <= 0.02 * y.norm()


@pytest.mark.parametrize("name", ["tiled", "sdpa"])
def test_padding_may_hold_anything(name):
    """A regression test: NaN past key_lengths had a weight of 0, and 0 * NaN is NaN."""
    q, k, v = (random(2, 2, 8, 8, seed=seed) for seed in range(3))
    lengths = torch.tensor([8, 5], device=DEVICE)
    results = []
    for padding in (0.0, torch.nan, torch.inf):
        tensors = [x.clone() for x in (q, k, v)]
        for x in tensors[1:]:
            x[1, :, 5:] = padding
            x.requires_grad_()
        q_leaf = tensors[0].requires_grad_()
        out = attention(*tensors, backend=name, causal=False, key_lengths=lengths).out
        results.append((out, *torch.autograd.grad(out.square().sum(), (q_leaf, *tensors[1:]))))
    for found in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found, results[0], strict=True))
