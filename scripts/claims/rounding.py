"""Claims about exactness: how far tiled attention is from naive attention, and both from float64.

Dimensions: B batch, H heads, N queries and keys, D head dim.
"""

import math

import numpy as np
import torch
from torch import Tensor

from attention import Backend, attention, get_backend, numpy_reference
from attention.online_softmax import OnlineSoftmax
from scripts.claims.claim import FAILS, HOLDS, Figures, claim, only_if, spread, verdict

STEP_4 = (2, 4, 256, 32)  # B, H, N, D of the chapter's own check


def inputs(seed: int, *shape: int, std: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of that standard deviation, so that scores have std**2; v of 1."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return (q * std).to(dtype), (k * std).to(dtype), v.to(dtype)


def run(name: str | Backend, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, **options) -> Tensor:
    """out of that backend; block=T stands for block_q=T and block_kv=T."""
    if "block" in options:
        options["block_q"] = options["block_kv"] = options.pop("block")
    backend = get_backend(name, **options) if isinstance(name, str) else name.configured(**options)
    with torch.no_grad():
        return attention(q, k, v, backend=backend, causal=causal).out


def exact(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """float64 attention of the same rounded inputs."""
    return run("naive", q.double(), k.double(), v.double(), causal=causal)


def textbook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The three lines every document starts from, all of it in the dtype of the inputs."""
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def largest(difference: Tensor) -> float:
    return difference.abs().max().item()


def relative(out: Tensor, reference: Tensor) -> float:
    return ((out.double() - reference).norm() / reference.norm()).item()


@claim(
    "chapter, deep dive",
    says="Tiled attention returns the same bits as naive attention in float32.",
    criterion="no element differs",
    measured="{unequal:.0%} of the elements differ, by at most {difference:.1e}",
    because="The sums are the same sums in another order: equal in exact arithmetic, not in floats.",
    verdict=lambda f: verdict(f["unequal"]["max"] == 0),
    tiny={"seeds": 1},
)
def bit_for_bit(seeds: int = 20) -> Figures:
    unequal, difference = [], []
    for seed in range(seeds):
        q, k, v = inputs(seed, *STEP_4)
        out, ref = run("tiled", q, k, v, block=32), textbook(q, k, v)
        unequal.append((out != ref).double().mean().item())
        difference.append(largest(out - ref))
    return {"unequal": spread(unequal), "difference": spread(difference)}


@claim(
    "chapter, guide",
    says="In float32 the two differ by about 1e-6.",
    criterion="the largest difference lies between 1e-7 and 1e-5 for every seed",
    measured="{difference:.1e}; from float64, tiled is off by {tiled:.1e} and naive by {naive:.1e}",
    because="Tiled is no worse than what it is checked against, so both errors belong in a report.",
    verdict=lambda f: verdict(f["difference"]["min"] >= 1e-7 and f["difference"]["max"] <= 1e-5),
    tiny={"seeds": 2},
)
def float32_difference(seeds: int = 20) -> Figures:
    found = {"difference": [], "tiled": [], "naive": []}
    for seed in range(seeds):
        q, k, v = inputs(seed, *STEP_4)
        out, ref, truth = run("tiled", q, k, v, block=32), textbook(q, k, v), exact(q, k, v)
        for name, x in (("difference", out - ref), ("tiled", out - truth), ("naive", ref - truth)):
            found[name].append(largest(x))
    return {name: spread(values) for name, values in found.items()}


@claim(
    "chapter",
    says="In float16, statistics included, the two differ by about 1e-3.",
    criterion="the largest difference lies between 1e-4 and 1e-2 for every seed",
    measured="{difference:.1e}; with statistics in float32 the error to float64 is {float32_statistics:.1e}",
    verdict=lambda f: verdict(f["difference"]["min"] >= 1e-4 and f["difference"]["max"] <= 1e-2),
    tiny={"seeds": 1},
)
def float16_difference(seeds: int = 5) -> Figures:
    difference, better = [], []
    for seed in range(seeds):
        q, k, v = inputs(seed, *STEP_4, dtype=torch.float16)
        difference.append(largest(run("tiled", q, k, v, block=32, softmax_dtype="input") - textbook(q, k, v)))
        better.append(largest(run("tiled", q, k, v, block=32) - exact(q, k, v)))
    return {"difference": spread(difference), "float32_statistics": spread(better)}


@claim(
    "chapter",
    says="The result does not depend on the block size.",
    criterion="over blocks of 16, 32, 64, 128 and 256 no output moves by more than 1e-5",
    measured="{spread:.1e}; the same check on no_rescale gives {no_rescale:.2f}, so it bites",
    verdict=lambda f: verdict(f["spread"]["max"] < 1e-5),
    tiny={"seeds": 1},
)
def block_sizes(seeds: int = 5) -> Figures:
    found = {"tiled": [], "no_rescale": []}
    for seed in range(seeds):
        q, k, v = inputs(seed, *STEP_4)
        for name, values in found.items():
            outs = torch.stack([run(name, q, k, v, block=block) for block in (16, 32, 64, 128, 256)])
            values.append(largest(outs.amax(0) - outs.amin(0)))
    return {"spread": spread(found["tiled"]), "no_rescale": spread(found["no_rescale"])}


@claim(
    "guide",
    says="In float16 at 2,048 tokens the tiled result is within 1e-3 of the standard one.",
    criterion="the largest difference is below 1e-3",
    measured="{difference:.1e}; to float64, tiled {tiled:.1e} and standard {naive:.1e}",
    because="Two float16 results are compared there: an error they share would not show. Compare both with float64.",
    verdict=lambda f: verdict(f["difference"] < 1e-3),
    tiny={"length": 512},
)
def float16_at_2048(length: int = 2048) -> Figures:
    q, k, v = inputs(0, 1, 8, length, 64, dtype=torch.float16)
    # the guide keeps one panel: all queries against 256 keys, statistics in float16
    out, ref = run("tiled", q, k, v, block_q=length, block_kv=256, softmax_dtype="input"), textbook(q, k, v)
    truth = exact(q, k, v)
    return {"difference": largest(out - ref), "tiled": largest(out - truth), "naive": largest(ref - truth)}


@claim(
    "chapter, guide",
    says="The running maximum, sum and output can be kept in the dtype of the inputs.",
    criterion="in bfloat16 the relative error at the longest sequence is within 1.5 times that of float32 statistics",
    measured="relative error by length, all in bfloat16: {input}; with float32 statistics: {float32}",
    because="The sums round at every tile, so the error grows with their number.",
    verdict=lambda f: verdict(list(f["input"].values())[-1] <= 1.5 * list(f["float32"].values())[-1]),
    tiny={"lengths": (512,)},
)
def statistics_in_input_dtype(lengths: tuple[int, ...] = (512, 2048, 8192)) -> Figures:
    found: Figures = {"input": {}, "float32": {}}
    for length in lengths:
        q, k, v = inputs(0, 1, 1, length, 64, dtype=torch.bfloat16)
        q, v = q[..., :128, :], v + 1  # values around 1: a sum that grows, as the documents' own checks never have
        truth = exact(q, k, v)
        for dtype, values in found.items():
            values[str(length)] = relative(run("tiled", q, k, v, block_q=128, block_kv=64, softmax_dtype=dtype), truth)
    return found


@claim(
    "notebook",
    says="Statistics in float32 keep the error of bfloat16 inputs under control.",
    criterion="from 512 to 8,192 tokens the relative error does not grow, and stays below 1e-2",
    measured="{error}; turning q, k and v into float32 copies first, as its code does, takes {copies:.0f} times their memory once more",
    verdict=lambda f: verdict(max(f["error"].values()) < 1e-2 and list(f["error"].values())[-1] <= 1.5 * list(f["error"].values())[0]),
    tiny={"lengths": (256, 1024)},
)
def statistics_in_float32(lengths: tuple[int, ...] = (512, 2048, 8192)) -> Figures:
    error = {}
    for length in lengths:
        q, k, v = inputs(0, 1, 1, length, 64, dtype=torch.bfloat16)
        q, v = q[..., :128, :], v + 1
        error[str(length)] = relative(run("tiled", q, k, v, block_q=128, block_kv=64), exact(q, k, v))
    return {"error": error, "copies": q.float().nbytes / q.nbytes}


@claim(
    "deep dive",
    says="In float64 the tiled result passes at 1e-5, at 2,048 tokens at 1e-4, and with one block at 1e-12.",
    criterion="the largest differences are below those bounds",
    measured="{tiles:.1e} with tiles of 32, {long:.1e} at 2,048 tokens, {one_block:.1e} with one block",
    because="It passes by ten orders of magnitude. At scores of standard deviation 0.0004 no_rescale, which is wrong, is off by only "
    "{no_rescale_tiny_scores:.0e} and passes at 1e-4 as well: float64 deserves 1e-12.",
    verdict=lambda f: verdict(f["tiles"] < 1e-5 and f["long"] < 1e-4 and f["one_block"] < 1e-12),
    also="python -m scripts.verify attention=tiled",
    tiny={"length": 512},
)
def float64_tolerances(length: int = 2048) -> Figures:
    q, k, v = inputs(0, 1, 1, 256, 64, dtype=torch.float64)
    truth = exact(q, k, v)
    tiny_q, tiny_k, _ = inputs(0, 1, 1, 256, 64, std=0.02, dtype=torch.float64)
    long = inputs(1, 1, 1, length, 64, dtype=torch.float64)
    return {
        "tiles": largest(run("tiled", q, k, v, block=32) - truth),
        "long": largest(run("tiled", *long, block=32) - exact(*long)),
        "one_block": largest(run("tiled", q, k, v, block=256) - truth),
        "no_rescale_tiny_scores": largest(run("no_rescale", tiny_q, tiny_k, v, block=32) - exact(tiny_q, tiny_k, v)),
    }


@claim(
    "deep dive",
    says="More blocks do not cost precision.",
    criterion="with 512 tiles the float32 error is within 3 times that with one tile",
    measured="largest error to float64 by number of tiles: {error}",
    because="Every correction is at most 1, so nothing grows.",
    verdict=lambda f: verdict(list(f["error"].values())[-1] <= 3 * list(f["error"].values())[0]),
    tiny={"length": 128},
)
def many_blocks(length: int = 512) -> Figures:
    q, k, v = inputs(0, 1, 4, length, 64)
    truth = exact(q, k, v)
    tiles = (1, 4, 16, 64, length)
    return {"error": {str(n): largest(run("tiled", q, k, v, block_q=length, block_kv=length // n) - truth) for n in tiles}}


@claim(
    "exercise",
    says="The result matches standard attention for every block size from 1 to N, and for unequal numbers of queries and keys.",
    criterion="no error to float64 above 1e-12, over all block sizes",
    measured="{error:.1e} over {cases} results of the tile loop and of one head in NumPy, queries x keys {shapes}",
    verdict=lambda f: verdict(f["error"] < 1e-12),
    tiny={"shapes": ((3, 7),)},
)
def any_block_size(shapes: tuple[tuple[int, int], ...] = ((13, 13), (5, 13), (13, 5), (1, 40))) -> Figures:
    errors = []
    for num_queries, num_keys in shapes:
        q, _, _ = inputs(0, 1, 1, num_queries, 4, dtype=torch.float64)
        _, k, v = inputs(1, 1, 1, num_keys, 4, dtype=torch.float64)
        truth = exact(q, k, v)
        for block in range(1, num_keys + 1):
            out = numpy_reference.flash_attention(q[0, 0], k[0, 0], v[0, 0], block)
            errors += [largest(run("tiled", q, k, v, block_kv=block) - truth), largest(torch.from_numpy(out) - truth)]
    return {"error": max(errors), "cases": len(errors), "shapes": ", ".join(f"{n} x {m}" for n, m in shapes)}


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
    q, k, v = (torch.tensor(x, dtype=torch.float64)[None, None] for x in ([[1, 0]], [[1, 0], [0, 1]], [[1, 2], [3, 4]]))
    first, second = run("tiled", q, k, v, block_kv=1).flatten().tolist()
    return {"first": first, "second": second}


@claim(
    "exercise",
    says="With the maximum at -inf and the sums at 0, the first correction is 0 and discards the empty state.",
    criterion="the correction is 0 after a first tile with a key, and after one without",
    measured="{with_key} after a tile with a key, {without_key} after a tile without",
    because="-inf - -inf is NaN: the subtracted maximum needs a guard, or every row must see a key in its first tile.",
    verdict=lambda f: (
        FAILS if f["with_key"] != 0 else HOLDS if f["without_key"] == 0 else only_if("the first tile holds a key that the row sees")
    ),
    tiny={},
)
def first_correction() -> Figures:
    empty = torch.tensor(-torch.inf)
    with_key, without_key = (torch.exp(empty - torch.maximum(empty, tile_max)).item() for tile_max in (torch.tensor(0.7), empty))
    return {"with_key": with_key, "without_key": "NaN" if math.isnan(without_key) else without_key}


@claim(
    "deep dive",
    says="In its worked example of eight scores in two blocks of four, the state ends at maximum 1.2 and sum 3.930.",
    criterion="both agree to three places with the running state and with all eight scores at once",
    measured="({max_1:.1f}, {sum_1:.3f}) after the first block, correction {alpha:.3f}, then ({max_2:.1f}, {sum_2:.3f}); all at once "
    "{at_once:.3f}",
    because="Its sum after the first block, 2.755, adds up rounded numbers; the error is gone in the third place of the end.",
    verdict=lambda f: verdict([round(f[name], 3) for name in ("max_2", "sum_2", "at_once")] == [1.2, 3.930, 3.930]),
    also="python -m scripts.trace",
    tiny={},
)
def worked_example() -> Figures:
    scores = torch.tensor([[0.8, 0.3, -0.1, 0.5, 1.2, -0.4, 0.6, 0.1]], dtype=torch.float64)
    first = OnlineSoftmax.empty(torch.zeros(1, 1), dtype=torch.float64).update(scores[:, :4], torch.ones(4, 1, dtype=torch.float64))
    second = first.update(scores[:, 4:], torch.ones(4, 1, dtype=torch.float64))
    alpha = first.correction(second.row_max)
    found = {"max_1": first.row_max, "sum_1": first.row_sum, "alpha": alpha, "max_2": second.row_max, "sum_2": second.row_sum}
    return {name: x.item() for name, x in found.items()} | {"at_once": torch.exp(scores - 1.2).sum().item()}


@claim(
    "guide",
    says="Its unit test of the online softmax checks that the running sum equals the sum of the softmax weights.",
    criterion="the test passes on a correct online softmax",
    measured="the running sum is {row_sum:.2f}, the weights sum to {weight_sum:.0f}; exp(score - max) / sum is off by {weights_error:.0e}",
    because="The sum of weights is 1 by definition; the running sum is what the weights are divided by.",
    verdict=lambda f: verdict(abs(f["row_sum"]["min"] - 1) < 1e-5 and abs(f["row_sum"]["max"] - 1) < 1e-5),
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
    "deep dive",
    says="Subtracting the new running maximum from a block's scores, without a separate beta, is a mistake.",
    criterion="it is further from float64 than the form with alpha and beta, by more than rounding (1e-14)",
    measured="{without_beta:.1e} without beta, {with_beta:.1e} with alpha and beta",
    because="beta * exp(s - block_max) is exp(s - new_max). The form without beta is what FlashAttention-2, the notebook, the exercise and "
    "the guide use; here the first is `tiled`, the second `alpha_beta`.",
    verdict=lambda f: verdict(f["without_beta"] > f["with_beta"] + 1e-14),
    tiny={},
)
def missing_beta() -> Figures:
    q, k, v = inputs(0, *STEP_4, std=2, dtype=torch.float64)
    truth = exact(q, k, v)
    return {
        "without_beta": largest(run("tiled", q, k, v, block=32) - truth),
        "with_beta": largest(run("alpha_beta", q, k, v, block=32) - truth),
    }


@claim(
    "chapter, deep dive",
    says="Decoding with a cache is the same kernel: one row of queries over all keys.",
    criterion="one query over the cache equals the last row of the full pass to 1e-12 in float64",
    measured="{error:.1e}; scores alive at once: {decode_scores} for that one query, {prefill_scores} for the naive full pass",
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


@claim(
    "deep dive",
    says="A backward pass can be verified with np.gradient.",
    criterion="its derivative in the middle of three samples agrees with autograd to 1e-6",
    measured="middle sample off by {middle:.0e}, edge samples by {edge:.0e}; torch.autograd.gradcheck passes: {gradcheck}",
    because="np.gradient differentiates samples on a grid. Three samples a coordinate make it a central difference; at the edges it is "
    "one-sided. gradcheck does all coordinates at once and knows the tolerance.",
    verdict=lambda f: only_if("the middle of three samples is read") if f["middle"] < 1e-6 < f["edge"] else verdict(f["edge"] < 1e-6),
    tiny={},
)
def numerical_gradient(step: float = 1e-4) -> Figures:
    q, k, v = (x.requires_grad_() for x in inputs(0, 1, 1, 9, 4, dtype=torch.float64))
    backend = get_backend("tiled", block_q=4, block_kv=3)

    def loss(q: Tensor) -> Tensor:
        return attention(q, k, v, backend=backend, causal=True).out.square().sum()

    (dq,) = torch.autograd.grad(loss(q), q)
    samples = []
    for shift in (-step, 0.0, step):
        moved = q.detach().clone()
        moved[0, 0, 5, 2] += shift
        samples.append(loss(moved).item())
    found = np.gradient(samples, step).tolist()
    expected = dq[0, 0, 5, 2].item()
    passes = torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, backend=backend).out, (q, k, v))
    return {"middle": abs(found[1] - expected), "edge": max(abs(found[0] - expected), abs(found[2] - expected)), "gradcheck": passes}
