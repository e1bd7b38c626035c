"""What is refused, and that the refusal says why: inputs, options, names, targets, and backends
that break their promise.
"""

import re
import sys
import warnings
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


def qkv(
    batch=1,
    num_heads=2,
    num_queries=6,
    head_dim=8,
    *,
    num_kv_heads=None,
    num_keys=None,
    dtype=torch.float32,
):
    kv = (batch, num_kv_heads or num_heads, num_keys or num_queries, head_dim)
    return [
        torch.ones(shape, dtype=dtype)
        for shape in ((batch, num_heads, num_queries, head_dim), kv, kv)
    ]


def refusal(*tensors, backend="naive", **arguments) -> str:
    """The one ValueError's text."""
    with pytest.raises(ValueError) as refused:
        attention(*tensors, backend=backend, **arguments)
    return str(refused.value)


def identity(score, b, h, i, j, params):
    return score, torch.ones_like(score)


NAN, INF = float("nan"), float("inf")
Q, K, V = qkv()
INPUTS = {
    "three-dimensional": (
        (Q[0], K, V),
        {},
        "q must be (B, H, N, D) and k, v (B, H_kv, M, D); got q (2, 6, 8), k (1, 2, 6, 8)",
    ),
    "other-batch": (
        (Q.expand(3, -1, -1, -1), K, V),
        {},
        "must share B, q and k D, and k and v all but their width; got q (3, 2, 6, 8)",
    ),
    "other-head-dim": ((Q[..., :4], K, V), {}, "must share B, q and k D"),
    "k-not-like-v": ((Q, K, V[:, :, :5]), {}, "v (1, 2, 5, 8)"),
    "no-queries": (
        (Q[:, :, :0], K, V),
        {},
        "every dimension must be at least 1; got q (1, 2, 0, 8)",
    ),
    "no-keys": ((Q, K[:, :, :0], V[:, :, :0]), {}, "every dimension must be at least 1"),
    "heads": (
        qkv(num_heads=3, num_kv_heads=2),
        {},
        "multiple of the key/value heads; got H=3, H_kv=2",
    ),
    "fewer-query-heads": (qkv(num_heads=2, num_kv_heads=4), {}, "got H=2, H_kv=4"),
    "mixed-dtypes": ((Q, K.half(), V), {}, "one floating dtype; got float32, float16, float32"),
    "integers": (qkv(dtype=torch.int64), {}, "one floating dtype; got int64, int64, int64"),
    "mixed-devices": ((Q, K.to("meta"), V), {}, "must be on one device; got cpu, meta, cpu"),
    "window-0": ((Q, K, V), {"window": 0}, "window=0 must be an integer of at least 1"),
    "window-not-causal": (
        (Q, K, V),
        {"window": 3, "causal": False},
        "window=3 must be an integer of at least 1 and needs causal=True (got causal=False)",
    ),
    "window-negative": ((Q, K, V), {"window": -3}, "window=-3 must be an integer of at least 1"),
    "window-bool": ((Q, K, V), {"window": True}, "window=True must be an integer of at least 1"),
    "window-float": ((Q, K, V), {"window": 2.0}, "window=2.0 must be an integer of at least 1"),
    **{
        f"window-{window}": (
            (Q, K, V),
            {"window": window, "causal": False},
            f"window={window} must be (left, right), two integers of at least 0, or -1 for no",
        )
        for window in ((1, 2, 3), (-2, 0), (1, True), (1, 2.0))
    },
    "lengths-list": (
        (Q, K, V),
        {"key_lengths": [6]},
        "key_lengths must be a tensor, its type is list",
    ),
    "lengths-shape": (
        (Q, K, V),
        {"key_lengths": torch.zeros(2, dtype=torch.int64)},
        "key_lengths must be integers of shape (B,) = (1,); got (2,) of int64",
    ),
    "lengths-dtype": (
        (Q, K, V),
        {"key_lengths": torch.zeros(1)},
        "key_lengths must be integers of shape (B,) = (1,); got (1,) of float32",
    ),
    **{
        f"lengths-{length}": (
            (Q, K, V),
            {"key_lengths": torch.tensor([length])},
            f"key_lengths must lie in 0 to M = 6; got [{length}]",
        )
        for length in (-1, 7)
    },
    "causal": ((Q, K, V), {"causal": "full"}, "causal='full' must be True or False"),
    **{
        f"scale-{scale}": (
            (Q, K, V),
            {"scale": scale},
            f"scale={scale!r} must be a number that is finite in float32",
        )
        for scale in (NAN, INF, -INF, True, 1e39, torch.tensor(1.0))
    },
    **{
        f"softcap-{softcap}": (
            (Q, K, V),
            {"softcap": softcap},
            f"softcap={softcap!r} must be a positive number, 1.2e-38 to 1.0e+31 as scores",
        )
        for softcap in (0.0, -1.0, NAN, INF, True, 1e-46, 1e32, torch.tensor(1.0))
    },
    "softcap-float64": (
        qkv(dtype=torch.float64),
        {"softcap": INF},
        "softcap=inf must be a positive number, 2.2e-308 to 1.0e+292",
    ),
    "slopes": (
        (Q, K, V),
        {"alibi_slopes": torch.ones(3)},
        "alibi_slopes must have shape (H,) = (2,); got (3,)",
    ),
    "slopes-2d": (
        (Q, K, V),
        {"alibi_slopes": torch.ones(1, 2)},
        "alibi_slopes must have shape (H,) = (2,); got (1, 2)",
    ),
    "slopes-list": (
        (Q, K, V),
        {"alibi_slopes": [0.5, 0.5]},
        "alibi_slopes must be a tensor, its type is list",
    ),
    "slopes-elsewhere": (
        (Q, K, V),
        {"alibi_slopes": torch.ones(2, device="meta")},
        "must be on the device of q, cpu; got meta",
    ),
    **{
        f"slopes-{dtype}": (
            (Q, K, V),
            {"alibi_slopes": torch.ones(2, dtype=dtype)},
            f"alibi_slopes must be floating; got {str(dtype)[6:]}",
        )
        for dtype in (torch.int64, torch.bool, torch.complex64)
    },
    "slopes-gradient": (
        (Q, K, V),
        {"alibi_slopes": torch.ones(2, requires_grad=True)},
        "alibi_slopes must not require a gradient, which attention does not compute: hand in "
        "x.detach() for x",
    ),
    "params-gradient": (
        (Q, K, V),
        {"score_mod": ScoreMod(identity, params=torch.ones(2, requires_grad=True))},
        "a score_mod's params must not require a gradient",
    ),
    "params-list": (
        (Q, K, V),
        {"score_mod": ScoreMod(identity, params=[1.0])},
        "a score_mod's params must be a tensor, their type is list",
    ),
    "document-list": (
        (Q, K, V),
        {"document_ids": [[0] * 6]},
        "document_ids must be a tensor, its type is list",
    ),
    **{
        f"document-{dtype}": (
            (Q, K, V),
            {"document_ids": torch.zeros(1, 6, dtype=dtype)},
            f"document_ids must be of int64, int32, int16, int8, uint8; got {str(dtype)[6:]}",
        )
        for dtype in (torch.float32, torch.bool, torch.uint16, torch.complex64)
    },
    "document-shape": (
        (Q, K, V),
        {"document_ids": torch.zeros(1, 5)},
        "document_ids must have shape (B, N) = (1, 6); got (1, 5)",
    ),
    "document-keys": (
        qkv(num_keys=9),
        {"document_ids": torch.zeros(1, 6)},
        "as many queries as keys; got N=6, M=9",
    ),
}


@pytest.mark.parametrize(("tensors", "arguments", "message"), INPUTS.values(), ids=INPUTS)
def test_inputs_no_backend_could_take(tensors, arguments, message):
    """One sentence of the interface's, before any backend is asked: sdpa itself refuses some."""
    assert message in refusal(*tensors, backend="sdpa", **arguments)


def test_a_constant_that_could_be_trained_is_taken_where_nothing_is():
    slopes = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not attention(Q, K, V, backend="naive", alibi_slopes=slopes).out.requires_grad


def test_what_a_backend_is_given_is_in_float32():
    """Whatever dtype the caller's tensors have: a user's backend need not convert them. A window
    reaches to the first key at most.
    """
    given = {}

    def look(q, k, v, **arguments):
        given.update(arguments)
        return AttentionOutput(v)

    def numbers(*, dtype, **optional):
        features = frozenset({"window", "alibi_slopes", "score_mod"})
        attention(*qkv(dtype=dtype), backend=Backend("look", look, features=features), **optional)
        return given

    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        for own in (torch.bfloat16, torch.float32, torch.float64):
            params = torch.tensor([0.3, 0.7], dtype=own)
            slopes = numbers(dtype=dtype, alibi_slopes=params)["alibi_slopes"]
            mod = numbers(dtype=dtype, score_mod=ScoreMod(identity, params=params))["score_mod"]
            assert slopes.dtype == mod.params.dtype == expected
            torch.testing.assert_close(slopes, params.to(expected), rtol=0, atol=0)
    assert [numbers(dtype=torch.float32, window=w)["window"] for w in (2, 6, 7, 2**63, 2**80)] == [
        2,
        6,
        6,
        6,
        6,
    ]


def ends(*positions, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(positions, dtype=dtype)


@pytest.mark.parametrize(
    ("of_queries", "of_keys", "message"),
    [
        ([0, 6], ends(0, 6), "cu_seqlens_q must be a tensor of int32 or int64, it is list"),
        (ends(0, 6), ends(0, 6, dtype=torch.int16), "cu_seqlens_k must be a tensor of int32 or"),
        (ends(0, 6), ends(0, 6).to("meta"), "cu_seqlens_k must be on the device of q, cpu; got"),
        (ends(0, 6), ends(0, 2, 6), "shape (S + 1,) for S sequences; got (2,) and (3,)"),
        (ends(0), ends(0), "must have shape (S + 1,) for S sequences; got (1,) and (1,)"),
        (ends(1, 6), ends(0, 6), "cu_seqlens_q must rise from 0 to the number of tokens, 6"),
        (ends(0, 6), ends(0, 7), "cu_seqlens_k must rise from 0 to the number of tokens, 6"),
        (ends(0, 4, 3, 6), ends(0, 3, 4, 6), "and may not fall; got [0, 4, 3, 6]"),
        (ends(0, 2, 6), ends(0, 3, 6), "alibi_slopes and score_mod need cu_seqlens_q equal to"),
    ],
)
def test_packed_sequences_that_are_none(of_queries, of_keys, message):
    tensors = [x[0].transpose(0, 1) for x in (Q, K, V)]
    slopes = torch.ones(2)
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_varlen(*tensors, of_queries, of_keys, backend="naive", alibi_slopes=slopes)
    with pytest.raises(ValueError, match=r"q must be \(T, H, D\) and k, v \(T_k, H_kv"):
        attention_varlen(Q, K, V, of_queries, of_keys, backend="naive")


def test_a_window_comes_in_its_simplest_form():
    """A backend with the feature window alone takes every window under a causal mask."""
    given = []

    def look(q, k, v, *, causal, scale, window):
        given.append(window)
        return AttentionOutput(v)

    one_sided = Backend("look", look, features=frozenset({"window", "non_causal"}))
    both = replace(one_sided, features=one_sided.features | {"two_sided_window"})
    for window in ((2, 0), (2, 5), (2, -1), (-1, 3), (2**80, -1)):
        attention(Q, K, V, backend=one_sided, window=window)
    assert given == [3, 3, 3, None, 6]
    assert attention(Q, K, V, backend=one_sided, window=(-1, -1), causal=False).out is V
    assert "it does not support two_sided_window" in refusal(
        Q, K, V, backend=one_sided, window=(2, 0), causal=False
    )
    attention(Q, K, V, backend=both, window=(-1, 2**80), causal=False)
    assert given[5:] == [None, (-1, 12)]


def test_what_a_backend_does_not_declare_is_refused():
    lengths = torch.tensor([3])
    plain = Backend("plain", fn)
    assert "it does not support key_lengths" in refusal(Q, K, V, backend=plain, key_lengths=lengths)
    assert "it does not support value_dim" in refusal(Q, K, V[..., :4], backend=plain)
    narrow = replace(plain, head_dims=(8, 16), features=frozenset({"value_dim"}))
    assert "it takes head_dim in (8, 16), v has 4" in refusal(Q, K, V[..., :4], backend=narrow)
    tensors = [x[0].transpose(0, 1) for x in (Q, K, V)]
    with pytest.raises(ValueError, match="it does not support cu_seqlens"):
        attention_varlen(*tensors, ends(0, 6), ends(0, 6), backend=plain)


def fn(q, k, v, *, causal, scale, **optional) -> AttentionOutput:
    return AttentionOutput(v.repeat_interleave(q.shape[1] // v.shape[1], 1))


def test_everything_a_backend_cannot_do_stands_in_one_error():
    narrow = Backend(
        "narrow", fn, devices=("cuda",), dtypes=(torch.float16,), head_dims=(16, 32), backward=False
    )
    q, k, v = (x.requires_grad_() for x in qkv(num_heads=4, num_kv_heads=2, num_keys=9))
    text = refusal(q, k, v, backend=narrow, causal=False, softcap=5.0, alibi_slopes=torch.ones(4))
    assert text.startswith(
        "attention=narrow cannot take q (1, 4, 6, 8), k (1, 2, 9, 8), float32 on cpu: "
    )
    reasons = [
        f"it does not support {name}"
        for name in ("gqa", "non_causal", "cross_length", "softcap", "alibi_slopes")
    ]
    reasons += [
        "it runs on cuda, the inputs are on cpu",
        "it takes float16, the inputs are float32",
    ]
    reasons += [
        "it takes head_dim in (16, 32), the inputs have 8",
        "it has no backward pass and the inputs require gradients",
    ]
    assert text.partition(": ")[2].split("; ") == reasons
    with torch.no_grad():
        assert "no backward" not in refusal(q, k, v, backend=narrow)


def test_a_backends_own_requirements_are_asked_last():
    picky = Backend(
        "picky",
        fn,
        options={"size": 3},
        requirements=lambda q, k, v, *, causal, scale, size: [f"it takes multiples of {size}"],
    )
    assert refusal(Q, K, V, backend=picky).endswith(": it takes multiples of 3")
    assert "multiples" not in refusal(*qkv(num_keys=9), backend=picky)


def test_a_model_is_refused_before_it_is_built():
    shape = {"head_dim": 8, "dtype": torch.float32, "device": torch.device("cpu")}
    with pytest.raises(
        ValueError, match=r"attention=plain cannot take q \(1, 4, \d+, 8\).*it does not support gqa"
    ):
        Backend("plain", fn).check_model(num_heads=4, num_kv_heads=2, **shape)
    with pytest.raises(ValueError, match="no backward pass"):
        Backend("plain", fn, backward=False).check_model(num_heads=4, num_kv_heads=4, **shape)
    Backend("plain", fn).check_model(num_heads=4, num_kv_heads=4, **shape)


def test_unknown_feature():
    with pytest.raises(
        ValueError,
        match=r"'mine' declares unknown features \['dropout'\]; valid: alibi_slopes, .*window",
    ):
        Backend("mine", fn, features=frozenset({"dropout", "gqa"}))


def test_unknown_name_lists_the_valid_ones():
    with pytest.raises(
        ValueError, match="attention=flash3 is not known; valid: naive, tiled, triton"
    ) as refused:
        get_backend("flash3")
    assert all(name in str(refused.value) for name in BACKENDS)
    assert "attention=flash3 is not known" in refusal(Q, K, V, backend="flash3")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "tiled",
            {"block": 4},
            r"attention=tiled has no option 'block' \(got block=4\); its options: block_q, "
            r"block_kv, softmax_dtype",
        ),
        ("tiled", {"detach_max": True}, "attention=tiled has no option 'detach_max'"),
        (
            "naive",
            {"block_q": 4},
            r"attention=naive has no option 'block_q' \(got block_q=4\); it has no options",
        ),
        ("tiled", {"block_q": 0}, "block_q=0 must be at least 1"),
        ("no_max", {"block_kv": -8}, "block_kv=-8 must be at least 1"),
    ],
)
def test_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        get_backend(name, **options)


def test_configuring_leaves_the_table_alone():
    before = dict(BACKENDS["tiled"].options)
    assert get_backend("tiled", block_q=7).options == before | {"block_q": 7}
    assert get_backend("tiled", block_q=7).configured(block_kv=3).options["block_q"] == 7
    assert BACKENDS["tiled"].options == before


def test_softmax_dtype():
    with pytest.raises(ValueError, match="softmax_dtype=half must be float32 or input"):
        get_backend("tiled", softmax_dtype="half")
    assert "backend=fast is not one of: auto, flash, efficient, cudnn, math" in refusal(
        Q, K, V, backend=get_backend("sdpa", backend="fast")
    )


def test_a_kernel_pytorch_refuses_is_refused_in_pytorchs_words():
    assert "PyTorch's efficient kernel refuses them: " in refusal(
        Q, K, V, backend=get_backend("sdpa", backend="efficient")
    )


def test_of_pytorchs_words_those_about_the_kernel_that_was_asked_for(monkeypatch):
    """As PyTorch 2.11 says it on an H200 where flash meets float32."""
    said = [
        "Memory efficient kernel not used because:",
        "Memory Efficient attention has been runtime disabled.",
        "Flash attention kernel not used because:",
        "Expected query to be of dtype: {Half, BFloat16}. Got float instead.",
        "cuDNN attention kernel not used because:",
        "cuDNN attention has been runtime disabled.",
    ]

    def refuse(*_, **__) -> None:
        for words in said:
            warnings.warn(f"{words} (Triggered internally at sdp_utils.cpp:1.)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", refuse)
    sdpa._tried.cache_clear()
    found = refusal(Q, K, V, backend=get_backend("sdpa", backend="flash"))
    sdpa._tried.cache_clear()
    assert found.startswith("attention=sdpa cannot take q (1, 2, 6, 8)")
    assert f"flash kernel refuses them: {said[3]}; attention.backend=auto" in found


@pytest.mark.parametrize(
    "seen_in_the_trial", [True, False], ids=["asked-before", "only-in-the-call"]
)
def test_no_available_kernel_is_a_refusal_whatever_the_layout(monkeypatch, seen_in_the_trial):
    """A kernel that takes no sequence read as a batch of several: the trial has that layout too,
    and the call itself is listened to.
    """
    plain = sdpa.scaled_dot_product_attention
    if not seen_in_the_trial:
        monkeypatch.setattr(sdpa, "_tried", lambda *_: ())

    def refuse_expanded(q, *others, **arguments):
        if len(q) > 1 and q.stride(0) == 0:
            warnings.warn(
                "it takes no expanded batch (Triggered internally at sdp_utils.cpp:1.)",
                stacklevel=1,
            )
            raise RuntimeError("No available kernel. Aborting execution.")
        return plain(q, *others, **arguments)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", refuse_expanded)
    backend = get_backend("sdpa", backend="flash")
    assert attention(Q, K, V, backend=backend).out.shape == Q.shape
    words = (
        "PyTorch's flash kernel refuses them: it takes no expanded batch; attention.backend=auto "
        "lets PyTorch choose"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert words in refusal(*(x.expand(3, -1, -1, -1) for x in (Q, K, V)), backend=backend)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_pytorchs_flash_kernel_and_a_scale_that_is_not_positive(scale):
    """PyTorch hides scores before it scales them: -inf * 0 and inf - inf are NaN."""
    for kernel in ("auto", "flash"):
        found = refusal(Q, K, V, backend=get_backend("sdpa", backend=kernel), scale=scale)
        assert (
            f"with scale={scale}, which is not positive, PyTorch's flash kernel makes NaN of "
            "hidden scores; " in found
        )
        assert "attention.backend=math and attention=tiled take it" in found
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    for causal, kernel in ((True, "math"), (False, "auto"), (False, "flash")):
        out = attention(
            q, k, v, backend=get_backend("sdpa", backend=kernel), causal=causal, scale=scale
        ).out
        torch.testing.assert_close(
            out, attention(q, k, v, backend="naive", causal=causal, scale=scale).out
        )


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


def test_a_users_backend_in_twenty_lines(my_module):
    assert len(MODULE.strip().splitlines()) <= 20
    mean = get_backend("my_attention:BACKEND", floor=1.0)
    v = torch.arange(12.0).view(1, 1, 6, 2)
    out = attention(v, v, v, backend=mean).out
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor([1.0, 2, 3, 4, 5, 6]))
    assert "it does not support window" in refusal(v, v, v, backend=mean, window=2)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("my_attention", "attention=my_attention is not known; valid: naive"),
        (":BACKEND", "attention=:BACKEND must read pkg.module:NAME"),
        ("my_attention:", "must read pkg.module:NAME"),
        (
            "my_attention.py:BACKEND",
            "attention=my_attention.py:BACKEND names a file; name its module: my_attention:BACKEND",
        ),
        (
            "/own/mine.py:X",
            "its module: mine:X, and PYTHONPATH=/own before the command",
        ),
        (
            "not_there:BACKEND",
            "attention=not_there:BACKEND cannot be loaded: ModuleNotFoundError: No module "
            "named 'not_there'",
        ),
        (
            "my_attention:MINE",
            "cannot be loaded: AttributeError: module 'my_attention' has no attribute 'MINE'",
        ),
        (
            "my_broken:BACKEND",
            "cannot be loaded: ModuleNotFoundError: No module named 'a_package_that_is_not_there'",
        ),
        (
            "my_attention:NUMBER",
            "attention=my_attention:NUMBER must be an attention.Backend, its type is int",
        ),
        ("my_attention:mean_of_the_past", "must be an attention.Backend, its type is function"),
    ],
)
def test_a_target_that_is_no_backend(my_module, target, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        get_backend(target)


def test_register(monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", dict(BACKENDS))
    register(Backend("mine", fn))
    assert torch.equal(attention(Q, K, V, backend="mine").out, V)
    for taken in ("mine", "naive"):
        with pytest.raises(
            ValueError,
            match=f"a backend named '{taken}' exists already; names in use: naive, .*mine",
        ):
            register(Backend(taken, fn))
    assert "mine" in backends.BACKENDS and "mine" not in BACKENDS


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (V, "must return AttentionOutput(out, lse), it returned Tensor"),
        ((V, None), "must return AttentionOutput(out, lse), it returned tuple"),
        (
            AttentionOutput(V[:, :1]),
            "must return out of shape (1, 2, 6, 8) and float32, it returned (1, 1, 6, "
            "8) and float32",
        ),
        (AttentionOutput(V.double()), "it returned (1, 2, 6, 8) and float64"),
        (
            AttentionOutput(V, V),
            "must return lse of shape (1, 2, 6) and float32, it returned (1, 2, 6, 8) and float32",
        ),
        (
            AttentionOutput(V, V[..., 0].double()),
            "must return lse of shape (1, 2, 6) and float32, it returned (1, 2, 6) and float64",
        ),
        (AttentionOutput(V.to("meta")), "must return out on cpu, where q is; it returned it on m"),
        (AttentionOutput(V, V[..., 0].to("meta")), "must return lse on cpu, where q is; it retu"),
    ],
    ids=["tensor", "tuple", "shape", "dtype", "lse", "lse-dtype", "device", "lse-device"],
)
def test_a_backend_that_returns_something_else(returned, message):
    text = refusal(
        Q,
        K,
        V,
        backend=replace(BACKENDS["naive"], name="mine", fn=lambda *args, **kwargs: returned),
    )
    assert text.startswith("attention=mine ") and message in text
