"""Caches of fixed shape that hold sequences of several lengths, in one piece or in pages, with the
exact results of each sequence.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M capacity in keys of a
sequence, D head dim; P pages.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
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

    @classmethod
    def of(
        cls, lengths: list[int], case: Case, expect: Callable[[Case], Expected], *, room: int = 0
    ) -> "Cache":
        """One sequence of `case` for each of `lengths`. `expect` computes the exact results."""
        cases = [replace(case, num_keys=max(n, 1), seed=i) for i, n in enumerate(lengths)]
        expected = [expect(each) for each in cases]
        q, keys, values = zip(*(each.tensors for each in expected), strict=True)
        shape = (len(lengths), case.num_kv_heads, max(room, *lengths), case.head_dim)
        k, v = (q[0].new_full(shape, torch.nan) for _ in range(2))
        for row, length in enumerate(lengths):
            k[row, :, :length], v[row, :, :length] = (
                keys[row][0, :, :length],
                values[row][0, :, :length],
            )
        sizes = torch.tensor(lengths, dtype=torch.int32, device=k.device)
        known = [each if n else None for each, n in zip(expected, lengths, strict=True)]
        return cls(torch.cat(q), k, v, sizes, known, expected[0].arguments)

    def call(self, backend: str | Backend, **options: Any) -> AttentionOutput:
        tensors = self.q, self.k, self.v, self.lengths
        return attention_with_cache(*tensors, backend=backend, **self.arguments, **options)

    def paged(self, page_size: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """k and v (P, page_size, H_kv, D) with shuffled pages, and the block_table (B, max_pages),
        whose unused entries point nowhere.
        """
        batch, heads, room, head_dim = self.k.shape
        lengths = self.lengths.tolist()
        counts = [-(-length // page_size) for length in lengths]
        generator = torch.Generator().manual_seed(seed)
        order = iter((SPARE + torch.randperm(sum(counts), generator=generator)).tolist())
        table = self.lengths.new_full((batch, -(-room // page_size)), UNUSED)
        table[1::2] = -1
        pages = self.k.new_full((2, SPARE + sum(counts), page_size, heads, head_dim), torch.nan)
        for row, length in enumerate(lengths):
            for entry, page in zip(range(counts[row]), order, strict=False):
                used = slice(entry * page_size, min((entry + 1) * page_size, length))
                own = torch.stack((self.k[row, :, used], self.v[row, :, used])).transpose(1, 2)
                pages[:, page, : own.shape[1]], table[row, entry] = own, page
        return pages[0], pages[1], table

    def call_paged(
        self, backend: str | Backend, page_size: int, *, seed: int = 0, **options: Any
    ) -> AttentionOutput:
        k, v, table = self.paged(page_size, seed=seed)
        return replace(self, k=k, v=v).call(backend, block_table=table, **options)

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
