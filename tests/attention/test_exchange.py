"""Tokens exchanged for heads: where each number goes, and how many bytes are copied on the way.

Ranks are threads here, or this process is rank 0 of a fake group, which keeps its own messages.
Dimensions: B batch, H heads, n tokens of a rank, N of all, W ranks, D head dim.
"""

import ctypes
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import distributed
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from attention import attention, exchange, get_backend
from attention.context import Group, Shards
from attention.interface import Refusal

ATEN = torch.ops.aten
BF16 = torch.bfloat16


def played(monkeypatch, world: int, run):
    """run(rank) of each rank, in threads that exchange messages."""
    sent, here, everyone = [None] * world, local(), Barrier(world, timeout=30)

    def all_to_all(received, message, group):
        sent[here.rank] = message
        everyone.wait()
        received.copy_(torch.stack([each[here.rank] for each in sent]))
        everyone.wait()

    def start(rank):
        here.rank = rank
        return run(rank)

    monkeypatch.setattr(distributed, "all_to_all_single", all_to_all)
    monkeypatch.setitem(exchange.groups, "played", None)
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(start, range(world)))


def packed_views(batch, counts, tokens, dim, dtype=BF16):
    """Each (B, H, N, D), views of one projection (B, N, sum of H, D)."""
    return exchange.parts_of(torch.randn(batch, tokens, sum(counts), dim).to(dtype), counts)


def laid_out(tensors, packed):
    """The same numbers in one memory or each in its own, with heads outside."""
    if not packed:
        return [x.clone(memory_format=torch.contiguous_format) for x in tensors]
    joined = torch.cat([x.transpose(1, 2) for x in tensors], 2)
    return exchange.parts_of(joined, [x.shape[1] for x in tensors])


@pytest.mark.parametrize(
    ("world", "batch", "counts", "dim", "dtype", "packed"),
    [
        pytest.param(2, 1, [4, 4, 4], 16, BF16, True, id="mha-packed"),
        pytest.param(2, 1, [2, 2, 2], 8, torch.float32, False, id="a-head-for-each-rank"),
        pytest.param(4, 1, [8, 4, 4], 4, BF16, True, id="4-ranks-8-bytes-packed"),
        pytest.param(3, 1, [3, 3, 3], 5, BF16, False, id="3-ranks-number-by-number"),
        pytest.param(2, 2, [4, 2, 2], 16, BF16, True, id="batch-gqa-packed"),
        pytest.param(2, 2, [4, 2, 2], 16, BF16, False, id="batch-gqa"),
        pytest.param(2, 3, [2, 2, 2], 3, torch.float64, True, id="batch-fp64-packed"),
        pytest.param(2, 1, [6], 8, BF16, False, id="one-tensor"),
    ],
)
def test_every_number_arrives(monkeypatch, world, batch, counts, dim, dtype, packed):
    """There and back with their gradients, to the bit."""
    whole = packed_views(batch, counts, 3 * world, dim, dtype)
    weights = packed_views(batch, counts, 3 * world, dim, dtype)

    def part(tensors, rank, axis):
        parts = [x.tensor_split(world, axis)[rank] for x in tensors]
        return [x.detach().requires_grad_() for x in laid_out(parts, packed)]

    def run(rank):
        for back, mine, others in ((False, 2, 1), (True, 1, 2)):  # tokens, heads
            given = part(whole, rank, mine)
            found = exchange.exchanged(given, "played", world, back=back)
            gradients = torch.autograd.grad(found, given, part(weights, rank, others))
            assert all(map(torch.equal, found, part(whole, rank, others))), back
            assert all(map(torch.equal, gradients, part(weights, rank, mine))), back

    played(monkeypatch, world, run)


class Copies(TorchDispatchMode):
    """Bytes that are copied from one tensor to another, by the dtype as which they are copied."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (ATEN.copy_.default, ATEN.clone.default, ATEN.cat.default):
            self.bytes[result.dtype] += result.nbytes
        return result


@pytest.fixture
def shards(monkeypatch):
    """Rank 0 of two."""
    fake = distributed.all_to_all_single

    def keeping(received, sent, group):
        fake(received, sent, group=group)
        # torch 2.13's fake group copies the message, 2.11's does not. memmove is not an operator,
        # so Copies does not count it
        assert received.is_contiguous() and sent.is_contiguous() and received.nbytes == sent.nbytes
        ctypes.memmove(received.data_ptr(), sent.data_ptr(), sent.nbytes)

    monkeypatch.setattr(distributed, "all_to_all_single", keeping)
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    monkeypatch.setitem(exchange.groups, "heads", distributed.group.WORLD)
    yield Shards(heads=Group("heads", 0, 2))
    distributed.destroy_process_group()


@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 2), (2, 4)], ids=["B1-gqa", "B2-mha"])
def test_no_more_is_copied_than_must_be(shards, batch, kv_heads):
    """Of one sequence, each tensor once: on its way into the message or out of it. All of it 16
    bytes at a time.
    """
    counts, tokens, dim = [4, kv_heads, kv_heads], 8, 16
    qkv = [x.requires_grad_() for x in packed_views(batch, counts, tokens, dim)]
    d_heads = packed_views(batch, [x // 2 for x in counts], 2 * tokens, dim)
    (out,) = packed_views(batch, [2], 2 * tokens, dim)
    (d_tokens,) = packed_views(batch, [4], tokens, dim)
    out.requires_grad_()
    bytes_of_qkv, times = sum(x.nbytes for x in qkv), 1 if batch == 1 else 2
    steps = {
        "to_heads": (lambda: shards.to_heads(*qkv), qkv, d_heads, bytes_of_qkv),
        "to_tokens": (lambda: [shards.to_tokens(out)], [out], [d_tokens], out.nbytes),
    }
    for name, (call, inputs, gradients, size) in steps.items():
        with Copies() as copies:
            results = call()
        assert copies.bytes == {torch.complex128: times * size}, name
        with Copies() as copies:
            torch.autograd.grad(results, inputs, gradients)
        assert copies.bytes == {torch.complex128: times * size}, f"backward of {name}"


def test_what_arrives_is_one_projection(shards):
    """As attention=triton looks for, so that its gradient is one tensor too, and a block's merged
    heads lie side by side.
    """
    counts = [4, 2, 2]
    found = shards.to_heads(*packed_views(1, counts, 8, 16))
    assert exchange.one_memory(found, [2, 1, 1]) is not None
    assert exchange.one_memory([x.clone() for x in found], [2, 1, 1]) is None
    assert shards.to_tokens(found[0]).transpose(1, 2).is_contiguous()


def test_the_operators_are_lawful(shards):
    qkv = packed_views(1, [4, 2, 2], 8, 16, torch.float32)
    for call in (exchange.exchange_tokens, exchange.exchange_heads):
        torch.library.opcheck(call, (qkv, "heads", 2))


@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 2), (2, 4)], ids=["B1-gqa", "B2-mha"])
def test_compiled_is_eager(shards, batch, kv_heads):
    backend = get_backend("tiled")

    def call(qkv):
        q, k, v = (x.transpose(1, 2) for x in qkv.split((4, kv_heads, kv_heads), 2))
        return shards.attention(attention, q, k, v, backend=backend).out.transpose(1, 2).flatten(2)

    def results(call):
        x = qkv.clone().requires_grad_()
        out = call(x)
        return out, *torch.autograd.grad(out.square().sum(), x)

    qkv = torch.randn(batch, 8, 4 + 2 * kv_heads, 16)
    expected = results(call)
    found = results(torch.compile(call, fullgraph=True, backend="aot_eager"))
    assert all(map(torch.equal, found, expected))


def test_compiled_gradients_are_not_joined_first(shards):
    """With a registered gradient of the operators they were: a copy more, and with Inductor two."""
    graphs = []

    def noted(graph, _):
        graphs.append({node.target for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(fw_compiler=noted, bw_compiler=noted)
    call = torch.compile(lambda *qkv: shards.to_heads(*qkv), fullgraph=True, backend=compiler)
    counts = [4, 2, 2]
    qkv = [x.requires_grad_() for x in packed_views(1, counts, 8, 16)]
    gradients = packed_views(1, [x // 2 for x in counts], 16, 16)
    found = torch.autograd.grad(call(*qkv), qkv, gradients)
    expected = torch.autograd.grad(shards.to_heads(*qkv), qkv, gradients)
    assert all(map(torch.equal, found, expected))
    forward, backward = graphs
    assert exchange.exchange_tokens in forward and exchange.exchange_heads in backward
    assert not (forward | backward) & {ATEN.cat.default, ATEN.clone.default, ATEN.copy_.default}


def test_a_gradient_of_gradients_goes_back_too(shards):
    qkv = [x.requires_grad_() for x in packed_views(1, [4, 2, 2], 8, 16, torch.float64)]
    total = sum(x.pow(3).sum() for x in shards.to_heads(*qkv))
    first = torch.autograd.grad(total, qkv, create_graph=True)
    second = torch.autograd.grad(sum(x.sum() for x in first), qkv)
    for x, y, z in zip(qkv, first, second, strict=True):
        assert torch.allclose(y, 3 * x * x) and torch.allclose(z, 6 * x)


def test_values_of_another_width_are_refused(shards):
    q, v = torch.zeros(1, 4, 8, 16), torch.zeros(1, 4, 8, 1)
    with pytest.raises(Refusal, match=r"v .* \{16, 1\}|v .* \{1, 16\}"):
        shards.to_heads(q, q, v)
