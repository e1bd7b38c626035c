"""Claims made by examples: small numbers, hidden tests, one query at a time."""

import math

import torch

from attention.online_softmax import OnlineSoftmax
from conformance import numpy_reference
from lab.claims.claim import FAILS, HOLDS, Figures, claim, only_if, spread, verdict
from lab.claims.inputs import exact, inputs, largest, run


@claim(
    "exercise",
    says="The result matches standard attention for every block size from 1 to N, and for unequal "
    "numbers of queries and keys.",
    criterion="no error to float64 above 1e-12, over all block sizes",
    measured="{error:.1e} over {cases} results of the tile loop and of one head in "
    "NumPy, queries x "
    "keys {shapes}",
    verdict=lambda f: verdict(f["error"] < 1e-12),
    tiny={"shapes": ((3, 7),)},
)
def any_block_size(
    shapes: tuple[tuple[int, int], ...] = ((13, 13), (5, 13), (13, 5), (1, 40)),
) -> Figures:
    errors = []
    for num_queries, num_keys in shapes:
        q, _, _ = inputs(0, 1, 1, num_queries, 4, dtype=torch.float64)
        _, k, v = inputs(1, 1, 1, num_keys, 4, dtype=torch.float64)
        truth = exact(q, k, v)
        for block in range(1, num_keys + 1):
            out = numpy_reference.flash_attention(q[0, 0], k[0, 0], v[0, 0], block)
            errors += [
                largest(run("tiled", q, k, v, block_kv=block) - truth),
                largest(torch.from_numpy(out) - truth),
            ]
    return {
        "error": max(errors),
        "cases": len(errors),
        "shapes": ", ".join(f"{n} x {m}" for n, m in shapes),
    }


@claim(
    "exercise",
    says="One query over two keys gives 1.6604 and 2.6604.",
    criterion="both numbers are the result rounded to four places",
    measured="{first:.6f} and {second:.6f}",
    because="Rounded, they are 1.6605 and 2.6605, which is what a test to four places needs.",
    verdict=lambda f: (
        verdict(True)
        if [round(f[name], 4) for name in ("first", "second")] == [1.6604, 2.6604]
        else only_if("the digits are cut off after four places")
        if [math.floor(f[name] * 1e4) for name in ("first", "second")] == [16604, 26604]
        else FAILS
    ),
    tiny={},
)
def small_example() -> Figures:
    q, k, v = (
        torch.tensor(x, dtype=torch.float64)[None, None]
        for x in ([[1, 0]], [[1, 0], [0, 1]], [[1, 2], [3, 4]])
    )
    first, second = run("tiled", q, k, v, block_kv=1).flatten().tolist()
    return {"first": first, "second": second}


@claim(
    "exercise",
    says="With the maximum at -inf and the sums at 0, the first correction is 0 and discards "
    "the empty state.",
    criterion="the correction is 0 after a first tile with a key, and after one without",
    measured="{with_key} after a tile with a key, {without_key} after a tile without",
    because="-inf - -inf is NaN: the subtracted maximum needs a guard, or every row must "
    "see a key in "
    "its first tile.",
    verdict=lambda f: (
        FAILS
        if f["with_key"] != 0
        else HOLDS
        if f["without_key"] == 0
        else only_if("the first tile holds a key that the row sees")
    ),
    tiny={},
)
def first_correction() -> Figures:
    empty = torch.tensor(-torch.inf)
    with_key, without_key = (
        torch.exp(empty - torch.maximum(empty, tile_max)).item()
        for tile_max in (torch.tensor(0.7), empty)
    )
    return {"with_key": with_key, "without_key": "NaN" if math.isnan(without_key) else without_key}


@claim(
    "deep dive",
    says="In its worked example of eight scores in two blocks of four, the state ends at maximum "
    "1.2 and sum 3.930.",
    criterion="both agree to three places with the running state and with all eight scores at once",
    measured="({max_1:.1f}, {sum_1:.3f}) after the first block, correction {alpha:.3f}, then "
    "({max_2:.1f}, {sum_2:.3f}); all at once "
    "{at_once:.3f}",
    because="Its sum after the first block, 2.755, adds up rounded numbers; the error "
    "is gone in the "
    "third place of the end.",
    verdict=lambda f: verdict(
        [round(f[name], 3) for name in ("max_2", "sum_2", "at_once")] == [1.2, 3.930, 3.930]
    ),
    also="python -m scripts.trace",
    tiny={},
)
def worked_example() -> Figures:
    scores = torch.tensor([[0.8, 0.3, -0.1, 0.5, 1.2, -0.4, 0.6, 0.1]], dtype=torch.float64)
    first = OnlineSoftmax.empty(torch.zeros(1, 1), dtype=torch.float64).update(
        scores[:, :4], torch.ones(4, 1, dtype=torch.float64)
    )
    second = first.update(scores[:, 4:], torch.ones(4, 1, dtype=torch.float64))
    alpha = first.correction(second.row_max)
    found = {
        "max_1": first.row_max,
        "sum_1": first.row_sum,
        "alpha": alpha,
        "max_2": second.row_max,
        "sum_2": second.row_sum,
    }
    return {name: x.item() for name, x in found.items()} | {
        "at_once": torch.exp(scores - 1.2).sum().item()
    }


@claim(
    "guide",
    says="Its unit test of the online softmax checks that the running sum equals the sum of the "
    "softmax weights.",
    criterion="the test passes on a correct online softmax",
    measured="the running sum is {row_sum:.2f}, the weights sum to {weight_sum:.0f}; "
    "exp(score - max) "
    "/ sum is off by {weights_error:.0e}",
    because="The sum of weights is 1 by definition; the running sum is what the weights "
    "are divided by.",
    verdict=lambda f: verdict(
        abs(f["row_sum"]["min"] - 1) < 1e-5 and abs(f["row_sum"]["max"] - 1) < 1e-5
    ),
    tiny={},
)
def unit_test_of_the_guide() -> Figures:
    scores = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    state = OnlineSoftmax.empty(torch.zeros(1, 1, 4, 1), dtype=torch.float32)
    for block in (scores[..., :4], scores[..., 4:]):
        state = state.update(block, torch.zeros(4, 1))
    weights = scores.softmax(-1)
    return {
        "row_sum": spread(state.row_sum.flatten().tolist()),
        "weight_sum": weights.sum(-1).mean().item(),
        "weights_error": largest(torch.exp(scores - state.row_max) / state.row_sum - weights),
    }


@claim(
    "chapter, deep dive",
    says="Decoding with a cache is the same kernel: one row of queries over all keys.",
    criterion="one query over the cache equals the last row of the full pass to 1e-12 in float64",
    measured="{error:.1e}; scores alive at once: {decode_scores} for that one query, "
    "{prefill_scores} "
    "for the naive full pass",
    verdict=lambda f: verdict(f["error"] < 1e-12),
    tiny={},
)
def decoding_is_one_query_tile() -> Figures:
    q, k, v = inputs(0, 1, 2, 256, 32, dtype=torch.float64)
    one = run("tiled", q[..., -1:, :], k, v, causal=True, block=32)
    return {
        "error": largest(one - exact(q, k, v, causal=True)[..., -1:, :]),
        "decode_scores": k.shape[2],
        "prefill_scores": k.shape[2] ** 2,
    }
