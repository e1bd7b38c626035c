"""Where lazy rescaling is safe: threshold x dtype of p x offset x length, against float64.

    python -m lab.findings.lazy_rescaling out=lazy_rescaling.json

    lengths  numbers of keys (1024,8192,32768)
    seeds    of the inputs (0,1,2)
    out      the JSON file to write; the figure is written beside it

The streaming softmax of FlashAttention-4 updates the subtracted maximum only when a tile exceeds it
by `threshold`, so p reaches 2^(threshold + offset). A narrow dtype with a smaller range saturates.
As in kernels, the sums are float32 and use the unrounded p; p @ v uses the rounded p.

Inputs: "climbing" is the worst case, with later scores as high as the threshold allows, the same
number of them at each length. "normal" has scores of standard deviation 4.
"""

from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from math import log, log2
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor
from tqdm import tqdm

from attention import attention
from attention.online_softmax import OnlineSoftmax, finite
from attention.tiled import tile_loop_backend
from lab.findings.finding import publish
from scripts.arguments import Natural, command, default
from scripts.drawing import for_both_papers, new_figure, save_figure
from scripts.tables import Row, by

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
KINDS = ("climbing", "normal")
ROWS, HEAD_DIM, BLOCK_KV = 64, 64, 128
# both in powers of two: how far a score may exceed the subtracted maximum (0 always rescales, and
# is the baseline for the errors), and a factor on p, which makes better use of a narrow range
THRESHOLDS, OFFSETS = range(17), (0, 4, 8)
BROKEN = 2  # multiple of the error of a smaller threshold
NAMES = ("inputs", "dtype", "length", "offset", "threshold")  # of a case


@dataclass
class Options:
    lengths: list[Annotated[int, 2 * BLOCK_KV]] = default(1024, 8192, 32768)
    seeds: list[Natural] = default(0, 1, 2)
    out: Path = Path("lazy_rescaling.json")


@cache
def lazy(threshold: float, offset: float, dtype: torch.dtype) -> type[OnlineSoftmax]:
    """The streaming softmax with threshold and offset in powers of two, and p in `dtype`."""
    largest = torch.finfo(dtype).max

    class Lazy(OnlineSoftmax):
        def next_max(self, tile_max: Tensor) -> Tensor:
            outgrown = tile_max > self.row_max + threshold * log(2)
            return torch.where(outgrown, tile_max, self.row_max)

        def update(self, scores: Tensor, v: Tensor) -> "Lazy":
            next_max = self.next_max(scores.amax(-1, keepdim=True))
            alpha = self.correction(next_max)
            p = torch.exp(scores - finite(next_max))
            # conversion on a GPU saturates; in PyTorch it would give NaN or inf
            rounded = (p * 2**offset).clamp(max=largest).to(dtype).to(p.dtype) / 2**offset
            return replace(
                self,
                row_max=next_max,
                row_sum=alpha * self.row_sum + p.sum(-1, keepdim=True),
                acc=alpha * self.acc + rounded @ v,
            )

    return Lazy


def inputs(kind: str, length: int, threshold: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (1, R, D), k and v (1, M, D) in float32. The first feature of k sets the score of a key for
    all rows; with "normal", the others add a little that differs by row.
    """
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(1, ROWS, HEAD_DIM, generator=draw) / 8
    k, v = (torch.randn(1, length, HEAD_DIM, generator=draw) for _ in range(2))
    if kind == "normal":
        score = 4 * torch.randn(length, generator=draw)
    else:
        # one key of the first tile at 0; 64 later keys as high as the threshold allows
        score = torch.full((length,), -2.0)
        score[0] = 0
        high = BLOCK_KV + torch.randperm(length - BLOCK_KV, generator=draw)[:64]
        score[high] = (threshold - 0.05) * log(2)
        k[..., 1:] = 0
    q[..., 0], k[..., 0] = HEAD_DIM**0.5, score
    return q, k, v


def error(case: Row, seeds: list[int], device: torch.device) -> Row:
    """Relative error of out (root mean square) and largest error of lse against float64, for the
    worst seed.
    """
    length, threshold = case["length"], case["threshold"]
    drawn = [inputs(case["inputs"], length, threshold, seed) for seed in seeds]
    q, k, v = (torch.stack(each).to(device) for each in zip(*drawn, strict=True))
    softmax = lazy(threshold, case["offset"], DTYPES[case["dtype"]])
    backend = tile_loop_backend("lazy", softmax=softmax)
    backend = backend.configured(block_q=ROWS, block_kv=BLOCK_KV)
    out, lse = attention(q, k, v, backend=backend, causal=False)
    scores = q.double() @ k.double().mT * HEAD_DIM**-0.5
    expected = torch.softmax(scores, -1) @ v.double()
    relative = (out - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return {
        "out": float(relative.max()),
        "lse": float((lse - scores.logsumexp(-1)).abs().max()),
    }


@command
def main(options: Options) -> None:
    publish(options.out, partial(measure, options), in_text, draw)


def measure(options: Options, device: torch.device) -> Row:
    axes = (KINDS, DTYPES, options.lengths, OFFSETS, THRESHOLDS)
    cases = [dict(zip(NAMES, values, strict=True)) for values in product(*axes)]
    rows = [case | error(case, options.seeds, device) for case in tqdm(cases, disable=None)]
    regions = [region(rows, dtype, offset) for dtype in DTYPES for offset in OFFSETS]
    return {"seeds": options.seeds, "regions": regions, "runs": rows}


def in_text(found: Row) -> str:
    return "\n".join(
        f"p in {each['dtype']}, offset {each['offset']:g}: safe up to {each['last_safe']:g}, "
        f"predicted {each['predicted']:.2f}"
        for each in found["regions"]
    )


def region(rows: list[Row], dtype: str, offset: float) -> Row:
    """The largest threshold before any length of climbing inputs has BROKEN times the error of a
    smaller threshold; and the prediction, log2 of the dtype's largest number minus the offset.
    """
    broken = []
    for row in rows:
        if (row["inputs"], row["dtype"], row["offset"]) == ("climbing", dtype, offset):
            smaller = [
                other["out"]
                for other in rows
                if other["threshold"] <= row["threshold"]
                and all(other[key] == row[key] for key in NAMES if key != "threshold")
            ]
            if row["out"] > BROKEN * min(smaller):
                broken.append(row["threshold"])
    first = min(broken, default=None)
    return {
        "dtype": dtype,
        "offset": offset,
        "last_safe": max(each for each in THRESHOLDS if first is None or each < first),
        "first_broken": first,
        "predicted": log2(torch.finfo(DTYPES[dtype]).max) - offset,
    }


def draw(found: Row, path: Path) -> None:
    """Error against threshold at the longest length, a line per offset, with the prediction."""
    figure, panels = new_figure(2, len(DTYPES), size=(12, 5.5), sharex=True, sharey="row")
    longest = max(row["length"] for row in found["runs"])
    lines = by(found["runs"], "inputs", "dtype", "length", "offset")
    for axes, (kind, dtype) in zip(panels.flat, product(KINDS, DTYPES), strict=True):
        regions = by(found["regions"], "dtype")[dtype]
        for number, region in enumerate(regions):
            mine, color = lines[kind, dtype, longest, region["offset"]], f"C{number}"
            xs, ys = ([row[name] for row in mine] for name in ("threshold", "out"))
            axes.semilogy(xs, ys, ".-", color=color, label=f"offset {region['offset']:g}")
            if 0 < region["predicted"] <= max(THRESHOLDS):
                axes.axvline(region["predicted"], color=color, linestyle=":")
        axes.set_title(f"p in {dtype}, {kind} scores", size=9)
        axes.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    for axes in panels[1]:
        axes.set_xlabel("threshold (powers of two)")
    for line in panels:
        line[0].set_ylabel(f"relative error of out, {longest:,} keys")
    for_both_papers(save_figure(figure, path, dpi=110))


if __name__ == "__main__":
    main()
