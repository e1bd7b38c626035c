"""Properties of the numbers: out, lse and the gradients, for ordinary and extreme logits.

Dimensions: B batch, H query heads, N queries, M keys.
"""

from collections.abc import Iterator

import torch

from conformance.backend_under_test import Check, Subject
from conformance.cases import Case, distance, run


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
    yield from subject.compared(ordinary(subject), ["out"])


def gradients(subject: Subject) -> Iterator[Check]:
    """dq, dk and dv equal those of float64 attention, the gradient that arrives through lse
    included. Of another function without a reference they equal finite differences of its out.
    """
    yield from subject.compared(ordinary(subject), ["dq", "dk", "dv"])
    backend, case = subject.backend, subject.case(33, num_heads=1, num_kv_heads=1)
    if backend.claims_softmax or backend.reference or torch.float64 not in backend.dtypes:
        return
    if subject.takes(case, backward=True):
        tensors, arguments, *_ = case.make(torch.float64, subject.device)
        torch.autograd.gradcheck(
            lambda *tensors: subject.attend(*tensors, **arguments),
            [x.requires_grad_() for x in tensors],
            fast_mode=True,
            atol=1e-9,  # fast mode multiplies it by hundreds
            nondet_tol=torch.inf,
            check_undefined_grad=False,
        )


def log_sum_exp(subject: Subject) -> Iterator[Check]:
    """lse is the natural log-sum-exp of the scaled, masked scores."""
    if "lse" not in subject.backend.features:
        subject.refusals.append("it returns no lse")
        return
    for case in ordinary(subject):
        if row := subject.compare(case):
            yield row.get("lse", Check(f"lse of {case}, which it promises", torch.inf, 0.0))


def block_sizes(subject: Subject) -> Iterator[Check]:
    """The tile sizes do not show in the result."""
    if not subject.has_blocks:
        subject.refusals.append("it has no block_q and block_kv to choose")
        return
    # the last one holds all keys of the CPU's cases
    last = (128, 128) if subject.device == "cpu" else (64, 64)
    for case in filter(subject.takes, [subject.case(causal=causal) for causal in (True, False)]):
        expected, first = subject.expected(case), None
        for block_q, block_kv in ((32, 16), (16, 32), (64, 16), last):
            backend = subject.backend.configured(block_q=block_q, block_kv=block_kv)
            out = run(backend, *expected.inputs, backward=False)["out"]
            first = out if first is None else first
            # nearly equal results may round to neighbours, and a defect's results may be larger
            # than the reference
            neighbours = torch.finfo(subject.dtype).eps * first.abs().max().item()
            budget = max(2 * expected.budget("out"), neighbours)
            yield Check(f"tiles {block_q}x{block_kv} of {case}", distance(out, first), budget)


def key_permutation(subject: Subject) -> Iterator[Check]:
    """The order of keys that a query sees all of does not matter."""
    case = subject.case()
    if subject.takes(case):
        expected = subject.expected(case)
        q, k, v = expected.tensors
        mixed = case.num_keys * 2 // 3
        order = torch.randperm(mixed, generator=torch.Generator().manual_seed(0)).tolist()
        order += range(mixed, case.num_keys)
        plain, permuted = (
            {"out": subject.attend(q, *kv)[:, :, mixed - 1 :]}
            for kv in ((k, v), (k[:, :, order], v[:, :, order]))
        )
        yield from subject.same(case, "its keys permuted", permuted, plain)


def rows_sum_to_one(subject: Subject) -> Iterator[Check]:
    """With values of one the output is one: the weights of a row sum to it."""
    cases = [subject.case(inputs="ones", causal=causal) for causal in (True, False)]
    yield from subject.compared(cases, ["out"])


def large_logits(subject: Subject) -> Iterator[Check]:
    """Scores that grow from tile to tile, spike in the last one, or stand in the hundreds, all or
    one of them.
    """
    cases = [subject.case(inputs=name) for name in ("large", "growing", "spike", "huge")]
    yield from subject.compared([*cases, subject.case(causal=False, inputs="tower")])


def shifted_up(subject: Subject) -> Iterator[Check]:
    """Every score 100 higher, and a sink too: no exponential of a score itself survives it."""
    yield from subject.compared([subject.case(inputs="up"), subject.case(inputs="up", sinks=True)])


def shifted_down(subject: Subject) -> Iterator[Check]:
    """Every score 120 lower, or lower still: exponentials of the scores themselves are 0."""
    cases = [
        *(subject.case(inputs=name) for name in ("down", "negative")),
        subject.case(inputs="down", sinks=True),
        # one query may take a path of its own, in the backward pass too
        subject.case(1, subject.length, inputs="down"),
    ]
    yield from subject.compared(cases)


def float32_statistics(subject: Subject) -> Iterator[Check]:
    """With 16-bit inputs scores, sums and lse are kept in float32, which shows where scores are
    near 100.
    """
    for dtype in (
        (subject.dtype,) if subject.dtype.itemsize == 2 else (torch.bfloat16, torch.float16)
    ):
        narrow = subject.in_dtype(dtype)
        yield from narrow.compared([narrow.case(inputs="up")])


def rows_of_one_key(subject: Subject) -> Iterator[Check]:
    """A row that sees one key gives it all weight, however large its score: out is the key's value,
    and dv is d_out. A backward pass that rebuilds p from a rounded lse gives it a little more or
    less.
    """
    # a scale that is a power of two may hide it
    widths = [*(d for d in (80, 128) if d in subject.head_dims), subject.head_dims[0]]
    steep = {"inputs": "steep", "head_dim": widths[0]}
    cases = [
        subject.case(1, **steep),
        subject.case(window=1, **steep),
        subject.case(window=1, **steep, num_heads=4, num_kv_heads=1),
    ]
    eps = torch.finfo(subject.dtype).eps
    for case in filter(subject.takes, cases):
        expected, results = subject.expected(case), subject.run(case)
        groups = case.num_heads // case.num_kv_heads
        summed = {"out": (expected.tensors[2], 1), "dv": (expected.d_out, groups)}
        for name, (terms, count) in summed.items():
            if name in results:
                rounding = count * eps * terms.abs().max().item()
                error = distance(results[name], expected.reference[name])
                budget = 2 * expected.own[name] + rounding
                yield Check(f"{name} of {case}", error, budget)
