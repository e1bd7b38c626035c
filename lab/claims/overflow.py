"""Claims about the range of numbers: the maximum, the exponentials, the accumulator, the scale.

Dimensions: B batch, H heads, N queries and keys, D head dim; a tile is R queries by T keys.
"""

import math
from statistics import median

import torch
from torch import Tensor

from attention import LIMITS, attention, get_backend
from attention.mask import QueryTile
from attention.online_softmax import OnlineSoftmax
from attention.tiled import tile_loop_backend
from lab.claims.claim import FAILS, HOLDS, Figures, claim, only_if, spread, verdict
from lab.claims.inputs import STEP_4, exact, inputs, largest, run

HALF = {"float16": torch.float16, "float32": torch.float32}


@claim(
    "chapter",
    says="exp(89) is about 4e38, past float32's largest number; exp(12) is about 162,754, past "
    "float16's 65,504.",
    criterion="both values agree to two digits, and both overflow",
    measured="{exp_89:.2e} and {exp_12:.0f}; overflow starts at a score of {limit_float32:.2f} in "
    "float32 and {limit_float16:.2f} in "
    "float16",
    verdict=lambda f: verdict(
        f"{f['exp_89']:.0e}" == "4e+38"
        and round(f["exp_12"]) in (162754, 162755)
        and f["both_overflow"]
    ),
    tiny={},
)
def limits_of_exp() -> Figures:
    overflow = [
        torch.exp(torch.tensor(score, dtype=dtype)).isinf().item()
        for score, dtype in ((89.0, torch.float32), (12.0, torch.float16))
    ]
    limits = {f"limit_{name}": LIMITS[dtype] for name, dtype in HALF.items()}
    return {
        "exp_89": math.exp(89),
        "exp_12": math.exp(12),
        "both_overflow": all(overflow),
        "ratio": limits["limit_float32"] / limits["limit_float16"],
        **limits,
    }


def get_softmax(name: str) -> type[OnlineSoftmax]:
    """The streaming softmax that this backend runs through the tile loop."""
    return get_backend(name).fn.make_loop.keywords["softmax"]


@claim(
    "chapter",
    says="Without the maximum, scores in the tens overflow float32 because the sum over "
    "several tiles does.",
    criterion="a row sum of exp(20) overflows within 131,072 keys",
    measured="at a score of 20, {keys:,} keys sum to {row_sum:.1e}; overflow would take "
    "{needed:.0e} "
    "keys. One score of 88.8 overflows "
    "alone: {one_key}",
    because="exp(20) is 5e8. What kills float32 is a single score above 88.72, not a sum.",
    verdict=lambda f: verdict(math.isinf(f["row_sum"])),
    tiny={"keys": 8192},
)
def sums_of_tens(keys: int = 131072) -> Figures:
    state = get_softmax("no_max").empty(torch.zeros(1, 1), dtype=torch.float32)
    for _ in range(0, keys, 4096):
        state = state.update(torch.full((1, 4096), 20.0), torch.ones(4096, 1))
    alone = (
        get_softmax("no_max")
        .empty(torch.zeros(1, 1), dtype=torch.float32)
        .update(torch.full((1, 1), 88.8), torch.ones(1, 1))
    )
    return {
        "keys": keys,
        "row_sum": state.row_sum.item(),
        "needed": torch.finfo(torch.float32).max / math.exp(20),
        "one_key": "inf" if alone.row_sum.isinf() else "finite",
    }


def first_overflow(
    dtype: torch.dtype, std: float, *, length: int, tile: int, seed: int = 0
) -> Figures:
    """no_max with everything in `dtype`: the share of rows that leave the finite range, and at
    which key tile the first one does.
    """
    q, k, v = inputs(seed, 2, 4, length, 32, std=std, dtype=dtype)
    bad_tile = torch.full((2, 4, length), -1)  # of each row; -1 while it is finite
    scores_seen = []

    def observe(query_tile: QueryTile, keys: slice, scores: Tensor, state: OnlineSoftmax) -> None:
        scores_seen.append(scores.amax().item())
        bad = ~(state.row_sum.isfinite() & state.acc.isfinite()).all(-1).flatten(1, 2)
        rows = bad_tile[..., query_tile.rows]
        rows[bad & (rows < 0)] = keys.start // tile

    backend = get_backend("no_max", block_q=length, block_kv=tile, softmax_dtype="input")
    out = backend.fn(q, k, v, causal=False, scale=32**-0.5, **backend.options, observer=observe).out
    bad = bad_tile[bad_tile >= 0].tolist()
    return {
        "max_score": max(scores_seen),
        "bad_rows": len(bad) / bad_tile.numel(),
        "first_tile": min(bad) if bad else "none",
        "half": median(bad) if bad else "none",
        "nan_rows": out.isnan().any(-1).double().mean().item(),
        "inf_rows": out.isinf().any(-1).double().mean().item(),
        "zero_rows": (out == 0).all(-1).double().mean().item(),
    }


@claim(
    "chapter",
    says="Without the maximum, float16 at 256 tokens is NaN within the first tile or two.",
    criterion="some row leaves the finite range in the first two tiles of 32, at q and k of "
    "standard deviation 1",
    measured="by standard deviation of q and k, the first bad tile is {first_tile}; "
    "share of bad rows "
    "{bad_rows}; largest score "
    "{max_score}",
    because="It takes a score above 11.09, or a row sum above 65,504; ordinary random inputs "
    "have neither.",
    verdict=lambda f: (
        verdict(True)
        if f["first_tile"]["1"] in (0, 1)
        else only_if(f"q and k have a standard deviation of {f['from_std']} or more")
        if f["from_std"]
        else FAILS
    ),
    tiny={"stds": (1, 1.5)},
)
def float16_first_tiles(stds: tuple[float, ...] = (1, 1.5, 2, 3, 4)) -> Figures:
    rows = {f"{std:g}": first_overflow(torch.float16, std, length=256, tile=32) for std in stds}
    early = [std for std, row in rows.items() if row["first_tile"] in (0, 1)]
    names = ("first_tile", "bad_rows", "max_score")
    return {name: {std: row[name] for std, row in rows.items()} for name in names} | {
        "from_std": early[0] if early else ""
    }


def earlier(f: Figures) -> bool:
    half, single = (
        [math.inf if tile == "none" else tile for tile in f[name].values()] for name in HALF
    )
    return all(a <= b for a, b in zip(half, single, strict=True)) and half != single


@claim(
    "chapter",
    says="Overflow comes earlier in float16 than in float32.",
    criterion="at every size of the scores, float16 breaks at the same tile or earlier, and at one "
    "of them earlier",
    measured="first bad tile of 16 (64 keys each, 1,024 tokens), by standard deviation of q and k: "
    "float16 {float16}; float32 {float32}. "
    "Share of bad rows: float16 {float16_rows:.1%}; float32 {float32_rows:.1%}. Tile at which "
    "half of them have broken: float16 "
    "{float16_half:.0f}; float32 {float32_half:.0f}",
    because="The scores grow with the square of that standard deviation, and float32 stands 88.72 "
    "where float16 stands 11.09.",
    verdict=lambda f: verdict(earlier(f)),
    also="python -m scripts.trace attention=no_max dtype=fp16 inputs=large",
    tiny={"length": 256, "stds": (3, 4)},
)
def overflow_by_dtype(
    length: int = 1024, stds: tuple[float, ...] = (1, 1.5, 2, 3, 4, 5, 6)
) -> Figures:
    found: Figures = {}
    for name, dtype in HALF.items():
        rows = {f"{std:g}": first_overflow(dtype, std, length=length, tile=64) for std in stds}
        found[name] = {std: row["first_tile"] for std, row in rows.items()}
        found[f"{name}_rows"] = {std: row["bad_rows"] for std, row in rows.items()}
        found[f"{name}_half"] = {std: row["half"] for std, row in rows.items()}
    return found


def kinds(out: Tensor) -> Figures:
    """Share of outputs that are NaN, infinite or exactly 0."""
    return {
        name: x.double().mean().item()
        for name, x in (("NaN", out.isnan()), ("inf", out.isinf()), ("zero", out == 0))
    }


@claim(
    "chapter",
    says="When it overflows, the result is NaN.",
    criterion="every row that overflows ends as NaN, over float16 inputs with all scores "
    "equal (1,024 "
    "keys) and random ones",
    measured="all scores 5: {at_5}; 8: {at_8}; 11: {at_11}; random of standard "
    "deviation 3: {random}",
    because="A sum that overflows alone makes finite / inf = 0, an output that "
    "overflows alone makes "
    "inf. A detector of NaN misses the "
    "zeros.",
    verdict=lambda f: verdict(f["only_nan"]),
    tiny={"length": 512},
)
def overflow_gives_nan(length: int = 1024) -> Figures:
    found = {}
    _, _, v = inputs(0, 1, 1, length, 16, dtype=torch.float16)
    backend = get_backend("no_max", block_q=length, block_kv=64, softmax_dtype="input")
    for score in (5, 8, 11):
        q, k = (torch.full((1, 1, length, 16), x, dtype=torch.float16) for x in (1.0, score / 4))
        found[f"at_{score}"] = kinds(attention(q, k, v, backend=backend, causal=False).out)
    q, k, v = inputs(0, 1, 4, length, 32, std=3, dtype=torch.float16)
    found["random"] = kinds(attention(q, k, v, backend=backend, causal=False).out)
    return found | {"only_nan": not any(kind["inf"] or kind["zero"] for kind in found.values())}


@claim(
    "chapter",
    says="A running maximum that starts at 0 instead of -inf gives errors of 1e-1 or more.",
    criterion="the largest error is at least 0.1 at scores of standard deviation 1",
    measured="{normal:.1e} at ordinary scores; with every score at -100 {at_100:.1e}, at "
    "-110 {at_110}",
    because="Zero is a legal shift like any other. It fails where all of a row lies so "
    "far below zero "
    "that exp() has no bits left.",
    verdict=lambda f: verdict(f["normal"]["max"] >= 0.1),
    tiny={"seeds": 1},
    also="python -m scripts.verify attention=zero_init_max",
)
def maximum_from_zero(seeds: int = 5) -> Figures:
    normal = []
    for seed in range(seeds):
        q, k, v = inputs(seed, *STEP_4)
        normal.append(largest(run("zero_init_max", q, k, v, block=32) - exact(q, k, v)))
    _, _, v = inputs(0, 1, 1, 128, 16)
    far = []
    for score in (-100, -110):
        q, k = (
            torch.full((1, 1, 128, 16), 1.0),
            torch.full((1, 1, 128, 16), score / 4),
        )  # 16 * score / 4 / sqrt(16)
        out = run("zero_init_max", q, k, v, block=32)
        far.append("NaN" if out.isnan().all() else largest(out - exact(q, k, v)))
    return {"normal": spread(normal), "at_100": far[0], "at_110": far[1]}


@claim(
    "deep dive",
    says="An accumulator kept unnormalised grows and risks overflow.",
    criterion="it overflows for some dtype of the accumulator",
    measured="{length:,} equal scores and values of 32 give {acc}; the bound is N * max|v|",
    because="The weights are at most 1 each. In float32 the bound is out of reach, which is why "
    "FlashAttention-2 normalises once, at the "
    "end.",
    verdict=lambda f: (
        FAILS
        if "inf" not in f["acc"].values()
        else only_if("the accumulator is float16")
        if [name for name, acc in f["acc"].items() if acc == "inf"] == ["float16"]
        else HOLDS
    ),
    tiny={},
)
def unnormalised_accumulator(length: int = 4096) -> Figures:
    acc = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        state = OnlineSoftmax.empty(torch.zeros(1, 1), dtype=dtype)
        for _ in range(0, length, 64):
            state = state.update(
                torch.zeros(1, 64, dtype=dtype), torch.full((64, 1), 32.0, dtype=dtype)
            )
        acc[str(dtype).removeprefix("torch.")] = state.acc.item() if state.acc.isfinite() else "inf"
    return {"acc": acc, "length": length}


@claim(
    "chapter, deep dive",
    says="With the maximum subtracted, every exponential and every correction lies between 0 and "
    "1, whatever the scores.",
    criterion="the largest over all tiles is 1 and none is negative, for scores up to 1e4",
    measured="largest score {max_score:,.0f}; p from {p_min:.0f} to {p_max:.0f}, corrections from "
    "{alpha_min:.0f} to {alpha_max:.0f}",
    verdict=lambda f: verdict(
        min(f["p_min"], f["alpha_min"]) >= 0 and max(f["p_max"], f["alpha_max"]) <= 1
    ),
    tiny={},
)
def exponentials_up_to_one() -> Figures:
    q, k, v = inputs(0, 1, 2, 256, 32, std=45)
    seen: dict[str, list[float]] = {"score": [], "p": [], "alpha": []}

    class Watched(OnlineSoftmax):
        def update(self, scores: Tensor, v: Tensor) -> OnlineSoftmax:
            state = super().update(scores, v)
            found = {
                "score": scores,
                "p": torch.exp(scores - state.row_max),
                "alpha": self.correction(state.row_max),
            }
            for name, x in found.items():
                seen[name] += [x.amin().item(), x.amax().item()]
            return state

    run(tile_loop_backend("watched", softmax=Watched), q, k, v, block=32)
    both = {
        f"{name}_{kind}": pick(seen[name])
        for name in ("p", "alpha")
        for kind, pick in (("min", min), ("max", max))
    }
    return {"max_score": max(seen["score"])} | both


@claim(
    "deep dive, notebook",
    says="Without 1 / sqrt(d), scores at d = 128 are about 11 times too large; products of vectors "
    "with entries of variance 1 have a "
    "variance proportional to d.",
    criterion="the ratio is between 11 and 12, and the variance grows like d to the "
    "power 0.9 to 1.1",
    measured="ratio {ratio:.2f}; the variance grows like d^{exponent:.2f}, the scores "
    "themselves like "
    "its root; the mean largest weight "
    "goes from {weight:.2f} to {weight_unscaled:.2f}",
    because="So scores grow with the square root of d, not in proportion to d as the deep dive's "
    "first sentence has it.",
    verdict=lambda f: verdict(11 <= f["ratio"] <= 12 and 0.9 <= f["exponent"] <= 1.1),
    tiny={"length": 128},
    also="python -m scripts.verify attention=no_scale",
)
def missing_scale(length: int = 512) -> Figures:
    variance = {}
    for head_dim in (16, 32, 64, 128):
        q, k, _ = inputs(0, 1, 4, length, head_dim)
        variance[head_dim] = (q @ k.mT).var().item()
    raw = q @ k.mT
    scaled = raw * 128**-0.5
    return {
        "ratio": (raw.std() / scaled.std()).item(),
        "exponent": math.log(variance[128] / variance[16]) / math.log(128 / 16),
        "weight": scaled.softmax(-1).amax(-1).mean().item(),
        "weight_unscaled": raw.softmax(-1).amax(-1).mean().item(),
    }


@claim(
    "deep dive",
    says="Without the scale the softmax is nearly one-hot and its gradients vanish.",
    criterion="at d = 128 the mean largest weight exceeds 0.5, and the gradient of the "
    "scores (median "
    "over rows of its norm) falls below a "
    "tenth",
    measured="largest weight {weight:.2f}, from {weight_scaled:.2f}; gradient norm {gradient:.3f}, "
    "from {gradient_scaled:.3f}; rows whose "
    "gradient is below a tenth of the scaled one: {vanished:.0%}",
    because="A flat softmax over many keys has small gradients as well: 1 / N a key. "
    "They vanish for "
    "the rows that are saturated; in the "
    "others a few keys take all of the gradient.",
    verdict=lambda f: (
        HOLDS
        if f["weight"] > 0.5 and f["gradient"] < f["gradient_scaled"] / 10
        else only_if("the row is saturated")
        if f["weight"] > 0.5 and f["vanished"] > 0.01
        else FAILS
    ),
    tiny={"length": 256},
)
def gradients_without_the_scale(length: int = 512) -> Figures:
    q, k, _ = inputs(0, 1, 4, length, 128)
    raw = q @ k.mT
    d_weights = torch.randn(raw.shape, generator=torch.Generator().manual_seed(1))
    found = {}
    for name, scores in (("", raw), ("_scaled", raw * 128**-0.5)):
        p = scores.softmax(-1)
        found[f"weight{name}"] = p.amax(-1).mean().item()
        gradient = (p * (d_weights - (p * d_weights).sum(-1, keepdim=True))).norm(dim=-1)
        found[f"gradient{name}"] = gradient.median().item()
        if not name:
            unscaled = gradient
    return found | {"vanished": (unscaled < gradient / 10).double().mean().item()}
