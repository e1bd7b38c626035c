"""Tests of the properties themselves: green for a right backend, red for each kind of wrong one,
never a crash.

Dimensions: B batch, H heads, N queries, M keys, D head dim.
"""

import inspect
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention import BACKENDS, AttentionOutput, Backend, attention, get_backend
from attention.interface import PROPERTY_NAMES
from conformance.backend_under_test import Subject
from conformance.properties import PROPERTIES, SLOW, examine, red_properties, verify_backend
from tests import user_backends
from tests.selection import diagonal

naive = get_backend("naive").fn
MEMORY = frozenset({"saved bytes", "largest tensor"})
# interpreted, Triton takes a minute for what the conformance tests show as well, and FlexAttention
# without a compiler half of one
DEAR = ("ring", "ring_no_max", "ring_no_rescale", "ring_local_softmax")
IN_REACH = [name for name in BACKENDS if name not in ("triton", "flex")]


def column(backend: Backend, *names: str, **options) -> dict[str, str]:
    """Status by property."""
    cells = verify_backend(backend, random_cases=2, properties=names or None, **options)
    return {cell.property: cell.status for cell in cells}


def red(backend: Backend, *names: str) -> set[str]:
    return {
        name for name, status in column(backend, *names, quick=not names).items() if status == "red"
    }


def test_every_property_says_what_it_asks():
    for name, check in PROPERTIES.items():
        assert inspect.isgeneratorfunction(check) and check.__doc__, name
    assert set(PROPERTIES) >= SLOW


# one broken merge stays, with fewer ranks: each takes seconds
MARKED = [
    pytest.param(get_backend(name), marks=pytest.mark.slow if name in DEAR else (), id=name)
    for name in IN_REACH
]
MARKED.append(pytest.param(get_backend("ring_no_max", ranks=2), id="ring_no_max-of-2"))


@pytest.mark.parametrize("backend", MARKED)
def test_red_exactly_where_documented(backend):
    cells = verify_backend(backend, random_cases=6, quick=True)
    assert all(cell.ok for cell in cells), [
        (cell.property, cell.status, cell.note) for cell in cells if not cell.ok
    ]
    # it was looked at: an exact backend is not green because it refused everything
    assert sum(cell.checks for cell in cells) > 150
    if backend.exact:
        assert not any(cell.status == "red" for cell in cells)


@pytest.mark.parametrize(
    ("name", "dtype"),
    diagonal(
        ["tiled", "lazy_rescale", "sdpa", "no_rescale"],
        {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64},
    ),
)
def test_in_other_dtypes(name, dtype):
    cells = verify_backend(get_backend(name), random_cases=3, quick=True, dtype=dtype)
    assert all(cell.ok for cell in cells), [
        (cell.property, cell.status, cell.note) for cell in cells if not cell.ok
    ]


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.bfloat16, marks=pytest.mark.slow, id="bf16"), torch.float16],
)
def test_no_max_dies_of_the_same_inputs_in_every_dtype(dtype):
    cells = verify_backend(get_backend("no_max"), random_cases=3, quick=True, dtype=dtype)
    assert {cell.property for cell in cells if cell.status == "red"} == get_backend("no_max").breaks


@pytest.mark.parametrize("name", ["naive", "tiled", "sdpa", "no_max"])
def test_the_slow_properties(name):
    cells = verify_backend(get_backend(name), properties=SLOW)
    assert {cell.property for cell in cells} == SLOW and all(
        cell.ok and cell.status != "n/a" for cell in cells
    )


def test_triton_refuses_without_its_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cells = verify_backend(get_backend("triton"), quick=True, random_cases=2)
    assert {cell.status for cell in cells} == {"n/a"}
    assert all(
        "TRITON_INTERPRET=1" in cell.note for cell in cells if cell.property != "block sizes"
    )


@pytest.mark.parametrize("name", ["triton", "flex"])
def test_backends_that_are_slow_on_a_cpu(name):
    if torch.cuda.is_available() and name == "triton":
        pytest.skip("with a GPU the Triton kernels are compiled, not interpreted")
    names = ("rows sum to one", "prefill = decode")
    assert set(column(get_backend(name), *names).values()) == {"green"}


# backends of a user's, each wrong in one way


def shiftless(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> AttentionOutput:
    """softmax without its maximum, as in a first draft."""
    p = torch.exp(q @ k.mT * scale).tril()
    return AttentionOutput(p / p.sum(-1, keepdim=True) @ v)


def contiguous_only(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    """Reads the storage of its arguments as if they were contiguous."""

    def reread(x: Tensor) -> Tensor:
        return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())

    return naive(reread(q), reread(k), reread(v), **arguments)


def top_left(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> AttentionOutput:
    """Aligns the causal mask with the first key."""
    scores = (q @ k.mT * scale).masked_fill(
        ~torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(), -torch.inf
    )
    return AttentionOutput((scores if causal else q @ k.mT * scale).softmax(-1) @ v)


def first_head(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    """Assigns key/value heads to query heads in turn instead of in groups."""
    repeats = q.shape[1] // k.shape[1]
    return naive(q, k.repeat(1, repeats, 1, 1), v.repeat(1, repeats, 1, 1), **arguments)


def noisy(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    out, lse = naive(q, k, v, **arguments)
    # element by element: some of them change their last bit at every call
    return AttentionOutput(out * (1 + 1e-7 * torch.rand_like(out)), lse)


def two_faced(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    return AttentionOutput(
        naive(q, k, v, **arguments).out * (2 if torch.compiler.is_compiling() else 1)
    )


def detached_keys(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    return naive(q, k.detach() + 0 * k, v, **arguments)


def base_two(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    out, lse = naive(q, k, v, **arguments)
    return AttentionOutput(out, lse * 1.4426950408889634)


class KeptLayout(torch.autograd.Function):
    """Reads every d_out with the strides of the first d_out of its shape."""

    strides: dict[torch.Size, tuple[int, ...]] = {}

    @staticmethod
    def forward(ctx, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> Tensor:
        kept = KeptLayout.strides.setdefault(d_out.shape, d_out.stride())
        return d_out.as_strided(d_out.shape, kept)


def compiled_once(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    """Makes the mistake with which PyTorch calls cuDNN's backward pass."""
    return AttentionOutput(KeptLayout.apply(attention(q, k, v, backend="naive", **arguments).out))


def promised(q: Tensor, k: Tensor, v: Tensor, **arguments) -> AttentionOutput:
    return AttentionOutput(naive(q, k, v, **arguments).out)


def test_a_backend_that_passes_on_ordinary_inputs_is_caught():
    """The usual test, allclose on randn, passes it at every length and in the gradients."""
    backend = Backend("shiftless", shiftless)
    for length in (16, 64, 200):
        generator = torch.Generator().manual_seed(length)
        q, k, v = (
            torch.randn(2, 2, length, 32, generator=generator, requires_grad=True) for _ in range(3)
        )
        outs = [attention(q, k, v, backend=name).out for name in (backend, "naive")]
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(
            *(torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outs)
        )
    found = column(backend, quick=True)
    expected = [name for name in PROPERTIES if name in get_backend("no_max").breaks]
    assert [name for name, status in found.items() if status == "red"] == expected
    assert red_properties(backend, device="cpu", dtype=torch.float32) == expected
    # what it does not declare is not asked of it
    not_asked = {
        "lse",
        "block sizes",
        "first tile masked",
        "rows without a key",
        "N != M",
        "grouped heads",
        "optional arguments",
        "wider calls",
    }
    assert {name for name, status in found.items() if status == "n/a"} == not_asked | {
        "prefill = decode",
        "cache and pages",
        "streams and graphs",
    }


ALL = frozenset({"gqa", "non_causal", "cross_length"})
WRONG = {
    "contiguous_only": (Backend("wrong", contiguous_only), {"strides and views"}),
    "top_left": (
        Backend("wrong", top_left, features=frozenset({"cross_length", "non_causal"})),
        {
            "forward",
            "gradients",
            "logits - 120",
            "float32 statistics",
            "rows without a key",
            "N != M",
            "mask positions",
            "prefill = decode",
        },
    ),
    "first_head": (
        Backend("wrong", first_head, features=frozenset({"gqa"})),
        {"forward", "gradients", "grouped heads", "row independence"},
    ),
    "base_two": (Backend("wrong", base_two, features=frozenset({"lse"})), None),
    "promised": (Backend("wrong", promised, features=frozenset({"lse"})), None),
    "not_causal": (user_backends.NOT_CAUSAL, None),
    "nan": (user_backends.NAN, None),
    "scale": (user_backends.WRONG, None),
}


@pytest.mark.parametrize(("backend", "expected"), WRONG.values(), ids=WRONG)
def test_each_way_to_be_wrong(backend, expected):
    found = red(backend)
    if expected is not None:
        assert found == expected
    assert found


def test_a_promised_lse_is_asked_for():
    assert column(Backend("promised", promised, features=frozenset({"lse"})), "lse") == {
        "lse": "red"
    }
    assert column(Backend("silent", promised), "lse") == {"lse": "n/a"}


@pytest.mark.parametrize(
    ("function", "name", "others"),
    [
        (noisy, "bitwise repeat", ("forward", "compiled = eager")),
        (two_faced, "compiled = eager", ("forward", "bitwise repeat")),
        (detached_keys, "gradients", ("forward", "no leak (gradients)")),
        (compiled_once, "call history", ("forward", "gradients", "bitwise repeat")),
    ],
)
def test_what_only_one_property_sees(function, name, others):
    assert red(Backend("wrong", function), name, *others) == {name}


def in_its_own_dtype(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> AttentionOutput:
    """A typical first version: right in float32."""
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return AttentionOutput(scores.softmax(-1) @ v)


def test_statistics_in_the_inputs_dtype_are_red_in_float32_too():
    """In float32, the dtype for a CPU, a softmax in the inputs' dtype is right. The property still
    checks it in bfloat16.
    """
    assert red(get_backend("tiled", softmax_dtype="input")) == {"float32 statistics"}
    plain = Backend("plain", in_its_own_dtype, features=frozenset({"non_causal"}))
    assert red(plain) == {"float32 statistics"}
    # it can be documented, or not be taken
    assert all(
        cell.ok
        for cell in verify_backend(
            replace(plain, breaks=frozenset({"float32 statistics"})), quick=True, random_cases=2
        )
    )
    (cell,) = verify_backend(
        replace(plain, dtypes=(torch.float32,)), properties=["float32 statistics"]
    )
    assert cell.status == "n/a" and "it takes float32, the inputs are bfloat16" in cell.note


def test_not_causal_is_told_by_the_leak():
    assert {"no leak (outputs)", "no leak (gradients)", "mask positions"} <= red(
        user_backends.NOT_CAUSAL
    )
    assert "rows sum to one" not in red(user_backends.NOT_CAUSAL)


def test_a_backend_that_raises_is_red_with_its_words():
    cells = verify_backend(user_backends.RAISES)
    asked = [cell for cell in cells if cell.status != "n/a"]
    assert len(asked) > 10
    assert all(
        cell.status == "red" and cell.note == 'KeyError: "my kernel\'s table"' for cell in asked
    )


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
    assert (first.status, first.note) == (
        "red",
        "AcceleratorError: CUDA error: an illegal memory access",
    )
    second = examine(subject, "lse", lambda subject: pytest.fail("examined"))
    assert second.status == "red" and "not examined: an earlier property" in second.note


def test_a_backend_of_wrong_shapes_is_red_with_the_shapes():
    (cell,) = verify_backend(user_backends.WRONG_SHAPE, properties=["forward"])
    assert cell.status == "red" and "must return out of shape (2, 4, 70, 16)" in cell.note


def test_a_backend_for_one_head_dim_is_asked_for_no_other():
    backend = Backend("one", naive, head_dims=(24,), features=ALL)
    found = column(backend, quick=True)
    assert "red" not in found.values() and found["forward"] == found["mask positions"] == "green"


def test_refusals_say_why():
    (cell,) = verify_backend(user_backends.RIGHT, properties=["grouped heads"])
    assert (
        cell.status == "n/a"
        and cell.note == "it does not support gqa; it does not support non_causal"
    )
    (cell,) = verify_backend(
        user_backends.RIGHT_IN_FP32, properties=["forward"], dtype=torch.bfloat16
    )
    assert cell.status == "n/a" and cell.note.startswith(
        "it takes float32, the inputs are bfloat16"
    )


def test_documented_and_green_is_a_mistake_too():
    backend = replace(user_backends.RIGHT, breaks=frozenset({"forward"}))
    (cell,) = verify_backend(backend, properties=["forward"])
    assert cell.status == "green" and cell.documented and not cell.ok


def test_breaks_names_properties():
    """Whoever declares the backend hears of a mistake, before any property is examined."""
    assert list(PROPERTIES) == PROPERTY_NAMES
    with pytest.raises(
        ValueError, match="'right' breaks speed; properties: forward, gradients, lse"
    ):
        replace(user_backends.RIGHT, breaks=frozenset({"speed"}))


def test_memory_is_seen_and_may_be_documented():
    assert red(user_backends.RIGHT, *MEMORY) == MEMORY
    assert all(
        cell.ok
        for cell in verify_backend(replace(user_backends.RIGHT, breaks=MEMORY), properties=MEMORY)
    )


def test_random_cases_follow_the_seed_and_what_the_backend_takes():
    def drawn(backend: Backend, seed: int) -> list[str]:
        return [
            str(case)
            for case in Subject(backend, "cpu", torch.float32, random_cases=30, seed=seed).random()
        ]

    assert (
        drawn(get_backend("tiled"), 3)
        == drawn(get_backend("tiled"), 3)
        != drawn(get_backend("tiled"), 4)
    )
    assert len(set(drawn(get_backend("tiled"), 3))) == 30
    assert any("kv" in case for case in drawn(get_backend("tiled"), 0)) and any(
        "-M" in case for case in drawn(get_backend("tiled"), 0)
    )
    assert not any(
        "kv" in case or "-M" in case or "full" in case for case in drawn(user_backends.RIGHT, 0)
    )


def test_a_column_is_quick_where_it_must_be():
    """All properties use one subject: forward, gradients and lse share their runs."""
    subject = Subject(get_backend("tiled"), "cpu", torch.float32, random_cases=3, seed=0)
    cells = [examine(subject, name) for name in ("forward", "gradients", "lse")]
    assert len({cell.checks for cell in cells[:1]}) == 1 and len(subject.rows) == 8
    assert cells[1].checks == 3 * cells[0].checks
