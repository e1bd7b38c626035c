"""Tokens exchanged for heads: where each number goes. Ranks are threads here.

Dimensions: B batch, H heads, n tokens of a rank, N of all, W ranks, D head dim.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from attention import attention, get_backend
from attention.ranks import Shards, name_of

BF16 = torch.bfloat16


def played(monkeypatch, world: int, run):
    """run(shards) of each rank, in threads that exchange messages."""
    sent, here, everyone = [None] * world, local(), Barrier(world, timeout=120)

    def all_to_all(received, message, group):
        sent[here.rank] = message
        everyone.wait()
        received.copy_(torch.stack([each[here.rank] for each in sent]))
        everyone.wait()

    def start(rank):
        here.rank = rank
        return run(Shards(name_of(SimpleNamespace(group_name="threads")), rank, world))

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
        pytest.param(4, 1, [8, 4, 4], 4, BF16, id="4-ranks-gqa"),
        pytest.param(3, 1, [3, 3, 3], 5, BF16, id="3-ranks"),
        pytest.param(2, 3, [2, 2, 2], 3, torch.float64, id="batch-fp64"),
        pytest.param(2, 1, [6], 8, BF16, id="one-tensor"),
    ],
)
def test_every_number_arrives(monkeypatch, world, batch, counts, dim, dtype):
    """There and back with their gradients, and the gradients of these, to the bit."""
    whole = packed_views(batch, counts, 3 * world, dim, dtype)
    weights = packed_views(batch, counts, 3 * world, dim, dtype)

    def part(tensors, rank, axis):
        return [x.tensor_split(world, axis)[rank].detach().requires_grad_() for x in tensors]

    def run(shards):
        to_tokens = lambda *tensors: [shards.to_tokens(x) for x in tensors]  # noqa: E731
        for exchange, mine, others in ((shards.to_heads, 2, 1), (to_tokens, 1, 2)):
            given = part(whole, shards.rank, mine)
            found = exchange(*given)
            d_found = part(weights, shards.rank, others)
            gradients = torch.autograd.grad(found, given, d_found, create_graph=True)
            assert all(map(torch.equal, found, part(whole, shards.rank, others)))
            assert all(map(torch.equal, gradients, part(weights, shards.rank, mine)))
            twice = torch.autograd.grad(gradients, d_found, part(whole, shards.rank, mine))
            assert all(map(torch.equal, twice, part(whole, shards.rank, others)))

    played(monkeypatch, world, run)


@pytest.fixture
def alone():
    """A group that torch.compile can trace: this rank sends to itself."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield Shards(name_of(distributed.group.WORLD), 0, 1)
    distributed.destroy_process_group()


def test_compiled_is_eager(alone):
    """One graph, and its gradient. tests/training has the same on two ranks."""
    backend = get_backend("tiled")

    def call(qkv):
        q, k, v = (x.transpose(1, 2) for x in qkv.split((4, 2, 2), 2))
        return alone.attention(attention, q, k, v, backend=backend).out.transpose(1, 2).flatten(2)

    def results(call):
        x = qkv.clone().requires_grad_()
        out = call(x)
        return out, *torch.autograd.grad(out.square().sum(), x)

    qkv = torch.randn(2, 8, 8, 16)
    expected = results(call)
    found = results(torch.compile(call, fullgraph=True, backend="aot_eager"))
    assert all(map(torch.equal, found, expected))
