"""A ring of ranks, played in one process: the same attention on any number of them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import attention, get_backend
from attention.context import Group, Shards, register_ring, take_part
from attention.kernels import TRITON
from attention.mask import intervals
from attention.online_softmax import OnlineSoftmax
from attention.played_ring import RING, RING_DEFECTS, PlayedRing
from attention.ring import Ring, RingCall, standing_call, zigzag
from attention.tiled import TileBlocks
from training.memory import MemoryMeter

TILES = {"block_q": 16, "block_kv": 16}
DEFECTS = [backend.name for backend in RING_DEFECTS]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the kernels


def inputs(length=96, dtype=torch.float32, heads=4, device="cpu"):
    draw = torch.Generator().manual_seed(0)
    shapes = (
        (2, heads, length, 16),
        (2, 2, length, 16),
        (2, 2, length, 16),
        (2, heads, length, 16),
    )
    q, k, v, weights = (torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v)], weights


def results(backend, tensors, weights, **mask):
    out, lse = attention(*tensors, backend=backend, **mask)
    return out, lse, *torch.autograd.grad((out * weights).sum() + lse.cos().sum(), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_does_not_grow_with_the_ranks(dtype):
    """At most 1.05 of one rank's, as no partial result is rounded to the dtype of q."""
    tensors, weights = inputs(dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    truth = results("naive", wide, weights.double())

    def errors(ranks):
        found = results(get_backend("ring", ranks=ranks, **TILES), tensors, weights)
        return [(x - y).norm().item() for x, y in zip(found, truth, strict=True)]

    alone = errors(1)
    for ranks in (2, 4, 8, 16):
        for error, one in zip(errors(ranks), alone, strict=True):
            # the sum of a row rounds once more in each merge of float32
            assert error <= (1.05 if dtype == torch.bfloat16 else 1.15) * one


class RoundedBlocks(TileBlocks):
    """Partial results in the dtype of q, as many rings have them."""

    def forward(self, q, *arguments, **settings):
        state, max_score = super().forward(q, *arguments, **settings)
        out, lse = state.finalize()
        lse = lse.unsqueeze(-1)
        return OnlineSoftmax(lse, torch.ones_like(lse), out.to(q.dtype).float()), max_score

    def backward(self, q, *arguments, **settings):
        return tuple(x.to(q.dtype).float() for x in super().backward(q, *arguments, **settings))


def test_rounded_partial_results_would_show():
    """By a fifth and more, which stays inside the budget of the properties."""
    tensors, weights = inputs(dtype=torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    truth = results("naive", wide, weights.double())
    rounded = replace(RING, name="rounded", fn=PlayedRing(Ring(RoundedBlocks())))
    alone, found = (
        results(each.configured(ranks=ranks, **TILES), tensors, weights)
        for each, ranks in ((RING, 1), (rounded, 8))
    )
    for name in (0, 2, 3, 4):  # out, dq, dk, dv
        error, one = ((x[name] - truth[name]).norm() for x in (found, alone))
        assert error > 1.15 * one


@pytest.mark.parametrize("name", ["ring", *DEFECTS])
def test_one_rank_is_the_tile_loop_to_the_bit(name):
    tensors, weights = inputs()
    expected = results(get_backend("tiled", **TILES), tensors, weights)
    found = results(get_backend(name, ranks=1, **TILES), tensors, weights)
    # the gradient of a broken merge is computed by running the block again
    count = 2 if name in DEFECTS else 5
    assert all(map(torch.equal, found[:count], expected[:count]))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_broken_merge_is_wrong_on_two_ranks(name):
    tensors, weights = inputs()
    expected = attention(*tensors, backend="tiled").out
    big = [x.detach() * (8 if name == "ring_no_max" else 1) for x in tensors]
    expected = attention(*big, backend="tiled").out
    found = attention(*big, backend=get_backend(name, ranks=2)).out
    wrong = ~(found - expected).abs().amax((0, 1, 3)).le(1e-4)
    assert wrong.any()


def test_local_softmax_sums_to_the_ranks_that_a_row_sees():
    """A regression test: the first block came in without its own softmax."""
    (q, k, v), _ = inputs()
    backend = get_backend("ring_local_softmax", ranks=4)
    out = attention(q, k, torch.ones_like(v), backend=backend, causal=False).out
    torch.testing.assert_close(out, torch.full_like(out, 4.0))


@pytest.mark.parametrize("name", DEFECTS)
def test_the_gradient_of_a_broken_merge_is_that_of_what_it_computes(name):
    """As autograd finds it through all tiles and merges of two ranks."""
    tensors, weights = inputs(32)
    found = results(get_backend(name, ranks=2, **TILES), tensors, weights)
    q, k, v = tensors
    parts = zigzag(32, 2)
    visible = intervals(32, 32, q.device, causal=True)
    blocks = TileBlocks()
    call = RingCall(get_backend(name).ring, parts, parts, visible, {})
    outs, lses = [], []
    for rank in range(2):
        state = None
        for source in (rank, 1 - rank):
            own = (q[:, :, parts[rank]], k[:, :, parts[source]], v[:, :, parts[source]])
            sees = call.sees(rank, source)
            block, _ = blocks.forward(*own, sees, look=False, scale=0.25, **TILES)
            state = block if state is None else call.ring.merge(state, block)
        out, lse = state.finalize()
        outs.append(out)
        lses.append(lse)
    order = torch.cat(parts).argsort()
    out, lse = torch.cat(outs, 2)[:, :, order], torch.cat(lses, 2)[:, :, order]
    expected = torch.autograd.grad((out * weights).sum() + lse.cos().sum(), tensors)
    torch.testing.assert_close(found[0], out)
    for one, other in zip(found[2:], expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def saved_bytes(backend, tensors) -> int:
    kept = {}
    pack = torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.setdefault(x.data_ptr(), x.nbytes) and x, lambda x: x
    )
    with pack:
        attention(*tensors, backend=backend)
    return sum(kept.values())


def test_ranks_keep_no_keys_of_others():
    """Together they keep what one process keeps, so each keeps 1 / W of it. Autograd through the
    merges would keep the keys of all on each.
    """
    tensors, _ = inputs(256)
    alone = saved_bytes("tiled", tensors)
    assert {saved_bytes(get_backend("ring", ranks=n), tensors) for n in (2, 4, 16)} == {alone}


def test_a_rank_frees_what_it_has_sent_on():
    """Its peak in the backward pass is that of some buffers, however many blocks come by."""
    peaks = {}
    for ranks in (4, 8):
        (q, k, v), d_out = inputs(64)  # a rank's part
        parts = zigzag(64 * ranks, ranks)
        visible = intervals(64 * ranks, 64 * ranks, q.device, causal=True)
        call = RingCall(RING.ring, parts, parts, visible, TILES | {"scale": 1.0})
        lse = d_out.sum(-1)
        meter = MemoryMeter("cpu")
        with torch.no_grad(), meter.measured():
            take_part(call.backward(0, q, k, v, d_out, lse, d_out, lse), "", 0, ranks)
        peaks[ranks] = meter.peak_gib() * 2**30 / d_out.nbytes
    assert 2 < peaks[8] <= 1.05 * peaks[4]


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(1, 40),
    ranks=st.integers(1, 6),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 40),
    edges=st.lists(st.integers(0, 39)),
)
def test_a_rank_sees_what_the_sequence_shows(length, ranks, causal, window, edges):
    """One search gives the intervals of any mask in any part of a sequence."""
    documents = torch.zeros(length, dtype=torch.int64)
    for edge in edges:
        documents[min(edge, length) :] += 1
    mask = {"causal": causal, "window": window if causal else None}
    visible = intervals(length, length, documents.device, document_ids=documents[None], **mask)
    parts = zigzag(length, ranks)
    call = RingCall(RING.ring, parts, parts, visible, {})
    assert torch.cat(parts).sort().values.tolist() == list(range(length))
    for rank in range(ranks):
        for source in range(ranks):
            expected = visible.mask()[:, :, parts[rank]][..., parts[source]]
            assert torch.equal(call.sees(rank, source).mask(), expected)


@given(
    num_queries=st.integers(1, 40),
    num_keys=st.integers(1, 40),
    ranks=st.integers(1, 5),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 30) | st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_a_part_holds_all_that_is_seen(num_queries, num_keys, ranks, causal, window):
    """And what it says of its mask is true."""
    if causal and isinstance(window, tuple):
        window = (window[0], 0)
    how = (torch.device("cpu"), frozenset(), causal, window)
    call = standing_call(RingCall, RING.ring, num_queries, num_keys, ranks, *how)
    for rank in range(ranks):
        for source in range(ranks):
            expected = call.sees(rank, source).mask()
            rows, keys, visible = part = call.part(rank, source)
            found = torch.zeros_like(expected)
            found[:, :, rows, keys] = visible.mask()
            assert torch.equal(found, expected)
            assert part.empty == (not expected.any())
            if visible.causal is not None and not part.empty:
                whole = torch.ones(visible.mask().shape, dtype=torch.bool)
                causal_mask = whole.tril(whole.shape[-1] - whole.shape[-2])
                assert torch.equal(visible.mask(), causal_mask if visible.causal else whole)
        halves = call._halves(rank)
        assert (halves[1] is None) == (ranks == 1)
        expected = call.sees(rank, rank).mask()
        found = torch.zeros_like(expected)
        for part in filter(None, halves):
            found[:, :, part.rows, part.keys] = part.visible.mask()
        assert torch.equal(found, expected)


def test_a_causal_ring_needs_no_intervals():
    """Its own keys are causal, whole and in halves, and of another's a rank sees all that it sees
    any of: half.
    """
    call = standing_call(
        RingCall, RING.ring, 64, 64, 4, torch.device("cpu"), frozenset(), True, None
    )
    for rank in range(4):
        for part in (call.part(rank, rank), *call._halves(rank)):
            assert part.visible.causal is True
        for source in {0, 1, 2, 3} - {rank}:
            rows, keys, visible = call.part(rank, source)
            assert visible.causal is False
            assert (rows, keys) == (
                (slice(0, 16), slice(0, 8)) if source < rank else (slice(8, 16), slice(0, 16))
            )


def test_causal_ranks_compute_alike():
    visible = intervals(64, 64, torch.device("cpu"), causal=True)
    parts = zigzag(64, 4)
    call = RingCall(RING.ring, parts, parts, visible, {})
    shown = [
        [int(call.sees(rank, source).mask().sum()) for source in range(4)] for rank in range(4)
    ]
    assert len({sum(row) for row in shown}) == 1


def test_a_merge_is_handed_in():
    """Your own: here two that are equal."""

    def by_the_class(state: OnlineSoftmax, other: OnlineSoftmax) -> OnlineSoftmax:
        return other.merge(state)

    own = replace(RING, name="own", fn=PlayedRing(Ring(TileBlocks(), by_the_class)))
    tensors, weights = inputs()
    for one, other in zip(
        results(own, tensors, weights), results("ring", tensors, weights), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_the_kernels_partial_results_are_not_rounded():
    """The same bound for them. Not in bfloat16, which the interpreter computes in float32."""
    tensors, weights = inputs(64, torch.float16, device=DEVICE)
    truth = results("naive", [x.detach().double().requires_grad_() for x in tensors], weights)

    def errors(ranks):
        kernels = replace(RING, fn=PlayedRing(TRITON.ring), options={"ranks": ranks})
        found = results(kernels, tensors, weights)
        return [(x - y).norm().item() for x, y in zip(found, truth, strict=True)]

    for error, one in zip(errors(4), errors(1), strict=True):
        assert error <= 1.05 * one


def test_ranks_run_the_kernels_that_were_asked_for():
    (q, k, v), _ = inputs(64)
    backend = get_backend("triton", kernel="hopper")
    register_ring(backend)
    shards = Shards(ring=Group("", 0, 2))  # sends nothing
    with pytest.raises(ValueError, match="attention.kernel=hopper cannot run: .* Hopper GPUs"):
        shards.attention(attention, q, k, v, backend=backend)


@pytest.mark.parametrize("mask", [{}, {"window": 20}, {"softcap": 2.0}], ids=str)
def test_the_kernels_on_a_ring(mask):
    """Their block gives out and lse, a state like any other."""
    kernels = replace(RING, fn=PlayedRing(TRITON.ring), options={"ranks": 2} | TILES)
    tensors, weights = inputs(40, device=DEVICE)
    for one, other in zip(
        results(kernels, tensors, weights, **mask),
        results("tiled", tensors, weights, **mask),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
