"""The Hopper kernels: their numbers and their protocol in an interpreter and on a GPU.
test_machine_code.py has what the compiler makes of them.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import BACKENDS, Backend, attention
from attention.kernels import hopper, key_intervals
from attention.kernels import launch as launches
from attention.kernels.hopper.launch import shares_of
from attention.kernels.launch import Settings, backward, forward
from attention.kernels.select import why_not_hopper
from conformance.cases import Case, probabilities
from tests.attention.kernels import gluon_interpreter
from tests.attention.kernels.gluon_interpreter import Failure, load_kernels
from tests.attention.test_conformance import check
from tests.conformance.edits import drop, swap

TRITON = BACKENDS["triton"]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


# in the interpreter


@cache
def unchanged_kernels() -> dict[str, ModuleType]:
    return load_kernels()


@pytest.fixture
def interpret(monkeypatch) -> Callable:
    """attention=triton runs the Hopper kernels in the interpreter; call it with other kernels."""

    def run(kernels: dict[str, ModuleType]) -> None:
        launch = kernels["launch"]

        def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others) -> None:
            launch.forward(q, k, v, out.fill_(torch.nan), lse.fill_(torch.nan), *others)

        def backward(*inputs: Any) -> Tensor:
            for gradient in inputs[7:10]:
                gradient.fill_(torch.nan)
            return launch.backward(*inputs)

        stand_in = SimpleNamespace(forward=forward, backward=backward)
        monkeypatch.setattr(hopper, "launch", stand_in)

    monkeypatch.setattr(launches, "runs_hopper", lambda *inputs: True)
    run(unchanged_kernels())
    return run


@dataclass(frozen=True)
class Uneven(Case):
    """Documents or packed sequences that end here."""

    ends: tuple[tuple[int, ...], ...] = ()  # of the queries, and of the keys

    __hash__ = Case.__hash__

    def __str__(self) -> str:
        return f"{super().__str__()}-until-{'-'.join(map(str, self.ends[1]))}"

    def make(self, dtype: torch.dtype, device: str):
        tensors, arguments, *gradients = super().make(dtype, device)
        if "document_ids" in arguments:
            lengths = self.sequences()[0].diff()
            ids = torch.arange(len(lengths)).repeat_interleave(lengths)
            arguments["document_ids"] = ids[None].to(device)
        return tensors, arguments, *gradients

    def sequences(self) -> Tensor:
        return torch.tensor(self.ends).int()


def sized(num_queries: int, num_keys: int, head_dim: int, **others: Any) -> Case:
    """A case with its masks and changes of the scores as arguments."""
    fields = {name: others.pop(name) for name in list(others) if name in Case.__dataclass_fields__}
    return Case(
        num_queries=num_queries, num_keys=num_keys, head_dim=head_dim, optional=others, **fields
    )


def uneven(head_dim: int, *ends: Iterable[int], causal: bool = True, **optional: bool) -> Case:
    """Sequences or documents that end at `ends`: for queries and keys, or one tuple for each."""
    ends = tuple(map(tuple, ends if len(ends) == 2 else 2 * ends))
    shape = {"num_queries": ends[0][-1], "num_keys": ends[1][-1], "head_dim": head_dim}
    return Uneven(**shape, causal=causal, ends=ends, optional=optional)


# a block of keys starts at 150, where one of queries does, and queries see both its sides
ACROSS = (0, 150, 600), (0, 400, 600)
BOTH = {"softcap": 2.0, "alibi_slopes": True}
# several blocks of queries, several tiles of keys, and more work than the interpreter's two
# programs: each kernel, each mask, a change of the scores and each order of the work
QUICK_CASES = [
    # the first 170 rows see no key; of three heads in sections of two, a launch pointed past the
    # last head
    sized(300, 130, 64, num_heads=3, num_kv_heads=3, sinks=True),
    # masked scores are 0, far above all others
    sized(130, 200, 64, num_heads=4, num_kv_heads=1, causal=False, inputs="negative"),
    uneven(64, *ACROSS, cu_seqlens=True),
    # queries of a document see all the last keys of a block, and not the first
    uneven(128, (0, 12, 220, 240, 400), document_ids=True),
    sized(130, 400, 128, num_kv_heads=1, window=40),  # no query sees the first keys
    # sequences end inside a tile and on its edge, and some are empty
    sized(130, 384, 64, batch=3, num_kv_heads=1, key_lengths=True, **BOTH),
    # longer than SHORT and LONG, where the work has another order; the diagonal in one tile
    sized(66, 1090, 128, num_heads=4),
]
# for make test-all and the device, which runs the calls of test_conformance.py too
SLOW_CASES = [
    sized(290, 290, 128, num_heads=4),
    sized(130, 384, 64, batch=3, num_heads=1, num_kv_heads=1, key_lengths=True),
    sized(130, 1100, 128, num_kv_heads=1),
    sized(450, 450, 64, window=100),
    sized(270, 270, 128, batch=2, num_heads=1, num_kv_heads=1, causal=False, document_ids=True),
    sized(130, 200, 128, batch=2, causal=False, score_mod=True),
    sized(600, 600, 128, num_kv_heads=1, window=300),
    sized(300, 130, 64, window=5),
    # of eight blocks of keys the first six are seen by no query
    *(sized(130, 900, d, num_heads=6, num_kv_heads=3, window=40) for d in (64, 128)),
    sized(400, 400, 64, batch=2, num_kv_heads=1, document_ids=True),
    sized(400, 400, 128, batch=2, document_ids=True, window=30),
    sized(310, 310, 128, batch=3, document_ids=True, softcap=2.0),
    *(uneven(d, range(0, 601, 100), document_ids=True) for d in (64, 128)),
    uneven(64, *ACROSS, causal=False, cu_seqlens=True),
    uneven(128, *ACROSS, cu_seqlens=True),
    sized(200, 400, 64, causal=False, window=(40, 90)),
    sized(130, 256, 128, batch=3, causal=False, key_lengths=True, window=(100, -1)),
    sized(320, 640, 64, cu_seqlens=True),
    sized(400, 350, 128, cu_seqlens=True),
    # blocks start where long documents do, or just after them; with a window they do not
    sized(780, 780, 64, num_heads=4, num_kv_heads=4, cu_seqlens=True),
    sized(780, 780, 64, num_heads=4, causal=False, cu_seqlens=True, **BOTH),
    sized(780, 780, 128, num_heads=4, num_kv_heads=4, causal=False, cu_seqlens=True),
    sized(780, 780, 128, num_heads=4, num_kv_heads=1, cu_seqlens=True),
    sized(780, 780, 128, num_heads=4, cu_seqlens=True, sinks=True, window=150),
    sized(200, 300, 128, batch=2, num_heads=4, window=70, **BOTH),
    sized(200, 300, 128, batch=2, num_heads=4, window=70, softcap=2.0, sinks=True),
    sized(200, 300, 64, batch=2, num_heads=4, causal=False, alibi_slopes=True),
    sized(200, 300, 64, batch=2, num_heads=4, score_mod=True),
    sized(130, 1100, 64, inputs="growing"),
    sized(1100, 1100, 64, num_kv_heads=1),
]


@pytest.mark.parametrize("case", [*QUICK_CASES, *map(slow, SLOW_CASES)], ids=str)
def test_interpreted(case, interpret):
    check(TRITON, case, torch.float16, "cpu")
    counters = unchanged_kernels()["launch"].counters("cpu")
    assert not counters.any(), "a launch leaves the counters as it found them"


# with several programs for the query heads of one key/value head
SHARED_CASES = [
    sized(200, 130, 64, num_heads=12),
    slow(sized(200, 200, 128, batch=2, num_heads=8)),
    slow(sized(300, 130, 128, batch=2, num_heads=12)),
]


@pytest.mark.parametrize("case", SHARED_CASES, ids=str)
def test_shares_of_a_group_are_joined_where_the_cache_is_small(case, interpret):
    interpret(load_kernels(cache_bytes=1))
    check(TRITON, case, torch.float16, "cpu")


@pytest.mark.parametrize(
    ("head_dim", "num_queries", "num_keys", "window"),
    [(128, 300, 300, 70), slow(64, 290, 290, None), slow(64, 300, 130, None)],
)
def test_largest_score_of_each_row(head_dim, num_queries, num_keys, window, interpret):
    """Though the maximum that is subtracted lags behind it. The scores grow by less than the
    threshold from tile to tile, so that it does.
    """
    q = torch.randn(1, 2, num_queries, head_dim).half()
    k, v = (torch.randn(1, 2, num_keys, head_dim).half() for _ in range(2))
    k = k * torch.linspace(1.5, 0.5, num_keys)[:, None].half()  # tiles are walked backwards
    mask = {"causal": True, "window": window}
    lo, hi = key_intervals(q, k, **mask) if window else (None, None)
    settings = Settings(True, head_dim**-0.5)
    top = forward(q, k, v, lo, hi, None, None, True, settings)[3]
    wide = q.double(), k.double()
    largest = probabilities(*wide, mask | {"scale": head_dim**-0.5}).amax(-1).log()
    exact = largest + attention(*wide, v.double(), backend="naive", **mask).lse
    torch.testing.assert_close(top.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("groups", "blocks", "mib", "equal", "shares"),
    [
        # fastest on an H200, whose cache has 60 MiB
        (16, 128, 16, False, 8),  # MQA, 16 heads, 16,384 keys: 128 programs for 132 multiprocessors
        (8, 1024, 4, False, 2),  # 64:8, four sequences of 4,096 keys
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
        grads = torch.autograd.grad((out * out).sum() + lse.sum(), tensors)
        results.append((out, lse, *grads))
    (out, lse, dq, dk, dv), (expected_out, expected_lse, expected_dq, *expected) = results
    assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)
    assert torch.equal(dk, expected[0]) and torch.equal(dv, expected[1])
    eps = torch.finfo(dq.dtype).eps
    assert (dq - expected_dq).float().norm() <= eps * expected_dq.float().norm()
    for gradient, view in zip((dq, dk, dv), views, strict=True):
        assert gradient.stride() == view.stride()
        assert gradient.storage_offset() == view.storage_offset()
        assert gradient.untyped_storage().data_ptr() == dq.untyped_storage().data_ptr()


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 64), slow(1, 128)])
def test_parts_of_a_projection_are_read_and_written_where_they_are(
    num_kv_heads, head_dim, interpret
):
    projected = torch.randn(2, 200, 2 + 2 * num_kv_heads, head_dim).half()
    compare_packed(TRITON, projected, num_kv_heads)


@pytest.mark.slow
def test_nan_is_not_lost_in_a_polynomial(interpret, monkeypatch):
    """One number of one query: dv of half of the keys may miss it, where the row is one of those
    whose exponentials are the polynomial's.
    """
    same_bits = lambda x, y: torch.equal(x.view(torch.int16), y.view(torch.int16))  # noqa: E731
    monkeypatch.setattr(gluon_interpreter, "unchanged", same_bits)
    for row in (3, 72, 199):
        q, k, v = (torch.randn(1, 1, 200, 64).half() for _ in range(3))
        q[0, 0, row, 5] = torch.nan
        tensors = [x.requires_grad_() for x in (q, k, v)]
        out = attention(*tensors, backend=TRITON).out
        dq, dk, dv = torch.autograd.grad(out, tensors, torch.randn_like(out))
        for x in (out, dq):
            assert x[0, 0, row].isnan().all() and x.isnan().sum() == 64
        assert dk[0, 0, : row + 1].isnan().all()
        assert dv[0, 0, : row + 1].isnan().float().mean() >= 0.45


def test_exponentials_by_polynomial():
    """Two of sixteen numbers are not exp2's own, and none is far from it."""
    x = torch.linspace(-130, 0.9, 4096).reshape(64, 64)
    x[:, 8], x[:, 17] = -torch.inf, torch.nan
    with torch.no_grad():
        p = unchanged_kernels()["primitives"].exp2_by_two_units(gluon_interpreter.Value(x)).data
    # below the smallest normal number the units give 0, or next to it
    exact = torch.where(x < -126, 0, x.double().exp2())
    error = (p.double() / exact - 1).abs()[x > -126]
    assert 0.9e-4 < error.max() < 1.1e-4
    assert (error > 1e-6).double().mean() == pytest.approx(1 / 8, abs=0.02)
    assert (p[:, 8] == 0).all()
    assert p[:, 17].isnan().sum() == 32  # the other half are the polynomial's
    assert (p[x < -126] < 2.0**-125).all() and (p[x < -127.1].abs() <= 2.0**-126).all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_an_accumulator_is_rescaled_where_any_row_of_a_warp_asks_for_it(head_dim):
    rescaled = unchanged_kernels()["primitives"].rescaled
    acc, alpha = torch.randn(64, head_dim), torch.ones(64, 1)
    for row in (None, 0, 8, 29, 63):
        if row is not None:
            alpha[row] = 0.5
        found = rescaled(gluon_interpreter.Value(acc), gluon_interpreter.Value(alpha))
        assert torch.equal(found.data, acc * alpha)


FORWARD, BACKWARD = "forward:consumer", "backward:add_queries"
# a wrong protocol for each thing that the interpreter looks at, and what it must say
ERRORS = {
    "v-released-before-its-product": (
        swap(
            FORWARD,
            "acc, p = warpgroup_mma_wait(0, deps=(acc_pending, p)); v_ring.release(item - 2)",
            "v_ring.release(item - 2); acc, p = warpgroup_mma_wait(0, deps=(acc_pending, p))",
        ),
        "operand",
    ),
    "k-not-awaited": (drop(FORWARD, "k_ring.await_full(item, pred=tile > own_first)"), "NaN"),
    "v-not-released": (drop(FORWARD, "v_ring.release(item - 2)"), "deadlock"),
    "ds-not-fenced": (drop(BACKWARD, "fence_async_shared()"), "fence"),
    "dq-tile-not-awaited": (drop(BACKWARD, "await_own_stores()"), "being stored"),
    "dp-used-before-its-wait": (swap(BACKWARD, "PARTS + part - 1", "PARTS + part"), "waited for"),
}
QUICK_ERRORS = "v-released-before-its-product", "ds-not-fenced"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        pytest.param(*error, id=name, marks=() if name in QUICK_ERRORS else pytest.mark.slow)
        for name, error in ERRORS.items()
    ],
)
def test_the_interpreter_sees_an_error_in_the_protocol(edit, said, interpret):
    interpret(load_kernels(edit))
    q, k, v = (torch.randn(1, 2, 600, 64).half().requires_grad_() for _ in range(3))
    with pytest.raises(Failure, match=said):
        for _ in range(10):  # boxes come in any order, and not every order shows every error
            attention(q, k, v, backend=TRITON).out.sum().backward()


# on the device

HOPPER = TRITON.configured(kernel="hopper")
ON_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available()
    or bool(why_not_hopper(device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=64)),
    reason="needs a Hopper GPU and the Triton that the kernels are written for",
)
DEVICE_CASES = [
    *QUICK_CASES,
    *SLOW_CASES,
    # sequences shorter than a tile
    sized(17, 17, 64, num_kv_heads=1),
    sized(70, 70, 64, window=9),
    sized(70, 70, 64, score_mod=True),
    sized(70, 70, 64, document_ids=True, window=6, softcap=5.0, alibi_slopes=True),
    sized(33, 70, 64, causal=False, window=(9, 4)),
    sized(33, 70, 64, batch=3, key_lengths=True),
    sized(70, 60, 64, num_kv_heads=1, cu_seqlens=True),
    # more pieces of work than programs
    sized(320, 320, 64, batch=4, num_heads=64, num_kv_heads=64),
    sized(192, 192, 128, batch=2, num_heads=70, num_kv_heads=70),
    sized(640, 640, 128, batch=4, num_heads=32, num_kv_heads=8),
    *(sized(130, 900, d, batch=4, num_heads=48, num_kv_heads=48, window=40) for d in (64, 128)),
    # one block a program, and shares of a group on programs of their own
    sized(2200, 2200, 128, num_heads=16, num_kv_heads=16),
    sized(1100, 1500, 128, batch=2, num_heads=16, num_kv_heads=8),
    sized(2100, 1900, 128, num_heads=16, num_kv_heads=4, causal=False),
    sized(1500, 1500, 128, batch=2, num_heads=16, num_kv_heads=2),
    sized(1500, 1500, 128, batch=2, num_heads=16, num_kv_heads=2, document_ids=True),
    sized(1500, 1500, 128, num_heads=16, num_kv_heads=1),
    sized(1500, 1500, 128, num_heads=16, num_kv_heads=1, window=300),
    sized(1100, 1300, 128, num_heads=16, num_kv_heads=1, causal=False),
    # many blocks that start where documents do, more than programs
    *(
        sized(n, n, d, batch=batch, num_heads=16, num_kv_heads=kv_heads, **others)
        for d in (64, 128)
        for batch, kv_heads, n, others in (
            (2, 16, 1777, {"document_ids": True}),
            (2, 4, 1500, {"causal": False, "document_ids": True}),
            (1, 16, 2500, {"cu_seqlens": True}),
            (1, 2, 2500, {"causal": False, "cu_seqlens": True, "window": (300, 100)}),
        )
    ),
]


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", DEVICE_CASES, ids=str)
def test_on_the_device(case, dtype):
    check(HOPPER, case, dtype, "cuda")


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
    saved = q, k, v, out.detach(), lse.detach(), lse.new_empty(0)
    portable = backward(d_out, None, *saved, *(None,) * 4, False, Settings(True, 64**-0.5))
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
