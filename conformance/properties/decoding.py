"""Properties of decoding: the last queries of each sequence attend to a cache.

They look for bugs of servers. A length or a table may be of the step before, or name one page too
many. Positions may count from the capacity, not the length. Parts of a row may merge without lse.

Dimensions: B batch, H query heads, N queries, M keys.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from conformance.backend_under_test import Check, Subject
from conformance.caches import Cache
from conformance.views import cached, far_apart, spread_out


def prefill_equals_decode(subject: Subject) -> Iterator[Check]:
    """The last queries alone, against a cache of all keys, give the last rows of the whole pass:
    one token at a time or several. Of another function than softmax, the first tokens alone give
    the first rows.
    """
    n = subject.length
    if not subject.backend.claims_softmax:
        whole = subject.case()
        tensors = subject.expected(whole).tensors
        together = subject.attend(*tensors)
        for first in (1, n // 2 + 1):
            alone = subject.attend(*(x[:, :, :first] for x in tensors))
            outs = {"out": alone}, {"out": together[:, :, :first]}
            yield from subject.same(whole, f"the first {first} tokens", *outs)
    for optional in ({}, {"window": 9}, {"alibi_slopes": True}, {"sinks": True}):
        whole = subject.case(**optional)
        if not subject.takes(whole):
            continue
        (q, k, v), arguments, *_ = subject.expected(whole).inputs
        together = subject.attend(q, k, v, **arguments)
        # rows of few keys too: there a sink weighs most
        for last in dict.fromkeys(map(subject.rounded, (1, 3, 9, n - 7))):
            if last < n and subject.takes(subject.case(last, n, **optional)):
                alone = subject.attend(q[:, :, -last:], *cached(k, v), **arguments)
                outs = {"out": alone}, {"out": together[:, :, -last:]}
                yield from subject.same(whole, f"the last {last} queries", *outs)


def cache_and_pages(subject: Subject) -> Iterator[Check]:
    """Queries against a cache of fixed shape give what each sequence gives by itself: in one piece
    with room to spare, in pages of any order, and in any number of splits. Lengths, tables and
    keys change in place from step to step, and offsets pass 2^31.
    """
    backend = subject.backend
    if backend.decode is None or not backend.can_decode:
        subject.refusals.append("it does not decode over a cache (Backend.decode)")
        return
    n, pages = subject.length, (16, 8) if subject.device == "cpu" else (64, 16)
    grouped = {"num_heads": 4, "num_kv_heads": 2}
    cases = [
        subject.case(1, n),
        subject.case(3, n, **grouped, inputs="growing", window=9),
        subject.case(2, n, **grouped, inputs="negative", causal=False, window=(20, 1)),
        subject.case(3, n, inputs="up and down", sinks=True),
        subject.case(1, n, **grouped, inputs="large", softcap=5.0),
    ]
    for case in filter(subject.takes, cases):
        cache = Cache.of([n, n // 2 + 1, 2, 0], case, subject.expected, room=n + 5)
        yield from cache.checks(cache.call(backend, splits=3), f"in one piece: {case}")
        for page_size, splits in zip(pages, (1, 4), strict=True):
            found = cache.paged(page_size).call(backend, splits=splits)
            yield from cache.checks(found, f"in pages of {page_size}: {case}")
    case = subject.case(1, n)
    if subject.takes(case):
        # one of them has a last page of one key
        lengths = [n - n % pages[1] + 1, n // 2 + 1]
        caches = [Cache.of(x, case, subject.expected, room=n + 5) for x in (lengths, lengths[::-1])]
        # pages first, while the caches are as they were made
        for step in ([cache.paged(pages[1]) for cache in caches], caches):
            yield from changed_in_place(subject, *step)
        yield from other_layouts(subject, Cache.of(lengths, case, subject.expected), pages[1])


def changed_in_place(subject: Subject, cache: Cache, other: Cache) -> Iterator[Check]:
    """Another step has other keys, lengths and pages at the same addresses."""
    cache.call(subject.backend, splits=2)
    for name in ("k", "v", "lengths", "block_table"):
        x, y = (getattr(each, name) for each in (cache, other))
        if x is not None:
            x.copy_(y)
    yield from other.checks(cache.call(subject.backend, splits=2), "changed in place")


def other_layouts(subject: Subject, cache: Cache, page_size: int) -> Iterator[Check]:
    """Views of larger tensors, and offsets past 2^31."""
    paged = cache.paged(page_size)
    views = dict(zip("qkv", spread_out(paged.q, paged.k, paged.v), strict=True))
    for name in ("lengths", "block_table"):
        x = getattr(paged, name).long()
        views[name] = torch.stack((x, torch.zeros_like(x)), -1)[..., 0]
    found = replace(paged, **views).call(subject.backend, splits=2)
    yield from cache.checks(found, "parts of larger tensors")
    for what, each, dim in (("rows past 2^31", cache, 2), ("pages past 2^31", paged, 0)):
        try:
            k, v = far_apart(each.k, each.v, dim=dim)
        except RuntimeError as error:  # PyTorch raises it if memory is too small
            subject.refusals.append(f"{what}: {str(error).splitlines()[0]}")
            continue
        found = replace(each, k=k, v=v).call(subject.backend, splits=2)
        yield from cache.checks(found, what)
