"""The probe lets a backend through that a run could trust, and says in one sentence what is wrong
with any other.
"""

import re
from dataclasses import replace

import pytest
import torch

from attention import BACKENDS, AttentionOutput, Backend, attention, get_backend, probe_backend

SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "device": torch.device("cpu")}


def naive(q, k, v, *, causal, scale, **optional) -> AttentionOutput:
    return attention(q, k, v, backend="naive", causal=causal, scale=scale, **optional)


def backend(fn, **properties) -> Backend:
    return Backend("mine", fn, features=frozenset({"gqa"}), **properties)


def verdict(fn, *, dtype: torch.dtype = torch.float32, **properties) -> str:
    with pytest.raises(ValueError) as refused:
        probe_backend(backend(fn, **properties), dtype=dtype, **SHAPE)
    return str(refused.value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
def test_accepts_a_right_one(dtype):
    probe_backend(backend(naive), dtype=dtype, **SHAPE)


@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in ("flex", "triton")])
def test_accepts_the_table(name):
    """Exact or broken on purpose: what a run may be started with. (The two others need a GPU, or
    are slow without.)
    """
    probe_backend(get_backend(name), dtype=torch.float32, **SHAPE)


def test_accepts_what_does_not_claim_to_be_exact():
    probe_backend(
        backend(
            lambda q, k, v, *, causal, scale: naive(q, k, v, causal=causal, scale=0.5), exact=False
        ),
        dtype=torch.float32,
        **SHAPE,
    )


def test_nan():
    assert (
        verdict(lambda q, k, v, **arguments: AttentionOutput(q / 0))
        == "attention=mine returns NaN or inf for ordinary inputs"
    )


@pytest.mark.parametrize("exact", [True, False])
def test_ignoring_causal(exact):
    text = verdict(
        lambda q, k, v, *, causal, scale: naive(q, k, v, causal=False, scale=scale), exact=exact
    )
    assert re.match(
        r"attention=mine is not causal: changing keys 75:150 moved the outputs of queries "
        r"0:75 by [\d.]+;",
        text,
    )


def test_seeing_one_key_of_the_future():
    def shifted(q, k, v, *, causal, scale):
        return AttentionOutput(naive(q, k, v.roll(-1, 2), causal=causal, scale=scale).out)

    assert "is not causal" in verdict(shifted)


def test_documents_that_see_one_another():
    apart = frozenset({"gqa", "document_ids"})
    deaf = replace(
        backend(lambda q, k, v, *, document_ids=None, **rest: naive(q, k, v, **rest)),
        features=apart,
    )
    with pytest.raises(
        ValueError,
        match="declares the feature document_ids and does not keep documents apart: changing "
        "keys 0:75 moved",
    ):
        probe_backend(deaf, dtype=torch.float32, **SHAPE)
    probe_backend(replace(backend(naive), features=apart), dtype=torch.float32, **SHAPE)


def test_no_gradient_at_all():
    assert "attention=mine cuts the gradient" in verdict(
        lambda q, k, v, **arguments: AttentionOutput(naive(q, k, v, **arguments).out.detach())
    )


@pytest.mark.parametrize("missing", ["q", "k", "v"])
def test_no_gradient_for_one_input(missing):
    def partly(q, k, v, **arguments):
        inputs = {"q": q, "k": k, "v": v}
        return naive(**inputs | {missing: inputs[missing].detach()}, **arguments)

    heads = 4 if missing == "q" else 2
    assert (
        verdict(partly) == f"attention=mine gives no gradient for {missing} (1, {heads}, 150, 16)"
    )


def test_gradient_that_is_not_finite():
    def root_of_nothing(q, k, v, **arguments):
        return AttentionOutput(naive(q, k, v, **arguments).out + (q - q).abs().sqrt())

    assert (
        verdict(root_of_nothing)
        == "attention=mine gives a non-finite gradient for q (1, 4, 150, 16)"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_claiming_to_be_exact(dtype):
    text = verdict(
        lambda q, k, v, *, causal, scale: naive(q, k, v, causal=causal, scale=1.1 * scale),
        dtype=dtype,
    )
    assert re.match(
        r"attention=mine says exact=True, but its out is [\d.]+ away from softmax attention in "
        r"float64 where [\d.e-]+ is",
        text,
    )
    assert "declare exact=False" in text


def test_right_output_with_a_wrong_gradient():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    text = verdict(lambda q, k, v, **arguments: naive(q, Doubled.apply(k), v, **arguments))
    assert text.startswith("attention=mine says exact=True, but its dk is ")


@pytest.mark.parametrize("name", ["no_rescale", "local_softmax"])
def test_a_defect_that_hides_what_it_is(name):
    """Several tiles are crossed: what one tile would hide is seen."""
    hidden = replace(get_backend(name), exact=True, defect=None)
    with pytest.raises(ValueError, match=f"attention={name} says exact=True, but its out is"):
        probe_backend(hidden, dtype=torch.float32, **SHAPE)


def scales_q(q, k, v, **arguments):
    q.mul_(2)
    return naive(q, k, v, **arguments)


def zeroes_v_where_nobody_trains(q, k, v, **arguments):
    if not torch.is_grad_enabled():
        v.zero_()
    return naive(q, k, v, **arguments)


class Twice(torch.autograd.Function):
    """Its backward pass doubles the gradient that it is given."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, d_out):
        return d_out.mul_(2)


def doubles_d_out(q, k, v, **arguments):
    return AttentionOutput(Twice.apply(naive(q, k, v, **arguments).out / 2))


@pytest.mark.parametrize(
    ("fn", "name"), [(scales_q, "q"), (zeroes_v_where_nobody_trains, "v"), (doubles_d_out, "d_out")]
)
def test_writing_into_what_it_is_given(fn, name):
    """A regression test: it was let pass, or said not to be causal."""
    text = verdict(fn, exact=False)
    assert text.startswith(f"attention=mine writes into {name}, which others")


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
    assert text.startswith(f"attention=mine changes torch.{read.__name__}() from {before} to ")
    assert read() == before
    # a default device, even the usual one, intercepts every call; graphs then do not compile whole
    assert not torch.overrides._get_current_function_mode_stack()


def unpacks(x) -> None:
    _, _, _ = x.shape


class UnpacksItsGradient(Twice):
    @staticmethod
    def backward(ctx, d_out):
        unpacks(d_out)


def fails_outside_of_training(q, k, v, **arguments):
    if not torch.is_grad_enabled():
        unpacks(q)
    return naive(q, k, v, **arguments)


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, k, v, **arguments: unpacks(q),
        lambda q, k, v, **arguments: AttentionOutput(
            UnpacksItsGradient.apply(naive(q, k, v, **arguments).out)
        ),
        fails_outside_of_training,
        lambda q, k, v, **arguments: torch.zeros(2).split(0),
    ],
    ids=["forward", "backward", "no_grad", "in-torch"],
)
def test_an_error_is_located_in_the_users_file(fn):
    """A regression test: a ValueError came bare, and a place in torch helped nobody."""
    said = r"attention=mine fails on ordinary inputs: \w+Error: .* \(.*test_probe.py, line \d+\)"
    assert re.fullmatch(said, verdict(fn, exact=False))


def test_refusals_and_broken_promises_come_through():
    assert "it takes float16, the inputs are float32" in verdict(naive, dtypes=(torch.float16,))
    assert "it has no backward pass" in verdict(naive, backward=False)
    assert "must return AttentionOutput(out, lse), it returned Tensor" in verdict(
        lambda q, k, v, **arguments: q
    )


@pytest.mark.parametrize(
    ("interpreted", "way_out"),
    [
        ("0", "Triton needs a GPU, or TRITON_INTERPRET=1 set before the start"),
        ("1", "Triton needs a GPU for this, even with TRITON_INTERPRET=1"),
    ],
)
def test_a_kernel_without_a_gpu(monkeypatch, tmp_path, interpreted, way_out):
    """Triton's own message does not say what is missing, neither in a call nor in an import."""
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    raised = "raise RuntimeError('0 active drivers ([]). There should only be one.')"
    (tmp_path / "needs_a_gpu.py").write_text(raised)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=way_out):
        get_backend("needs_a_gpu:BACKEND")
    assert verdict(lambda *tensors, **arguments: exec(raised)).endswith(f"; {way_out}")
