"""The properties of attention, checked for any backend: ours, broken ones, and yours.

    for cell in verify_backend(get_backend("tiled")): print(cell.property, cell.status, cell.note)

A property is a function that yields checks. A check has an error and a budget, which is relative to
the error of naive attention (see conformance.cases). A backend is green if every check holds, red
if one fails, and n/a if it declares that it takes no such input. A backend that computes another
function (exact=False without a defect) is n/a in properties of softmax, and has
its own oracle in the others: see conformance.other_functions. A defect, or an exact
backend that needs much memory, lists in `breaks` the properties in which it is red.

Dimensions: B batch, H query heads, H_kv key/value heads, N queries, M keys, D head dim.
"""

import builtins
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from attention import Backend
from attention.interface import Refusal
from attention.mask import visible_keys
from conformance.backend_under_test import Check, Subject
from conformance.caches import cache_and_pages
from conformance.cases import Case, call, distance
from conformance.errors import in_one_line
from conformance.isolation import (
    call_history,
    deterministic_algorithms,
    poisoned_memory,
    row_independence,
    streams_and_graphs,
)
from conformance.mask_tensors import masks_as_tensors
from conformance.memory_growth import LINEAR, exponents, lengths_on, shape_of
from conformance.other_functions import finite_differences, hidden_keys_with_gradient, widest
from conformance.views import FAR, LAYOUTS, cached, spread_out

TENSORS = ("out", "lse", "dq", "dk", "dv", "dsinks")
# PyTorch warns so about FlexAttention on every machine, and no user can change it
WARNINGS = (
    "return_lse is deprecated",
    r"flex_attention called without torch\.compile",
    "Dynamo detected a call to a `functools.lru_cache`",
)


@dataclass(frozen=True)
class Cell:
    """The result of one backend in one property."""

    property: str
    status: str  # green, red or n/a
    note: str  # red: the worst check or the exception; n/a: the reason
    documented: bool  # whether `breaks` of the backend names the property
    checks: int = 0
    worst_share: float | None = None  # of the budget
    worst_multiple: float | None = None  # of naive attention's error

    @builtins.property  # the field above has its name
    def ok(self) -> bool:
        return self.status == "n/a" or (self.status == "red") == self.documented


def compared(
    subject: Subject, cases: Iterable[Case], tensors: Iterable[str] = TENSORS
) -> Iterator[Check]:
    """Check against softmax attention in float64; for another function, against its oracle."""
    backend = subject.backend
    if not backend.claims_softmax and widest(backend) == subject.dtype and not backend.reference:
        subject.refusals.append(f"it takes no wider dtype than {subject.dtype}: add reference=")
        return
    for case in cases:
        found = subject.compare(case) or {}
        yield from (found[name] for name in tensors if name in found)


def is_softmax(subject: Subject) -> bool:
    """Whether a property that only softmax attention has applies."""
    if not subject.backend.claims_softmax:
        subject.refusals.append("it does not claim to be softmax attention (exact=False)")
    return subject.backend.claims_softmax


def ordinary(subject: Subject) -> list[Case]:
    return [
        subject.case(batch=2, num_heads=4, num_kv_heads=4),
        subject.case(causal=False),
        subject.case(300, num_heads=1, num_kv_heads=1),
        subject.case(1),
        subject.case(inputs="ties"),
        *subject.random(),
    ]


def forward(subject: Subject) -> Iterator[Check]:
    """out equals float64 attention's, for ordinary logits of random shapes."""
    yield from compared(subject, ordinary(subject), ["out"])


def gradients(subject: Subject) -> Iterator[Check]:
    """dq, dk and dv equal those of float64 attention, the gradient that arrives through lse
    included. Of another function without a reference they equal finite differences of its out.
    """
    yield from compared(subject, ordinary(subject), ["dq", "dk", "dv"])
    backend, case = subject.backend, subject.case(33)
    if backend.claims_softmax or backend.reference or torch.float64 not in backend.dtypes:
        return
    if subject.takes(case, backward=True):
        for name, error, excused in finite_differences(backend, case, subject.device):
            yield Check(f"slope along {name} of {case} in float64", error, excused)


def log_sum_exp(subject: Subject) -> Iterator[Check]:
    """lse is the natural log-sum-exp of the scaled, masked scores."""
    if not is_softmax(subject):
        return
    if "lse" not in subject.backend.features:
        subject.refusals.append("it returns no lse")
        return
    cases = ordinary(subject)
    yield from compared(subject, cases, ["lse"])
    rows = [row for case in cases if (row := subject.compare(case)) is not None]
    if rows:
        yield Check(
            "cases without the lse it promises",
            float(sum("lse" not in row for row in rows)),
            0.0,
        )


def block_sizes(subject: Subject) -> Iterator[Check]:
    """The tile sizes do not show in the result."""
    if not subject.has_blocks:
        subject.refusals.append("it has no block_q and block_kv to choose")
        return
    for causal in (True, False):
        case = subject.case(causal=causal)
        if subject.takes(case, backward=False):
            expected = subject.expected(case)
            first = None
            # the last one holds all keys of the CPU's cases
            for block_q, block_kv in (
                (32, 16),
                (16, 32),
                (64, 16),
                (128, 128) if subject.device == "cpu" else (64, 64),
            ):
                backend = subject.backend.configured(block_q=block_q, block_kv=block_kv)
                out = subject.attend(
                    *expected.tensors, backend=backend, **expected.arguments
                ).double()
                first = out if first is None else first
                # nearly equal results may round to neighbours, and a defect's results may be larger
                # than the reference
                neighbours = torch.finfo(subject.dtype).eps * first.abs().max().item()
                yield Check(
                    f"tiles {block_q}x{block_kv} of {case}",
                    distance(out, first),
                    max(2 * expected.budget("out"), neighbours),
                )


def key_permutation(subject: Subject) -> Iterator[Check]:
    """The order of keys that a query sees all of does not matter."""
    case = subject.case()
    if is_softmax(subject) and subject.takes(case, backward=False):
        expected = subject.expected(case)
        q, k, v = expected.tensors
        mixed = case.num_keys * 2 // 3
        order = torch.arange(case.num_keys, device=q.device)
        order[:mixed] = torch.randperm(mixed, generator=torch.Generator().manual_seed(0)).to(
            q.device
        )
        plain, permuted = (
            subject.attend(q, *kv)[:, :, mixed - 1 :].double()
            for kv in ((k, v), (k[:, :, order], v[:, :, order]))
        )
        yield Check(str(case), distance(permuted, plain), 2 * expected.budget("out"))


def rows_sum_to_one(subject: Subject) -> Iterator[Check]:
    """With values of one the output is one: the weights of a row sum to it."""
    if is_softmax(subject):
        cases = [subject.case(inputs="ones", causal=causal) for causal in (True, False)]
        yield from compared(subject, cases, ["out"])


def large_logits(subject: Subject) -> Iterator[Check]:
    """Scores that grow from tile to tile, spike in the last one, stand in the hundreds, all or one
    of them, or come from a trained model.
    """
    cases = [subject.case(inputs=name) for name in ("large", "growing", "spike", "huge")]
    cases += [
        subject.case(causal=False, inputs="tower"),
        subject.case(128, head_dim=32, inputs="trained"),
    ]
    yield from compared(subject, cases)


def shifted_up(subject: Subject) -> Iterator[Check]:
    """Every score 100 higher, and a sink too: no exponential of a score itself survives it."""
    if is_softmax(subject):
        cases = [subject.case(inputs="up"), subject.case(inputs="up", sinks=True)]
        yield from compared(subject, cases)


def shifted_down(subject: Subject) -> Iterator[Check]:
    """Every score 120 lower, or lower still: exponentials of the scores themselves are 0."""
    if is_softmax(subject):
        cases = [subject.case(inputs=name) for name in ("down", "negative")]
        cases.append(subject.case(inputs="down", sinks=True))
        # one query may take a path of its own, in the backward pass too
        cases.append(subject.case(1, subject.length, inputs="down"))
        yield from compared(subject, cases)


def float32_statistics(subject: Subject) -> Iterator[Check]:
    """With 16-bit inputs scores, sums and lse are kept in float32, which shows where scores are
    near 100. (A rounding of scores is like one of q, so the oracle of another function excuses it.)
    """
    if not is_softmax(subject):
        return
    for dtype in (
        (subject.dtype,) if subject.dtype.itemsize == 2 else (torch.bfloat16, torch.float16)
    ):
        narrow = subject.in_dtype(dtype)
        yield from compared(narrow, [narrow.case(inputs="up")])
        subject.refusals += narrow.refusals


def ragged_tails(subject: Subject) -> Iterator[Check]:
    """Lengths that no tile size divides."""
    lengths = (1, 2, 15, 17, 31, 33) if subject.device == "cpu" else (2, 15, 63, 65, 127, 129, 257)
    yield from compared(
        subject, [subject.case(n, causal=causal) for n in lengths for causal in (True, False)]
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
    yield from compared(subject, dict.fromkeys(cases))


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
    yield from compared(subject, cases)


def rows_without_a_key(subject: Subject) -> Iterator[Check]:
    """More queries than keys: the first N - M rows see nothing, give out = 0, lse = -inf (or their
    sink) and no gradient, and spoil no other row.
    """
    n = subject.length
    for case in (subject.case(n, n // 2 - 2), subject.case(n, n // 2, sinks=True)):
        none = case.num_queries - case.num_keys  # 0 if rounding to multiples made them equal
        if not none or not subject.passes(case):
            continue
        arguments = subject.expected(case).arguments
        nothing = {"out": 0.0, "dq": 0.0, "lse": -torch.inf}
        if "sinks" in arguments:
            nothing["lse"] = arguments["sinks"].double()[:, None]
        for name, x in subject.run(case).items():
            if name in nothing:
                empty, x = x[:, :, :none], x[:, :, none:]
                expected = torch.zeros_like(empty) + nothing[name]
                yield Check(f"{name} of {case}", distance(empty, expected), 0.0)
            wrong = float((~x.isfinite()).sum())
            yield Check(f"non-finite numbers in {name} of {case}", wrong, 0.0)


def rows_of_one_key(subject: Subject) -> Iterator[Check]:
    """A row that sees one key gives it all weight, however large its score: out is the key's value,
    and dv is d_out. A backward pass that rebuilds p from a rounded lse gives it a little more or
    less.
    """
    if not is_softmax(subject):
        return
    # a scale that is a power of two may hide it
    widths = [d for d in (80, 128) if d in subject.head_dims] or subject.head_dims[:1] or [16]
    steep = {"inputs": "steep", "head_dim": widths[0]}
    cases = (
        subject.case(1, **steep),
        subject.case(window=1, **steep),
        subject.case(window=1, **steep, num_heads=4, num_kv_heads=1),
    )
    eps = torch.finfo(subject.dtype).eps
    for case in cases:
        if not subject.passes(case):
            continue
        expected, results = subject.expected(case), subject.run(case)
        groups = case.num_heads // case.num_kv_heads
        summed = {"out": (expected.tensors[2], 1), "dv": (expected.d_out, groups)}
        for name, (terms, count) in summed.items():
            if name in results:
                rounding = count * eps * terms.abs().max().item()
                error = distance(results[name], expected.reference[name])
                budget = 2 * expected.own[name] + rounding
                yield Check(f"{name} of {case}", error, budget)


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
    yield from compared(subject, [subject.case(a, b, causal=causal) for a, b, causal in shapes])


def grouped_heads(subject: Subject) -> Iterator[Check]:
    """Several query heads share a key/value head."""
    cases = [
        subject.case(batch=2, num_heads=4, num_kv_heads=2),
        subject.case(num_heads=4, num_kv_heads=1, causal=False),
    ]
    yield from compared(subject, cases)


def strides(subject: Subject) -> Iterator[Check]:
    """Views of any layout give what contiguous tensors give, with NaN around them, and with
    offsets past 2^31.
    """
    case = subject.case(batch=2)
    passes = subject.passes(case)
    if not passes:
        return
    expected, plain = subject.expected(case), subject.run(case)
    for layout, change in (LAYOUTS | FAR).items():
        # on a CPU a gradient of as_strided() would write to all the memory in between
        backward = passes == "both" and not (layout in FAR and subject.device == "cpu")
        try:
            views = change(expected.tensors)
        except RuntimeError as error:  # PyTorch raises it if memory is too small
            subject.refusals.append(f"{layout}: {str(error).splitlines()[0]}")
            continue
        reasons = subject.backend.unsupported_reasons(
            *(x.requires_grad_(backward) for x in views), **expected.arguments
        )
        if reasons:
            subject.refusals += reasons
            continue
        found = subject.run(case, views, backward=backward)
        yield from subject.unmoved(case, layout, found, plain)
    if passes == "both":
        yield from gradients_of_any_layout(subject, case)
    yield from ids_of_any_layout(subject)
    yield from shared_keys(subject)


def gradients_of_any_layout(subject: Subject, case: Case) -> Iterator[Check]:
    """Gradients of out and lse may be views too: that of out.sum() is a single expanded one."""
    expected = subject.expected(case)
    d_out, d_lse = expected.d_out.to(subject.dtype), expected.inputs[3]
    expanded = d_out[:1, :1, :1].expand_as(d_out)
    views = {"d_out spread out": [spread_out(d_out)], "d_out expanded": [expanded]}
    if subject.lse_gradient and d_lse is not None:
        d_lse = d_lse.to(torch.promote_types(subject.dtype, torch.float32))
        views["d_lse transposed"] = [d_out, d_lse.mT.contiguous().mT]
        views["d_lse expanded"] = [d_out, d_lse[:1, :1, :1].expand_as(d_lse)]
    for layout, given in views.items():
        found = []
        for gradient in (given, [x.contiguous() for x in given]):
            made = call(subject.backend, expected.tensors, expected.arguments)
            outputs = [x for x in made.output[: len(given)] if x is not None]
            gradients = torch.autograd.grad(outputs, list(made.leaves.values()), gradient)
            found.append({name: x.double() for name, x in zip(made.leaves, gradients, strict=True)})
        yield from subject.unmoved(case, layout, *found)


def ids_of_any_layout(subject: Subject) -> Iterator[Check]:
    """document_ids may be a column of a larger table."""
    case = subject.case(batch=2, document_ids=True)
    if subject.takes(case, backward=False):
        expected = subject.expected(case)
        ids = expected.arguments["document_ids"]
        column = torch.stack((ids, ids.flip(1)), -1)[..., 0]
        found, plain = (
            subject.attend(*expected.tensors, **expected.arguments | {"document_ids": x}).double()
            for x in (column, ids)
        )
        yield Check(f"out of {case}, ids a column", distance(found, plain), expected.budget("out"))


def shared_keys(subject: Subject) -> Iterator[Check]:
    """All sequences share one set of keys and values, whose stride along B is 0."""
    tile = 32 if subject.device == "cpu" else 128
    case = subject.case(2 * tile + 1, batch=2)  # one key in a tile of its own
    if subject.takes(case, backward=False):
        expected = subject.expected(case)
        q, *kv = expected.tensors
        k, v = (x[:1].expand_as(x) for x in kv)
        reasons = subject.backend.unsupported_reasons(q, k, v, **expected.arguments)
        if reasons:
            subject.refusals += reasons
            return
        shared, copied = (
            {"out": subject.attend(q, *each).double()} for each in ((k, v), (k.clone(), v.clone()))
        )
        yield from subject.unmoved(case, "shared keys", shared, copied)


def no_leak_forward(subject: Subject) -> Iterator[Check]:
    """Later queries, keys and values do not change an earlier output, however large they are, nor
    do other sequences of the batch.
    """
    case = subject.case(batch=2)
    if subject.takes(case, backward=False):
        expected = subject.expected(case)
        q, k, v = expected.tensors
        before = subject.attend(q, k, v)
        for seen in (1, case.num_queries // 2 + 3):
            later_q, later_k, later_v = later = [x.clone() for x in (q, k, v)]
            later_q[:, :, seen:] *= -1
            later_k[:, :, seen:] *= -100
            later_v[:, :, seen:] += 100
            for x in later:
                x[1] = -x[1]
            after = subject.attend(*later)
            moved = distance(after[:1, :, :seen].double(), before[:1, :, :seen].double())
            yield Check(f"first {seen} queries of {case}", moved, expected.budget("out"))


def no_leak_backward(subject: Subject) -> Iterator[Check]:
    """An earlier output has no gradient for later keys and values, and a later output none for
    earlier queries.
    """
    case = subject.case()
    if subject.takes(case, backward=True):
        seen = case.num_queries // 2 + 3
        expected = subject.expected(case)
        for rows, zero in ((slice(seen), slice(seen, None)), (slice(seen, None), slice(seen))):
            q, k, v = (x.detach().requires_grad_() for x in expected.tensors)
            d_out = torch.zeros_like(q)
            d_out[:, :, rows] = expected.d_out[:, :, rows].to(q.dtype)
            gradients = torch.autograd.grad(subject.attend(q, k, v), (q, k, v), d_out)
            # a key is hidden from earlier queries only
            names = ("dq", "dk", "dv") if zero.start else ("dq",)
            for name, x in zip(names, gradients, strict=False):
                leak = x[:, :, zero].double()
                yield Check(f"{name} of {case}", distance(leak, torch.zeros_like(leak)), 0.0)


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
    for case in (subject.case(), subject.case(n // 2, n), *masked):
        if not subject.takes(case, backward=False):
            continue
        (q, k, v), arguments, *_ = case.make(subject.dtype, subject.device)
        if not subject.backend.claims_softmax:
            if subject.takes(case, backward=True):
                found = hidden_keys_with_gradient(q, k, v, backend=subject.backend, **arguments)
                yield Check(f"hidden keys with a gradient of {case}", float(found), 0.0)
            continue
        q = torch.zeros_like(q)  # all scores are equal
        weights = []
        for start in range(0, case.num_keys, case.head_dim):
            # v is a part of the identity: each output column is the weight of one key
            v = torch.zeros_like(k)
            columns = torch.arange(min(case.head_dim, case.num_keys - start), device=k.device)
            v[:, :, start + columns, columns] = 1
            weights.append(subject.attend(q, k, v, **arguments)[..., : len(columns)])
        visible = visible_keys(q, k, **arguments).mask()
        wrong = ((torch.cat(weights, -1) > 0) != visible).sum()
        yield Check(f"wrong weights of {case}", float(wrong), 0.0)
    yield from masks_as_tensors(subject)


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
    yield from compared(subject, cases)


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
    yield from compared(subject, cases)


def growth(subject: Subject, *figures: str) -> Iterator[Check]:
    shape, lengths = shape_of(subject.head_dims), lengths_on(subject.device)
    if not subject.takes(subject.case(128, **shape), backward=True):
        return
    if not subject.exponents:
        subject.exponents = exponents(
            subject.given, lengths, device=subject.device, dtype=subject.dtype, **shape
        )
    for name in figures:
        if name in subject.exponents:
            what = f"exponent of N in the {name} bytes, N = {lengths[0]} to {lengths[-1]}"
            yield Check(what, subject.exponents[name], LINEAR)


def saved_bytes(subject: Subject) -> Iterator[Check]:
    """The bytes saved for the backward pass grow like N, not like N x M."""
    yield from growth(subject, "saved")


def largest_tensor(subject: Subject) -> Iterator[Check]:
    """No intermediate tensor of either pass is N x M, and their peak grows like N."""
    yield from growth(subject, "largest", "peak")


def bitwise_repeat(subject: Subject) -> Iterator[Check]:
    """The same call gives the same bits again, where PyTorch must use deterministic kernels."""
    case = subject.case(batch=2, num_heads=4, num_kv_heads=4)
    if not subject.passes(case):
        return
    with deterministic_algorithms():
        first = subject.run(case)
        for _ in range(3 if subject.device == "cpu" else 50):
            for name, x in subject.run(case).items():
                yield Check(f"{name} of {case}", distance(x, first[name]), 0.0)


def compiled_equals_eager(subject: Subject) -> Iterator[Check]:
    """torch.compile changes nothing but the speed."""
    case = subject.case()
    passes = subject.passes(case)
    if not passes:
        return
    expected = subject.expected(case)
    # on a CPU only the graph is checked: code generation needs a compiler and takes time
    function = torch.compile(
        lambda q, k, v: subject.attend(q, k, v) * 1,
        backend="aot_eager" if subject.device == "cpu" else "inductor",
    )
    results = []
    # eager first: it creates the module of a backend that has one
    for attend in (subject.attend, function):
        tensors = [x.detach().requires_grad_(passes == "both") for x in expected.tensors]
        out = attend(*tensors)
        result = [out.detach()]
        if passes == "both":
            result += torch.autograd.grad(out, tensors, expected.d_out.to(out.dtype))
        results.append(result)
    torch.compiler.reset()
    for name, eager, compiled in zip(("out", "dq", "dk", "dv"), *results, strict=False):
        error = distance(compiled.double(), eager.double())
        yield Check(f"{name} of {case}", error, 2 * expected.budget(name))


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
        for last in (1, 3, 9, n - 7):  # rows of few keys too: there a sink weighs most
            if subject.takes(subject.case(last, n, **optional), backward=False):
                alone = subject.attend(q[:, :, -last:], cached(k), cached(v), **arguments)
                yield Check(
                    f"last {last} queries of {whole}",
                    distance(alone.double(), together[:, :, -last:]),
                    2 * expected.budget("out"),
                )


Property = Callable[[Subject], Iterator[Check]]
PROPERTIES: dict[str, Property] = {
    "forward": forward,
    "gradients": gradients,
    "lse": log_sum_exp,
    "block sizes": block_sizes,
    "key permutation": key_permutation,
    "rows sum to one": rows_sum_to_one,
    "large logits": large_logits,
    "logits + 100": shifted_up,
    "logits - 120": shifted_down,
    "float32 statistics": float32_statistics,
    "ragged tails": ragged_tails,
    "every length": every_length,
    "first tile masked": first_tile_masked,
    "rows without a key": rows_without_a_key,
    "rows of one key": rows_of_one_key,
    "N != M": cross_length,
    "grouped heads": grouped_heads,
    "strides and views": strides,
    "no leak (outputs)": no_leak_forward,
    "no leak (gradients)": no_leak_backward,
    "mask positions": mask_positions,
    "optional arguments": optional_arguments,
    "wider calls": wider_calls,
    "call history": call_history,
    "poisoned memory": poisoned_memory,
    "row independence": row_independence,
    "streams and graphs": streams_and_graphs,
    "saved bytes": saved_bytes,
    "largest tensor": largest_tensor,
    "bitwise repeat": bitwise_repeat,
    "compiled = eager": compiled_equals_eager,
    "prefill = decode": prefill_equals_decode,
    "cache and pages": cache_and_pages,
}
# these take long and do not test whether a result is right
SLOW = {"saved bytes", "largest tensor", "bitwise repeat", "compiled = eager"}


def why_unusable(device: str) -> str:
    """The error that made the GPU unusable for this process, such as an illegal memory access;
    empty if there was none.
    """
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return ""


def examine(subject: Subject, name: str, property: Property | None = None) -> Cell:
    """The cell of a property, by default the one of that name in PROPERTIES. An exception from the
    backend makes it red, and the note tells it with its cause. Raises ValueError if the backend
    lists an unknown name in `breaks`.
    """
    if unknown := set(subject.backend.breaks) - PROPERTIES.keys():
        raise ValueError(
            f"attention={subject.backend.name} breaks {', '.join(sorted(unknown))}; properties: "
            f"{', '.join(PROPERTIES)}"
        )
    subject.begin()
    documented = name in subject.backend.breaks
    checks = []
    if lost := why_unusable(subject.device):
        note = f"not examined: an earlier property left the GPU unusable ({lost})"
        return Cell(name, "red", note, documented)
    try:
        with warnings.catch_warnings():
            for message in WARNINGS:
                warnings.filterwarnings("ignore", message)
            for check in (property or PROPERTIES[name])(subject):
                checks.append(check)
        if subject.device == "cuda":  # a kernel's error belongs to the property that launched it
            torch.cuda.synchronize()
    except Refusal as error:  # a layout that unsupported_reasons() did not see
        subject.refusals.append(str(error))
    except (Exception, SystemExit) as error:  # a user's backend may raise anything
        return Cell(name, "red", in_one_line(error), documented, len(checks))
    finally:
        if subject.device == "cuda" and not why_unusable(subject.device):
            torch.cuda.empty_cache()  # dozens of GiB after views that are far apart
    if not checks:
        return Cell(name, "n/a", "; ".join(dict.fromkeys(subject.refusals)), documented)
    worst = max(checks, key=lambda check: check.share)
    red = worst.share > 1
    note = f"{worst.case}: {worst.error:.3g} where {worst.budget:.3g} is allowed" if red else ""
    multiples = [check.multiple for check in checks if check.multiple is not None]
    return Cell(
        name,
        "red" if red else "green",
        note,
        documented,
        len(checks),
        worst.share,
        max(multiples, default=None),
    )


def verify_backend(
    backend: Backend,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    quick: bool = False,
    random_cases: int = 20,
    seed: int = 0,
    properties: Iterable[str] | None = None,
) -> list[Cell]:
    """A cell for every property. quick leaves out memory, repeats and compilation."""
    subject = Subject(backend, str(torch.device(device).type), dtype, random_cases, seed)
    names = PROPERTIES if properties is None else properties
    return [examine(subject, name) for name in names if not (quick and name in SLOW)]


def red_properties(
    backend: Backend, *, device: str | torch.device, dtype: torch.dtype
) -> list[str]:
    """The properties that are red in a quick check, including those that the backend lists in
    `breaks`.
    """
    cells = verify_backend(backend, device=device, dtype=dtype, quick=True, random_cases=4)
    return [cell.property for cell in cells if cell.status == "red"]
