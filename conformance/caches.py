"""Caches of fixed shape that hold sequences of several lengths, in one piece or in pages, with the
exact results of each sequence.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M capacity in keys of a
sequence, D head dim; P pages.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import AttentionOutput, Backend, attention_with_cache
from conformance.cases import Case, Check, Expected, distance

UNUSED = 2**30  # table entry of a page that a sequence does not have
SPARE = 3  # the first pages, which belong to no sequence


@dataclass(frozen=True)
class Cache:
    """Sequences of different lengths in one cache, and the exact results of each (None for a
    sequence without keys). Unwritten entries are NaN.
    """

    q: Tensor  # (B, H, N, D)
    k: Tensor  # (B, H_kv, M, D)
    v: Tensor
    lengths: Tensor  # (B,) int32
    expected: list[Expected | None]
    arguments: dict[str, Any]
    # (B, pages of a sequence) int32, and then k and v are (P, page_size, H_kv, D)
    block_table: Tensor | None = None

    @classmethod
    def of(
        cls, lengths: list[int], case: Case, expect: Callable[[Case], Expected], *, room: int = 0
    ) -> "Cache":
        """One sequence of `case` for each of `lengths`. `expect` computes the exact results."""
        expected = [
            expect(replace(case, num_keys=max(n, 1), seed=i)) for i, n in enumerate(lengths)
        ]
        q, keys, values = zip(*(each.tensors for each in expected), strict=True)
        capacity = max(room, *lengths)
        k, v = (
            torch.cat(
                [
                    F.pad(x[:, :, :n], (0, 0, 0, capacity - n), value=torch.nan)
                    for x, n in zip(rows, lengths, strict=True)
                ]
            )
            for rows in (keys, values)
        )
        sizes = torch.tensor(lengths, dtype=torch.int32, device=k.device)
        known = [each if n else None for each, n in zip(expected, lengths, strict=True)]
        return cls(torch.cat(q), k, v, sizes, known, expected[0].arguments)

    def call(self, backend: str | Backend, **options: Any) -> AttentionOutput:
        return attention_with_cache(
            *(self.q, self.k, self.v, self.lengths),
            backend=backend,
            block_table=self.block_table,
            **self.arguments,
            **options,
        )

    def paged(self, page_size: int, *, seed: int = 0) -> "Cache":
        """A copy of the cache in shuffled pages. The first pages belong to no sequence. Entries of
        pages that a sequence does not have point nowhere.
        """
        # (B, H_kv, M, D) to (B * pages of a sequence, page_size, H_kv, D)
        to_fill = (0, 0, 0, -self.k.shape[2] % page_size)
        k, v = (
            F.pad(x, to_fill, value=torch.nan)
            .unflatten(2, (-1, page_size))
            .permute(0, 2, 3, 1, 4)
            .flatten(0, 1)
            for x in (self.k, self.v)
        )
        begins = torch.arange(len(k) // len(self.q), device=k.device) * page_size
        used = (begins < self.lengths[:, None]).flatten().nonzero()[:, 0]
        used = used[torch.randperm(len(used), generator=torch.Generator().manual_seed(seed))]
        table = self.lengths.new_full((len(self.q), len(begins)), UNUSED)
        table[1::2] = -1
        table.view(-1)[used] = SPARE + torch.arange(len(used), device=k.device).int()
        k, v = (F.pad(x[used], (0, 0) * 3 + (SPARE, 0), value=torch.nan) for x in (k, v))
        return replace(self, k=k, v=v, lengths=self.lengths.clone(), block_table=table)

    def checks(self, output: AttentionOutput, what: str) -> Iterator[Check]:
        """out and lse of each sequence against its exact results."""
        empty = {"out": 0.0, "lse": -torch.inf}
        if "sinks" in self.arguments:
            empty["lse"] = self.arguments["sinks"].double()[:, None]
        for row, expected in enumerate(self.expected):
            for name in ("out", "lse"):
                found = getattr(output, name)
                if found is None:
                    continue
                x = found[row].double()
                if expected is None:
                    exact, budget = torch.zeros_like(x) + empty[name], 0.0
                else:
                    exact, budget = expected.reference[name][0], expected.budget(name)
                where = f"{name} of sequence {row}, {int(self.lengths[row])} keys, {what}"
                yield Check(where, distance(x, exact), budget)
