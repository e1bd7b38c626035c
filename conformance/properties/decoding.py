"""Properties of decoding: the last queries of each sequence attend to a cache.

They look for bugs of servers. A length or a table may be of the step before, or name one page too
many. Positions may count from the capacity, not the length. Parts of a row may merge without lse.

Dimensions: B batch, H query heads, N queries, M keys.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from attention import attention_with_cache
from conformance.backend_under_test import Check, Subject
from conformance.caches import UNUSED, Cache
from conformance.cases import distance
from conformance.views import cached, far_apart, spread_out


def prefill_equals_decode(subject: Subject) -> Iterator[Check]:
    """The last queries alone, against a cache of all keys, give the last rows of the whole pass:
    one token at a time or several. Of another function than softmax, the first tokens alone give
    the first rows.
    """
    n = subject.length
    if not subject.backend.claims_softmax:
        expected = subject.expected(whole := subject.case())
        q, k, v = expected.tensors
        for first in (1, n // 2 + 1):
            alone, together = (
                subject.attend(*(x[:, :, :tokens] for x in (q, k, v)))[:, :, :first].double()
                for tokens in (first, n)
            )
            error, budget = distance(alone, together), 2 * expected.budget("out")
            yield Check(f"first {first} tokens of {whole}", error, budget)
    for optional in ({}, {"window": 9}, {"alibi_slopes": True}, {"sinks": True}):
        whole = subject.case(**optional)
        if not subject.takes(whole, backward=False):
            continue
        expected = subject.expected(whole)
        (q, k, v), arguments = expected.tensors, expected.arguments
        together = subject.attend(q, k, v, **arguments).double()
        # rows of few keys too: there a sink weighs most
        for last in dict.fromkeys(map(subject.rounded, (1, 3, 9, n - 7))):
            if last < n and subject.takes(subject.case(last, n, **optional), backward=False):
                alone = subject.attend(q[:, :, -last:], cached(k), cached(v), **arguments)
                yield Check(
                    f"last {last} queries of {whole}",
                    distance(alone.double(), together[:, :, -last:]),
                    2 * expected.budget("out"),
                )


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
