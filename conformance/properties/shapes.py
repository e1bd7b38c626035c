"""Properties of the lengths and heads of a call.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys.
"""

from collections.abc import Iterator

import torch

from conformance.backend_under_test import Check, Subject
from conformance.cases import distance


def ragged_tails(subject: Subject) -> Iterator[Check]:
    """Lengths that no tile size divides."""
    multiple = subject.limits.multiple
    if multiple > 1:
        subject.refusals.append(f"it takes lengths that are multiples of {multiple}")
        return
    lengths = (1, 2, 15, 17, 31, 33) if subject.device == "cpu" else (2, 15, 63, 65, 127, 129, 257)
    yield from subject.compared(
        [subject.case(n, causal=causal) for n in lengths for causal in (True, False)]
    )


def every_length(subject: Subject) -> Iterator[Check]:
    """Each remainder of a length after whole tiles, with the scores of one head 100 higher and of
    another 120 lower: what fills a tile up may not count, in either pass.
    """
    tile = 32 if subject.device == "cpu" else 128
    # each remainder of half a tile comes with a causal mask and without
    cases = [
        subject.case(n, causal=n <= tile + tile // 2, inputs="up and down")
        for n in range(tile + 1, 2 * tile + 1)
    ]
    # half a tile again, without the other mask and with one that is a tensor
    half = {"num_queries": tile + tile // 2, "causal": False, "inputs": "up and down"}
    cases += [subject.case(**half), subject.case(**half, key_lengths=True)]
    yield from subject.compared(dict.fromkeys(cases))


def first_tile_masked(subject: Subject) -> Iterator[Check]:
    """A row of whose first tile no key is visible, as under a sliding window: -inf - -inf must not
    become NaN.
    """
    n = subject.length
    cases = [
        subject.case(window=9),
        subject.case(n // 2, n, window=n // 2 + 5),
        subject.case(document_ids=True),
    ]
    yield from subject.compared(cases)


def rows_without_a_key(subject: Subject) -> Iterator[Check]:
    """More queries than keys: the first N - M rows see nothing, give out = 0, lse = -inf (or their
    sink) and no gradient, and spoil no other row.
    """
    n = subject.length
    for case in (subject.case(n, n // 2 - 2), subject.case(n, n // 2, sinks=True)):
        none = case.num_queries - case.num_keys  # 0 if rounding to multiples made them equal
        if not none or not subject.takes(case):
            continue
        exact = subject.expected(case).reference
        for name, x in subject.run(case).items():
            if name in ("out", "lse", "dq"):
                expected = exact["lse"] if name == "lse" else torch.zeros_like(x)
                moved = distance(x[:, :, :none], expected[:, :, :none])
                yield Check(f"{name} of {case}", moved, 0.0)
                x = x[:, :, none:]
            wrong = float((~x.isfinite()).sum())
            yield Check(f"non-finite numbers in {name} of {case}", wrong, 0.0)


def cross_length(subject: Subject) -> Iterator[Check]:
    """N and M differ: queries are aligned with the last keys. With one key more than queries the
    last row of a tile of queries sees one key of a tile of its own.
    """
    n = subject.length
    shapes = (
        (n // 2, n, True),
        (n // 2, n, False),
        (n, n // 2, False),
        (1, n, True),
        (n, n + 1, True),
    )
    yield from subject.compared([subject.case(a, b, causal=causal) for a, b, causal in shapes])


def grouped_heads(subject: Subject) -> Iterator[Check]:
    """Several query heads share a key/value head."""
    cases = [
        subject.case(batch=2, num_heads=4, num_kv_heads=2),
        subject.case(num_heads=4, num_kv_heads=1, causal=False),
    ]
    yield from subject.compared(cases)
