"""attention_with_cache(): the kernel within the budget of conformance, and what is refused. The
specification is held to the budget by tests/conformance/test_properties.py.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from attention import BACKENDS, AttentionOutput, attention, attention_with_cache, get_backend
from attention.decoding import FIXED_SPLITS, MOST_SPLITS, busy_splits, num_splits
from attention.kernels import decoding as kernels
from conformance.caches import Cache
from conformance.cases import Case, expect
from tests.selection import diagonal

pytestmark = pytest.mark.anywhere
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS_THAT_DECODE = [name for name, backend in BACKENDS.items() if backend.decode is not None]


def cache_of(lengths: list[int], case: Case, dtype=torch.float32, *, room: int = 0) -> Cache:
    return Cache.of(lengths, case, partial(expect, dtype=dtype, device=DEVICE), room=room)


def share(cache: Cache, output: AttentionOutput) -> float:
    """The worst error as a share of its budget; 1 is all of it."""
    return max(check.share for check in cache.checks(output, ""))


CASES = {
    "MHA-N1-D64": ([70, 33, 1], Case(num_queries=1, head_dim=64)),
    "GQA-6:1-N5-D16-window": (
        [40, 21],
        Case(num_heads=6, num_kv_heads=1, num_queries=5, optional={"window": 19}),
    ),
    "MQA-N16-D128": ([30, 17], Case(num_heads=3, num_kv_heads=1, num_queries=16, head_dim=128)),
    "N2-D24-full-growing": (
        [70, 20],
        Case(num_queries=2, head_dim=24, causal=False, inputs="growing"),
    ),
    "N3-two-sided-sinks": (
        [50, 12],
        Case(num_queries=3, causal=False, optional={"window": (20, 1), "sinks": True}),
    ),
    "N2-right-side": (
        [30, 12],
        Case(num_queries=2, causal=False, optional={"window": (-1, 0)}),
    ),
    # the first rows of the second stand before its first key
    "N3-fewer-keys-and-none": ([20, 2, 0], Case(num_queries=3)),
    "N1-softcap-huge": ([60, 31], Case(num_queries=1, inputs="huge", optional={"softcap": 5.0})),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize(("dtype", "case"), diagonal(DTYPES, CASES))
def test_the_budget_is_kept(dtype, case):
    """Contiguous, and in pages: of whole tiles of the kernel, or in tiles of whole pages."""
    cache = cache_of(*case, dtype, room=75)
    assert share(cache, cache.call("triton", splits=3)) <= 1
    page_size = 32 if dtype == torch.float32 else 8
    assert share(cache, cache.paged(page_size).call("triton", splits=2)) <= 1


def test_fixed_splits_give_the_same_bits_in_any_batch_room_and_order_of_pages():
    case = Case(num_heads=1, num_kv_heads=1, num_queries=1)
    cache = cache_of([60, 35], case)
    whole = cache.call("triton", splits="fixed")
    alone = replace(cache, **{x: getattr(cache, x)[:1] for x in ("q", "k", "v", "lengths")})
    for other in (
        alone.call("triton", splits="fixed"),
        cache.paged(8, seed=1).call("triton", splits="fixed"),
        cache_of([60, 9], case, room=99).call("triton", splits="fixed"),
    ):
        assert torch.equal(other.out[0], whole.out[0])
        assert torch.equal(other.lse[0], whole.lse[0])


def test_the_most_parts():
    """Most of them without a key, one row without any."""
    cache = cache_of([150, 0], Case(num_heads=1, num_kv_heads=1, num_queries=1))
    assert share(cache, cache.call("triton", splits=MOST_SPLITS)) <= 1


@pytest.mark.parametrize(
    ("programs", "tiles", "slots", "splits"),
    [(1, 8, 264, 8), (264, 64, 264, 1), (512, 64, 264, 4), (32, 512, 264, 8), (1, 1, 264, 1)],
)
def test_splits_fill_the_device_and_no_more(programs, tiles, slots, splits):
    assert busy_splits(programs, tiles, slots) == splits
    assert num_splits("fixed", programs=programs, tiles=tiles, slots=slots) == FIXED_SPLITS


def test_the_operator_keeps_pytorchs_contract():
    """5 s, of PyTorch's tracing."""
    cache = cache_of([20, 9], Case(num_heads=2, num_queries=1))
    paged = cache.paged(8)
    pages = (paged.k.transpose(1, 2), paged.v.transpose(1, 2), cache.lengths, paged.block_table)
    settings = (None, 20, 0, 0.25, "", "2")
    torch.library.opcheck(kernels.split_attention_op, (cache.q, *pages, *settings))


PAGES = torch.zeros(2, 8, 1, 16)
REFUSED = {
    "k-of-3-dims": ({"k": torch.zeros(1, 20, 16)}, r"\(1, 20, 16\)"),
    "lengths-of-another-batch": ({"cache_lengths": torch.tensor([1])}, r"cache_lengths .* B = 2"),
    "lengths-in-floats": ({"cache_lengths": torch.tensor([1.0, 2.0])}, "cache_lengths .* float32"),
    "more-keys-than-room": (
        {"cache_lengths": torch.tensor([20, 21])},
        r"k \(2, 1, 20, 16\): cache_lengths \[20, 21\]",
    ),
    "no-such-page": (
        {"block_table": torch.tensor([[0, 1], [1, 2]]), "k": PAGES, "v": PAGES},
        r"cache_lengths \[9, 9\], block_table \[\[0, 1\], \[1, 2\]\]",
    ),
    "pages-of-k-and-v-differ": (
        {"block_table": torch.tensor([[0, 1], [1, 0]]), "k": PAGES, "v": PAGES[:1]},
        r"k \(2, 8, 1, 16\), v \(1, 8, 1, 16\)",
    ),
    "no-pages": (
        {"block_table": torch.zeros(2, 0).int(), "k": PAGES, "v": PAGES},
        r"block_table .* \(2, 0\)",
    ),
    "splits-0": ({"splits": 0}, "splits=0"),
    "splits-all": ({"splits": "all"}, "splits=all"),
    "sdpa": ({"backend": "sdpa"}, "sdpa .* tiled, triton"),
    # a regression test: the option was dropped
    "narrow-statistics": (
        {"backend": get_backend("tiled", softmax_dtype="input")},
        "softmax_dtype=input",
    ),
    "gradient-of-q": ({"q": torch.zeros(2, 2, 1, 16, requires_grad=True)}, "gradient"),
    "gradient-of-sinks": ({"sinks": torch.zeros(2, requires_grad=True)}, "gradient"),
    "another-dtype": ({"k": torch.zeros(2, 1, 20, 16).double()}, "dtype"),
    "triton-narrow-values": (
        {"backend": "triton", "v": torch.zeros(2, 1, 20, 8)},
        "triton .* 16, not 8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inputs_that_are_refused(name):
    arguments = {
        "q": torch.zeros(2, 2, 1, 16),
        "k": torch.zeros(2, 1, 20, 16),
        "v": torch.zeros(2, 1, 20, 16),
        "cache_lengths": torch.tensor([9, 9]),
        "backend": "tiled",
    }
    changes, named = REFUSED[name]
    arguments |= changes
    if arguments["backend"] == "triton":  # it refuses a CPU first
        arguments |= {x: arguments[x].to(DEVICE) for x in ("q", "k", "v", "cache_lengths")}
    with pytest.raises(ValueError, match=named):
        attention_with_cache(**arguments)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter
@pytest.mark.parametrize("backend", BACKENDS_THAT_DECODE)
def test_a_page_or_length_outside_the_cache_is_nan_where_no_value_is_read(backend):
    """On a GPU no value is read before the call: a wrong one may not pass for a result. Unused
    entries of a table may hold anything.
    """
    q, pages = torch.randn(2, 2, 1, 16, device=DEVICE), torch.randn(9, 2, 4, 16, device=DEVICE)
    settings = {"causal": True, "scale": 1.0, "window": None, "softcap": None, "splits": 2}
    for length, row in ((4, [0, 99]), (5, [0, 99]), (5, [0, -1]), (9, [0, 1]), (-1, [0, 1])):
        lengths = torch.tensor([length, 8], device=DEVICE)
        table = torch.tensor([row, [2, 3]], device=DEVICE)
        out, lse = get_backend(backend).decode(q, pages, pages, lengths, table, **settings)
        assert out[0].isnan().all() == lse[0].isnan().all() == (length != 4)
        assert out[1].isfinite().all() and lse[1].isfinite().all()
    lengths = torch.tensor([5, 4], device=DEVICE)
    found = get_backend(backend).decode(q, pages[:2], pages[:2], lengths, None, **settings)
    assert found.out[0].isnan().all() and found.out[1].isfinite().all()


def test_values_of_another_width_than_the_keys():
    """A regression test: a width of 1 was broadcast to that of the keys."""
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 1)
    out = attention_with_cache(q, k, v, torch.tensor([20, 20]), backend="tiled").out
    torch.testing.assert_close(out, attention(q, k, v, backend="naive").out)  # shapes too


def test_a_window_of_more_than_32_bits_hides_no_key():
    """A regression test: it was cut to 32 bits, and hid every key."""
    cache = cache_of([20, 5], Case(num_queries=1, optional={"window": 2**32}))
    assert all(share(x, x.call("tiled")) <= 1 for x in (cache, cache.paged(8)))
