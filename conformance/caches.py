"""The property of decoding, for a backend with Backend.decode: the last queries of each sequence
attend to a cache of fixed shape, in one piece or in pages.

It looks for bugs of servers: a length or a table from the step before, one page too many, positions
counted from the capacity instead of the length, parts of a row merged without lse.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M capacity in keys of a
sequence, D head dim; P pages.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attention import AttentionOutput, Backend, attention_with_cache
from conformance.backend_under_test import Check, Subject
from conformance.cases import Case, Expected, distance
from conformance.views import far_apart, spread_out

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


def cache_and_pages(subject: Subject) -> Iterator[Check]:
    """Queries against a cache of fixed shape give what each sequence gives by itself: in one piece
    with room to spare, in pages of any order, and in any number of splits. Lengths, tables and
    keys change in place from step to step, and offsets pass 2^31.
    """
    if subject.backend.decode is None or not subject.backend.can_decode:
        subject.refusals.append("it does not decode over a cache (Backend.decode)")
        return
    n, pages = subject.length, (16, 8) if subject.device == "cpu" else (64, 16)
    grouped = {"num_heads": 4, "num_kv_heads": 2}
    for case in (
        subject.case(1, n),
        subject.case(3, n, **grouped, inputs="growing", window=9),
        subject.case(2, n, **grouped, inputs="negative", causal=False, window=(20, 1)),
        subject.case(3, n, inputs="up and down", sinks=True),
        subject.case(1, n, **grouped, inputs="large", softcap=5.0),
    ):
        if not subject.takes(case, backward=False):
            continue
        cache = Cache.of([n, n // 2 + 1, 2, 0], case, subject.expected, room=n + 5)
        backend = subject.backend
        yield from cache.checks(cache.call(backend, splits=3), f"in one piece: {case}")
        for page_size, splits in zip(pages, (1, 4), strict=True):
            found = cache.call_paged(backend, page_size, splits=splits)
            yield from cache.checks(found, f"in pages of {page_size}: {case}")
    case = subject.case(1, n)
    if subject.takes(case, backward=False):
        yield from token_by_token(subject, pages[1])
        yield from other_layouts(
            subject, Cache.of([n, n // 2 + 1], case, subject.expected), pages[1]
        )


def token_by_token(subject: Subject, page_size: int) -> Iterator[Check]:
    """A cache that grows: each step writes a token, its length and its page in place."""
    n, whole = subject.length, subject.case(batch=2)
    expected = subject.expected(whole)
    (q, k, v), start = expected.tensors, n - n % page_size - 1
    table = torch.full((2, n // page_size + 1), UNUSED, device=q.device)
    pages = k.new_full((2, 2 * table.shape[1], page_size, *k.shape[1::2]), torch.nan)
    lengths = torch.zeros(2, dtype=torch.int32, device=q.device)
    room = [x.new_full((*x.shape[:2], n + page_size, x.shape[3]), torch.nan) for x in (k, v)]
    for t in range(n):
        for row in range(2):
            lengths[row] = t + 1
            # the sequences take turns, and the second one's pages come first
            table[row, t // page_size] = 2 * (t // page_size) + 1 - row
            for cache, each, x in zip(pages, room, (k, v), strict=True):
                each[row, :, t] = cache[table[row, t // page_size], t % page_size] = x[row, :, t]
        if t < start or t > start + 2:
            continue
        exact = expected.reference["out"][:, :, t : t + 1]
        for what, cache, block_table in (
            ("in one piece", room, None),
            ("in pages", pages, table),
        ):
            found = attention_with_cache(
                *(q[:, :, t : t + 1], cache[0], cache[1], lengths),
                backend=subject.backend,
                block_table=block_table,
                splits=2,
            )
            moved = distance(found.out.double(), exact)
            yield Check(f"token {t} of {whole}, {what}", moved, expected.budget("out"))


def other_layouts(subject: Subject, cache: Cache, page_size: int) -> Iterator[Check]:
    """Views of larger tensors, and offsets past 2^31."""
    k, v, table = cache.paged(page_size)
    strided = torch.stack((table.long(), torch.zeros_like(table).long()), -1)[..., 0]
    lengths = torch.stack((cache.lengths.long(), torch.zeros_like(cache.lengths).long()), -1)[:, 0]
    views = replace(cache, q=spread_out(cache.q), k=spread_out(k), v=spread_out(v), lengths=lengths)
    found = views.call(subject.backend, block_table=strided, splits=2)
    yield from cache.checks(found, "parts of larger tensors")
    for what, tensors, dim, block_table in (
        ("rows past 2^31", [cache.k, cache.v], 2, None),
        ("pages past 2^31", [k, v], 0, table),
    ):
        try:
            k, v = far_apart(tensors, dim=dim)
        except RuntimeError as error:  # PyTorch raises it if memory is too small
            subject.refusals.append(f"{what}: {str(error).splitlines()[0]}")
            continue
        found = replace(cache, k=k, v=v).call(subject.backend, splits=2, block_table=block_table)
        yield from cache.checks(found, what)
