"""Which keys a query sees: one interval lo_i <= j < hi_i a query, both ends non-decreasing in i.

Causal masks, bottom-right alignment, sliding windows, packed documents and ragged tails all take
this form, so a tile loop needs two integers a row, and knows for a whole tile whether to skip it,
to mask it, or neither.

    causal, N=4, M=4      causal, N=2, M=4      causal, window=2      documents 0 0 1 1
       1 . . .               1 1 1 .               1 . . .               1 . . .
       1 1 . .               1 1 1 1               1 1 . .               1 1 . .
       1 1 1 .                                     . 1 1 .               . . 1 .
       1 1 1 1                                     . . 1 1               . . 1 1
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class QueryTile(NamedTuple):
    """Rows start:stop of the queries, and the keys any of them sees (first:last) or all of them see
    (full_first:full_last).
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

    lo: Tensor  # (B or 1, N) int64
    hi: Tensor  # (B or 1, N) int64, hi >= lo
    num_keys: int

    def query_tiles(self, block_q: int) -> list[QueryTile]:
        starts = torch.arange(0, self.lo.shape[1], block_q, device=self.lo.device)
        stops = (starts + block_q).clamp(max=self.lo.shape[1])
        # both ends are non-decreasing, so a tile's extremes stand in its first and last row
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
        rows, keys = (
            rows or slice(None),
            keys or slice(None),
        )  # not as defaults: torch.compile of torch 2.11 cannot take one from there
        j = torch.arange(self.num_keys, device=self.lo.device)[keys]
        return ((j >= self.lo[:, rows, None]) & (j < self.hi[:, rows, None])).unsqueeze(1)


def visible_keys(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    document_ids: Tensor | None = None,
) -> VisibleKeys:
    """The intervals for q (B, H, N, D) and k (B, H_kv, M, D); see intervals()."""
    mask = {"causal": causal, "window": window, "document_ids": document_ids}
    return intervals(q.shape[2], k.shape[2], q.device, **mask)


def intervals(
    num_queries: int,
    num_keys: int,
    device: torch.device,
    *,
    causal: bool,
    window: int | None = None,
    document_ids: Tensor | None = None,
) -> VisibleKeys:
    """The intervals for N queries and M keys.

    causal is aligned bottom-right: query i sees key j iff j <= i + (M - N). window=w leaves the w
    most recent of those. document_ids (B, N): a run of equal ids is a document, and attention stays
    inside it.
    """
    i = torch.arange(num_queries, device=device)[None]  # (1, N)
    lo = torch.zeros_like(i)
    hi = (i + 1 + num_keys - num_queries).clamp(min=0) if causal else torch.full_like(i, num_keys)
    if window is not None:
        lo = (hi - window).clamp(min=0)
    if document_ids is not None:
        change = document_ids[:, 1:] != document_ids[:, :-1]
        edge = (
            torch.ones_like(change[:, :1])
            if num_queries > 1
            else torch.ones_like(document_ids, dtype=torch.bool)
        )
        is_first = torch.cat((edge, change), 1)
        is_last = torch.cat((change, edge), 1)
        start = torch.where(is_first, i, 0).cummax(1).values
        end = torch.where(is_last, i + 1, num_keys).flip(1).cummin(1).values.flip(1)
        lo, hi = torch.maximum(lo, start), torch.minimum(hi, end)
    return VisibleKeys(lo, hi, num_keys)
