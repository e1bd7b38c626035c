"""One table of calls, held by every backend of BACKENDS that declares what the call needs, forward
and backward, against naive attention in float64.

A new backend gets these tests by being in BACKENDS, a new argument by a line in CALLS.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from attention import BACKENDS, Backend, attention
from attention.exact_variants import EXACT_VARIANTS
from attention.kernels.select import HEAD_DIMS
from attention.look import diagnose
from conformance.backend_under_test import expected_of
from conformance.cases import SHORT, Case, expect, run
from conformance.views import LAYOUTS

# small tiles: every call crosses several, ragged at the end
TILES = {"block_q": 32, "block_kv": 16}
HALVES = (torch.bfloat16, torch.float16)
COMPILED = torch.cuda.is_available()  # otherwise Triton's kernels are interpreted
LONG = 70 if COMPILED else 50  # tokens: a GPU has larger tiles, and an interpreter is slow


@dataclass(frozen=True)
class Call(Case):
    """A case with further fields. The name of a call is its id."""

    num_queries: int = LONG
    num_keys: int = LONG
    scale: float | None = None
    layout: str | None = None  # of q, k and v: a name in LAYOUTS, or "expanded"

    __hash__ = Case.__hash__

    def make(self, dtype: torch.dtype, device: str):
        tensors, arguments, *gradients = super().make(dtype, device)
        if self.scale is not None:
            arguments["scale"] = self.scale
        if self.layout == "expanded":
            tensors = [x[:1].expand_as(x) for x in tensors]
        elif self.layout is not None:
            tensors = [*LAYOUTS[self.layout](*tensors)]
        return tensors, arguments, *gradients


def shape(num_queries: int, num_keys: int, **fields) -> Call:
    return Call(num_queries=num_queries, num_keys=num_keys, **fields)


def masked(*lengths: int, causal: bool = True, **optional) -> Call:
    batch = 3 if "key_lengths" in optional else 2 if "document_ids" in optional else 1
    return shape(*(lengths or (LONG, LONG)), causal=causal, batch=batch, optional=optional)


def grouped(**optional) -> Call:
    return Call(num_heads=4, num_kv_heads=2, optional=optional)


def capped(softcap: float) -> Call:
    """Scores far below the cap: tanh as 1 - 2 / (1 + e) lost what is left of them."""
    heads = {"num_heads": 3, "num_kv_heads": 3, "head_dim": 32}
    return shape(16, 16, **heads, optional={"softcap": softcap, "window": 64})


CALLS: dict[str, Call] = {
    "causal": Call(batch=2),
    "full": Call(causal=False),
    "gqa": shape(33, 33, batch=2, num_heads=4, num_kv_heads=2, head_dim=24),
    "multi-query": shape(33, 33, num_heads=3, num_kv_heads=1, head_dim=64, causal=False),
    "fewer-queries": shape(33, LONG),
    "fewer-queries-full": shape(33, LONG, causal=False),
    "rows-without-a-key": shape(LONG, 33),
    "one-query": shape(1, 50),
    "one-token": shape(1, 1),
    "N17-D40": shape(17, 17, head_dim=40),
    **{name: Call(inputs=name) for name in ("large", "growing", "spike", "negative", "ties")},
    # whole tiles to the left are out of sight, a row's first visible tile is partly masked
    "window": masked(window=9),
    "window-fewer-queries": masked(33, LONG, window=20),
    "window-fewer-keys": masked(LONG, 33, window=5),
    "window-two-sided": masked(33, LONG, causal=False, window=(9, 4)),
    "documents": masked(document_ids=True),
    "documents-full": masked(causal=False, document_ids=True),
    "key-lengths": masked(33, LONG, key_lengths=True),
    "key-lengths-fewer-keys": masked(LONG, 33, key_lengths=True, window=9, sinks=True),
    "varlen": shape(LONG, LONG - 10, num_kv_heads=1, optional={"cu_seqlens": True}),
    "varlen-window": masked(causal=False, cu_seqlens=True, window=(7, 20)),
    "softcap": Call(inputs="large", optional={"softcap": 2.0}),
    "softcap-20": capped(20.0),
    "softcap-100": capped(100.0),
    "alibi": grouped(alibi_slopes=True),
    "alibi-full": masked(causal=False, alibi_slopes=True),
    "alibi-fewer-keys-full": masked(2 * LONG, 33, causal=False, alibi_slopes=True),
    "score_mod": Call(batch=2, num_kv_heads=1, optional={"score_mod": True}),
    "score_mod-full": masked(causal=False, score_mod=True),
    "score_mod-fewer-queries": masked(33, LONG, score_mod=True, window=20),
    "sinks": grouped(sinks=True),
    "sinks-fewer-keys": masked(LONG, 33, sinks=True),
    "all-together": masked(document_ids=True, window=6, softcap=5.0, alibi_slopes=True),
    "wider-values": Call(value_dim=24, causal=False),
    "narrower-values": shape(5, 33, num_kv_heads=1, value_dim=8, optional={"window": 20}),
    "scale": Call(scale=0.4),
    "scale-negative": Call(scale=-0.3),
    "scale-negative-full": Call(scale=-0.3, causal=False),
    "scale-0-full": Call(scale=0.0, causal=False),
    **{f"views-{name}": shape(33, 33, batch=2, layout=name) for name in (*LAYOUTS, "expanded")},
}

# without a compiler it takes seconds, and has no backward pass
FLEX_ON_CPU = {"gqa", "window-two-sided", "documents-full", "score_mod", "sinks", "softcap"}
FLEX_ON_CPU |= {"alibi-fewer-keys-full"}
# what its own softmax and its own walk over the tiles see
VARIANTS = [backend.name for backend in EXACT_VARIANTS]
OF_VARIANTS = {"causal", "full", "gqa", "rows-without-a-key", "one-token", "large", "growing"}
OF_VARIANTS |= {"spike", "negative", "ties", "window", "window-fewer-keys", "window-two-sided"}
OF_VARIANTS |= {"documents", "key-lengths-fewer-keys", "varlen", "wider-values", "all-together"}
# interpreted, a call of Triton's kernels takes long. In half precision they are the same code, and
# these calls differ from others only in what the other backends have to do for them
QUICK_HALVES = {"causal": torch.float16, "gqa": torch.bfloat16, "large": torch.float16}
SLOW_INTERPRETED = {"large", "ties", "softcap-20", "alibi-full", "scale-0-full", "views-expanded"}
SLOW_INTERPRETED |= {f"views-{name}" for name in LAYOUTS}
# masks are intervals to the kernels, whatever they come from: test_mask.py tests those
SLOW_INTERPRETED |= {"window-fewer-queries", "window-two-sided", "documents-full", "key-lengths"}
SLOW_INTERPRETED |= {"varlen-window", "score_mod-full", "score_mod-fewer-queries"}
SLOW_INTERPRETED |= {"scale-negative-full"}

GPU_CALLS = {
    f"H{num_heads}kv{num_kv_heads}-N{n}-M{m}-D{d}-{causal}-{inputs}": shape(
        n,
        m,
        batch=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=d,
        causal=causal == "causal",
        inputs=inputs,
    )
    for num_heads, num_kv_heads in ((4, 4), (8, 2))
    for n, m in ((257, 257), (1024, 1024), (129, 600), (600, 129), (1, 777))
    for d in (16, 40, 64, 128, 256)
    for causal in ("causal", "full")
    for inputs in ("normal", "spike")
} | {
    f"N513-D64-{inputs}": shape(513, 513, head_dim=64, inputs=inputs)
    for inputs in ("large", "growing", "negative", "ties")
}


def configured(backend: Backend) -> Backend:
    tiles = {name: size for name, size in TILES.items() if name in backend.options}
    return backend.configured(**tiles)


def needed(case: Case) -> set[str]:
    """The features that a case needs of a backend."""
    wanted = {
        "gqa": case.num_kv_heads != case.num_heads,
        "cross_length": case.num_queries != case.num_keys,
        "non_causal": not case.causal,
        "lse": "sinks" in case.optional,  # or the backend's own sinks
        "two_sided_window": isinstance(case.optional.get("window"), tuple),
        "value_dim": case.value_dim is not None,
    }
    return {name for name, needs in wanted.items() if needs} | case.optional.keys() - {"sinks"}


def takes(backend: Backend, call: Call, device: str) -> bool:
    """Whether the backend declares what the call needs."""
    widths = {call.head_dim, call.value_dim or call.head_dim}
    if backend.head_dims is not None and not all(width in backend.head_dims for width in widths):
        return False
    # PyTorch's flash kernel hides scores before it scales them
    hides = backend.name == "sdpa" and (call.causal or device == "cuda")
    unscaled = call.scale is not None and call.scale <= 0
    return needed(call) <= backend.features and not (hides and unscaled)


def in_dtype(backend: Backend, name: str, call: Call, dtype: torch.dtype, device: str) -> bool:
    """Whether to hold the call in this dtype. Masks and tails are the same code for each, so half
    precision keeps to the plain calls.
    """
    if backend.name in VARIANTS or (backend.name == "flex" and device == "cpu"):
        names = OF_VARIANTS if backend.name in VARIANTS else FLEX_ON_CPU
        return dtype == torch.float32 and name in names
    plain = call.scale is None and call.layout is None and not call.optional
    return dtype == torch.float32 or plain or dtype not in HALVES


def is_slow(name: str, dtype: torch.dtype) -> bool:
    if dtype in HALVES:
        return QUICK_HALVES.get(name) != dtype
    return name in SLOW_INTERPRETED


def pairs(calls: dict[str, Call], backends: list[Backend], device: str = "cpu") -> list:
    """(backend, call, dtype) for each call that a backend declares that it takes."""
    found = []
    for backend in map(configured, backends):
        for name, call in calls.items():
            if not takes(backend, call, device):
                continue
            for dtype in backend.dtypes:
                if not in_dtype(backend, name, call, dtype, device):
                    continue
                interpreted = backend.name == "triton" and device == "cpu"
                marks = pytest.mark.slow if interpreted and is_slow(name, dtype) else ()
                id = f"{backend.name}-{name}-{SHORT[dtype]}"
                found.append(pytest.param(backend, call, dtype, id=id, marks=marks))
    return found


def check(backend, call, dtype, device) -> None:
    """Hold the backend to the budget of the call, and rows without a key to exact zeros."""
    backward = backend.name != "flex" or device == "cuda"
    # kept for other backends, but not in the memory of a GPU that several workers share
    exact = expect if device == "cuda" else expected_of
    expected = exact(call, dtype, device, with_lse="lse" in backend.features)
    results = run(backend, *expected.inputs, backward=backward)
    assert ("lse" in results) == ("lse" in backend.features)
    checks = expected.checks(call, results).values()
    assert all(each.share <= 1 for each in checks), "\n".join(map(str, checks))
    no_key = expected.reference["lse"] == -torch.inf
    for name in {"out", "dq"} & results.keys():
        assert not results[name][no_key].any(), f"{name} of a row without a key is not 0"


EXACT = [backend for backend in BACKENDS.values() if backend.exact and backend.name != "naive"]
# on a Hopper GPU `triton` is other kernels for the dtypes and head dims that these can take
PORTABLE = replace(
    BACKENDS["triton"].configured(kernel="portable"), name="triton (portable)", dtypes=HALVES
)


@pytest.mark.parametrize(("backend", "call", "dtype"), pairs(CALLS, EXACT))
def test_cpu(backend, call, dtype):
    check(backend, call, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "call", "dtype"),
    [
        *pairs(CALLS | GPU_CALLS, [BACKENDS["triton"]], "cuda"),
        *pairs(CALLS, [BACKENDS[name] for name in ("tiled", "sdpa", "flex")], "cuda"),
        *(
            each
            for each in pairs(CALLS | GPU_CALLS, [PORTABLE], "cuda")
            if each.values[1].head_dim in HEAD_DIMS
        ),
    ],
)
def test_gpu(backend, call, dtype):
    if backend.name == "flex":
        torch._dynamo.reset()  # it compiles for every call, and PyTorch stops after a few
    check(backend, call, dtype, "cuda")


LOOKED_AT = ["causal", "full", "gqa", "growing", "rows-without-a-key", "window-fewer-queries"]
LOOKED_AT += ["documents", "key-lengths-fewer-keys", "softcap", "alibi", "score_mod"]
LOOKED_AT += ["scale-negative"]
# it declares no max_score: attention() computes it beside the call, as beside sdpa
BESIDE = replace(
    BACKENDS["naive"], name="beside", features=BACKENDS["naive"].features - {"max_score"}
)


@pytest.mark.anywhere
@pytest.mark.parametrize(
    ("backend", "call"),
    [
        pytest.param(configured(backend), CALLS[name], id=f"{backend.name}-{name}")
        for backend in (BACKENDS["tiled"], BACKENDS["triton"], BESIDE)
        for name in LOOKED_AT
    ],
)
def test_the_largest_score_of_each_head(backend, call, monkeypatch):
    """Sinks, hidden keys and rows without a key do not count, and nothing else changes."""
    monkeypatch.setattr(diagnose, "TILE_SCORES", 2**11)  # several tiles
    device = "cuda" if COMPILED else "cpu"
    tensors, arguments, *_ = call.make(torch.float32, device)
    with torch.no_grad():
        found = attention(*tensors, backend=backend, return_max_score=True, **arguments)
        plain = attention(*tensors, backend=backend, **arguments)
    assert found.out.equal(plain.out) and len(plain) == 2
    assert found.max_score.dtype == torch.float32
    wide: list[Tensor] = [x.double() for x in tensors]
    arguments.pop("sinks", None)
    exact = attention(*wide, backend="naive", return_max_score=True, **arguments).max_score
    torch.testing.assert_close(found.max_score.double(), exact, rtol=1e-5, atol=1e-5)
