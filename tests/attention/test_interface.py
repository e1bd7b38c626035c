"""What is refused, and that the refusal says why: inputs, options, names, targets, and backends that break their promise."""

import re
import warnings
from dataclasses import replace

import pytest
import torch

import attention as package
from attention import BACKENDS, AttentionOutput, Backend, attention, get_backend, register, sdpa


def qkv(batch=1, num_heads=2, num_queries=6, head_dim=8, *, num_kv_heads=None, num_keys=None, dtype=torch.float32):
    kv = (batch, num_kv_heads or num_heads, num_keys or num_queries, head_dim)
    return [torch.ones(shape, dtype=dtype) for shape in ((batch, num_heads, num_queries, head_dim), kv, kv)]


def refusal(*tensors, backend="naive", **arguments) -> str:
    """The one ValueError's text."""
    with pytest.raises(ValueError) as refused:
        attention(*tensors, backend=backend, **arguments)
    return str(refused.value)


Q, K, V = qkv()
INPUTS = {
    "three-dimensional": ((Q[0], K, V), {}, "q must be (B, H, N, D) and k, v (B, H_kv, M, D); got q (2, 6, 8), k (1, 2, 6, 8)"),
    "other-batch": ((Q.expand(3, -1, -1, -1), K, V), {}, "must share B and D, and k and v all of their shape; got q (3, 2, 6, 8)"),
    "other-head-dim": ((Q[..., :4], K, V), {}, "must share B and D"),
    "k-not-like-v": ((Q, K, V[:, :, :5]), {}, "v (1, 2, 5, 8)"),
    "no-queries": ((Q[:, :, :0], K, V), {}, "every dimension must be at least 1; got q (1, 2, 0, 8)"),
    "no-keys": ((Q, K[:, :, :0], V[:, :, :0]), {}, "every dimension must be at least 1"),
    "heads": (qkv(num_heads=3, num_kv_heads=2), {}, "multiple of the key/value heads; got H=3, H_kv=2"),
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
    "softcap-0": ((Q, K, V), {"softcap": 0.0}, "softcap=0.0 must be positive"),
    "softcap-nan": ((Q, K, V), {"softcap": float("nan")}, "softcap=nan must be positive"),
    "slopes": ((Q, K, V), {"alibi_slopes": torch.ones(3)}, "alibi_slopes must have shape (H,) = (2,); got (3,)"),
    "document-shape": ((Q, K, V), {"document_ids": torch.zeros(1, 5)}, "document_ids must have shape (B, N) = (1, 6); got (1, 5)"),
    "document-keys": (qkv(num_keys=9), {"document_ids": torch.zeros(1, 6)}, "as many queries as keys; got N=6, M=9"),
}


@pytest.mark.parametrize(("tensors", "arguments", "message"), INPUTS.values(), ids=INPUTS)
def test_inputs_no_backend_could_take(tensors, arguments, message):
    assert message in refusal(*tensors, **arguments)


def fn(q, k, v, *, causal, scale, **optional) -> AttentionOutput:
    return AttentionOutput(v.repeat_interleave(q.shape[1] // v.shape[1], 1))


def test_everything_a_backend_cannot_do_stands_in_one_error():
    narrow = Backend("narrow", fn, devices=("cuda",), dtypes=(torch.float16,), head_dims=(16, 32), backward=False)
    q, k, v = (x.requires_grad_() for x in qkv(num_heads=4, num_kv_heads=2, num_keys=9))
    text = refusal(q, k, v, backend=narrow, causal=False, softcap=5.0, alibi_slopes=torch.ones(4))
    assert text.startswith("attention=narrow cannot take q (1, 4, 6, 8), k (1, 2, 9, 8), float32 on cpu: ")
    reasons = [f"it does not support {name}" for name in ("gqa", "non_causal", "cross_length", "softcap", "alibi_slopes")]
    reasons += ["it runs on cuda, the inputs are on cpu", "it takes float16, the inputs are float32"]
    reasons += ["it takes head_dim in (16, 32), the inputs have 8", "it has no backward pass and the inputs require gradients"]
    assert text.partition(": ")[2].split("; ") == reasons
    with torch.no_grad():
        assert "no backward" not in refusal(q, k, v, backend=narrow)


def test_a_backends_own_requirements_are_asked_last():
    picky = Backend("picky", fn, options={"size": 3}, requirements=lambda q, k, v, *, causal, size: [f"it takes multiples of {size}"])
    assert refusal(Q, K, V, backend=picky).endswith(": it takes multiples of 3")
    assert "multiples" not in refusal(*qkv(num_keys=9), backend=picky)


def test_a_model_is_refused_before_it_is_built():
    shape = {"head_dim": 8, "dtype": torch.float32, "device": torch.device("cpu")}
    with pytest.raises(ValueError, match=r"attention=plain cannot take q \(1, 4, \d+, 8\).*it does not support gqa"):
        Backend("plain", fn).check_model(num_heads=4, num_kv_heads=2, **shape)
    with pytest.raises(ValueError, match="no backward pass"):
        Backend("plain", fn, backward=False).check_model(num_heads=4, num_kv_heads=4, **shape)
    Backend("plain", fn).check_model(num_heads=4, num_kv_heads=4, **shape)


def test_unknown_feature():
    with pytest.raises(ValueError, match=r"'mine' declares unknown features \['dropout'\]; valid: alibi_slopes, .*window"):
        Backend("mine", fn, features=frozenset({"dropout", "gqa"}))


def test_unknown_name_lists_the_valid_ones():
    with pytest.raises(ValueError, match="attention=flash3 is not known; valid: naive, tiled, triton") as refused:
        get_backend("flash3")
    assert all(name in str(refused.value) for name in BACKENDS)
    assert "attention=flash3 is not known" in refusal(Q, K, V, backend="flash3")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tiled", {"block": 4}, r"attention=tiled has no option 'block' \(got block=4\); its options: block_q, block_kv, softmax_dtype"),
        ("tiled", {"detach_max": True}, "attention=tiled has no option 'detach_max'"),
        ("naive", {"block_q": 4}, r"attention=naive has no option 'block_q' \(got block_q=4\); it has no options"),
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
    assert 'softmax_dtype=\'half\' must be "float32" or "input"' in refusal(Q, K, V, backend=get_backend("tiled", softmax_dtype="half"))
    assert "backend=fast is not one of: auto, flash, efficient, cudnn, math" in refusal(
        Q, K, V, backend=get_backend("sdpa", backend="fast")
    )


def test_a_kernel_pytorch_refuses_is_refused_in_pytorchs_words():
    assert "PyTorch's efficient kernel refuses them: " in refusal(Q, K, V, backend=get_backend("sdpa", backend="efficient"))


def test_of_pytorchs_words_those_about_the_kernel_that_was_asked_for(monkeypatch):
    """As PyTorch 2.11 says it on an H200 where flash meets float32."""
    said = [
        "Memory efficient kernel not used because:", "Memory Efficient attention has been runtime disabled.",
        "Flash attention kernel not used because:", "Expected query to be of dtype: {Half, BFloat16}. Got float instead.",
        "cuDNN attention kernel not used because:", "cuDNN attention has been runtime disabled.",
    ]  # fmt: skip

    def refuse(*_, **__) -> None:
        for words in said:
            warnings.warn(f"{words} (Triggered internally at sdp_utils.cpp:1.)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(sdpa, "sdpa_attention", refuse)
    sdpa._tried.cache_clear()
    found = refusal(Q, K, V, backend=get_backend("sdpa", backend="flash"))
    sdpa._tried.cache_clear()
    assert f"flash kernel refuses them: {said[3]}; attention.backend=auto" in found


MODULE = """
import torch
from attention import AttentionOutput, Backend

def mean_of_the_past(q, k, v, *, causal, scale, floor):
    weights = torch.ones(q.shape[2], k.shape[2]).tril() if causal else torch.ones(q.shape[2], k.shape[2])
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
    monkeypatch.setattr("sys.path", list(package.sys.path))


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
        ("not_there:BACKEND", "attention=not_there:BACKEND cannot be loaded: ModuleNotFoundError: No module named 'not_there'"),
        ("my_attention:MINE", "cannot be loaded: AttributeError: module 'my_attention' has no attribute 'MINE'"),
        ("my_broken:BACKEND", "cannot be loaded: ModuleNotFoundError: No module named 'a_package_that_is_not_there'"),
        ("my_attention:NUMBER", "attention=my_attention:NUMBER must be an attention.Backend, it is a int"),
        ("my_attention:mean_of_the_past", "must be an attention.Backend, it is a function"),
    ],
)
def test_a_target_that_is_no_backend(my_module, target, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        get_backend(target)


def test_register(monkeypatch):
    monkeypatch.setattr(package, "BACKENDS", dict(BACKENDS))
    register(Backend("mine", fn))
    assert torch.equal(attention(Q, K, V, backend="mine").out, V)
    for taken in ("mine", "naive"):
        with pytest.raises(ValueError, match=f"a backend named '{taken}' exists already; names in use: naive, .*mine"):
            register(Backend(taken, fn))
    assert "mine" not in BACKENDS


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (V, "must return AttentionOutput(out, lse), it returned Tensor"),
        ((V, None), "must return AttentionOutput(out, lse), it returned tuple"),
        (AttentionOutput(V[:, :1]), "must return out of shape (1, 2, 6, 8) and float32, it returned (1, 1, 6, 8) and float32"),
        (AttentionOutput(V.double()), "it returned (1, 2, 6, 8) and float64"),
        (AttentionOutput(V, V), "must return lse of shape (1, 2, 6), it returned (1, 2, 6, 8)"),
    ],
    ids=["tensor", "tuple", "shape", "dtype", "lse"],
)
def test_a_backend_that_returns_something_else(returned, message):
    text = refusal(Q, K, V, backend=replace(BACKENDS["naive"], name="mine", fn=lambda *args, **kwargs: returned))
    assert text.startswith("attention=mine ") and message in text
