"""Tokens exchanged for heads: where each number goes, and what the exchange costs.

Ranks are threads here, or this process is rank 0 of a fake group, which keeps its own messages.
Dimensions: B batch, H heads, n tokens of a rank, N of all, W ranks, D head dim.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local

import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from attention import attention, get_backend
from attention.ranks import Shards

BF16 = torch.bfloat16


def played(monkeypatch, world: int, run):
    """run(shards) of each rank, in threads that exchange messages."""
    sent, here, everyone = [None] * world, local(), Barrier(world, timeout=30)

    def all_to_all(received, message, group):
        sent[here.rank] = message
        everyone.wait()
        received.copy_(torch.stack([each[here.rank] for each in sent]))
        everyone.wait()

    def start(rank):
        here.rank = rank
        return run(Shards(None, rank, world))

    monkeypatch.setattr(distributed, "all_to_all_single", all_to_all)
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(start, range(world)))


def packed_views(batch, counts, tokens, dim, dtype=BF16):
    """Each (B, H, N, D), views of one projection (B, N, sum of H, D)."""
    packed = torch.randn(batch, tokens, sum(counts), dim).to(dtype)
    return [x.transpose(1, 2) for x in packed.split(counts, 2)]


@pytest.mark.parametrize(
    ("world", "batch", "counts", "dim", "dtype"),
    [
        pytest.param(2, 1, [4, 4, 4], 16, BF16, id="mha"),
        pytest.param(2, 1, [2, 2, 2], 8, torch.float32, id="a-head-for-each-rank"),
        pytest.param(4, 1, [8, 4, 4], 4, BF16, id="4-ranks-gqa"),
        pytest.param(3, 1, [3, 3, 3], 5, BF16, id="3-ranks"),
        pytest.param(2, 2, [4, 2, 2], 16, BF16, id="batch-gqa"),
        pytest.param(2, 3, [2, 2, 2], 3, torch.float64, id="batch-fp64"),
        pytest.param(2, 1, [6], 8, BF16, id="one-tensor"),
    ],
)
def test_every_number_arrives(monkeypatch, world, batch, counts, dim, dtype):
    """There and back with their gradients, to the bit."""
    whole = packed_views(batch, counts, 3 * world, dim, dtype)
    weights = packed_views(batch, counts, 3 * world, dim, dtype)

    def part(tensors, rank, axis):
        return [x.tensor_split(world, axis)[rank].detach().requires_grad_() for x in tensors]

    def run(shards):
        to_tokens = lambda *tensors: [shards.to_tokens(x) for x in tensors]  # noqa: E731
        for exchange, mine, others in ((shards.to_heads, 2, 1), (to_tokens, 1, 2)):
            given = part(whole, shards.rank, mine)
            found = exchange(*given)
            gradients = torch.autograd.grad(found, given, part(weights, shards.rank, others))
            assert all(map(torch.equal, found, part(whole, shards.rank, others)))
            assert all(map(torch.equal, gradients, part(weights, shards.rank, mine)))

    played(monkeypatch, world, run)


@pytest.fixture
def messages():
    """The sizes of the messages that were sent."""
    return []


@pytest.fixture
def shards(monkeypatch, messages):
    """Rank 0 of two."""
    fake = distributed.all_to_all_single

    def keeping(received, sent, group):
        fake(received, sent, group=group)
        messages.append(sent.nbytes)
        # torch 2.13's fake group copies the message, 2.11's does not
        assert received.is_contiguous() and sent.is_contiguous() and received.nbytes == sent.nbytes
        ctypes.memmove(received.data_ptr(), sent.data_ptr(), sent.nbytes)

    monkeypatch.setattr(distributed, "all_to_all_single", keeping)
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield Shards(distributed.group.WORLD, 0, 2)
    distributed.destroy_process_group()


def test_q_k_and_v_go_in_one_message(shards, messages):
    """And their gradients in another."""
    qkv = [x.requires_grad_() for x in packed_views(2, [4, 2, 2], 8, 16)]
    found = shards.to_heads(*qkv)
    torch.autograd.grad(sum(x.sum() for x in found), qkv)
    assert messages == [sum(x.nbytes for x in qkv)] * 2


def test_what_arrives_is_one_projection(shards):
    """As attention=triton looks for, so that its gradient is one tensor too, and a block's merged
    heads lie side by side.
    """
    q, k, v = shards.to_heads(*packed_views(1, [4, 2, 2], 8, 16))
    assert {x.stride() for x in (q, k, v)} == {(16 * 4 * 16, 16, 4 * 16, 1)}
    heads = (k.data_ptr() - q.data_ptr(), v.data_ptr() - k.data_ptr())
    assert heads == (2 * 16 * q.itemsize, 16 * q.itemsize)
    assert shards.to_tokens(q).transpose(1, 2).is_contiguous()


@pytest.fixture
def alone():
    """A group that torch.compile can trace: this rank sends to itself."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield Shards(distributed.group.WORLD, 0, 1)
    distributed.destroy_process_group()


@pytest.mark.parametrize("batch", [1, 2])
def test_compiled_is_eager(alone, batch):
    """One graph, and its gradient. tests/training has the same on two ranks."""
    backend = get_backend("tiled")

    def call(qkv):
        q, k, v = (x.transpose(1, 2) for x in qkv.split((4, 2, 2), 2))
        return alone.attention(attention, q, k, v, backend=backend).out.transpose(1, 2).flatten(2)

    def results(call):
        x = qkv.clone().requires_grad_()
        out = call(x)
        return out, *torch.autograd.grad(out.square().sum(), x)

    qkv = torch.randn(batch, 8, 8, 16)
    expected = results(call)
    found = results(torch.compile(call, fullgraph=True, backend="aot_eager"))
    assert all(map(torch.equal, found, expected))


def test_a_gradient_of_gradients_goes_back_too(shards):
    qkv = [x.requires_grad_() for x in packed_views(1, [4, 2, 2], 8, 16, torch.float64)]
    total = sum(x.pow(3).sum() for x in shards.to_heads(*qkv))
    first = torch.autograd.grad(total, qkv, create_graph=True)
    second = torch.autograd.grad(sum(x.sum() for x in first), qkv)
    for x, y, z in zip(qkv, first, second, strict=True):
        assert torch.allclose(y, 3 * x * x) and torch.allclose(z, 6 * x)
