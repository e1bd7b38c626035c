"""Properties of what hides keys, and of the other optional arguments.

Dimensions: B batch, H query heads, N queries, M keys, D head dim.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from attention.mask import visible_keys
from conformance.backend_under_test import Check, Subject
from conformance.cases import Case, distance, run
from conformance.other_functions import hidden_keys_with_gradient


def after(cuts: list[int], case: Case, subject: Subject) -> Tensor:
    """Which tokens lie after the cut of their sequence, (B, 1, N, 1), one sequence for each cut."""
    position = torch.arange(case.num_queries, device=subject.device)
    first = torch.tensor(cuts, device=subject.device)
    return (position >= first[:, None])[:, None, :, None]


def no_leak_forward(subject: Subject) -> Iterator[Check]:
    """Later queries, keys and values do not change an earlier output, after whichever token a
    sequence is cut and however large they are, nor do other sequences of the batch.
    """
    case = subject.case(batch=2)
    if not subject.takes(case):
        return
    q, k, v = (x[:1] for x in subject.expected(case).tensors)
    before = subject.attend(q, k, v)[0]
    cuts = list(range(1, case.num_queries))
    later = after(cuts, case, subject)
    changed = [torch.where(later, *x) for x in ((-q, q), (-100 * k, k), (v + 100, v))]
    # one more sequence, of other numbers altogether
    found = subject.attend(*(torch.cat((-x[:1], x)) for x in changed))[1:]
    for cut, out in zip(cuts, found, strict=True):
        first, plain = ({"out": x[:, :cut]} for x in (out, before))
        yield from subject.same(case, f"the first {cut} queries", first, plain)


def no_leak_backward(subject: Subject) -> Iterator[Check]:
    """An earlier output has no gradient for later keys and values, a later one none for earlier
    queries. Cuts are after the first token, at every border of a tile and before the last query.
    """
    case = subject.case()
    if not subject.takes(case, backward=True):
        return
    expected = subject.expected(case)
    # borders of tiles of 16 are those of larger tiles too
    cuts = sorted({1, *range(16, case.num_queries, 16), case.num_queries - 1})
    later = after(cuts, case, subject)
    # a key is hidden from earlier queries only
    for rows, names in ((~later, ("dq", "dk", "dv")), (later, ("dq",))):
        tensors = [x.repeat(len(cuts), 1, 1, 1) for x in expected.tensors]
        found = run(subject.backend, tensors, expected.arguments, expected.d_out * rows, None)
        for name in names:
            for cut, leak in zip(cuts, torch.where(rows, 0.0, found[name]), strict=True):
                error = distance(leak, torch.zeros_like(leak))
                yield Check(f"{name} of {case}, cut after {cut} tokens", error, 0.0)


def mask_positions(subject: Subject) -> Iterator[Check]:
    """Which keys have weight, key by key: the mask depends on positions in the sequence, not on
    tiles.
    """
    n = subject.length
    masked = [
        # the last ones begin a key after a tile, of either device
        *(subject.case(window=window) for window in (9, 15, 63)),
        *(subject.case(document_ids=True, causal=causal) for causal in (True, False)),
        subject.case(n // 2, n, causal=False, window=(9, 4)),
        subject.case(batch=3, causal=False, key_lengths=True),
        subject.case(n, n + n // 4, cu_seqlens=True),
    ]
    for case in filter(subject.takes, [subject.case(), subject.case(n // 2, n), *masked]):
        (q, k, v), arguments, *_ = case.make(subject.dtype, subject.device)
        if not subject.backend.claims_softmax:
            if subject.takes(case, backward=True):
                found = hidden_keys_with_gradient(q, k, v, backend=subject.backend, **arguments)
                yield Check(f"hidden keys with a gradient of {case}", float(found), 0.0)
            continue
        # all scores are equal, and each column of the output is the weight of one key
        q, width = torch.zeros_like(q), case.num_keys + -case.num_keys % case.head_dim
        identity = torch.eye(case.num_keys, width, dtype=k.dtype, device=k.device)
        parts = [
            subject.attend(q, k, columns.expand_as(k).contiguous(), **arguments)
            for columns in identity.split(case.head_dim, dim=1)
        ]
        weights = torch.cat(parts, -1)[..., : case.num_keys]
        wrong = ((weights > 0) != visible_keys(q, k, **arguments).mask()).sum()
        yield Check(f"wrong weights of {case}", float(wrong), 0.0)


def optional_arguments(subject: Subject) -> Iterator[Check]:
    """window, softcap, alibi_slopes, document_ids, score_mod and sinks, alone and together, in
    their order, with keys to both sides of a query.
    """
    n = subject.length
    cases = [
        subject.case(window=20),
        # the last query that sees a tile of keys is the first of its tile of queries
        subject.case(window=2),
        subject.case(softcap=2.0, inputs="large"),
        # scores far below the cap, for which tanh as 1 - 2 / (1 + e) loses precision
        subject.case(16, num_heads=3, num_kv_heads=3, softcap=100.0),
        subject.case(num_heads=4, num_kv_heads=2, alibi_slopes=True),
        subject.case(n // 2, n, alibi_slopes=True),
        subject.case(causal=False, alibi_slopes=True),
        subject.case(batch=2, document_ids=True),
        subject.case(batch=2, causal=False, document_ids=True),
        subject.case(batch=2, num_heads=4, num_kv_heads=2, score_mod=True),
        subject.case(causal=False, score_mod=True),
        subject.case(n // 2, n, score_mod=True),
        subject.case(num_heads=4, num_kv_heads=2, sinks=True),
        subject.case(n // 2, n, sinks=True),
        subject.case(document_ids=True, window=6, softcap=5.0, alibi_slopes=True),
    ]
    yield from subject.compared(cases)


def wider_calls(subject: Subject) -> Iterator[Check]:
    """A window to both sides, padding by key_lengths, packed sequences, and values of another width
    than the keys, each also with the other arguments.
    """
    n = subject.length
    grouped = {"num_heads": 4, "num_kv_heads": 2}
    cases = [
        subject.case(n // 2, n, causal=False, window=(7, 20)),
        subject.case(batch=2, causal=False, window=(-1, 3), document_ids=True, key_lengths=True),
        subject.case(batch=3, **grouped, causal=False, key_lengths=True),
        subject.case(n, n // 2, batch=2, key_lengths=True, window=9, sinks=True),
        subject.case(n, n + n // 4, **grouped, cu_seqlens=True),
        subject.case(n, n // 2, causal=False, cu_seqlens=True, window=(7, 20)),
        subject.case(cu_seqlens=True, window=6, softcap=5.0, alibi_slopes=True),
    ]
    if len(subject.head_dims) > 1:
        one, other = subject.head_dims[:2]
        cases += [
            subject.case(**grouped, head_dim=other, value_dim=one),
            subject.case(batch=2, causal=False, head_dim=one, value_dim=other, key_lengths=True),
        ]
    yield from subject.compared(cases)
