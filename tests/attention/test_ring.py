"""A ring of ranks, played in one process: the same attention on any number of them."""

from dataclasses import replace

import pytest
import torch

from attention import attention, get_backend
from attention.context import Group, Shards, register_ring
from attention.kernels import TRITON
from attention.played_ring import RING, RING_DEFECTS, PlayedRing

TILES = {"block_q": 16, "block_kv": 16}
DEFECTS = [backend.name for backend in RING_DEFECTS]
KERNELS = replace(RING, name="kernels", fn=PlayedRing(TRITON.ring), options={"ranks": 1})
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the kernels


def inputs(num_queries=96, num_keys=None, dtype=torch.float32):
    """q, k, v and the weights of a sum over out."""
    draw = torch.Generator().manual_seed(0)
    of_keys = (1, 2, num_keys or num_queries, 16)
    shapes = (1, 4, num_queries, 16), of_keys, of_keys, (1, 4, num_queries, 16)
    q, k, v, weights = (torch.randn(shape, generator=draw).to(DEVICE, dtype) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v)], weights


def results(backend, tensors, weights, **mask):
    """out, lse, dq, dk, dv."""
    out, lse = attention(*tensors, backend=backend, **mask)
    total = (out * weights).sum() + lse.masked_fill(lse.isinf(), 0.0).cos().sum()
    return out, lse, *torch.autograd.grad(total, tensors)


@pytest.mark.parametrize(
    ("backend", "ranks", "mask"),
    [
        pytest.param(RING, 1, {}, id="tiled-1"),
        pytest.param(RING, 3, {"causal": False}, id="tiled-3-full"),
        pytest.param(RING, 4, {"window": 20, "softcap": 2.0}, id="tiled-4-window-softcap"),
        pytest.param(RING, 6, {"window": (3, 9), "causal": False}, id="tiled-6-two-sided"),
        pytest.param(RING, 4, {"document_ids": True}, id="tiled-4-documents"),
        pytest.param(KERNELS, 2, {"softcap": 2.0}, id="triton-2-softcap"),
        # more parts than the kernels join at a time, and parts of which a rank sees nothing
        pytest.param(KERNELS, 5, {"window": 20}, id="triton-5-window"),
    ],
)
def test_any_number_of_ranks_computes_attention(backend, ranks, mask):
    """With its gradients. Parts of a sequence differ in length, and the first rows see no key."""
    tensors, weights = inputs(41, 41 if "document_ids" in mask else 37)
    if "document_ids" in mask:
        mask = {"document_ids": torch.tensor([0] * 7 + [1] * 13 + [2] * 21)[None]}
    found = results(backend.configured(ranks=ranks), tensors, weights, **mask)
    exact = results("naive", tensors, weights, **mask)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    # the interpreter computes bfloat16 in float32
    [
        pytest.param(RING, torch.bfloat16, id="tiled"),
        pytest.param(KERNELS, torch.half, id="triton"),
    ],
)
def test_the_error_does_not_grow_with_the_ranks(backend, dtype):
    """At most 1.05 of one rank's, because no partial result is rounded to the dtype of q."""
    tensors, weights = inputs(64, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    truth = results("naive", wide, weights.double())

    def errors(ranks):
        found = results(backend.configured(ranks=ranks), tensors, weights)
        return [(x - y).norm().item() for x, y in zip(found, truth, strict=True)]

    for error, one in zip(errors(4), errors(1), strict=True):
        assert error <= 1.05 * one


@pytest.mark.parametrize("name", DEFECTS)
def test_a_broken_merge_is_right_on_one_rank_and_wrong_on_two(name):
    tensors, weights = inputs()
    alone = results(get_backend(name, ranks=1), tensors, weights)
    torch.testing.assert_close(alone, results("tiled", tensors, weights))
    # a missing maximum matters where scores are large
    big = [8 * x if name == "ring_no_max" else x for x in tensors]
    exact = attention(*big, backend="tiled").out
    found = attention(*big, backend=get_backend(name, ranks=2)).out
    assert not (found - exact).abs().amax().le(1e-4)


def test_local_softmax_sums_to_the_ranks_that_a_row_sees():
    """A regression test: the first block came in without its own softmax."""
    (q, k, v), _ = inputs()
    backend = get_backend("ring_local_softmax", ranks=4)
    out = attention(q, k, torch.ones_like(v), backend=backend, causal=False).out
    torch.testing.assert_close(out, torch.full_like(out, 4.0))


@pytest.mark.parametrize("name", DEFECTS)
def test_the_gradient_of_a_broken_merge_is_that_of_its_result(name):
    tensors = [torch.randn(1, 1, 6, 3).double().requires_grad_() for _ in range(3)]
    backend = get_backend(name, ranks=2, block_q=2, block_kv=2)
    assert torch.autograd.gradcheck(lambda *qkv: tuple(attention(*qkv, backend=backend)), tensors)


def test_ranks_keep_no_keys_of_others():
    """Together they keep as much as one process, so each keeps 1 / W of it. Autograd through the
    merges would keep the keys of all on each.
    """
    tensors, _ = inputs(256)

    def saved_bytes(backend) -> int:
        kept = {}

        def note(x):
            kept[x.data_ptr()] = x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            attention(*tensors, backend=backend)
        return sum(kept.values())

    alone = saved_bytes("tiled")
    assert {saved_bytes(get_backend("ring", ranks=n)) for n in (2, 16)} == {alone}


def test_ranks_run_the_kernels_that_were_asked_for():
    (q, k, v), _ = inputs(64)
    backend = get_backend("triton", kernel="hopper")
    register_ring(backend)
    shards = Shards(ring=Group("", 0, 2))  # sends nothing
    with pytest.raises(ValueError, match="kernel=hopper"):
        shards.attention(attention, q, k, v, backend=backend)
