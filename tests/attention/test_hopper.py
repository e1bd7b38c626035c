"""The Hopper kernels: their numbers and their protocol in an interpreter, their machine code
without a GPU, and all of it on one.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import BACKENDS, AttentionOutput, Backend, attention, get_backend, kernel_choice
from attention.interface import OWN_SINKS, ScoreMod
from attention.kernels import score_change
from attention.kernels import select as choice
from attention.kernels.intervals import block_starts
from attention.kernels.launch import shares_of
from attention.kernels.select import choose_kernel, why_not_hopper
from attention.mask import MASKS, visible_keys
from conformance.cases import Case, attend
from tests.selection import diagonal

sys.path.append(str(Path(__file__).parent))
import gluon_interpreter  # noqa: E402
from gluon_interpreter import COUNTERS, Failure, load_kernels  # noqa: E402
from test_conformance import CASES, GPU_CASES, check  # noqa: E402

ROOT = Path(__file__).parents[2]
INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="the plain Triton kernels around the Hopper ones are compiled here",
)


# in the interpreter


@cache
def launcher(edit: tuple[str, str, str] | None = None):
    return load_kernels(edit)["launch"]


class Interpreted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        launch,
        causal: bool,
        scale: float,
        mod: str,
        params: Tensor | None,
        sinks: Tensor | None,
        lo: Tensor | None,
        hi: Tensor | None,
        starts: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ):
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan)
        settings = lo, starts, causal, scale, mod
        run = launch.Forward(q, k, out, None, *settings)
        run(q, k, v, out, lse, None, lo, hi, starts, params, sinks)
        ctx.save_for_backward(lo, hi, starts, q, k, v, out, lse, params, sinks)
        ctx.settings = launch, causal, scale, mod
        return out, lse

    @staticmethod
    def backward(ctx, d_out: Tensor, d_lse: Tensor):
        from attention.kernels.op import empty_gradients, gradient_of_sinks, is_packed, unpacked

        lo, hi, starts, q, k, v, out, lse, params, sinks = ctx.saved_tensors
        launch, *settings = ctx.settings
        grads = unpacked(
            [x.fill_(torch.nan) for x in empty_gradients(q, k, v, is_packed(q, k, v))],
            q.shape[1],
            k.shape[1],
        )
        d_out = d_out.contiguous()
        run = launch.Backward(d_out, q, k, out, *grads, lo, starts, *settings)
        delta = run(d_out, d_lse.contiguous(), q, k, v, out, lse, *grads, lo, hi, starts, params)
        d_sinks = None if sinks is None else gradient_of_sinks(sinks, lse, delta)
        return *([None] * 5), d_sinks, None, None, None, *grads


def interpreted_backend(edit: tuple[str, str, str] | None = None) -> Backend:
    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        sinks: Tensor | None = None,
        **mask,
    ) -> AttentionOutput:
        lo = hi = starts = None
        mod = score_change(q.device, softcap, alibi_slopes, score_mod)
        given = {name for name, each in mask.items() if each is not None}
        if given:
            visible = visible_keys(q, k, causal=causal, **mask)
            # as attention.kernels hands them on
            lo, hi = visible.lo.int(), visible.hi.int()
            causal = causal and not {"key_lengths", "cu_seqlens"} & given
            packed = "window" not in given and {"document_ids", "cu_seqlens"} & given
            if packed and len(lo) == len(q) and q.shape[2] == k.shape[2]:
                starts = block_starts(lo)
        inputs = causal, scale, *mod, sinks, lo, hi, starts, q, k, v
        return AttentionOutput(*Interpreted.apply(launcher(edit), *inputs))

    features = {"gqa", "non_causal", "cross_length", "two_sided_window", "lse", *MASKS}
    features |= {"softcap", "alibi_slopes", "score_mod", OWN_SINKS}
    return Backend("hopper-interpreted", function, features=frozenset(features))


# several blocks of queries, several tiles of keys, and more work than the interpreter's two
# programs
INTERPRETED_CASES = [
    Case(num_queries=400, num_keys=400, head_dim=64),
    Case(batch=1, num_heads=4, num_kv_heads=2, num_queries=290, num_keys=290, head_dim=128),
    Case(num_queries=256, num_keys=256, head_dim=64, causal=False),
    Case(num_heads=4, num_kv_heads=1, num_queries=130, num_keys=200, head_dim=64, causal=False),
    Case(num_queries=130, num_keys=256, head_dim=128, causal=False),
    Case(num_queries=130, num_keys=300, head_dim=64),
    Case(num_queries=130, num_keys=322, head_dim=128),
    Case(num_queries=300, num_keys=130, head_dim=64),  # the first 170 rows see no key
    Case(num_queries=300, num_keys=130, head_dim=64, optional={"sinks": True}),
    Case(num_queries=300, num_keys=130, head_dim=128, num_kv_heads=1),
    Case(num_queries=1, num_keys=200, head_dim=64),
    Case(num_queries=1, num_keys=1, head_dim=128),
    *(
        Case(num_queries=200, num_keys=200, head_dim=64, inputs=name)
        for name in ("large", "growing", "spike", "negative", "ties")
    ),
    Case(
        num_queries=200, num_keys=200, head_dim=64, inputs="negative", causal=False
    ),  # masked scores are 0, far above all others
    Case(num_queries=450, num_keys=450, head_dim=64, optional={"window": 100}),
    Case(
        num_queries=130, num_keys=400, head_dim=128, num_kv_heads=1, optional={"window": 40}
    ),  # no query sees the first keys
    Case(num_queries=128, num_keys=400, head_dim=64, optional={"window": 40}),
    *(
        Case(
            num_heads=2,
            num_kv_heads=1,
            num_queries=600,
            num_keys=600,
            head_dim=size,
            optional={"window": 300},
        )
        for size in (64, 128)
    ),
    Case(num_queries=300, num_keys=130, head_dim=64, optional={"window": 5}),
    # of eight blocks of keys the first six are seen by no query
    *(
        Case(
            num_heads=6,
            num_kv_heads=3,
            num_queries=130,
            num_keys=900,
            head_dim=size,
            optional={"window": 40},
        )
        for size in (64, 128)
    ),
    Case(
        batch=2,
        num_queries=400,
        num_keys=400,
        head_dim=64,
        num_kv_heads=1,
        optional={"document_ids": True},
    ),
    Case(
        batch=2,
        num_queries=270,
        num_keys=270,
        head_dim=128,
        causal=False,
        optional={"document_ids": True},
    ),
    Case(
        batch=2,
        num_queries=400,
        num_keys=400,
        head_dim=128,
        optional={"document_ids": True, "window": 30},
    ),
    Case(num_queries=200, num_keys=400, head_dim=64, causal=False, optional={"window": (40, 90)}),
    # sequences end inside a tile and on its edge, and some are empty
    Case(batch=3, num_queries=130, num_keys=384, head_dim=64, optional={"key_lengths": True}),
    Case(
        batch=3,
        num_queries=130,
        num_keys=256,
        head_dim=128,
        num_kv_heads=1,
        causal=False,
        optional={"key_lengths": True, "window": (100, -1)},
    ),
    Case(num_queries=320, num_keys=640, head_dim=64, optional={"cu_seqlens": True}),
    Case(num_queries=400, num_keys=350, head_dim=128, optional={"cu_seqlens": True}),
    # blocks start where long documents do, or just after them; with a window they do not
    *(
        Case(
            num_heads=4,
            num_kv_heads=kv_heads,
            num_queries=780,
            num_keys=780,
            head_dim=size,
            causal=causal,
            optional={"cu_seqlens": True} | optional,
        )
        for size, kv_heads, causal, optional in (
            (64, 4, True, {}),
            (64, 2, False, {"softcap": 2.0, "alibi_slopes": True}),
            (128, 4, False, {}),
            (128, 1, True, {}),
            (128, 4, True, {"sinks": True, "window": 150}),
        )
    ),
    Case(
        batch=3,
        num_queries=310,
        num_keys=310,
        head_dim=128,
        optional={"document_ids": True, "softcap": 2.0},
    ),
    *(
        Case(
            batch=2,
            num_heads=4,
            num_queries=200,
            num_keys=300,
            head_dim=size,
            causal=causal,
            optional=optional,
        )
        for size, causal, optional in (
            (64, True, {"softcap": 2.0, "alibi_slopes": True}),
            (128, True, {"softcap": 2.0, "alibi_slopes": True, "window": 70}),
            (64, False, {"alibi_slopes": True}),
            (64, True, {"score_mod": True}),
            (64, True, {"sinks": True}),
            (128, True, {"sinks": True, "softcap": 2.0, "window": 70}),
            (128, False, {"score_mod": True}),
        )
    ),
]


@INTERPRETED
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "causal", "window"),
    [(290, 290, True, None), (130, 200, False, None), (300, 130, True, None), (300, 300, True, 70)],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_interpreted_largest_scores(head_dim, num_queries, num_keys, causal, window):
    """Of each row, though the maximum that is subtracted lags behind it. The scores grow by less
    than the threshold from tile to tile, so that it does.
    """
    torch.manual_seed(0)
    q = torch.randn(1, 2, num_queries, head_dim).half()
    k, v = (torch.randn(1, 2, num_keys, head_dim).half() for _ in range(2))
    k = k * torch.linspace(1.5, 0.5, num_keys)[:, None].half()  # tiles are walked backwards
    visible = visible_keys(q, k, causal=causal, window=window)
    lo, hi = (visible.lo.int(), visible.hi.int()) if window else (None, None)
    out, (lse, top) = torch.empty_like(q), torch.full((2, 1, 2, num_queries), torch.nan)
    scale = head_dim**-0.5
    run = launcher().Forward(q, k, out, top, lo, None, causal, scale)
    run(q, k, v, out, lse, top, lo, hi)
    scores = (q.float() @ k.float().mT * scale).masked_fill(~visible.mask(), -torch.inf)
    torch.testing.assert_close(top, scores.amax(-1), rtol=1e-5, atol=1e-5)


# of long documents, and of functions of the scores, one each stays for causal and full masks
DEAR = (
    "B1-H4-N780-D128-full-cu_seqlens",
    "B1-H4-N780-D128-causal-cu_seqlens-sinks-window150",
    "B1-H4-N780-D64-causal-cu_seqlens",
    "B2-H4kv2-N200-M300-D128-causal-softcap2-alibi_slopes-window70",
    "B2-H4kv2-N200-M300-D64-full-alibi_slopes",
    "B2-H4kv2-N200-M300-D128-full-score_mod",
)


@INTERPRETED
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if str(case) in DEAR else (), id=str(case))
        for case in INTERPRETED_CASES
    ],
)
def test_interpreted(case, conformance_record):
    check(interpreted_backend(), case, torch.float16, "cpu", conformance_record)
    assert not COUNTERS.any(), "a launch leaves the counters as it found them"


@INTERPRETED
@pytest.mark.parametrize(("head_dim", "shares"), [(64, 1), (64, 2), (128, 1), (128, 2)])
def test_interpreted_float32_results(head_dim, shares, monkeypatch):
    """What a ring merges: the same numbers before they are rounded to 16 bits."""
    torch.manual_seed(0)
    monkeypatch.setattr(launcher(), "shares_of", lambda *_, **__: shares)
    q, k, v, d_out = (
        torch.randn(1, heads, length, head_dim).half()
        for heads, length in ((2, 200), (1, 300), (1, 300), (2, 200))
    )
    visible = visible_keys(q, k, causal=True, window=120)
    lo, hi = visible.lo.int(), visible.hi.int()
    settings, launch = (lo, None, False, head_dim**-0.5), launcher()
    lse = torch.empty(q.shape[:3])

    def results(dtype: torch.dtype) -> list[Tensor]:
        out, *gradients = (torch.full_like(x, torch.nan, dtype=dtype) for x in (q, q, k, v))
        launch.Forward(q, k, out, None, *settings)(q, k, v, out, lse, None, lo, hi)
        known = out.half()
        run = launch.Backward(d_out, q, k, known, *gradients, *settings)
        run(d_out, None, q, k, v, known, lse, *gradients, lo, hi)
        return [out, *gradients]

    narrow, wide = results(torch.float16), results(torch.float32)
    for name, one, other in zip(("out", "dq", "dk", "dv"), narrow, wide, strict=True):
        assert not torch.equal(other, one.float()), name
        if name == "dq":  # which adds up in any order
            torch.testing.assert_close(other, one.float(), rtol=2**-10, atol=1e-5)
        else:
            assert torch.equal(other.half(), one), name


def compare_with_naive(length: int, head_dim: int, **arguments: Any) -> None:
    torch.manual_seed(0)
    tensors, results = torch.randn(3, 1, 2, length, head_dim).half(), []
    for backend, dtype in (
        (interpreted_backend(), torch.float16),
        (get_backend("naive"), torch.float64),
    ):
        inputs = [x.to(dtype).requires_grad_() for x in tensors]
        out = attend(*inputs, backend=backend, **arguments).out
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() < 4e-3 * expected.abs().max()


@INTERPRETED
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_blocks_that_start_where_queries_see_across(head_dim, causal):
    """A block of keys stops at 150, where one of queries does, and queries see both its sides."""
    bounds = torch.tensor([[0, 150, 600], [0, 400, 600]]).int()
    q = torch.empty(1, 1, 600, 1)
    lo = visible_keys(q, q, causal=causal, cu_seqlens=bounds).lo.int()
    assert block_starts(lo)[0, 1].tolist() == [128, 150, 256, 256]
    compare_with_naive(600, head_dim, causal=causal, cu_seqlens=bounds)


@INTERPRETED
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "lengths",
    [
        [100] * 6,  # queries of a document see all the last keys of a block, and not the first
        [12, 208, 20, 160],  # rows 128 to 255 are of three blocks
    ],
    ids=str,
)
def test_documents_of_these_lengths(head_dim, lengths):
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    compare_with_naive(sum(lengths), head_dim, causal=True, document_ids=ids)


PLAIN = [case for case in INTERPRETED_CASES if not case.optional]


@INTERPRETED
@pytest.mark.parametrize(
    "case",
    # what differs is the order of the work: shapes matter, and few inputs do
    [
        pytest.param(case, id=str(case), marks=() if i % 3 == 1 else pytest.mark.slow)
        for i, case in enumerate(PLAIN)
    ],
)
def test_interpreted_as_long_sequences(case, monkeypatch):
    monkeypatch.setattr(launcher(), "SHORT", 0)
    monkeypatch.setattr(launcher(), "LONG", 0)
    check(interpreted_backend(), case, torch.float16, "cpu")


@INTERPRETED
@pytest.mark.parametrize(
    ("head_dim", "shares", "groups", "num_queries", "num_keys", "causal"),
    [
        pytest.param(128, 2, 4, 200, 200, True, marks=pytest.mark.slow),
        pytest.param(128, 4, 4, 130, 200, False, marks=pytest.mark.slow),
        (64, 3, 6, 200, 130, True),
        pytest.param(64, 2, 4, 290, 290, True, marks=pytest.mark.slow),
        pytest.param(128, 3, 6, 300, 130, True, marks=pytest.mark.slow),
    ],
)
def test_shares_of_a_group_are_joined(
    head_dim, shares, groups, num_queries, num_keys, causal, monkeypatch
):
    """Several programs for the query heads of one key/value head."""
    launch = launcher()
    monkeypatch.setattr(launch, "shares_of", lambda *_, **__: shares)
    case = Case(
        batch=2,
        num_heads=2 * groups,
        num_kv_heads=2,
        num_queries=num_queries,
        num_keys=num_keys,
        head_dim=head_dim,
        causal=causal,
    )
    check(interpreted_backend(), case, torch.float16, "cpu")


@pytest.mark.parametrize(
    ("groups", "blocks", "mib", "equal", "shares"),
    [
        # fastest on an H200, whose cache has 60 MiB
        (16, 128, 16, False, 8),  # MQA, 16 heads, 16,384 keys: 128 programs for 132 multiprocessors
        (8, 1024, 4, False, 2),  # 64:8, four sequences of 4,096 keys
        (4, 512, 8, False, 2),
        (4, 512, 4, False, 1),
        (8, 2048, 32, False, 4),
        # as it follows
        (8, 16, 1, False, 8),  # too short to be enough
        (3, 1000, 32, False, 3),
        (6, 100, 1, False, 3),
        (4, 132, 64, True, 1),
        (4, 140, 64, True, 4),  # a second round for eight blocks alone
        (1, 20, 64, False, 1),
    ],
)
def test_every_program_has_work_in_the_backward(groups, blocks, mib, equal, shares):
    sizes = {"streamed": mib * 2**20, "cache": 60 * 2**20}
    assert shares_of(groups, blocks, 132, equal=equal, **sizes) == shares


@INTERPRETED
def test_heads_of_an_incomplete_section_are_computed(monkeypatch):
    """Three heads in sections of two: found by a launch whose last section pointed past the last
    head.
    """
    launch = launcher()
    monkeypatch.setattr(launch, "section_of", lambda *_, **__: 2)
    backend = interpreted_backend()
    case = Case(num_heads=3, num_kv_heads=3, num_queries=200, num_keys=200, head_dim=64)
    check(backend, case, torch.float16, "cpu")


def compare_packed(
    backend: Backend, projected: Tensor, num_kv_heads: int, **optional: object
) -> None:
    """Attention of the parts of one projection (B, N, H + 2 H_kv, D) and of copies of them, and its
    gradients.

    dq adds up in any order, so of its numbers in 16 bits some are rounded to the other side.
    """
    sizes = (projected.shape[2] - 2 * num_kv_heads, num_kv_heads, num_kv_heads)
    views = [x.transpose(1, 2).detach().requires_grad_() for x in projected.split(sizes, dim=2)]
    copies = [x.detach().contiguous().requires_grad_() for x in views]
    results = []
    for tensors in (views, copies):
        out, lse = attention(*tensors, backend=backend, **optional)
        results.append(
            [
                out.detach(),
                lse.detach(),
                *torch.autograd.grad((out * out).sum() + lse.sum(), tensors),
            ]
        )
    (*found, dq, dk, dv), (*expected, expected_dq, expected_dk, expected_dv) = results
    assert all(
        torch.equal(x, y)
        for x, y in zip((*found, dk, dv), (*expected, expected_dk, expected_dv), strict=True)
    )
    assert (dq - expected_dq).float().norm() <= torch.finfo(
        dq.dtype
    ).eps * expected_dq.float().norm()
    assert [(x.stride(), x.storage_offset()) for x in (dq, dk, dv)] == [
        (x.stride(), x.storage_offset()) for x in views
    ]
    assert (
        len({x.untyped_storage().data_ptr() for x in (dq, dk, dv)})
        == 1
        < len({x.data_ptr() for x in (dq, dk, dv)})
    )


@INTERPRETED
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 64), (1, 128)])
def test_parts_of_a_projection_are_read_and_written_where_they_are(num_kv_heads, head_dim):
    projected = torch.randn(2, 200, 2 + 2 * num_kv_heads, head_dim).half()
    compare_packed(interpreted_backend(), projected, num_kv_heads)


@INTERPRETED
@pytest.mark.parametrize(
    ("where", "causal"), diagonal(["q", "k", "v", "d_out"], {"causal": True, "full": False})
)
def test_nan_is_not_lost_in_a_polynomial(where, causal, monkeypatch):
    """One number of one row: it spoils what it spoils where all exponentials are exp2's, but for dv
    of some keys.
    """
    monkeypatch.setattr(
        gluon_interpreter,
        "unchanged",
        lambda x, y: torch.equal(x.view(torch.int16), y.view(torch.int16)),
    )
    alike = interpreted_backend(("backward", "p = exp2_by_two_units(x)", "p = gl.exp2(x)"))
    for row in (
        3,
        72,
        199,
        # the last key is seen by one query alone; of row 72, half of the exponentials are the
        # polynomial's
    ):
        tensors = {name: torch.randn(1, 1, 200, 64).half() for name in ("q", "k", "v", "d_out")}
        tensors[where][0, 0, row, 5] = torch.nan
        grads = []
        for backend in (interpreted_backend(), alike):
            q, k, v = (tensors[name].clone().requires_grad_() for name in "qkv")
            grads.append(
                torch.autograd.grad(
                    attention(q, k, v, backend=backend, causal=causal).out,
                    (q, k, v),
                    tensors["d_out"],
                )
            )
        found, expected = ([x.isfinite() for x in each] for each in grads)
        assert all(torch.equal(x, y) for x, y in zip(found[:2], expected[:2], strict=True))
        assert (found[2] >= expected[2]).all() and (~found[2]).sum() >= 0.45 * (~expected[2]).sum()
        assert not all(x.all() for x in found)


@INTERPRETED
def test_exponentials_by_polynomial():
    """Two of sixteen numbers are not exp2's own, and none is far from it."""
    x = torch.linspace(-130, 0.9, 4096).reshape(64, 64)
    x[:, 8], x[:, 17] = -torch.inf, torch.nan
    with torch.no_grad():
        p = load_kernels()["primitives"].exp2_by_two_units(gluon_interpreter.Value(x)).data
    exact = torch.where(
        x < -126, 0, x.double().exp2()
    )  # below the smallest normal number the units give 0, or next to it
    usual = x > -126
    error = (p.double() / exact - 1).abs()[usual]
    assert 0.9e-4 < error.max() < 1.1e-4
    assert (error > 1e-6).double().mean() == pytest.approx(1 / 8, abs=0.02)
    assert (p[:, 8] == 0).all() and p[
        :, 17
    ].isnan().sum() == 32  # the other half are the polynomial's
    assert (p[x < -126] < 2.0**-125).all() and (p[x < -127.1].abs() <= 2.0**-126).all()


@INTERPRETED
@pytest.mark.parametrize("head_dim", [64, 128])
def test_an_accumulator_is_rescaled_where_any_row_of_a_warp_asks_for_it(head_dim):
    rescaled = load_kernels()["primitives"].rescaled
    acc, alpha = torch.randn(64, head_dim), torch.ones(64, 1)
    for row in (None, 0, 8, 29, 63):
        if row is not None:
            alpha[row] = 0.5
        assert torch.equal(
            rescaled(gluon_interpreter.Value(acc), gluon_interpreter.Value(alpha)).data, acc * alpha
        )


# what the interpreter would be worth nothing without: it sees a protocol that is wrong
ERRORS = {
    "v-released-before-its-product": (
        "forward",
        "            acc, p = warpgroup_mma_wait(0, deps=(acc_pending, p))\n            "
        "v_ring.release(item - 2)",
        "            v_ring.release(item - 2)\n"
        "            acc, p = warpgroup_mma_wait(0, deps=(acc_pending, p))",
        "an operand changed",
    ),
    "v-not-awaited": (
        "forward",
        "            v_ring.await_full(item - 1)\n",
        "",
        "an operand changed, or was NaN",
    ),
    "v-not-released": ("forward", "            v_ring.release(item - 2)\n", "", "deadlock"),
    "out-not-fenced": ("forward", "            fence_async_shared()\n", "", "without a fence"),
    "out-overwritten": (
        "forward",
        "        tma.store_wait(0)\n        acc",
        "        acc",
        "written while it was being stored",
    ),
    "turn-not-passed": (
        "forward",
        "        begin_turn(consumer, TURNS)\n        end_turn(consumer, CONSUMERS, TURNS)\n    "
        "    item += 1",
        "        item += 1",
        "deadlock|more than 256 threads",
    ),
    "ds-read-before-the-other-wrote": (
        "backward",
        "            await_all(BOTH)\n            dq_pending",
        "            dq_pending",
        "an operand changed|without a fence",
    ),
    "ds-not-fenced": (
        "backward",
        "            fence_async_shared()\n            dv_pending",
        "            dv_pending",
        "without a fence",
    ),
    "dq-tile-not-awaited": (
        "backward",
        "            await_own_stores()\n",
        "",
        "written while it was being stored",
    ),
    "dp-used-before-its-wait": (
        "backward",
        "PARTS + part - 1, deps=(dp_pending",
        "PARTS + part, deps=(dp_pending",
        "not waited for",
    ),
    "q-released-before-its-product": (
        "backward",
        "            dk = warpgroup_mma_wait(0, deps=(dk_pending,))\n            "
        "q_ring.release(item)",
        "            q_ring.release(item)\n"
        "            dk = warpgroup_mma_wait(0, deps=(dk_pending,))",
        "an operand changed",
    ),
    "d_out-not-released": ("backward", "            do_ring.release(item)\n", "", "deadlock"),
    "gradients-written-over-dq": (
        "backward",
        "    tma.store_wait(0)\n    store_gradient(dv",
        "    store_gradient(dv",
        "while it was being stored",
    ),
    "gradients-not-fenced": (
        "backward",
        "    fence_async_shared()\n    store_box(desc, [batch, kv_head, start_kv, LAST]",
        "    store_box(desc, [batch, kv_head, start_kv, LAST]",
        "without a fence",
    ),
    "keys-not-released": ("backward", "    k_ring.release(visit)\n", "", "deadlock"),
    "values-not-released": (
        "backward",
        "v = v.load(FIXED)\n        v_ring.release(visit)",
        "v = v.load(FIXED)",
        "deadlock",
    ),
    "block-not-released": ("backward", "    block_ring.release(visit)\n", "", "deadlock"),
    "dq-used-before-its-wait": (
        "backward",
        "warpgroup_mma_wait(1, deps=(dv_pending",
        "warpgroup_mma_wait(3, deps=(dv_pending",
        "not waited for",
    ),
}


@INTERPRETED
@pytest.mark.parametrize(
    ("module", "old", "new", "said"),
    [
        pytest.param(*error, id=name, marks=() if i % 2 else pytest.mark.slow)
        for i, (name, error) in enumerate(ERRORS.items())
    ],
)
def test_the_interpreter_sees_an_error_in_the_protocol(module, old, new, said):
    backend = interpreted_backend((module, old, new))
    q, k, v = (torch.randn(1, 2, 600, 64).half().requires_grad_() for _ in range(3))
    try:
        with pytest.raises(Failure, match=said):
            for _ in range(10):  # boxes come in any order, and not every order shows every error
                attention(q, k, v, backend=backend).out.sum().backward()
    finally:
        COUNTERS.zero_()


# which kernel runs

H200 = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64}


@pytest.fixture
def on_an_h200(monkeypatch):
    choice.obstacle_of_the_place.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(choice, "version", lambda name: "3.6.0")
    yield monkeypatch
    choice.obstacle_of_the_place.cache_clear()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"dtype": torch.float16, "head_dim": 128}, ""),
        ({"device": torch.device("cpu")}, "the inputs are on cpu"),
        ({"dtype": torch.float32}, "bfloat16 and float16, the inputs are float32"),
        ({"head_dim": 96}, "head_dim 64 and 128, the inputs have 96"),
        ({"score_mod": "attention.kernels.score_mods:softcap"}, ""),
        ({"softmax": "no_max"}, "broken softmax"),
        ({"tile": 64}, "block_q or block_kv is given"),
        ({"scale": -1.0}, "a positive scale, not -1.0"),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else "",
)
def test_what_the_hopper_kernels_take(change, reason, on_an_h200):
    found = why_not_hopper(**H200 | change)
    assert reason in found and bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (
            lambda patch: patch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0)),
            "sm_90",
        ),
        (lambda patch: patch.setattr(torch.version, "cuda", None), "NVIDIA"),
        (
            lambda patch: patch.setattr(choice, "version", lambda name: "3.9.0"),
            "for Triton 3.6 and 3.7, this is Triton 3.9.0",
        ),
    ],
    ids=["A100", "not-NVIDIA", "another-Triton"],
)
def test_where_they_run(where, reason, on_an_h200):
    where(on_an_h200)
    assert reason in why_not_hopper(**H200)


def test_the_choice_and_its_reason(on_an_h200):
    assert choose_kernel("portable", **H200).kernel == "portable"
    assert choose_kernel("hopper", **H200).kernel == "hopper"
    assert choose_kernel("auto", **H200).kernel == "hopper"
    assert choose_kernel("auto", **H200 | {"head_dim": 96}) == (
        "portable",
        "not the Hopper kernels: they take head_dim 64 and 128, the inputs have 96",
    )
    capped = H200 | {"score_mod": "attention.kernels.score_mods:softcap"}
    chosen, reason = choose_kernel("auto", **capped)
    assert chosen == "portable" and "a softcap takes longer in them" in reason
    assert choose_kernel("hopper", **capped).kernel == "hopper"
    biased = H200 | {"score_mod": "attention.kernels.score_mods:alibi"}
    assert choose_kernel("auto", **biased).kernel == "hopper"
    with pytest.raises(
        ValueError,
        match="attention.kernel=hopper cannot run: they take head_dim 64 and 128, the inputs have "
        "96; attention.kernel=auto",
    ):
        choose_kernel("hopper", **H200 | {"head_dim": 96})


def test_what_a_run_writes_into_its_log(on_an_h200):
    assert kernel_choice(get_backend("tiled"), **H200) is None
    for option, kernel in (("portable", "portable"), ("hopper", "hopper")):
        assert kernel_choice(get_backend("triton", kernel=option), **H200) == (kernel, "asked for")
    assert kernel_choice(get_backend("triton"), **H200).kernel == "hopper"
    assert (
        "float32" in kernel_choice(get_backend("triton"), **H200 | {"dtype": torch.float32}).reason
    )


@INTERPRETED
def test_a_refusal_names_the_reason_and_the_way_out():
    q = torch.zeros(1, 1, 4, 64)
    with pytest.raises(
        ValueError, match="kernel=hopper .* inputs are on cpu; kernel=auto takes the portable ones"
    ):
        attention(q, q, q, backend=get_backend("triton", kernel="hopper"))
    with pytest.raises(ValueError, match="kernel=fast is not one of: auto, portable, hopper"):
        attention(q, q, q, backend=get_backend("triton", kernel="fast"))


# the machine code

# bytes a thread, with Triton 3.6 and with the releases after it; what is not here spills nothing
SPILLS = {
    ("forward", 64): (0, 4),
    ("backward", 64): (56, 516),
    ("backward", 64, "wide"): (68, 516),
    ("backward", 64, "top_wide"): (68, 516),
    ("backward", 64, "documents"): (104, 516),
    ("backward", 64, "full_documents"): (104, 516),
    ("backward", 64, "grouped_documents"): (108, 516),
    ("backward", 128): (52, 0),
    ("backward", 128, "documents"): (52, 4),
    ("backward", 128, "full_documents"): (52, 4),
    ("backward", 128, "grouped_documents"): (60, 4),
    # a score modifier's numbers and derivative take registers
    ("forward", 64, "sinks"): (0, 8),
    ("forward", 64, "softcap"): (0, 704),
    ("forward", 64, "alibi"): (0, 524),
    ("forward", 64, "both"): (0, 992),
    ("forward", 64, "grouped_both"): (0, 992),
    ("forward", 128, "softcap"): (0, 16),
    ("forward", 128, "alibi"): (0, 40),
    ("forward", 128, "both"): (8, 92),
    ("forward", 128, "grouped_both"): (8, 92),
    ("forward", 128, "both_intervals"): (16, 148),
    ("backward", 64, "grouped_both"): (64, 0),
    ("backward", 64, "both_intervals"): (76, 0),
    ("backward", 128, "softcap"): (208, 288),
    ("backward", 128, "alibi"): (48, 16),
    ("backward", 128, "both"): (344, 296),
    ("backward", 128, "grouped_both"): (248, 316),
    ("backward", 128, "both_intervals"): (712, 596),
}


def compiled(kernel: str, dtype: str, head_dim: int, variants: str) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "attention.kernels.hopper.offline",
        kernel,
        dtype,
        str(head_dim),
        variants,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_machine_code(kernel: str, dtype: str, head_dim: int, variants: str) -> None:
    from importlib.metadata import version

    newer = not version("triton").startswith("3.6.")
    rows = compiled(kernel, dtype, head_dim, variants)
    assert [row["variant"] for row in rows] == variants.split(",")
    for row in rows:
        assert row["shared"] <= 232448, row
        assert row["warnings"] == [], row
        usual = SPILLS.get((kernel, head_dim), (0, 0))
        assert row["spilled"] <= SPILLS.get((kernel, head_dim, row["variant"]), usual)[newer], row
        assert row["products"] >= 48, row
        if (kernel, head_dim) == (
            "forward",
            128,
        ):  # nearly all exponentials of a thread's 64 scores run beside the output's product
            # half of them where it keeps maxima under a mask too: in logged steps, one of ten
            least = 30 if row["variant"] in ("top_intervals", "top_wide") else 60
            assert min(row["overlapped"]) >= least, row


SHORT_DIFFERS = {
    ("forward", 64),
    ("backward", 128),
}  # elsewhere short sequences are computed as long ones
FIRST = ("causal", "short")
COMPILER = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton's compiler, not a GPU"
)


@COMPILER
@pytest.mark.parametrize(
    ("kernel", "head_dim"),
    [
        ("backward", 64),
        pytest.param("forward", 128, marks=pytest.mark.slow),
        pytest.param("forward", 64, marks=pytest.mark.slow),
        pytest.param("backward", 128, marks=pytest.mark.slow),
    ],
)
def test_sm_90_compiles(kernel, head_dim):
    """The compiler takes ten seconds for each: `make test` has the one with the most code."""
    check_machine_code(
        kernel,
        "bf16",
        head_dim,
        ",".join(FIRST if (kernel, head_dim) in SHORT_DIFFERS else FIRST[:1]),
    )


@COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_sm_90_compiles_the_other_variants(kernel, head_dim, dtype):
    from attention.kernels.hopper.offline import VARIANTS

    names = [
        name
        for name in VARIANTS
        if name not in FIRST and ((kernel, head_dim) in SHORT_DIFFERS or "short" not in name)
    ]
    check_machine_code(
        kernel, dtype, head_dim, ",".join(names if dtype == "bf16" else ("causal", "intervals"))
    )


# on the device

HOPPER = BACKENDS["triton"].configured(kernel="hopper")
ON_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or bool(why_not_hopper(**H200)),
    reason="needs a Hopper GPU and the Triton that the kernels are written for",
)
SMALL = [replace(case, head_dim=64) for case in CASES if case.features() <= HOPPER.features]
DEVICE_CASES = [
    *SMALL,
    *INTERPRETED_CASES,
    *(case for case in GPU_CASES if case.head_dim in (64, 128)),
    Case(
        batch=4, num_heads=64, num_kv_heads=64, num_queries=320, num_keys=320, head_dim=64
    ),  # more pieces of work than programs
    Case(batch=2, num_heads=70, num_kv_heads=70, num_queries=192, num_keys=192, head_dim=128),
    Case(batch=8, num_heads=32, num_kv_heads=8, num_queries=640, num_keys=640, head_dim=128),
    # one block a program, and shares of a group on programs of their own
    *(
        Case(
            batch=batch,
            num_heads=16,
            num_kv_heads=16 // groups,
            num_queries=num_queries,
            num_keys=num_keys,
            head_dim=128,
            causal=causal,
            optional=optional,
        )
        for batch, groups, num_queries, num_keys, causal, optional in (
            (2, 1, 2200, 2200, True, {}),
            (2, 2, 1100, 1500, True, {}),
            (1, 4, 2100, 1900, False, {}),
            (2, 8, 1500, 1500, True, {}),
            (1, 16, 1500, 1500, True, {}),
            (1, 16, 1100, 1300, False, {}),
            (1, 16, 1500, 1500, True, {"window": 300}),
            (2, 8, 1500, 1500, True, {"document_ids": True}),
        )
    ),
    # many blocks that start where documents do, more than programs
    *(
        Case(
            batch=batch,
            num_heads=16,
            num_kv_heads=kv_heads,
            num_queries=num_queries,
            num_keys=num_queries,
            head_dim=size,
            causal=causal,
            optional=optional,
        )
        for size in (64, 128)
        for batch, kv_heads, num_queries, causal, optional in (
            (3, 16, 1777, True, {"document_ids": True}),
            (2, 4, 1500, False, {"document_ids": True}),
            (1, 16, 2500, True, {"cu_seqlens": True}),
            (1, 2, 2500, False, {"cu_seqlens": True, "window": (300, 100)}),
        )
    ),
    *(
        Case(
            batch=4,
            num_heads=48,
            num_kv_heads=48,
            num_queries=130,
            num_keys=900,
            head_dim=size,
            optional={"window": 40},
        )
        for size in (64, 128)
    ),
]


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", dict.fromkeys(DEVICE_CASES), ids=str)
def test_conformance(case, dtype, conformance_record):
    check(HOPPER, case, dtype, "cuda", conformance_record)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(
        "cuda", torch.bfloat16
    )


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("optional", [{}, {"window": 300}], ids=["causal", "window"])
@pytest.mark.parametrize(("head_dim", "num_kv_heads"), [(64, 4), (64, 1), (128, 4), (128, 1)])
def test_the_same_bits_fifty_times(head_dim, num_kv_heads, optional):
    """The forward, and dk and dv; dq adds up in any order."""
    q, k, v = (
        random(2, heads, 2000, head_dim, seed=heads).requires_grad_()
        for heads in (16, num_kv_heads, num_kv_heads)
    )
    d_out = random(2, 16, 2000, head_dim, seed=1)

    def once() -> tuple[Tensor, ...]:
        out, lse = attention(q, k, v, backend=HOPPER, **optional)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, (k, v), d_out)

    first = once()
    for _ in range(50):
        assert all(torch.equal(x, y) for x, y in zip(once(), first, strict=True))


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize(
    "optional", [{}, {"window": 300}, {"document_ids": True}], ids=["causal", "window", "documents"]
)
@pytest.mark.parametrize("num_kv_heads", [16, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_a_projections_parts_are_written_into_one_tensor(
    head_dim, num_kv_heads, optional
):
    projected = random(2, 2000, 16 + 2 * num_kv_heads, head_dim, seed=0)
    if "document_ids" in optional:
        optional = {"document_ids": torch.arange(2000, device="cuda").expand(2, -1) // 700}
    compare_packed(HOPPER, projected, num_kv_heads, **optional)


@pytest.mark.gpu
@ON_HOPPER
def test_deterministic_algorithms_take_the_portable_backward():
    q, k, v = (random(1, 4, 600, 64, seed=seed).requires_grad_() for seed in range(3))
    out, lse = attention(q, k, v, backend=HOPPER)
    d_out = random(1, 4, 600, 64, seed=3)
    from attention.kernels.op import flash_attention_backward

    plain = (None, None, None, True, 64**-0.5, "", "online", 0, 0)
    portable = flash_attention_backward(
        d_out, None, q, k, v, out.detach(), lse.detach(), *plain, "portable"
    )
    torch.use_deterministic_algorithms(True)
    try:
        found = torch.autograd.grad(out, (q, k, v), d_out)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(found, portable, strict=True))


@pytest.mark.gpu
@ON_HOPPER
def test_cuda_graph_and_two_streams():
    """Counters are a stream's, or a graph's own: neither disturbs the other."""
    q, k, v = (random(2, 8, 1500, 64, seed=seed) for seed in range(3))
    expected = attention(q, k, v, backend=HOPPER).out
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(attention(q, k, v, backend=HOPPER).out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(q, k, v, backend=HOPPER).out
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, expected) for x in (*found, captured))


@pytest.mark.gpu
@ON_HOPPER
def test_graphs_of_torch_compile():
    """Its reduce-overhead mode first runs on a stream and in a pool of its own, and goes no further
    if memory of it stays in use.
    """

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (attention(q, k, v, backend=HOPPER).out * d_out).sum()

    *tensors, d_out = (random(2, 8, 1500, 64, seed=seed) for seed in range(4))
    tensors = [x.requires_grad_() for x in tensors]
    expected = torch.autograd.grad(loss(*tensors), tensors)
    compiled = torch.compile(loss, mode="reduce-overhead")
    for _ in range(4):  # as it is, recorded, and replayed
        torch.compiler.cudagraph_mark_step_begin()
        found = torch.autograd.grad(compiled(*tensors), tensors)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)
