"""The tile loop as an operator: PyTorch's contract, which loops it runs, and which calls break the
graph as before.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from attention import BACKENDS, Backend, ScoreMod, attention, get_backend, is_operator
from attention.exact_variants import LazyRescale
from attention.tile_op import TENSORS, tile_loop, tile_loop_backward
from attention.tiled import tile_loop_backend

PLAIN = {
    "causal": True,
    "scale": 0.25,
    "window": (-1, -1),
    "block_q": 8,
    "block_kv": 8,
    "softmax_dtype": "float32",
}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(dtype: torch.dtype) -> list[Tensor]:
    """q (2, 4, 20, 16) and k, v (2, 2, 20, 16) as views of one projection."""
    heads = random(2, 20, 8, 16, dtype=dtype).transpose(1, 2)
    return [x.detach().requires_grad_() for x in heads.split((4, 2, 2), 1)]


CALLS = {
    "tiled": (
        torch.float32,
        {"window": (2, 6), "key_lengths": torch.tensor([20, 7]), "causal": False},
    ),
    "kv_outer": (
        torch.bfloat16,
        {
            "softcap": 3.0,
            "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]),
            "document_ids": torch.arange(20).expand(2, -1) // 7,
        },
    ),
    "lazy_rescale": (torch.float16, {"softmax_dtype": "input", "causal": False}),
}


def test_the_operators_keep_pytorchs_contract():
    """8 s, of PyTorch's tracing: schema, shapes, strides and dtypes promised to torch.compile, and
    the registered gradient.
    """
    dtype, own = CALLS["tiled"]
    settings = PLAIN | own | {"loop": "tiled"}
    tensors = [settings.pop(key, None) for key in TENSORS]
    q, k, v = operands(dtype)
    look = torch.ones((), dtype=torch.bool)
    torch.library.opcheck(tile_loop, (q, k, v, look, *tensors), settings)
    with torch.no_grad():
        out, lse, _ = tile_loop(q, k, v, look, *tensors, **settings)
        results = out, lse, torch.ones_like(out), torch.ones_like(lse)
        torch.library.opcheck(tile_loop_backward, (q, k, v, *results, *tensors), settings)


@pytest.mark.parametrize("name", CALLS)
def test_compiled_it_is_the_same_to_the_bit(name):
    """With every argument that attention() hands on, and a gradient that comes in through lse."""
    dtype, own = CALLS[name]
    arguments = {key: x for key, x in own.items() if key not in BACKENDS[name].options}
    options = {key: x for key, x in own.items() if key not in arguments}
    backend = get_backend(name, **options, block_q=8, block_kv=8)
    function = partial(attention, backend=backend, **arguments)

    def differentiated(function) -> tuple[Tensor, ...]:
        tensors = operands(dtype)
        out, lse = function(*tensors)
        total = (out * out).sum() + lse[:, 1].sum()
        return out.detach(), lse.detach(), *torch.autograd.grad(total, tensors)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = differentiated(compiled)
    torch.testing.assert_close(found, differentiated(function), rtol=0, atol=0)


def breaks(backend: Backend, **arguments: object) -> bool:
    """Whether the loop stays outside the graph. The result is right in any case."""
    q, k, v = (x.detach() for x in operands(torch.float32))

    def call(q: Tensor) -> Tensor:
        return attention(q + 0, k, v, backend=backend, **arguments).out * 2

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = torch.compile(call, backend="aot_eager")(q)
    torch.testing.assert_close(found, call(q), rtol=0, atol=0)
    return bool(torch._dynamo.utils.counters["graph_break"])


def shifted(score, b, h, i, j, params):
    return score + 0.1 * j, torch.ones_like(score)


def test_a_call_that_the_operator_cannot_carry_stays_outside_the_graph():
    backend = get_backend("tiled", block_q=8, block_kv=8)
    assert not breaks(backend)
    assert breaks(backend, score_mod=ScoreMod(shifted))
    naive = get_backend("naive")
    own = Backend("own", naive.fn, features=naive.features, traceable=False)
    assert breaks(own)


def test_a_setting_that_would_be_lost_is_refused():
    backend = get_backend("tiled")
    more = replace(backend, options={**backend.options, "kv_outer": True})
    q = operands(torch.float32)[0]
    function = partial(attention, backend=more)
    with pytest.raises(Exception, match="kv_outer"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(q, q, q)


def test_only_the_very_loop_of_that_name_is_the_operator(monkeypatch):
    """A loop with something around it, or another loop of its name, runs itself."""
    backend = get_backend("tiled", block_q=8, block_kv=8)
    namesake = tile_loop_backend("tiled", softmax=LazyRescale)
    around = replace(backend, fn=partial(backend.fn, softcap=2.0))
    for each in (namesake, around, replace(backend, name="other")):
        assert not is_operator(each)
    assert is_operator(backend)
    own = tile_loop_backend("own_loop", softmax=LazyRescale)
    assert not is_operator(own)
    monkeypatch.setitem(BACKENDS, own.name, own)  # as register() does
    assert is_operator(own)
