"""Which keys a query sees: an interval lo_i <= j < hi_i, both ends non-decreasing in i.

Causal masks, windows, packed documents and sequences, padding and ragged tails all take this form.
So a tile loop needs two integers a row, and can tell whether to skip a tile, to mask it, or
neither.

    causal, N=4, M=4      causal, N=2, M=4      causal, window=2      documents 0 0 1 1
       1 . . .               1 1 1 .               1 . . .               1 . . .
       1 1 . .               1 1 1 1               1 1 . .               1 1 . .
       1 1 1 .                                     . 1 1 .               . . 1 .
       1 1 1 1                                     . . 1 1               . . 1 1

    window=(1, 2),        key_lengths=[3],      sequences of 2, 0 and 2 queries
    not causal            window=(1, 2)         with 3, 1 and 1 keys, causal
       1 1 1 .               1 1 1 .               1 1 . . .
       1 1 1 1               1 1 1 .               1 1 1 . .
       . 1 1 1               . 1 1 .               . . . . .
       . . 1 1               . . 1 .               . . . . 1
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# the w most recent keys, or (left, right); see intervals()
Window = int | tuple[int, int] | None
# the arguments of attention() that say which keys a query sees, beside causal; see intervals()
MASKS = ("window", "document_ids", "key_lengths", "cu_seqlens")


class QueryTile(NamedTuple):
    """Query rows start:stop, the keys that any of them sees (first:last), and the keys that all of
    them see (full_first:full_last).
    """

    start: int
    stop: int
    first: int
    last: int
    full_first: int
    full_last: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    def key_tiles(self, block_kv: int) -> Iterator[tuple[slice, bool]]:
        """(keys, needs_mask) for each tile of the fixed grid 0, block_kv, 2 * block_kv, ... that
        some row of this tile sees.
        """
        for j in range(self.first // block_kv * block_kv, self.last, block_kv):
            end = j + block_kv
            yield slice(j, end), j < self.full_first or end > self.full_last


@dataclass(frozen=True)
class VisibleKeys:
    """Query i of sequence b sees keys lo[b, i] <= j < hi[b, i]."""

    lo: Tensor  # (B or 1, N) int32
    hi: Tensor  # (B or 1, N) int32, hi >= lo
    num_keys: int

    def query_tiles(self, block_q: int) -> list[QueryTile]:
        if is_fake(self.lo):  # as if every query saw all keys, and some of them hidden
            num_queries = self.lo.shape[1]
            return [
                QueryTile(start, min(start + block_q, num_queries), 0, self.num_keys, 0, 0)
                for start in range(0, num_queries, block_q)
            ]
        starts = torch.arange(0, self.lo.shape[1], block_q, device=self.lo.device)
        stops = (starts + block_q).clamp(max=self.lo.shape[1])
        # both ends are non-decreasing, so a tile's extremes are in its first and last row
        bounds = (
            starts,
            stops,
            self.lo[:, starts].amin(0),
            self.hi[:, stops - 1].amax(0),
            self.lo[:, stops - 1].amax(0),
            self.hi[:, starts].amin(0),
        )
        return [QueryTile(*row) for row in torch.stack(bounds, 1).tolist()]

    def mask(self, rows: slice | None = None, keys: slice | None = None) -> Tensor:
        """Boolean (B or 1, 1, rows, keys), true where the query sees the key; None: all of them."""
        # not as defaults: torch.compile of torch 2.11 cannot take one from there
        rows, keys = rows or slice(None), keys or slice(None)
        j = torch.arange(self.num_keys, device=self.lo.device)[keys]
        return ((j >= self.lo[:, rows, None]) & (j < self.hi[:, rows, None])).unsqueeze(1)


def is_fake(x: Tensor) -> bool:
    """Whether x has a shape and no values, as in a step of scripts.plan."""
    return isinstance(x, FakeTensor)


def visible_keys(q: Tensor, k: Tensor, *, causal: bool, **mask: Any) -> VisibleKeys:
    """The intervals for q (B, H, N, D) and k (B, H_kv, M, D); see intervals()."""
    return intervals(q.shape[2], k.shape[2], q.device, causal=causal, **mask)


def pair(window: Window) -> tuple[int, int]:
    """Any window as (left, right), where -1 is no limit."""
    if window is None:
        return -1, -1
    return window if isinstance(window, tuple) else (window - 1, 0)


def sides(
    window: Window, *, causal: bool, longest: int = sys.maxsize
) -> tuple[int | None, int | None]:
    """How many keys a query sees before and after its own position; None is all of them. A side
    beyond `longest`, which hides no more, becomes `longest`.
    """
    left, right = pair(window)
    if causal:
        right = 0
    return (
        None if left == -1 else min(left, longest),
        None if right == -1 else min(right, longest),
    )


def plain_window(window: Window, *, causal: bool, longest: int) -> Window:
    """A window in its simplest form: None, a number under a causal mask, (left, right) without."""
    left, right = sides(window, causal=causal, longest=longest)
    if causal:
        return None if left is None else min(left + 1, longest)
    if left is None and right is None:
        return None
    return -1 if left is None else left, -1 if right is None else right


def intervals(
    num_queries: int,
    num_keys: int,
    device: torch.device,
    *,
    causal: bool,
    window: Window = None,
    document_ids: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cache_lengths: Tensor | None = None,
) -> VisibleKeys:
    """The intervals for N queries and M keys.

    Query i stands at key p = i + M - N: aligned bottom-right. causal: it sees key j iff j <= p.
    window=w leaves the w most recent of those, window=(left, right) those with p - left <= j <= p +
    right, where -1 is no limit. document_ids (B, N): a run of equal ids is a document, and
    attention stays inside it. key_lengths (B,): sequence b sees only its first key_lengths[b] keys.
    cu_seqlens (2, S + 1): where each of S sequences begins and ends, among the queries and among
    the keys. Attention stays inside a sequence, and M and N above are its own. cache_lengths (B,):
    the number of keys of sequence b, used as M above; the queries are its last tokens.
    """
    i = torch.arange(num_queries, dtype=torch.int32, device=device)[None]  # (1, N)
    first, last = torch.zeros_like(i), torch.full_like(i, num_keys)  # of the query's sequence
    position = i + num_keys - num_queries
    if cu_seqlens is not None:
        of_queries, of_keys = cu_seqlens.int()
        end = torch.searchsorted(of_queries, i, right=True)
        first, last = of_keys[end - 1], of_keys[end]
        position = i + last - of_queries[end]
    if cache_lengths is not None:
        last = cache_lengths.int()[:, None].expand(-1, num_queries)  # (B, N)
        position = i + last - num_queries
    # a longer side may not fit into 32 bits
    left, right = sides(window, causal=causal, longest=num_queries + num_keys)
    lo = first if left is None else (position - left).clamp(first, last)
    hi = last if right is None else (position + right + 1).clamp(first, last)
    if document_ids is not None:
        change = document_ids[:, 1:] != document_ids[:, :-1]
        edge = torch.ones_like(document_ids[:, :1], dtype=torch.bool)
        is_first = torch.cat((edge, change), 1)
        is_last = torch.cat((change, edge), 1)
        start = torch.where(is_first, i, 0).cummax(1).values
        end = torch.where(is_last, i + 1, num_keys).flip(1).cummin(1).values.flip(1)
        lo, hi = torch.maximum(lo, start), torch.minimum(hi, end)
    if key_lengths is not None:
        hi = torch.minimum(hi, key_lengths.int()[:, None])
        lo = torch.minimum(lo, hi)
    return VisibleKeys(lo, hi, num_keys)
