"""The try-out lets a backend through that a run could trust, and says in one sentence what is wrong
with any other.

Dimensions: B batch, H query heads, H_kv key/value heads, N tokens, D head dim.
"""

import math
import re

import pytest
import torch

from attention import (
    BACKENDS,
    AttentionOutput,
    Backend,
    ScoredOutput,
    ScoreMod,
    attention,
    get_backend,
)
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


def halves_the_scale(q, k, v, *, causal, scale):
    return naive(q, k, v, causal=causal, scale=scale / 2)


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


def no_gradient_for_k(q, k, v, **arguments):
    return naive(q, k.detach(), v, **arguments)


def root_of_nothing(q, k, v, **arguments):
    return AttentionOutput(naive(q, k, v, **arguments).out + (q - q).abs().sqrt())


def never_rescales(q, k, v, **arguments):
    return attention(q, k, v, backend="no_rescale", **arguments)


def hooked(x, change):
    """x, whose gradient goes through `change`."""
    x = x.clone()
    if x.requires_grad:
        x.register_hook(change)
    return x


def doubles_the_gradient_of_k(q, k, v, **arguments):
    return naive(q, hooked(k, lambda gradient: 2 * gradient), v, **arguments)


def writes_into_q(q, k, v, **arguments):
    q.mul_(2)
    return naive(q, k, v, **arguments)


def writes_into_v_where_nobody_trains(q, k, v, **arguments):
    if not torch.is_grad_enabled():
        v.zero_()
    return naive(q, k, v, **arguments)


def writes_into_d_out(q, k, v, **arguments):
    out = naive(q, k, v, **arguments).out
    return AttentionOutput(hooked(out, lambda gradient: gradient.mul_(2)))


def lse_and_one(q, k, v, **arguments):
    output = naive(q, k, v, **arguments)
    return output._replace(lse=output.lse + 1)


def lse_in_base_2(q, k, v, **arguments):
    output = naive(q, k, v, **arguments)
    return output._replace(lse=output.lse / math.log(2))


def always_minus_7(q, k, v, *, return_max_score=False, **arguments):
    output = naive(q, k, v, **arguments)
    return ScoredOutput(*output, q.new_full(q.shape[:2], -7.0, dtype=torch.float32))


INEXACT = {"exact": False}
SCORED = {"features": frozenset({"gqa", "max_score"})}
DOCUMENTS = {"features": frozenset({"gqa", "document_ids"})}


def takes_the_layout_of_the_model_alone(q, k, v, **arguments):
    assert q.stride() == k.stride() == v.stride() == (19200, 16, 128, 1)
    return naive(q, k, v, **arguments)


def draws_random_numbers(q, k, v, **arguments):
    return naive(q + torch.randn_like(q), k, v, **arguments)


ACCEPTED = [
    (naive, {"dtype": torch.bfloat16}),
    (naive, {"dtype": torch.float16}),
    (naive, DOCUMENTS),
    (halves_the_scale, INEXACT),
    (takes_the_layout_of_the_model_alone, {}),
    (draws_random_numbers, INEXACT),
    (lse_and_one, INEXACT),
    (naive, SCORED),
]


@pytest.mark.parametrize(("fn", "declared"), ACCEPTED)
def test_what_a_run_can_trust_is_accepted(fn, declared):
    properties = dict(declared)
    tensors = handed_over(properties.pop("dtype", torch.float32))
    before = torch.get_rng_state()
    try_out(backend(fn, **properties), *tensors)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in ("flex", "triton")])
def test_accepts_the_table(name):
    """Exact or broken on purpose: what a run may be started with. (The two others need a GPU, or
    are slow without.)
    """
    try_out(get_backend(name), *handed_over())


# the backend, how it is declared, and what the verdict must name
WRONG = [
    (returns_nan, {}, "NaN or inf"),
    (sees_the_future, {}, "not causal", "keys 75:150", "queries 0:75"),
    (sees_the_future, INEXACT, "not causal", "keys 75:150", "queries 0:75"),
    (sees_one_key_of_the_future, {}, "not causal"),
    (mixes_documents, DOCUMENTS, "documents", "keys 0:75"),
    (cuts_the_gradient, {}, "no gradient"),
    (no_gradient_for_k, {}, "no gradient for k (2, 2, 150, 16)"),
    (root_of_nothing, {}, "non-finite", "q (2, 4, 150, 16)"),
    (halves_the_scale, {}, "exact=True", "its out is", "exact=False"),
    (never_rescales, {}, "exact=True", "its out is"),  # one tile would hide it
    (doubles_the_gradient_of_k, {}, "exact=True", "its dk is"),
    # these trained, and their numbers were recorded
    (lse_and_one, {}, "exact=True", "its lse is 1 away"),
    (lse_and_one, {"dtype": torch.bfloat16}, "exact=True", "its lse is 1 away"),
    (lse_in_base_2, {}, "exact=True", "its lse is"),
    (always_minus_7, SCORED, "exact=True", "its max_score is"),
    # these were let pass, or said not to be causal
    (writes_into_q, INEXACT, "writes into q,"),
    (writes_into_v_where_nobody_trains, INEXACT, "writes into v,"),
    (writes_into_d_out, INEXACT, "writes into d_out,"),
    (naive, {"backward": False}, "backward"),  # a refusal comes through
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong[0].__name__)
def test_what_no_run_could_trust_is_refused(wrong):
    fn, declared, *named = wrong
    text = verdict(fn, **declared)
    assert text.startswith("attention=mine ") and all(name in text for name in named), text


def unpacks(x) -> None:
    _, _, _ = x.shape


def fails_at_once(q, k, v, **arguments):
    unpacks(q)


def fails_in_its_backward_pass(q, k, v, **arguments):
    return AttentionOutput(hooked(naive(q, k, v, **arguments).out, unpacks))


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


def as_if_contiguous(x):
    """What a kernel reads that takes a tensor as contiguous."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


def takes_q_as_contiguous(q, k, v, **arguments):
    return naive(as_if_contiguous(q), k, v, **arguments)


def views_q_as_rows(q, k, v, **arguments):
    return naive(q.view(-1, q.shape[3]).view(q.shape), k, v, **arguments)


def takes_d_out_as_contiguous(q, k, v, **arguments):
    return AttentionOutput(hooked(naive(q, k, v, **arguments).out, as_if_contiguous))


@pytest.mark.parametrize(
    ("fn", "exact"),
    [
        (takes_q_as_contiguous, True),
        (takes_q_as_contiguous, False),
        (views_q_as_rows, False),
        (takes_d_out_as_contiguous, False),
    ],
)
def test_what_takes_a_tensor_as_contiguous_is_refused_by_the_strides(fn, exact):
    """A regression test: the tensors of the try-out were contiguous, and such a kernel trained."""
    text = verdict(fn, exact=exact)
    assert text.startswith("attention=mine ") and "\n" not in text
    batch, row = 150 * 8 * 16, 8 * 16
    assert f"strides of the model, q ({batch}, 16, {row}, 1), " in text
    assert f"d_out ({batch // 2}, 16, {row // 2}, 1)" in text


HIDES = ScoreMod(lambda score, b, h, i, j, params: (score.where(i > 9, -torch.inf), 1.0 * (i > 9)))


def test_rows_without_a_key_have_an_infinite_lse():
    own = backend(get_backend("naive").fn, features=get_backend("naive").features)
    try_out(own, *handed_over(), score_mod=HIDES)


@pytest.mark.parametrize("length", [1, 150])
def test_any_length_is_taken_as_it_is(monkeypatch, length):
    """Naive attention in float64 is computed for the first tokens alone, here for 100."""
    monkeypatch.setattr("attention.look.try_out.REFERENCE_SCORES", 2 * 4 * 100**2)

    def of_that_length_alone(q, k, v, **arguments):
        assert q.shape == (2, 4, length, 16)
        return naive(q, k, v, **arguments)

    try_out(backend(of_that_length_alone, **SCORED), *handed_over(length=length))


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
