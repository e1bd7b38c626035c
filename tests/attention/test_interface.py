"""What is refused, and that the refusal names the argument and its value: inputs, options, names,
targets, and backends that break their promise.
"""

import sys
from dataclasses import replace

import pytest
import torch

from attention import (
    BACKENDS,
    AttentionOutput,
    Backend,
    ScoreMod,
    attention,
    attention_varlen,
    backends,
    get_backend,
    register,
    sdpa,
)
from attention.interface import ScoredOutput


def ones(*shape: int, **options) -> torch.Tensor:
    return torch.ones(shape, **options)


def refused(function, *names: str, **arguments) -> str:
    """The one ValueError of the call, which must hold all these names and values."""
    with pytest.raises(ValueError) as error:
        function(**arguments)
    text = str(error.value)
    assert all(name in text for name in names), text
    return text


def identity(score, b, h, i, j, params):
    return score, torch.ones_like(score)


def unchanged(params) -> ScoreMod:
    return ScoreMod(identity, params=params)


NAN, INF = float("nan"), float("inf")
Q = K = V = ones(1, 2, 6, 8)
QKV = {"q": Q, "k": K, "v": V}
INT64 = {"dtype": torch.int64}
TRAINED = {"requires_grad": True}
LONG = {"k": ones(1, 2, 9, 8), "v": ones(1, 2, 9, 8)}
META = {"device": "meta"}

# the changed arguments, and what the refusal must name
CALLS = [
    ({"q": Q[0]}, "q (2, 6, 8)"),
    ({"q": Q.expand(3, -1, -1, -1)}, "q (3, 2, 6, 8)", "k (1, 2, 6, 8)"),
    ({"q": Q[..., :4]}, "q (1, 2, 6, 4)"),
    ({"v": V[:, :, :5]}, "v (1, 2, 5, 8)"),
    ({"q": Q[:, :, :0]}, "q (1, 2, 0, 8)"),
    ({"k": K[:, :, :0], "v": V[:, :, :0]}, "k (1, 2, 0, 8)"),
    ({"q": ones(1, 3, 6, 8)}, "H=3", "H_kv=2"),
    ({"k": ones(1, 4, 6, 8), "v": ones(1, 4, 6, 8)}, "H=2", "H_kv=4"),
    ({"k": K.half()}, "float32 on cpu, float16 on cpu"),
    ({name: x.long() for name, x in QKV.items()}, "int64"),
    ({"k": K.to("meta")}, "on cpu", "on meta"),
    *(({"causal": causal}, f"causal={causal!r}") for causal in ("full", 1)),
    ({"window": 3, "causal": False}, "window=3", "causal=False"),
    *(({"window": window}, f"window={window}") for window in (0, -3, True, 2.0)),
    *(
        ({"window": window, "causal": False}, f"window={window}")
        for window in ((1, 2, 3), (-2, 0), (1, True), (1, 2.0), [1, 2])
    ),
    *(
        ({"scale": scale}, f"scale={scale!r}", "float32")
        for scale in (NAN, INF, -INF, True, 1e39, torch.tensor(1.0))
    ),
    *(
        ({"softcap": softcap}, f"softcap={softcap!r}", "1.2e-38 to 1.0e+31")
        for softcap in (0.0, -1.0, NAN, INF, True, 1e-46, 1e32, torch.tensor(1.0))
    ),
    (
        {name: x.double() for name, x in QKV.items()} | {"softcap": INF},
        "softcap=inf",
        "2.2e-308 to 1.0e+292",
    ),
    ({"key_lengths": [6]}, "key_lengths", "list"),
    ({"key_lengths": ones(2, **INT64)}, "key_lengths", "(1,)", "(2,)"),
    ({"key_lengths": ones(1)}, "key_lengths", "float32"),
    ({"key_lengths": torch.tensor([-1])}, "key_lengths", "M = 6", "[-1]"),
    ({"key_lengths": torch.tensor([7])}, "key_lengths", "M = 6", "[7]"),
    *(
        case
        for name in ("alibi_slopes", "sinks")
        for case in (
            ({name: [0.5, 0.5]}, name, "list"),
            ({name: ones(3)}, name, "(2,)", "(3,)"),
            ({name: ones(1, 2)}, name, "(2,)", "(1, 2)"),
            ({name: ones(2, **META)}, name, "cpu", "meta"),
            ({name: ones(2, **INT64)}, name, "int64"),
            ({name: ones(2, dtype=torch.bool)}, name, "bool"),
            ({name: ones(2, dtype=torch.complex64)}, name, "complex64"),
        )
    ),
    ({"alibi_slopes": ones(2, **TRAINED)}, "alibi_slopes", "x.detach()"),
    ({"score_mod": unchanged(ones(2, **TRAINED))}, "score_mod", "params", "x.detach()"),
    ({"score_mod": unchanged([1.0])}, "score_mod", "params", "list"),
    ({"score_mod": identity}, "score_mod", "attention.ScoreMod", "function"),
    ({"score_mod": unchanged(None), "softcap": 2.0}, "score_mod", "softcap"),
    ({"document_ids": [[0] * 6]}, "document_ids", "list"),
    *(
        ({"document_ids": ones(1, 6, dtype=dtype)}, "document_ids", "int64", str(dtype)[6:])
        for dtype in (torch.float32, torch.bool, torch.uint16, torch.complex64)
    ),
    ({"document_ids": ones(1, 5, **INT64)}, "document_ids", "(1, 6)", "(1, 5)"),
    (LONG | {"document_ids": ones(1, 6)}, "document_ids", "N=6", "M=9"),
]


# a kind of call that passed is not checked again, and True equals 1
TAKEN = [
    *({"scale": 1.0}, {"window": 1}, {"window": (1, 1)}, {"softcap": 1.0}),
    {"document_ids": ones(1, 6, **INT64)},
    {"alibi_slopes": ones(2)},
]


@pytest.fixture(scope="module")
def experienced() -> Backend:
    """naive, which takes everything, after calls of many kinds."""
    for arguments in TAKEN:
        attention(**QKV, backend="naive", **arguments)
    return get_backend("naive")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(call[1:]))
def test_a_call_that_no_backend_could_take(experienced, call):
    arguments, *names = call
    for _ in range(2):
        refused(attention, *names, **QKV | arguments, backend=experienced)


def ends(*positions, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(positions, dtype=dtype)


BY_TOKEN = {name: x[0].transpose(0, 1) for name, x in QKV.items()}
WHOLE = {"cu_seqlens_q": ends(0, 6), "cu_seqlens_k": ends(0, 6)}
PACKED = [
    ([0, 6], ends(0, 6), "cu_seqlens_q", "list"),
    (ends(0, 6), ends(0, 6, dtype=torch.int16), "cu_seqlens_k", "int16"),
    (ends(0, 6), ends(0, 6).to("meta"), "cu_seqlens_k", "cpu", "meta"),
    (ends(0, 6), ends(0, 2, 6), "(S + 1,)", "(2,)", "(3,)"),
    (ends(0), ends(0), "(S + 1,)", "(1,)"),
    (ends(1, 6), ends(0, 6), "cu_seqlens_q", "[1, 6]"),
    (ends(0, 6), ends(0, 7), "cu_seqlens_k", "[0, 7]"),
    (ends(0, 4, 3, 6), ends(0, 3, 4, 6), "cu_seqlens_q", "[0, 4, 3, 6]"),
    (ends(0, 2, 6), ends(0, 3, 6), "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k"),
]


@pytest.mark.parametrize("packed", PACKED, ids=lambda packed: "-".join(packed[2:]))
def test_packed_sequences_that_are_none(packed):
    of_queries, of_keys, *names = packed
    bounds = {"cu_seqlens_q": of_queries, "cu_seqlens_k": of_keys}
    refused(attention_varlen, *names, **BY_TOKEN, **bounds, backend="naive", alibi_slopes=ones(2))


@pytest.fixture
def seen():
    """The arguments of the last call of `looking`."""
    return {}


@pytest.fixture
def looking(seen) -> Backend:
    """A backend that declares one-sided windows and two changes of the scores."""

    def look(q, k, v, **arguments):
        seen.update(arguments)
        return AttentionOutput(v)

    features = {"window", "alibi_slopes", "score_mod", "non_causal"}
    return Backend("look", look, features=frozenset(features))


def test_causal_and_the_scale_have_their_documented_defaults(looking, seen):
    attention(**QKV, backend=looking)
    assert seen["causal"] is True and seen["scale"] == 8**-0.5


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_numbers_reach_a_backend_in_the_dtype_of_the_statistics(looking, seen, dtype, own):
    """Whatever dtype the caller's tensors have: a backend need not convert them. In bfloat16 the
    bias of far keys was off by 0.05.
    """
    params = torch.tensor([0.3, 0.7], dtype=own)
    tensors = {name: x.to(dtype) for name, x in QKV.items()}
    expected = params.to(torch.float64 if dtype == torch.float64 else torch.float32)
    attention(**tensors, backend=looking, alibi_slopes=params)
    assert seen["alibi_slopes"].dtype == expected.dtype and seen["alibi_slopes"].equal(expected)
    attention(**tensors, backend=looking, score_mod=unchanged(params))
    found = seen["score_mod"].params
    assert found.dtype == expected.dtype and found.equal(expected)


def test_a_window_comes_in_its_simplest_form(looking, seen):
    """Under a causal mask a number, for which the feature window is enough; and no further than
    the first or the last key.
    """
    numbers = {2: 2, 6: 6, 7: 6, 2**63: 6, 2**80: 6}
    pairs = {(2, 0): 3, (2, 5): 3, (2, -1): 3, (-1, 3): None, (2**80, -1): 6}
    for window, simplest in (numbers | pairs).items():
        attention(**QKV, backend=looking, window=window)
        assert seen["window"] == simplest, window
    call = {**QKV, "causal": False}
    refused(attention, "two_sided_window", **call, backend=looking, window=(2, 0))
    attention(**call, backend=looking, window=(-1, -1))
    assert seen["window"] is None
    both = replace(looking, features=looking.features | {"two_sided_window"})
    attention(**call, backend=both, window=(-1, 2**80))
    assert seen["window"] == (-1, 12)


def of_values(q, k, v, *, causal, scale, **optional) -> AttentionOutput:
    return AttentionOutput(v.repeat_interleave(q.shape[1] // v.shape[1], 1))


PLAIN = Backend("plain", of_values)


def test_all_that_a_backend_cannot_do_stands_in_one_error():
    narrow = Backend(
        "narrow",
        of_values,
        devices=("cuda",),
        dtypes=(torch.float16,),
        head_dims=(16, 32),
        backward=False,
    )
    inputs = {"q": ones(1, 4, 6, 8, **TRAINED), "k": LONG["k"], "v": LONG["v"][..., :4]}
    inputs |= {"causal": False, "softcap": 5.0, "alibi_slopes": ones(4)}
    inputs |= {"key_lengths": torch.tensor([3]), "sinks": ones(4)}
    names = ("attention=narrow", "(1, 4, 6, 8)", "(1, 2, 9, 8)", "float32 on cpu")
    text = refused(attention, *names, **inputs, backend=narrow)
    reasons = text.partition(": ")[2].split("; ")
    named = ["gqa", "non_causal", "cross_length", "value_dim", "softcap", "alibi_slopes"]
    named += ["key_lengths", "lse", "cuda", "float16", "(16, 32)", "backward"]
    assert len(reasons) == len(named)
    assert all(any(name in reason for reason in reasons) for name in named)


def test_what_has_no_gradient_is_taken_where_nothing_is_trained():
    forward_only = replace(PLAIN, backward=False)
    inputs = QKV | {"q": ones(1, 2, 6, 8, **TRAINED)}
    with torch.no_grad():
        attention(**inputs, backend=forward_only)
        attention(**inputs, backend="naive", alibi_slopes=ones(2, **TRAINED))
    refused(attention, "backward", **inputs, backend=forward_only)
    refused(attention, "alibi_slopes", **inputs, backend="naive", alibi_slopes=ones(2, **TRAINED))


def test_the_width_of_the_values_and_packed_sequences_are_asked_for():
    refused(attention_varlen, "q (1, 2, 6, 8)", **QKV, **WHOLE, backend=PLAIN)
    narrow = replace(PLAIN, head_dims=(8, 16), features=frozenset({"value_dim"}))
    refused(attention, "(8, 16)", "v has 4", **QKV | {"v": V[..., :4]}, backend=narrow)
    refused(attention_varlen, "cu_seqlens", **BY_TOKEN, **WHOLE, backend=PLAIN)


def test_a_backends_own_requirements_are_asked_last_and_for_each_kind_of_call():
    def requirements(q, k, v, *, causal, scale, size):
        return [] if q.is_contiguous() else [f"multiples of {size}"]

    picky = replace(PLAIN, options={"size": 3}, requirements=requirements)
    strided = QKV | {"q": Q.mT.contiguous().mT}
    for _ in range(2):
        attention(**QKV, backend=picky)
        refused(attention, "multiples of 3", **strided, backend=picky)
    assert "multiples" not in refused(attention, **strided | LONG, backend=picky)


def test_a_model_is_refused_before_it_is_built():
    shape = {"num_kv_heads": 2, "head_dim": 8}
    shape |= {"dtype": torch.float32, "device": torch.device("cpu")}
    PLAIN.check_model(num_heads=2, **shape)
    refused(PLAIN.check_model, "attention=plain", "gqa", num_heads=4, **shape)
    forward_only = replace(PLAIN, backward=False)
    refused(forward_only.check_model, "backward", num_heads=2, **shape)


@pytest.mark.parametrize(
    ("backend", "option", "value", "names"),
    [
        ("tiled", "block", 4, ["'block'", "block=4", "block_q, block_kv, softmax_dtype"]),
        ("naive", "block_q", 4, ["'block_q'", "block_q=4", "no options"]),
        ("tiled", "block_q", 0, ["block_q=0", "1"]),
        ("no_max", "block_kv", -8, ["block_kv=-8", "1"]),
        ("tiled", "softmax_dtype", "half", ["softmax_dtype=half", "float32", "input"]),
    ],
)
def test_an_option_that_is_none(backend, option, value, names):
    refused(get_backend, *names, name=backend, **{option: value})


def test_configuring_leaves_the_table_alone():
    before = dict(BACKENDS["tiled"].options)
    assert get_backend("tiled", block_q=7).options == before | {"block_q": 7}
    assert get_backend("tiled", block_q=7).configured(block_kv=3).options["block_q"] == 7
    assert BACKENDS["tiled"].options == before


def test_what_a_kernel_of_pytorchs_cannot_take():
    """Its flash kernel hides scores before it scales them: -inf * 0 and inf - inf are NaN."""
    ways_out = ["scale=-1.0", "attention.backend=math", "attention=tiled"]
    for kernel, scale, names in (
        ("fast", None, ["backend=fast", *sdpa.KERNELS]),
        ("efficient", None, ["efficient", "attention.backend=auto"]),
        ("auto", -1.0, ways_out),
        ("flash", -1.0, ways_out),
    ):
        backend = get_backend("sdpa", backend=kernel)
        refused(attention, *names, **QKV, backend=backend, scale=scale)
    math = get_backend("sdpa", backend="math")
    found, exact = (attention(**QKV, backend=x, scale=-1.0).out for x in (math, "naive"))
    torch.testing.assert_close(found, exact)


MODULE = """
import torch
from attention import AttentionOutput, Backend

def mean_of_the_past(q, k, v, *, causal, scale, floor):
    weights = torch.ones(q.shape[2], k.shape[2])
    weights = weights.tril() if causal else weights
    return AttentionOutput((weights / weights.sum(-1, keepdim=True)) @ v + floor)

BACKEND = Backend("mean", mean_of_the_past, exact=False, options={"floor": 0.0})
NUMBER = 3
"""


@pytest.fixture
def my_module(tmp_path, monkeypatch):
    """A module of the user's in the current folder."""
    (tmp_path / "my_attention.py").write_text(MODULE)
    (tmp_path / "my_broken.py").write_text("import a_package_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))


def test_a_users_backend_is_one_function(my_module):
    mean = get_backend("my_attention:BACKEND", floor=1.0)
    v = torch.arange(12.0).view(1, 1, 6, 2)
    out = attention(v, v, v, backend=mean).out
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor([1.0, 2, 3, 4, 5, 6]))
    refused(attention, "window", q=v, k=v, v=v, backend=mean, window=2)


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("my_attention", [*BACKENDS, "pkg.module:NAME"]),
        (":BACKEND", ["pkg.module:NAME"]),
        ("my_attention:", ["pkg.module:NAME"]),
        ("my_attention.py:BACKEND", ["my_attention:BACKEND"]),
        ("/own/mine.py:X", ["mine:X", "PYTHONPATH=/own"]),
        ("not_there:BACKEND", ["ModuleNotFoundError", "not_there.py", "PYTHONPATH"]),
        ("my_attention:MINE", ["AttributeError", "'MINE'"]),
        ("my_broken:BACKEND", ["ModuleNotFoundError", "'a_package_that_is_not_there'"]),
        ("my_attention:NUMBER", ["attention.Backend", "int"]),
        ("my_attention:mean_of_the_past", ["attention.Backend", "function"]),
    ],
)
def test_a_target_that_is_no_backend(my_module, target, names):
    refused(get_backend, f"attention={target}", *names, name=target)


def test_a_name_is_registered_once(monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", dict(BACKENDS))
    register(replace(PLAIN, name="mine"))
    assert torch.equal(attention(**QKV, backend="mine").out, V)
    for taken in ("mine", "naive"):
        refused(register, f"'{taken}'", "naive", "mine", backend=replace(PLAIN, name=taken))
    assert "mine" in backends.BACKENDS and "mine" not in BACKENDS


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (V, ["Tensor"]),
        ((V, None), ["tuple"]),
        (AttentionOutput(V[:, :1]), ["out", "(1, 2, 6, 8)", "(1, 1, 6, 8)"]),
        (AttentionOutput(V.double()), ["out", "float64"]),
        (AttentionOutput(V, V), ["lse", "(1, 2, 6)", "(1, 2, 6, 8)"]),
        (AttentionOutput(V, V[..., 0].double()), ["lse", "float32", "float64"]),
        (AttentionOutput(V.to("meta")), ["out", "cpu", "meta"]),
        (AttentionOutput(V, V[..., 0].to("meta")), ["lse", "cpu", "meta"]),
        (ScoredOutput(V, None, ones(1)), ["max_score", "(1, 2)", "(1,)"]),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, list) else "",
)
def test_a_backend_that_returns_something_else(returned, names):
    mine = Backend("mine", lambda *tensors, **arguments: returned)
    refused(attention, "attention=mine", *names, **QKV, backend=mine)
