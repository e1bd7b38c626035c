"""Attentions that do not know this project: judged in their dialect, and written as scripts."""

import inspect
from dataclasses import replace
from functools import cache

import pytest
import torch

from attention import attention
from conformance import minimise
from conformance.backend_under_test import Subject
from conformance.cases import ADVERSARIAL, Case
from conformance.command import cells_of, parse_dialect
from conformance.dialects import DIALECTS, Adapter, Target, pages_of, target
from conformance.minimise import Minimiser, plain, with_options
from conformance.properties import examine
from conformance.script_of_call import (
    INPUTS,
    VIEWS,
    Call,
    input_lines,
    values_of,
    write,
)
from conformance.views import HEADS_INSIDE, LAYOUTS

MINE = "tests.user_attentions"
SDPA = "torch.nn.functional:scaled_dot_product_attention"
HF_SDPA = "transformers.integrations.sdpa_attention:sdpa_attention_forward"
HF_EAGER = "transformers.models.llama.modeling_llama:eager_attention_forward"
FLEX = "torch.nn.attention.flex_attention:flex_attention"
HF_SINKS = "hf sinks=module"
CACHE = (
    "fa-paged layout=BHND scale=scale window=window softcap=softcap used=cache_lengths sinks=sinks "
    "returns=out,lse lse_flag= constants=backend='tiled' dtypes=fp32"
)
# of what no gradient flows through, in fp32
FORWARD_ONLY = ["gradients", "float32 statistics", "no leak (gradients)"]
FP32 = torch.float32


def named(text: str, dialect: str) -> Target:
    return target(text, *parse_dialect(dialect.split()))


def column(text: str, dialect: str) -> dict[str, str]:
    """Status by property, from a quick check."""
    subject = Subject(named(text, dialect).backend, "cpu", FP32, random_cases=1, seed=0)
    return {cell.property: cell.status for cell in cells_of(subject, quick=True)}


@pytest.mark.parametrize(
    "text, dialect, red, not_asked",
    [
        (SDPA, "sdpa", [], ["lse"]),
        (HF_SDPA, "hf", [], ["lse", "rows without a key"]),
        # its scores are rounded to 16 bits
        (HF_EAGER, "hf", ["float32 statistics"], ["lse", "rows without a key"]),
        (f"{MINE}:flash", "fa", [], []),
        (f"{MINE}:flash_varlen", "fa-varlen", [], []),
        (f"{MINE}:with_cache", "fa-paged dtypes=fp32", [], FORWARD_ONLY),
        (f"{MINE}:vllm", "vllm dtypes=fp32", [], FORWARD_ONLY),
        ("attention:attention_with_cache", CACHE, [], FORWARD_ONLY),
        (
            f"{MINE}:single_prefill",
            "flashinfer dtypes=fp32 head_dims=",
            [],
            # these have a batch
            [*FORWARD_ONLY, "strides and views", "no leak (outputs)", "call history"]
            + ["row independence"],
        ),
        (
            f"{MINE}:ragged_prefill",
            "flashinfer-ragged dtypes=fp32 head_dims=",
            [],
            FORWARD_ONLY,
        ),
        (
            f"{MINE}:Student",
            "cs336",
            [],
            ["lse", "ragged tails", "rows without a key", "prefill = decode"]
            + ["first tile masked", "grouped heads", "optional arguments", "wider calls"],
        ),
    ],
)
def test_what_others_wrote_is_green(text, dialect, red, not_asked):
    found = column(text, dialect)
    assert [name for name, status in found.items() if status == "red"] == red
    absent = [name for name, status in found.items() if status == "n/a" and name != "block sizes"]
    # streams are a GPU's, and no dialect decodes
    assert sorted(absent) == sorted([*not_asked, "streams and graphs", "cache and pages"])


@pytest.mark.parametrize(
    "text, dialect, red",
    [
        # of mask positions and wider calls only a window that has two sides is wrong
        ("one_sided", "fa", {"mask positions", "wider calls"}),
        # a row of ordinary scores is wrong, as are those of shifted ones
        ("unshifted_sink", "fa", {"optional arguments", "logits + 100", "logits - 120"}),
        ("pages_as_they_lie", "fa-paged dtypes=fp32", {"forward", "mask positions"}),
        ("one_key_too_many", "vllm dtypes=fp32", {"forward", "ragged tails"}),
    ],
)
def test_what_is_wrong_in_its_dialect_alone_is_red(text, dialect, red):
    found = column(f"{MINE}:{text}", dialect)
    found = {name for name, status in found.items() if status == "red"}
    assert red <= found
    if text == "one_sided":
        assert red == found


def test_sequences_of_pages_lie_in_any_order_and_end_anywhere():
    slots, table, used = pages_of((5, 0, 3), 2, torch.device("cpu"))
    tokens = [slots[row.long()].flatten()[:n].tolist() for row, n in zip(table, used, strict=True)]
    assert tokens == [[0, 1, 2, 3, 4], [], [5, 6, 7]]
    assert table[0].tolist() != sorted(table[0].tolist())
    # what no token fills is number 8, the filler, also where the table has no page
    assert slots.flatten().tolist().count(8) == 4 and (slots[table[1].long()] == 8).all()


def test_sinks_are_handed_in_only_where_the_function_names_them():
    # it takes **kwargs, and would not look at them
    assert named(HF_SDPA, "hf").dialect.sinks == ""
    eager = named("transformers.models.gpt_oss.modeling_gpt_oss:eager_attention_forward", HF_SINKS)
    assert "sinks" in eager.backend.features
    q = torch.randn(1, 2, 5, 4)
    sinks = torch.tensor([1.0, -2.0])
    out = attention(q, q, q, backend=eager.backend, sinks=sinks).out
    expected = attention(q, q, q, backend="naive", sinks=sinks).out
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    "text, dialect",
    [
        (f"{MINE}:flash", "fa"),
        (f"{MINE}:flash_varlen", "fa-varlen"),
        (f"{MINE}:with_cache", "fa-paged dtypes=fp32"),
        (f"{MINE}:vllm", "vllm dtypes=fp32"),
        (f"{MINE}:single_prefill", "flashinfer dtypes=fp32 head_dims="),
        (SDPA, "sdpa"),
        (HF_EAGER, "hf"),
        # PyTorch imports its compiler for the mask
        pytest.param(FLEX, "flex backward=false", marks=pytest.mark.slow),
        ("tiled", ""),
    ],
)
def test_a_script_of_a_right_call_passes(text, dialect):
    """The script of a failure means something only if it passes for a right attention."""
    found = target(text) if not dialect else named(text, dialect)
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
    ran = 0
    for case in cases:
        for tensor in ("out", "lse", "dq", "dk", "dv"):
            there = tensor != "lse" or "lse" in found.backend.features
            if there and subject.takes(case, backward=tensor.startswith("d")):
                exec(write(found, Call(case, tensor, FP32), "cpu", 2e-4), {})
                ran += 1
    assert ran >= (8 if found.backend.backward else 4)


BY_POSITION = [
    Case(),
    Case(num_queries=30),
    Case(num_keys=50),  # 20 rows without a key
    Case(num_queries=1, optional={"window": 9}),
    Case(num_queries=30, optional={"window": 1000, "softcap": 2.0, "alibi_slopes": True}),
    Case(num_keys=50, causal=False, optional={"window": (9, 4), "alibi_slopes": True}),
    Case(num_queries=40, causal=False, optional={"window": (-1, 4), "alibi_slopes": True}),
    Case(causal=False, optional={"window": (9, -1)}),
    Case(causal=False, optional={"window": (-1, -1), "alibi_slopes": True}),
]
BY_VALUE = [
    Case(batch=2, optional={"document_ids": True, "window": 9, "alibi_slopes": True}),
    Case(batch=3, causal=False, optional={"key_lengths": True}),
    Case(num_queries=30, optional={"cu_seqlens": True}),
]


def test_a_mask_of_positions_is_a_formula():
    case = BY_POSITION[5]
    masked = DIALECTS["flex"].needs_mask(70, 50, causal=False, given={"window": (9, 4)})
    written = DIALECTS["flex"].call(
        "q, k, v", values_of(Call(case, "out", FP32), None), masked=masked
    )
    assert "(j >= i - 29) & (j <= i - 16)" in written
    assert "s - slopes[h] * (i - j - 20)" in written


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
    read = {}

    def attend(q, k, v, score_mod=None, block_mask=None, **others):
        for mod in (score_mod, getattr(block_mask, "mask_mod", None)):
            if mod is not None:
                assert mod.__defaults__ is None
                read.update(inspect.getclosurevars(mod).nonlocals)
        return flex_with_gradients(q, k, v, score_mod, block_mask, **others)

    subject = Subject(Adapter(attend, DIALECTS["flex"]).backend("flex"), "cpu", FP32)
    for cases, names in (
        (BY_POSITION, {"low", "high", "past", "slopes", "softcap"}),
        (BY_VALUE, {"seen", "past", "slopes"}),
    ):
        read.clear()
        for case in cases:
            row = subject.compare(case)
            assert row is not None and {"out", "lse", "dq", "dk", "dv"} <= row.keys()
            assert all(check.share <= 1 for check in row.values()), case
        assert read.keys() == names


def test_a_script_draws_what_the_case_draws():
    case = Case(num_heads=4, num_queries=7, num_keys=7, head_dim=4)
    for name, line in INPUTS.items():
        tensors, *_ = replace(case, inputs=name).make(torch.float64, "cpu")
        q, k, v = case.make(torch.float64, "cpu")[0]
        variables = {"torch": torch, "q": q, "k": k, "v": v}
        exec(line, variables)
        for x, expected in zip("qkv", tensors, strict=True):
            torch.testing.assert_close(variables[x], expected, msg=f"{name}: {x}")
    assert INPUTS.keys() == ADVERSARIAL.keys() - {"trained"}


def test_a_script_lays_out_what_the_property_lays_out():
    for name, line in VIEWS.items():
        case = [torch.randn(2, 3, 5, 4) for _ in range(3)]
        variables = {"torch": torch, **dict(zip("qkv", case, strict=True))}
        exec("\n".join(input_lines("x", name, gradient=False)), variables)
        for x, expected in zip("qkv", LAYOUTS[name](case), strict=True):
            assert torch.equal(variables[x], expected), f"{name}: {line}"
            assert variables[x].stride() == expected.stride(), name
    assert LAYOUTS.keys() - VIEWS.keys() == {"each another"}


@pytest.mark.parametrize(
    "name, dialect, property, first",
    [
        ("contiguous_assumed", "fa", "strides and views", "misaligned, fp32: written"),
        ("float32_alone", "fa", "float32 statistics", "bf16: written"),
        ("mean_of_nothing", "sdpa", "mask positions", "out of B1-H1-N1-D1-full-key_lengths"),
    ],
)
def test_the_script_of_what_no_plain_call_shows(name, dialect, property, first):
    found = named(f"{MINE}:{name}", dialect)
    subject = Subject(found.backend, "cpu", FP32)
    cell = examine(subject, property)
    script = Minimiser(found, subject).script(cell)
    assert cell.status == "red" and script is not None
    assert first in script.splitlines()[0] and "conformance" not in script
    with pytest.raises((AssertionError, NotImplementedError)):
        exec(script, {})


def test_memory_has_no_script_of_one_call():
    found = named(f"{MINE}:flash", "fa")
    subject = Subject(found.backend, "cpu", FP32)
    cell = examine(subject, "saved bytes")
    assert cell.status == "red" and Minimiser(found, subject).script(cell) is None


def smaller_batch(case, subject):
    return [replace(case, batch=1)] if case.batch > 1 else []


def test_a_script_of_a_lost_gpu_runs_in_a_process_of_its_own(monkeypatch):
    """After some errors every call of the process fails, so what fails there proves nothing."""
    found = named(f"{MINE}:only_aligned", "fa")
    subject = Subject(found.backend, "cpu", FP32)
    cell = examine(subject, "strides and views")
    assert "misaligned address" in cell.note
    monkeypatch.setattr(minimise, "why_unusable", lambda device: "misaligned address")
    monkeypatch.setattr(minimise, "executed", lambda text: pytest.fail("it ran in this process"))
    monkeypatch.setattr(minimise, "smaller", smaller_batch)
    monkeypatch.setitem(minimise.LAYOUTS_OF, "strides and views", ["misaligned"])
    script = minimise.Minimiser(found, subject).script(cell)
    assert script is not None and "out of B1-" in script and "misaligned, fp32" in script
    with pytest.raises(RuntimeError, match="misaligned address"):
        exec(script, {})
    unexamined = replace(cell, note="not examined: an earlier property left the GPU unusable")
    assert minimise.Minimiser(found, subject).script(unexamined) is None


def test_a_script_of_two_backward_passes():
    """No single call shows what an attention keeps from an earlier one."""
    function = f"{MINE}:WrongOnceWarm"
    found = named(function, "layout=BNHD causal=causal scale=softmax_scale")
    subject = Subject(found.backend, "cpu", FP32)
    cell = examine(subject, "call history")
    assert cell.status == "red" and HEADS_INSIDE in cell.note
    script = Minimiser(found, subject).script(cell)
    assert script is not None and HEADS_INSIDE in script.splitlines()[0]
    with pytest.raises(AssertionError):
        exec(script, {})
    right = script.replace("WrongOnceWarm.apply(", "flash(").replace("WrongOnceWarm", "flash")
    exec(right.replace("found = result", "found = result[0]"), {})


def fails_twice(q, k, v, causal=False, scale=None):
    if q.shape[3] < 4:
        raise RuntimeError(f"{q.shape[3]} numbers are too few")
    if q.shape[2] != k.shape[2]:
        raise RuntimeError(f"{q.shape[2]} queries and {k.shape[2]} keys")
    return q


def test_a_script_raises_what_the_property_raised():
    """Not another exception of the same type, which smaller calls may raise."""
    found = named(f"{__name__}:fails_twice", "layout=BHND causal=causal scale=scale")
    subject = Subject(found.backend, "cpu", FP32)
    script = Minimiser(found, subject).script(examine(subject, "N != M"))
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


def test_an_output_of_another_form_is_an_error():
    adapter = Adapter(lambda q, k, v, **_: (q, q), DIALECTS["sdpa"])
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises(ValueError, match="tuple of 2.*returns=out"):
        adapter(q, q, q, causal=False, scale=0.5)
