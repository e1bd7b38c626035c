"""Overflow: what the running maximum is for.

Dimensions: B batch, H heads, N queries and keys, D head dim.
"""

import math
from statistics import median

import torch
from torch import Tensor

from attention import dtype_name, get_backend
from attention.defects import NoMax
from attention.online_softmax import OnlineSoftmax
from attention.trace import survey
from lab.claims.claim import Figures, claim
from lab.claims.inputs import exact, inputs, largest, over_seeds, run


@claim(
    "chapter",
    holds=lambda f: math.isinf(f["row_sum"]),
)
def sums_of_tens() -> Figures:
    """Without the maximum, scores in the tens overflow float32 because the sum over several
    tiles does.

    Holds if a row sum of exp(20) overflows within 131,072 keys.

    Measured: at a score of 20, {keys:,} keys sum to {row_sum:.1e}; overflow would take
    {needed:.0e} keys. One score of 88.8 overflows alone: {one_key}.

    exp(20) is 5e8. A single score above 88.72 breaks float32, not a sum.
    """
    empty = NoMax.empty(torch.zeros(1, 1), dtype=torch.float32)
    state, keys = empty, 131072
    for _ in range(0, keys, 4096):
        state = state.update(torch.full((1, 4096), 20.0), torch.ones(4096, 1))
    alone = empty.update(torch.full((1, 1), 88.8), torch.ones(1, 1))
    return {
        "keys": keys,
        "row_sum": state.row_sum.item(),
        "needed": torch.finfo(torch.float32).max / math.exp(20),
        "one_key": "inf" if alone.row_sum.isinf() else "finite",
    }


def overflowing_tiles(dtype: torch.dtype, std: float) -> list[int | None]:
    """For each of 8 x 1,024 rows of no_max, entirely in `dtype`: the tile of 64 keys at which the
    row overflows, or None.
    """
    backend = get_backend("no_max", block_q=1024, block_kv=64, softmax_dtype="input")
    qkv = inputs(0, 2, 4, 1024, 32, std=std, dtype=dtype)
    tiles = []
    for head in zip(*(x.flatten(0, 1)[:, None, None] for x in qkv), strict=True):
        breaks = survey(*head, backend=backend, causal=False, scale=32**-0.5).first_break
        tiles += [None if key is None else key // 64 for key in breaks]
    return tiles


def float16_breaks_earlier(f: Figures) -> bool:
    half, single = (
        [math.inf if tile == "none" else tile for tile in f[name].values()]
        for name in ("float16", "float32")
    )
    return all(a <= b for a, b in zip(half, single, strict=True)) and half != single


@claim(
    "chapter",
    table="standard deviation of q and k",
    holds=lambda f: float16_breaks_earlier(f) and f["float16"]["1"] in (0, 1),
    only_if=(
        "q and k have a standard deviation of 1.5 or more",
        lambda f: float16_breaks_earlier(f) and f["float16"]["1.5"] in (0, 1),
    ),
)
def overflow_by_dtype() -> Figures:
    """Without the maximum, float16 overflows in the first tile or two, earlier than float32.

    Holds if at every size of the scores float16 breaks at the same tile as float32 or earlier,
    at one size earlier, and at standard deviation 1 by the second tile.

    Measured: the first bad tile of 16 (from 0, 64 keys each), the share of bad rows (rows), and
    the tile at which half of them have broken (half).

    It takes a score above 11.09 in float16 and above 88.72 in float32. Scores grow with the
    square of that standard deviation; ordinary random inputs reach neither limit.
    """
    figures: Figures = {}
    for dtype in (torch.float16, torch.float32):
        name = dtype_name(dtype)
        first, share, half = {}, {}, {}
        for std in (1, 1.5, 2, 3, 4, 5, 6):
            tiles = overflowing_tiles(dtype, std)
            bad = [tile for tile in tiles if tile is not None]
            first[f"{std:g}"] = min(bad, default="none")
            share[f"{std:g}"] = len(bad) / len(tiles)
            half[f"{std:g}"] = median(bad) if bad else "none"
        figures |= {name: first, f"{name}_rows": share, f"{name}_half": half}
    return figures


@claim(
    "chapter",
    holds=lambda f: f["only_nan"],
)
def overflow_gives_nan() -> Figures:
    """When attention without the maximum overflows, the result is NaN.

    Holds if every row that overflows ends as NaN, over float16 inputs with all scores equal
    (1,024 keys) and random ones.

    Measured: all scores 5: {at_5}; 8: {at_8}; 11: {at_11}; random of standard deviation 3:
    {random}.

    A sum that overflows alone makes finite / inf = 0, an output that overflows alone makes inf.
    A detector of NaN misses the zeros.
    """
    backend = get_backend("no_max", block_q=1024, block_kv=64, softmax_dtype="input")

    def shares(q: Tensor, k: Tensor, v: Tensor) -> Figures:
        out = run(backend, q, k, v)
        kinds = {"NaN": out.isnan(), "inf": out.isinf(), "zero": out == 0}
        return {name: is_kind.double().mean().item() for name, is_kind in kinds.items()}

    _, _, v = inputs(0, 1, 1, 1024, 16, dtype=torch.float16)
    figures = {}
    for score in (5, 8, 11):
        # 16 products of 1 and score / 4, times 1 / sqrt(16)
        figures[f"at_{score}"] = shares(torch.ones_like(v), torch.full_like(v, score / 4), v)
    figures["random"] = shares(*inputs(0, 1, 4, 1024, 32, std=3, dtype=torch.float16))
    only_nan = not any(share["inf"] or share["zero"] for share in figures.values())
    return figures | {"only_nan": only_nan}


@claim(
    "chapter",
    holds=lambda f: f["normal"]["max"] >= 0.1,
)
def maximum_from_zero() -> Figures:
    """A running maximum that starts at 0 instead of -inf gives errors of 1e-1 or more.

    Holds if the largest error is at least 0.1 at scores of standard deviation 1.

    Measured: {normal:.1e} at ordinary scores; with every score at -100 {at_100:.1e}, at -110
    {at_110}.

    Zero is a legal shift like any other. It fails only where all scores of a row lie so far
    below zero that exp() underflows.
    """

    def error(q: Tensor, k: Tensor, v: Tensor) -> float:
        return largest(run("zero_init_max", q, k, v, block=32) - exact(q, k, v))

    figures = over_seeds(lambda *qkv: {"normal": error(*qkv)}, 5)
    _, _, v = inputs(0, 1, 1, 128, 16)
    for score in (-100, -110):
        far = error(torch.ones_like(v), torch.full_like(v, score / 4), v)
        figures[f"at_{-score}"] = "NaN" if math.isnan(far) else far
    return figures


@claim(
    "deep dive",
    holds=lambda f: set(f["acc"].values()) == {"inf"},
    only_if=("the accumulator is float16", lambda f: f["acc"]["float16"] == "inf"),
)
def unnormalised_accumulator() -> Figures:
    """An accumulator kept unnormalised grows and risks overflow.

    Holds if it overflows whatever its dtype.

    Measured: {length:,} equal scores and values of 32 give {acc}; the bound is N * max|v|.

    The weights are at most 1 each. float32 never reaches the bound, which is why
    FlashAttention-2 normalises once, at the end.
    """
    acc, length = {}, 4096
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        scores = torch.zeros(1, length, dtype=dtype)
        values = torch.full((length, 1), 32.0, dtype=dtype)
        state = OnlineSoftmax.empty(torch.zeros(1, 1), dtype=dtype)
        for tile in zip(scores.split(64, -1), values.split(64), strict=True):
            state = state.update(*tile)
        name = dtype_name(dtype)
        acc[name] = state.acc.item() if state.acc.isfinite() else "inf"
    return {"acc": acc, "length": length}


@claim(
    "deep dive",
    holds=lambda f: f["weight"] > 0.5 and f["gradient"] < f["gradient_scaled"] / 10,
    only_if=("the row is saturated", lambda f: f["weight"] > 0.5 and f["vanished"] > 0.01),
)
def gradients_without_the_scale() -> Figures:
    """Without 1 / sqrt(d) the softmax is nearly one-hot and its gradients vanish.

    Holds if at d = 128 the mean largest weight exceeds 0.5, and the gradient of the scores
    (median over rows of its norm) falls below a tenth.

    Measured: largest weight {weight:.2f}, from {weight_scaled:.2f}; gradient norm
    {gradient:.3f}, from {gradient_scaled:.3f}; rows whose gradient is below a tenth of the
    scaled one: {vanished:.0%}.

    A flat softmax over many keys has small gradients as well: 1 / N a key. They vanish in
    saturated rows; in the others a few keys take all of the gradient.
    """
    q, k, _ = inputs(0, 1, 4, 512, 128)
    raw = q @ k.mT
    d_weights = torch.randn(raw.shape, generator=torch.Generator().manual_seed(1))

    def weight_and_gradient(scores: Tensor) -> tuple[float, Tensor]:
        p = scores.softmax(-1)
        d_scores = p * (d_weights - (p * d_weights).sum(-1, keepdim=True))
        return p.amax(-1).mean().item(), d_scores.norm(dim=-1)

    weight, gradient = weight_and_gradient(raw)
    weight_scaled, gradient_scaled = weight_and_gradient(raw * 128**-0.5)
    return {
        "weight": weight,
        "gradient": gradient.median().item(),
        "weight_scaled": weight_scaled,
        "gradient_scaled": gradient_scaled.median().item(),
        "vanished": (gradient < gradient_scaled / 10).double().mean().item(),
    }
