"""The try-out lets a backend through that a run could trust, and says in one sentence what is wrong
with any other.

Dimensions: B batch, H query heads, H_kv key/value heads, N tokens, D head dim.
"""

import re
from dataclasses import replace

import pytest
import torch

from attention import BACKENDS, AttentionOutput, Backend, attention, get_backend
from attention.look.try_out import try_out


def handed_over(dtype: torch.dtype = torch.float32, length: int = 150) -> list[torch.Tensor]:
    """q (2, 4, N, 16), k and v (2, 2, N, 16), views of a projection (2, N, 8, 16) as in a model."""
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(2, length, 8, 16, generator=generator).to(dtype)
    heads = projected.requires_grad_().clone().transpose(1, 2)
    return [heads[:, :4], heads[:, 4:6], heads[:, 6:]]


def naive(q, k, v, *, causal, scale, **optional) -> AttentionOutput:
    return attention(q, k, v, backend="naive", causal=causal, scale=scale, **optional)


def backend(fn, **properties) -> Backend:
    return Backend("mine", fn, **{"features": frozenset({"gqa"})} | properties)


def verdict(fn, *, dtype: torch.dtype = torch.float32, **properties) -> str:
    with pytest.raises(ValueError) as refused:
        try_out(backend(fn, **properties), *handed_over(dtype))
    return str(refused.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accepts_a_right_one(dtype):
    try_out(backend(naive), *handed_over(dtype))


@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in ("flex", "triton")])
def test_accepts_the_table(name):
    """Exact or broken on purpose: what a run may be started with. (The two others need a GPU, or
    are slow without.)
    """
    try_out(get_backend(name), *handed_over())


def halves_the_scale(q, k, v, *, causal, scale):
    return naive(q, k, v, causal=causal, scale=scale / 2)


def test_accepts_what_does_not_claim_to_be_exact():
    try_out(backend(halves_the_scale, exact=False), *handed_over())


def returns_nan(q, k, v, **arguments):
    return AttentionOutput(q / 0)


def sees_the_future(q, k, v, *, causal, scale):
    return naive(q, k, v, causal=False, scale=scale)


def sees_one_key_of_the_future(q, k, v, **arguments):
    return naive(q, k, v.roll(-1, 2), **arguments)


def mixes_documents(q, k, v, *, document_ids=None, **arguments):
    return naive(q, k, v, **arguments)


def cuts_the_gradient(q, k, v, **arguments):
    return AttentionOutput(naive(q, k, v, **arguments).out.detach())


def no_gradient_for_q(q, k, v, **arguments):
    return naive(q.detach(), k, v, **arguments)


def no_gradient_for_k(q, k, v, **arguments):
    return naive(q, k.detach(), v, **arguments)


def no_gradient_for_v(q, k, v, **arguments):
    return naive(q, k, v.detach(), **arguments)


def root_of_nothing(q, k, v, **arguments):
    return AttentionOutput(naive(q, k, v, **arguments).out + (q - q).abs().sqrt())


class Twice(torch.autograd.Function):
    """Its backward pass doubles the gradient that it is given, in place."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, d_out):
        return d_out.mul_(2)


class DoubledGradient(Twice):
    """The identity, with twice its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d_out):
        return 2 * d_out


def doubles_the_gradient_of_k(q, k, v, **arguments):
    return naive(q, DoubledGradient.apply(k), v, **arguments)


def writes_into_q(q, k, v, **arguments):
    q.mul_(2)
    return naive(q, k, v, **arguments)


def writes_into_v_where_nobody_trains(q, k, v, **arguments):
    if not torch.is_grad_enabled():
        v.zero_()
    return naive(q, k, v, **arguments)


def writes_into_d_out(q, k, v, **arguments):
    return AttentionOutput(Twice.apply(naive(q, k, v, **arguments).out / 2))


def returns_a_tensor(q, k, v, **arguments):
    return q


INEXACT = {"exact": False}
DOCUMENTS = {"features": frozenset({"gqa", "document_ids"})}
# the backend, how it is declared, and what the verdict must name
WRONG = [
    (returns_nan, {}, "NaN or inf"),
    (sees_the_future, {}, "not causal", "keys 75:150", "queries 0:75"),
    (sees_the_future, INEXACT, "not causal", "keys 75:150", "queries 0:75"),
    (sees_one_key_of_the_future, {}, "not causal"),
    (mixes_documents, DOCUMENTS, "documents", "keys 0:75"),
    (cuts_the_gradient, {}, "no gradient"),
    (no_gradient_for_q, {}, "no gradient for q (2, 4, 150, 16)"),
    (no_gradient_for_k, {}, "no gradient for k (2, 2, 150, 16)"),
    (no_gradient_for_v, {}, "no gradient for v (2, 2, 150, 16)"),
    (root_of_nothing, {}, "non-finite", "q (2, 4, 150, 16)"),
    (halves_the_scale, {}, "exact=True", "its out is", "exact=False"),
    (halves_the_scale, {"dtype": torch.bfloat16}, "exact=True", "its out is", "exact=False"),
    (doubles_the_gradient_of_k, {}, "exact=True", "its dk is"),
    # these were let pass, or said not to be causal
    (writes_into_q, INEXACT, "writes into q,"),
    (writes_into_v_where_nobody_trains, INEXACT, "writes into v,"),
    (writes_into_d_out, INEXACT, "writes into d_out,"),
    # refusals and broken promises come through
    (naive, {"dtypes": (torch.float16,)}, "float16", "float32"),
    (naive, {"backward": False}, "backward"),
    (returns_a_tensor, {}, "AttentionOutput", "Tensor"),
]


@pytest.mark.parametrize("number", range(len(WRONG)), ids=lambda i: f"{i}-{WRONG[i][0].__name__}")
def test_what_no_run_could_trust_is_refused(number):
    fn, declared, *named = WRONG[number]
    text = verdict(fn, **declared)
    assert text.startswith("attention=mine ") and all(name in text for name in named), text


def test_accepts_what_keeps_documents_apart():
    try_out(backend(naive, **DOCUMENTS), *handed_over())


@pytest.mark.parametrize("name", ["no_rescale", "local_softmax"])
def test_a_defect_that_hides_what_it_is(name):
    """Several tiles are crossed: what one tile would hide is seen."""
    hidden = replace(get_backend(name), exact=True, defect=None)
    with pytest.raises(ValueError, match=f"attention={name} .*exact=True.* out "):
        try_out(hidden, *handed_over())


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
        (torch.get_default_device, lambda: torch.set_default_device("meta")),
        (
            torch.get_float32_matmul_precision,
            lambda: torch.set_float32_matmul_precision("medium"),
        ),
        (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
        (torch.initial_seed, lambda: torch.manual_seed(1)),
    ],
    ids=["dtype", "device", "precision", "gradients", "seed"],
)
def test_changing_what_holds_for_the_whole_program(read, change):
    """A regression test: a run went on in float64. It is put back: a sweep has other jobs."""
    before = read()

    def changing(q, k, v, **arguments):
        change()
        return naive(q, k, v, **arguments)

    text = verdict(changing)
    assert f"torch.{read.__name__}() from {before} to " in text
    assert read() == before
    # a default device, even the usual one, intercepts every call; graphs then do not compile whole
    assert not torch.overrides._get_current_function_mode_stack()


def unpacks(x) -> None:
    _, _, _ = x.shape


class UnpacksItsGradient(Twice):
    @staticmethod
    def backward(ctx, d_out):
        unpacks(d_out)


def fails_at_once(q, k, v, **arguments):
    unpacks(q)


def fails_in_its_backward_pass(q, k, v, **arguments):
    return AttentionOutput(UnpacksItsGradient.apply(naive(q, k, v, **arguments).out))


def fails_outside_of_training(q, k, v, **arguments):
    if not torch.is_grad_enabled():
        unpacks(q)
    return naive(q, k, v, **arguments)


def fails_in_torch(q, k, v, **arguments):
    return torch.zeros(2).split(0)


@pytest.mark.parametrize(
    "fn",
    [fails_at_once, fails_in_its_backward_pass, fails_outside_of_training, fails_in_torch],
)
def test_an_error_is_located_in_the_users_file(fn):
    """A regression test: a ValueError came bare, and a place in torch helped nobody."""
    said = r"attention=mine .*\w+Error: .* \(.*test_try_out.py, line \d+\)"
    assert re.fullmatch(said, verdict(fn, exact=False))


PACKED = torch.contiguous_format


def as_if_contiguous(x):
    """What a kernel reads that takes a tensor as contiguous."""
    return x.as_strided(x.shape, torch.empty_like(x, memory_format=PACKED).stride())


class TritonCopy(torch.autograd.Function):
    """A contiguous copy by a Triton kernel that counts elements instead of reading strides."""

    @staticmethod
    def forward(ctx, x):
        triton = pytest.importorskip("triton")
        from tests.attention.look.copy_kernel import copy_elements

        out = torch.empty_like(x, memory_format=PACKED)
        copy_elements[(triton.cdiv(out.numel(), 256),)](x.detach(), out, out.numel(), BLOCK=256)
        return out

    @staticmethod
    def backward(ctx, d_out):
        return d_out


class SumsItsGradient(torch.autograd.Function):
    """The identity, whose backward pass takes its gradient as contiguous."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d_out):
        return as_if_contiguous(d_out)


def takes_q_as_contiguous(q, k, v, **arguments):
    return naive(as_if_contiguous(q), k, v, **arguments)


def takes_v_as_contiguous(q, k, v, **arguments):
    return naive(q, k, as_if_contiguous(v), **arguments)


def views_q_as_rows(q, k, v, **arguments):
    return naive(q.view(-1, q.shape[3]).view(q.shape), k, v, **arguments)


def takes_q_as_contiguous_in_triton(q, k, v, **arguments):
    return naive(TritonCopy.apply(q), k, v, **arguments)


def takes_d_out_as_contiguous(q, k, v, **arguments):
    return AttentionOutput(SumsItsGradient.apply(naive(q, k, v, **arguments).out))


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "variant"])
@pytest.mark.parametrize(
    "fn",
    [
        takes_q_as_contiguous,
        takes_v_as_contiguous,
        views_q_as_rows,
        takes_q_as_contiguous_in_triton,
        takes_d_out_as_contiguous,
    ],
)
def test_what_takes_a_tensor_as_contiguous_is_refused_by_the_strides(fn, exact):
    """A regression test: the tensors of the try-out were contiguous, and such a kernel trained."""
    text = verdict(fn, exact=exact)
    assert text.startswith("attention=mine ") and "\n" not in text
    batch, row = 150 * 8 * 16, 8 * 16
    assert f"strides of the model, q ({batch}, 16, {row}, 1), " in text
    assert f"d_out ({batch // 2}, 16, {row // 2}, 1)" in text


def test_a_kernel_for_the_layout_of_the_model_alone_is_taken():
    """It is never asked for another one."""

    def reads_a_projection(q, k, v, **arguments):
        assert q.stride() == k.stride() == v.stride() == (19200, 16, 128, 1)
        return naive(q, k, v, **arguments)

    try_out(backend(reads_a_projection), *handed_over())


def test_random_features_are_no_fault_of_the_strides():
    def noisy(q, k, v, **arguments):
        return naive(q + torch.randn_like(q), k, v, **arguments)

    torch.manual_seed(7)
    before = torch.get_rng_state()
    try_out(backend(noisy, **INEXACT), *handed_over())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("length", [1, 2, 700])
def test_any_length_is_taken_as_it_is(length):
    """Naive attention in float64 is computed for the first tokens alone."""
    seen = set()

    def noted(q, k, v, **arguments):
        seen.add(q.shape)
        return naive(q, k, v, **arguments)

    try_out(backend(noted), *handed_over(length=length))
    assert seen == {(2, 4, length, 16)}


@pytest.mark.parametrize("interpreted", ["0", "1"])
def test_a_kernel_without_a_gpu(monkeypatch, tmp_path, interpreted):
    """Triton's own message does not say what is missing, neither in a call nor in an import."""
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    raised = "raise RuntimeError('0 active drivers ([]). There should only be one.')"
    (tmp_path / "needs_a_gpu.py").write_text(raised)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="needs a GPU.*TRITON_INTERPRET=1"):
        get_backend("needs_a_gpu:BACKEND")
    way_out = verdict(lambda *tensors, **arguments: exec(raised)).rpartition("; ")[2]
    assert "needs a GPU" in way_out
    # where it is set already, the variable is no way out
    assert ("set before" in way_out) == (interpreted == "0")
