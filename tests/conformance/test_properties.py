"""Tests of the properties themselves: green for a right backend, red for each kind of wrong one,
never a crash.

Dimensions: B batch, H heads, N queries, M keys, D head dim.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention import BACKENDS, AttentionOutput, Backend, attention, get_backend
from conformance.backend_under_test import Subject
from conformance.cases import Case, expect, run
from conformance.properties import PROPERTIES, SLOW, Cell, examine, verify_backend
from tests import user_backends

naive = get_backend("naive").fn
# interpreted, Triton takes a minute for what the conformance tests show as well, and FlexAttention
# without a compiler half of one
IN_REACH = [name for name in BACKENDS if name not in ("triton", "flex")]


def column(backend: Backend, *names: str, **options) -> dict[str, str]:
    """Status by property."""
    cells = verify_backend(backend, random_cases=2, properties=names or None, **options)
    return {cell.property: cell.status for cell in cells}


def red(backend: Backend, *names: str) -> set[str]:
    found = column(backend, *names, quick=not names)
    return {name for name, status in found.items() if status == "red"}


def assert_as_documented(backend: Backend, **options) -> list[Cell]:
    cells = verify_backend(backend, **options)
    assert [(cell.property, cell.status, cell.note) for cell in cells if not cell.ok] == []
    return cells


SLOWLY = [
    *((name, torch.float32) for name in ("kv_outer", "lazy_rescale", "normalized_acc")),
    *((name, torch.float16) for name in ("no_max", "lazy_rescale")),
    ("no_rescale", torch.bfloat16),
]
JUDGED = [
    *((name, torch.float32) for name in IN_REACH if (name, torch.float32) not in SLOWLY),
    *(("tiled", torch.bfloat16), ("sdpa", torch.float64)),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOWLY),
]


@pytest.mark.parametrize(("name", "dtype"), JUDGED, ids=str)
def test_red_exactly_where_documented(name, dtype):
    """In every dtype the same inputs break the same defect."""
    backend = get_backend(name)
    cells = verify_backend(backend, random_cases=3, quick=True, dtype=dtype)
    red = {cell.property: cell.note for cell in cells if cell.status == "red"}
    assert red.keys() == backend.breaks - SLOW, red
    # it was looked at: an exact backend is not green because it refused everything
    assert sum(cell.checks for cell in cells) > 150


def test_the_slow_properties():
    """Memory that grows with N x M is red, and may be documented."""
    cells = assert_as_documented(get_backend("tiled"), properties=SLOW)
    assert {cell.property for cell in cells if cell.status == "green"} == SLOW
    memory = frozenset({"saved bytes", "largest tensor"})
    assert red(user_backends.RIGHT, *memory) == memory
    assert_as_documented(replace(user_backends.RIGHT, breaks=memory), properties=memory)


@pytest.mark.parametrize("name", ["triton", "flex"])
def test_backends_that_are_slow_on_a_cpu(name):
    names = ("rows sum to one", "prefill = decode")
    assert set(column(get_backend(name), *names).values()) == {"green"}


# backends of a user's, each wrong in one way


def shiftless(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> AttentionOutput:
    """softmax without its maximum, as in a first draft."""
    p = torch.exp(q @ k.mT * scale).tril()
    return AttentionOutput(p / p.sum(-1, keepdim=True) @ v)


def noisy(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    out, lse = naive(q, k, v, **arguments)
    # element by element: some of them change their last bit at every call
    return AttentionOutput(out * (1 + 1e-7 * torch.rand_like(out)), lse)


def two_faced(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    return AttentionOutput(
        naive(q, k, v, **arguments).out * (2 if torch.compiler.is_compiling() else 1)
    )


class KeptLayout(torch.autograd.Function):
    """Reads every d_out with the strides of the first d_out of its shape, as PyTorch calls cuDNN's
    backward pass.
    """

    strides: dict[torch.Size, tuple[int, ...]] = {}

    @staticmethod
    def forward(ctx, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> Tensor:
        kept = KeptLayout.strides.setdefault(d_out.shape, d_out.stride())
        return d_out.as_strided(d_out.shape, kept)


def compiled_once(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    return AttentionOutput(KeptLayout.apply(attention(q, k, v, backend="naive", **arguments).out))


def promised(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    return AttentionOutput(naive(q, k, v, **arguments).out)


def test_a_backend_that_passes_on_ordinary_inputs_is_caught():
    """It is softmax attention as long as no score is large."""
    found = column(Backend("shiftless", shiftless), quick=True)
    expected = [name for name in PROPERTIES if name in get_backend("no_max").breaks]
    assert [name for name, status in found.items() if status == "red"] == expected
    # what it does not declare is not asked of it
    for name in ("lse", "N != M", "grouped heads", "optional arguments", "prefill = decode"):
        assert found[name] == "n/a"


def test_an_lse_that_is_promised_and_missing_is_red():
    assert red(Backend("wrong", promised, features=frozenset({"lse"})), "lse") == {"lse"}
    assert column(Backend("silent", promised), "lse") == {"lse": "n/a"}


@pytest.mark.parametrize(
    ("function", "seen_by", "others"),
    [
        (noisy, {"bitwise repeat", "call history"}, ("forward", "compiled = eager")),
        (two_faced, {"compiled = eager"}, ("forward", "bitwise repeat")),
        (compiled_once, {"call history"}, ("forward", "gradients", "bitwise repeat")),
    ],
)
def test_what_few_properties_see(function, seen_by, others):
    assert red(Backend("wrong", function), *seen_by, *others) == seen_by


def in_its_own_dtype(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> AttentionOutput:
    """A typical first version: right in float32."""
    scores = q @ k.mT * scale
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return AttentionOutput(scores.masked_fill(future, -torch.inf).softmax(-1) @ v)


def test_statistics_in_the_inputs_dtype_are_red_in_float32_too():
    """In float32, the dtype for a CPU, a softmax in the inputs' dtype is right. The property still
    checks it in bfloat16.
    """
    name = "float32 statistics"
    plain, others = Backend("plain", in_its_own_dtype), ("forward", "gradients", "large logits")
    for backend in (plain, get_backend("tiled", softmax_dtype="input")):
        assert red(backend, name, *others) == {name}
    # it can be documented, or not be taken
    assert_as_documented(replace(plain, breaks=frozenset({name})), properties=[name])
    (cell,) = verify_backend(replace(plain, dtypes=(torch.float32,)), properties=[name])
    assert cell.status == "n/a" and "bfloat16" in cell.note


@pytest.mark.parametrize("row", [15, 31, 33, -2])
def test_a_leak_at_one_place_is_red(row):
    """A regression test: green where a single query saw one key too many, at a border of tiles or
    at the end.
    """

    def leaks(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> AttentionOutput:
        seen = torch.ones(q.shape[2], k.shape[2]).tril().bool()
        if seen.shape[0] > 40:
            seen[row, row + 1] = True
        return AttentionOutput((q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v)

    found = column(Backend("leaks", leaks), "no leak (outputs)", "no leak (gradients)")
    assert found["no leak (outputs)"] == "red"
    # gradients are looked at where borders of tiles may be, and at the end
    assert found["no leak (gradients)"] == ("green" if row == 33 else "red")


def test_a_backend_that_raises_is_red_with_its_words():
    asked = [cell for cell in verify_backend(user_backends.RAISES) if cell.status != "n/a"]
    assert len(asked) > 10
    for cell in asked:
        assert cell.status == "red"
        assert "KeyError" in cell.note and "my kernel's table" in cell.note


def test_a_call_that_raises_is_red_in_each_property_that_makes_it():
    """A regression test: only the first of them was red, and the others left the call out."""

    def fails_at_300(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
        if q.shape[2] == 300:
            raise RuntimeError("300 is too long")
        return naive(q, k, v, **arguments)

    backend = Backend("fails", fails_at_300, features=frozenset({"lse"}))
    assert red(backend, "forward", "gradients", "lse") == {"forward", "gradients", "lse"}


def test_a_kernel_that_leaves_the_gpu_unusable_is_red_and_nothing_after_it_runs(monkeypatch):
    """The error appears at the end of the property that launched the kernel, and ever after."""
    subject = Subject(get_backend("naive"), "cuda", torch.float32, 0, 0)
    launched = []

    def synchronize():
        if launched:
            raise torch.AcceleratorError("CUDA error: an illegal memory access\nSearch for it")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("raises without a GPU"))
    first = examine(subject, "forward", lambda subject: iter([launched.append(1)][1:]))
    assert first.status == "red" and "illegal memory access" in first.note
    second = examine(subject, "lse", lambda subject: pytest.fail("examined"))
    assert second.status == "red" and "not examined" in second.note


def test_a_backend_for_one_head_dim_is_asked_for_no_other():
    features = frozenset({"gqa", "non_causal", "cross_length"})
    backend = Backend("one", naive, head_dims=(24,), features=features)
    found = column(backend, quick=True)
    assert "red" not in found.values() and found["forward"] == found["mask positions"] == "green"


def test_refusals_say_why():
    (cell,) = verify_backend(user_backends.RIGHT, properties=["grouped heads"])
    assert cell.status == "n/a" and "gqa" in cell.note and "non_causal" in cell.note
    narrow = {"properties": ["forward"], "dtype": torch.bfloat16}
    (cell,) = verify_backend(user_backends.RIGHT_IN_FP32, **narrow)
    assert cell.status == "n/a" and "float32" in cell.note and "bfloat16" in cell.note


def test_breaks_names_properties():
    """An unknown one is refused before any property is examined."""
    backend = replace(user_backends.RIGHT, breaks=frozenset({"speed"}))
    with pytest.raises(ValueError, match="right .*speed.*forward, gradients"):
        verify_backend(backend)


def test_random_cases_follow_the_seed_and_what_the_backend_takes():
    def drawn(backend: Backend, seed: int) -> str:
        subject = Subject(backend, "cpu", torch.float32, random_cases=30, seed=seed)
        return " ".join(map(str, subject.random()))

    tiled, right = get_backend("tiled"), user_backends.RIGHT
    assert drawn(tiled, 3) == drawn(tiled, 3) != drawn(tiled, 4)
    for word in ("kv", "-M", "full"):
        assert word in drawn(tiled, 0) and word not in drawn(right, 0)


def test_the_gradient_of_a_sink_that_holds_next_to_nothing():
    """A regression test: the reference rounded it to zero, so exact attention was red."""
    sunk = {"softcap": 64.0, "sinks": True}
    case = Case(num_heads=1, num_kv_heads=1, inputs="down", optional=sunk, seed=3)
    expected = expect(case, torch.float32, "cpu")
    reference = expected.reference["dsinks"]
    assert 0 < reference.abs() < 1e-20
    found = run("naive", *expected.inputs)["dsinks"]
    assert torch.allclose(found, reference, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("dtype", "inputs", "softcap"),
    [(torch.float32, "up", 1.0), (torch.float16, "negative", 16.0)],
)
def test_weights_too_small_for_the_dtype_beside_a_sink_may_be_zero(dtype, inputs, softcap):
    shape = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 64}
    case = Case(**shape, inputs=inputs, optional={"softcap": softcap, "sinks": True})
    expected = expect(case, dtype, "cpu")
    flushed = dict(expected.reference)
    for name in ("out", "dq", "dk", "dv"):
        assert flushed[name].abs().max() < 1e-5
        flushed[name] = torch.zeros_like(flushed[name])
    assert all(check.share < 1 for check in expected.checks(case, flushed).values())
    flushed["out"] = flushed["out"] + 1e-4
    assert expected.checks(case, flushed)["out"].share > 1
