"""Intervals made by a kernel, against attention/mask.py, which defines them; and the backward's
ranges of queries, against counting.

Without a GPU the kernels run in Triton's interpreter, which scans rows one by one.
Dimensions: B batch, N queries, M keys.
"""

import pytest
import torch
from torch import Tensor

from attention import attention, get_backend
from attention.kernels import intervals as kernels
from attention.kernels.hopper.documents import ALIGNED, block_starts
from attention.kernels.intervals import causal_intervals, query_ranges
from attention.mask import visible_keys

pytestmark = pytest.mark.anywhere
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


def ids_of(*sequences: list[int]) -> Tensor:
    """Ids (B, N) of documents of these lengths. They come again, in any order."""
    ids = torch.tensor([2, 0, 1, 0, 2, 1, 0, 1])
    rows = [ids[: len(x)].repeat_interleave(torch.tensor(x)) for x in sequences]
    return torch.stack(rows).to(DEVICE)


AT = torch.arange(36, device=DEVICE)
LONG_AND_SHORT = ids_of([30, 9, 1, 23, 1, 26], [1, 1, 15, 16, 17, 40])
# the arguments of check()
PROBLEMS = {
    # sequence p of the batch has two documents, the second from position p on
    "every-edge": ((AT[:, None] <= AT).int(), 36, 36, 11, 7),
    "by-column": (LONG_AND_SHORT.mT.contiguous().mT, 90, 90, 25, 16),
    "expanded": (LONG_AND_SHORT[:1].short().expand(2, -1), 90, 90, None, 9),
    "one-document": (ids_of([70]).to(torch.uint8), 70, 70, None, 40),
    "fewer-keys": (None, 70, 33, None, 16),
    "fewer-queries": (None, 33, 70, 9, 1),
    "one": (None, 1, 1, 1, 1),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_equal_to_the_definition(name, monkeypatch):
    """With blocks so small that rows, searches and bounds cross several."""
    monkeypatch.setattr(kernels, "ROWS", 16)
    monkeypatch.setattr(kernels, "SEARCH", 8)
    monkeypatch.setattr(kernels, "BOUNDS", 64)
    check(*PROBLEMS[name])


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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "sequences",
    [
        ([128, 128, 1, 300, 60],),
        ([1, 2, 3, 250, 5], [261]),
        ([127, 129, 40, 300], [60, 64, 200, 172], [496, 100]),
        ([40, 20, 30],),
        ([40, 250],),  # no block starts in the last 128 rows by itself
    ],
)
def test_blocks_start_where_long_documents_do(sequences, causal):
    length = min(map(sum, sequences))
    ids = torch.cat([ids_of(x)[:, :length] for x in sequences])
    q = torch.empty(1, 1, length, 1, device=DEVICE)
    visible = visible_keys(q, q, causal=causal, document_ids=ids)
    check_starts(visible.lo, visible.hi.expand_as(visible.lo).contiguous())


def test_blocks_hold_all_rows_whatever_they_see():
    """Keys of other rows than their own, as packed sequences of as many queries as keys may."""
    row = torch.arange(700, device=DEVICE, dtype=torch.int32)
    for lo in (row - row % 200 + 130, (row - 300).clamp(min=0) * 2, row // 250 * 128):
        check_starts(lo[None], torch.maximum(lo, row)[None] + 1)


class Layer(torch.nn.Module):
    def forward(self, x: Tensor, document_ids: Tensor) -> Tensor:
        backend = get_backend("triton", kernel="portable")
        return attention(x, x, x, backend=backend, document_ids=document_ids, window=9).out


@pytest.mark.slow
@torch.no_grad()
def test_exported():
    inputs = torch.randn(1, 2, 40, 16, device=DEVICE), documents(40, each=17)
    exported = torch.export.export(Layer(), inputs)
    assert torch.equal(exported.module()(*inputs), Layer()(*inputs))
