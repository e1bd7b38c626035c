"""Intervals made by a kernel, against attention/mask.py, which defines them; and the backward's
ranges of queries, against counting.

Without a GPU the kernels run in Triton's interpreter, which scans rows one by one.
Dimensions: B batch, N queries, M keys.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention import attention, get_backend
from attention.kernels import intervals as kernels
from attention.kernels.hopper.documents import ALIGNED, block_starts
from attention.kernels.intervals import causal_intervals, query_ranges
from attention.mask import visible_keys

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def counted_ranges(lo: Tensor, hi: Tensor, num_keys: int, block_kv: int) -> Tensor:
    """For each tile of keys: the queries before the first that sees beyond its start, before the
    first that sees up to its stop, ...
    """
    lo, hi, counted = lo[:, None], hi[:, None], []
    for start in torch.arange(0, num_keys, block_kv, device=lo.device)[:, None].split(256):
        stop = start + block_kv
        edges = hi <= start, hi < stop, lo <= start, lo < stop
        counted.append(torch.stack([edge.sum(2) for edge in edges], -1))
    return torch.cat(counted, 1).int()


def check(
    ids: Tensor | None, num_queries: int, num_keys: int, window: int | None, block_kv: int
) -> None:
    q, k = (torch.empty(1, 1, length, 1, device=DEVICE) for length in (num_queries, num_keys))
    mask = {"window": window, "document_ids": ids}
    found, visible = causal_intervals(q, k, **mask), visible_keys(q, k, causal=True, **mask)
    expected = tuple(x.expand_as(found[0]) for x in (visible.lo, visible.hi))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)  # shapes and dtypes too
    ranges = query_ranges(*found, num_keys, block_kv)
    counted = counted_ranges(*expected, num_keys, block_kv)
    torch.testing.assert_close(ranges, counted, rtol=0, atol=0)


@st.composite
def problems(draw) -> tuple[Any, ...]:
    """The arguments of check(). Ids come again, in any order, and lie with any strides."""
    num_queries = draw(st.integers(1, 90))
    window = draw(st.none() | st.integers(1, 90))
    ids, num_keys = None, num_queries
    if draw(st.booleans()):
        lengths = st.lists(st.integers(1, 60), min_size=1, max_size=8)
        dtype = draw(st.sampled_from((torch.int64, torch.int32, torch.int16, torch.uint8)))
        sequences = []
        for documents in draw(st.lists(lengths, min_size=1, max_size=3)):
            numbers = torch.tensor([draw(st.integers(0, 2)) for _ in documents])
            sequence = numbers.repeat_interleave(torch.tensor(documents))
            sequences.append(sequence.repeat(num_queries // len(sequence) + 1)[:num_queries])
        ids = torch.stack(sequences).to(DEVICE, dtype)
        if draw(st.booleans()):
            ids = ids.mT.contiguous().mT
        elif len(ids) == 1:
            ids = ids.expand(2, -1)
    else:
        num_keys = draw(st.integers(1, 90))
    return ids, num_queries, num_keys, window, draw(st.integers(1, 40))


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """So small that rows, searches and bounds cross several."""
    monkeypatch.setattr(kernels, "ROWS", 16)
    monkeypatch.setattr(kernels, "SEARCH", 8)
    monkeypatch.setattr(kernels, "BOUNDS", 64)


@pytest.mark.usefixtures("small_blocks")
def test_equal_to_the_definition():
    settings(max_examples=20, deadline=None)(given(problems())(lambda problem: check(*problem)))()


@pytest.mark.usefixtures("small_blocks")
def test_an_edge_is_found_wherever_it_lies():
    """Sequence p of the batch has two documents, the second from position p on."""
    at = torch.arange(36, device=DEVICE)
    check((at >= at[:, None]).int(), 36, 36, 11, 7)


def documents(length: int, *, each: int, batch: int = 1) -> Tensor:
    return (torch.arange(length, device=DEVICE) // each).expand(batch, -1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("length", "each"),
    [(32768, 2048), (32768, 700), (32768, 1), (32768, 32768), (8192, 5000), (1000003, 1000003)],
)
def test_equal_to_the_definition_at_length(length, each):
    for window in (None, 1024, 5000):
        check(documents(length, each=each, batch=2), length, length, window, 128)


def check_starts(lo: Tensor, hi: Tensor) -> None:
    """Blocks divide the rows, and one starts where a long document does. Also the ranges of
    queries: of a tile's ALIGNED keys, some may belong to other blocks.
    """
    length, starts = lo.shape[1], block_starts(lo)
    ranges = query_ranges(lo, hi, length, ALIGNED, starts)
    for sequence, (left, right) in enumerate(zip(lo, hi, strict=True)):
        tiles = enumerate(starts[sequence].unfold(1, 2, 1).flatten(0, 1).tolist())
        found = [(4 * (tile // 3) + tile % 3, *rows) for tile, rows in tiles if rows[0] < rows[1]]
        assert [0, *(stop for *_, stop in found)] == [*(start for _, start, _ in found), length]
        long = {row for row in range(length) if (left[row : row + ALIGNED] == row).sum() == ALIGNED}
        assert long <= {start for _, start, _ in found}
        for tile, start, stop in found:
            assert stop - start <= ALIGNED and start // ALIGNED == tile // 4
            whole = start + ALIGNED
            counted = right <= start, right < whole, left <= start, left < stop
            assert ranges[sequence, tile].tolist() == [int(x.sum()) for x in counted]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=6), min_size=1, max_size=3))
def test_blocks_start_where_long_documents_do(sequences):
    length = min(map(sum, sequences))
    ids = torch.stack(
        [torch.arange(len(x)).repeat_interleave(torch.tensor(x))[:length] for x in sequences]
    ).to(DEVICE)
    q = torch.empty(1, 1, length, 1, device=DEVICE)
    for causal in (True, False):
        visible = visible_keys(q, q, causal=causal, document_ids=ids)
        check_starts(visible.lo, visible.hi.expand_as(visible.lo).contiguous())


def test_blocks_hold_all_rows_whatever_they_see():
    """Keys of other rows than their own, as packed sequences of as many queries as keys may."""
    row = torch.arange(700, device=DEVICE, dtype=torch.int32)
    for lo in (row - row % 200 + 130, (row - 300).clamp(min=0) * 2, row // 250 * 128):
        check_starts(lo[None], torch.maximum(lo, row)[None] + 1)


class Layers(torch.nn.Module):
    def forward(self, x: Tensor, document_ids: Tensor) -> Tensor:
        backend = get_backend("triton", kernel="portable")
        for _ in range(2):
            x = attention(x, x, x, backend=backend, document_ids=document_ids, window=9).out + x
        return x


def test_compiled_and_exported():
    inputs = torch.randn(1, 2, 40, 16, device=DEVICE, requires_grad=True), documents(40, each=17)
    compiled = torch.compile(Layers(), fullgraph=True, backend="aot_eager")
    found, expected = (function(*inputs) for function in (compiled, Layers()))
    gradients = [torch.autograd.grad(out.sum(), inputs[0]) for out in (found, expected)]
    torch.testing.assert_close((found, gradients[0]), (expected, gradients[1]))
    with torch.no_grad():
        exported = torch.export.export(Layers(), inputs)
        assert torch.equal(exported.module()(*inputs), expected)
