"""Attentions that do not know this project: judged in their dialect, and written as scripts."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from conformance.backend_under_test import Subject
from conformance.cases import Case
from conformance.outside.adapter import Adapter
from conformance.outside.dialects import DIALECTS, target
from conformance.outside.minimise import Minimiser, plain, with_options
from conformance.outside.properties import properties_of
from conformance.outside.script import Call, write
from conformance.properties import SLOW, examine

MINE = "tests.user_attentions"
SDPA = "torch.nn.functional:scaled_dot_product_attention"
FLEX = "torch.nn.attention.flex_attention:flex_attention"
FP32 = torch.float32


def column(text: str, dialect: str, dtype: torch.dtype = FP32) -> dict[str, str]:
    """Status by property, from a quick check."""
    found = target(text, dialect)
    subject = Subject(found.backend, "cpu", dtype, random_cases=1)
    checks = properties_of(found.backend)
    return {
        name: examine(subject, name, check).status
        for name, check in checks.items()
        if name not in SLOW
    }


# attention and dialect, and the properties that its conventions exclude
OTHERS = {
    (SDPA, "sdpa"): ["lse"],
    (f"{MINE}:flash", "fa"): [],
    (f"{MINE}:flash_varlen", "fa-varlen"): [],
    (f"{MINE}:Student", "cs336"): [
        *("lse", "ragged tails", "rows without a key", "prefill = decode", "first tile masked"),
        *("grouped heads", "optional arguments", "wider calls"),
    ],
}


def scores_differ_in_backward() -> bool:
    """Whether PyTorch's backward pass rounds the scores, which it computes again, in another way
    than the forward pass, as on some CPUs. Then a row's only key has not all of the weight.
    """
    q, k, v = 30 * torch.randn(3, 1, 1, 70, 80, generator=torch.Generator().manual_seed(0))
    v.requires_grad_()
    alone = torch.eye(70, dtype=torch.bool)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=alone)
    (weights,) = torch.autograd.grad(out.sum(), v)
    return bool((weights - 1).abs().max() > 1e-5)


@pytest.mark.parametrize("text, dialect", OTHERS)
def test_what_others_wrote_is_green(text, dialect):
    found = column(text, dialect)
    red = {"rows of one key"} if text == SDPA and scores_differ_in_backward() else set()
    assert {name for name, status in found.items() if status == "red"} == red
    absent = [name for name, status in found.items() if status == "n/a" and name != "block sizes"]
    # streams are a GPU's, and no dialect decodes
    assert sorted(absent) == sorted(
        [*OTHERS[text, dialect], "streams and graphs", "cache and pages"]
    )


@pytest.mark.parametrize(
    "text, dialect, red",
    [
        # only a window that has two sides is wrong
        ("one_sided", "fa", {"mask positions", "wider calls"}),
        # a row of ordinary scores is wrong, as are those of shifted ones
        (
            "unshifted_sink",
            "fa",
            {"optional arguments", "logits + 100", "logits - 120", "rows without a key"},
        ),
        # only a mask of another dtype or another layout than they expect is wrong
        ("float32_mask_misread", "sdpa", {"mask positions"}),
        ("mask_contiguous_assumed", "sdpa", {"mask positions"}),
    ],
)
def test_what_is_wrong_in_its_dialect_alone_is_red(text, dialect, red):
    found = column(f"{MINE}:{text}", dialect, torch.bfloat16)
    assert {name for name, status in found.items() if status == "red"} == red


def test_a_refusal_of_a_further_form_of_masks_is_no_mistake():
    found = target(f"{MINE}:float32_mask_refused", "sdpa")
    subject = Subject(found.backend, "cpu", torch.bfloat16)
    check = properties_of(found.backend)["mask positions"]
    assert examine(subject, "mask positions", check).status == "green"
    assert any("float32" in refusal and "RuntimeError" in refusal for refusal in subject.refusals)


def test_sinks_are_handed_in_only_where_the_function_names_them():
    """**others may take sinks and do nothing with them."""
    assert target(f"{MINE}:keywords", "fa").dialect.sinks == ""


@pytest.mark.parametrize(
    "text, dialect",
    [
        (f"{MINE}:flash", "fa"),
        (f"{MINE}:flash_varlen", "fa-varlen"),
        (SDPA, "sdpa"),
        # PyTorch imports its compiler for the mask
        pytest.param(FLEX, "flex", marks=pytest.mark.slow),
        ("tiled", None),
    ],
)
def test_a_script_of_a_right_call_passes(text, dialect):
    """The script of a failure means something only if it passes for a right attention."""
    found = target(text, dialect, {"backward": False} if dialect == "flex" else {})
    subject = Subject(found.backend, "cpu", FP32)
    found = with_options(found, subject.backend)
    small = Case(batch=2, num_heads=4, num_kv_heads=2, num_queries=6, num_keys=6, head_dim=4)
    cases = [
        small,
        replace(small, num_queries=3, inputs="up", seed=2),
        replace(small, num_keys=4, causal=False),
        replace(small, optional={"window": 3}, inputs="huge"),
        replace(small, batch=1, causal=False, optional={"window": (2, 1)}),
        replace(small, batch=1, num_keys=20, num_heads=2),
        replace(small, optional={"document_ids": True}),
        replace(small, optional={"softcap": 2.0, "alibi_slopes": True}),
        replace(small, num_queries=8),  # two rows without a key
        plain(
            replace(small, batch=3, num_keys=20, causal=False, optional={"key_lengths": True}),
            found.dialect,
        ),
    ]
    ran, layouts = 0, {"out": "each another", "dq": "transposed"}
    for case in cases:
        for tensor in ("out", "lse", "dq", "dk", "dv"):
            there = tensor != "lse" or "lse" in found.backend.features
            if there and subject.takes(case, backward=tensor.startswith("d")):
                call = Call(case, tensor, FP32, layout=layouts.get(tensor, ""))
                exec(write(found, call, "cpu", 2e-4), {})
                ran += 1
    assert ran >= (8 if found.backend.backward else 4)


HIDDEN_KEYS = [
    Case(),
    Case(num_keys=50),  # 20 rows without a key
    Case(num_queries=1, optional={"window": 9}),
    Case(num_queries=30, optional={"window": 1000, "softcap": 2.0, "alibi_slopes": True}),
    Case(num_keys=50, causal=False, optional={"window": (9, 4), "alibi_slopes": True}),
    Case(causal=False, optional={"window": (-1, -1), "alibi_slopes": True}),
    # by value
    Case(batch=2, optional={"document_ids": True, "window": 9, "alibi_slopes": True}),
    Case(batch=3, causal=False, optional={"key_lengths": True}),
    Case(num_queries=30, optional={"cu_seqlens": True}),
]


@cache
def compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, backend="aot_eager")


def flex_with_gradients(
    q, k, v, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False
):
    """FlexAttention without kernels. On a CPU it has gradients if PyTorch does not refuse them."""
    return compiled_flex()(q, k, v, score_mod, block_mask, scale, enable_gqa, return_lse=return_lse)


@pytest.fixture
def gradients_on_cpu(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    with torch._dynamo.config.patch(recompile_limit=64):  # past it nothing is compiled
        yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("gradients_on_cpu")
def test_flex_is_right_whatever_hides_the_keys():
    """From the second case on its lengths are symbols. Then PyTorch adds None to the gradient of q
    if a score_mod reads q.shape. PyTorch 2.11 keeps the first default of a parameter.
    """
    name = f"{__name__}:flex_with_gradients"
    found = target(name, "flex", {"lse_flag": "return_lse"})
    subject = Subject(found.backend, "cpu", FP32)
    for case in HIDDEN_KEYS:
        row = subject.compare(case)
        assert {"out", "lse", "dq", "dk", "dv"} <= row.keys()
        assert all(check.share <= 1 for check in row.values()), case


@pytest.mark.parametrize(
    "name, dialect, property, first",
    [
        ("contiguous_assumed", "fa", "strides and views", "misaligned, fp32: written"),
        ("float32_alone", "fa", "float32 statistics", "bf16: written"),
        ("mean_of_nothing", "sdpa", "mask positions", "out of B1-H1-N1-D1-full-key_lengths"),
    ],
)
def test_the_script_of_what_no_plain_call_shows(name, dialect, property, first):
    found = target(f"{MINE}:{name}", dialect)
    subject = Subject(found.backend, "cpu", FP32)
    cell = examine(subject, property, properties_of(found.backend)[property])
    script = Minimiser(found, subject).script(cell)
    assert cell.status == "red" and script is not None
    assert first in script.splitlines()[0] and "conformance" not in script
    with pytest.raises((AssertionError, NotImplementedError)):
        exec(script, {})


def fails_twice(q, k, v, causal=False, scale=None):
    if q.shape[3] < 4:
        raise RuntimeError(f"{q.shape[3]} numbers are too few")
    if q.shape[2] != k.shape[2]:
        raise RuntimeError(f"{q.shape[2]} queries and {k.shape[2]} keys")
    return q


def test_a_script_raises_what_the_property_raised():
    """Not another exception of the same type, which smaller calls may raise."""
    found = target(f"{__name__}:fails_twice", None, {"layout": "BHND"})
    subject = Subject(found.backend, "cpu", FP32)
    cell = examine(subject, "N != M")
    assert "N35-M70" in cell.note  # the last call
    script = Minimiser(found, subject).script(cell)
    assert script is not None
    with pytest.raises(RuntimeError, match="1 .* 2 keys"):
        exec(script, {})


def test_contiguous_inputs_arrive_contiguous_and_views_as_views():
    seen = []

    def watch(q, k, v, **_):
        seen.append(q)
        return q

    adapter = Adapter(watch, replace(DIALECTS["fa"], returns="out", lse_flag=""))
    for q in (torch.randn(2, 3, 5, 4), torch.randn(2, 5, 3, 8).transpose(1, 2)[..., ::2]):
        out, _ = adapter(q, q, q, causal=True, scale=0.5)
        assert torch.equal(out, q) and seen[-1].shape == (2, 5, 3, 4)
        assert seen[-1].is_contiguous() == q.is_contiguous()
