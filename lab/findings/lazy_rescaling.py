"""Where lazy rescaling is safe: threshold x dtype of p x offset x length, against float64.

    python -m lab.findings.lazy_rescaling out=results/lazy_rescaling.json

    lengths     keys of a row (1024,8192,32768)
    thresholds  powers of two that a score may outgrow the subtracted maximum by (0 to 16)
    offsets     powers of two that p is multiplied by, to use a narrow range well (0,4,8)
    seeds       of the inputs (0,1,2)
    device      auto, cpu or cuda (auto)
    out         the JSON file to write; the figure stands beside it

The streaming softmax of FlashAttention-4 moves the subtracted maximum only when a tile outgrows it
by `threshold`, so p reaches 2^(threshold + offset). A narrow dtype that ends before that
saturates. Sums are float32 and take p before it is rounded, as kernels do; p @ v takes it rounded.

Inputs: "climbing" has later scores as high as the threshold lets pass, and an equal number of them
at each length, which is the worst case; "normal" has scores of standard deviation 4.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import log, log2
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from attention import attention
from attention.online_softmax import OnlineSoftmax, finite
from attention.tiled import tile_loop_backend
from scripts.arguments import Device, check_at_least, command, default
from scripts.drawing import for_both_papers, new_figure, save_figure
from scripts.tables import Row
from training.device import pick_device
from training.environment import measured_on
from training.files import check_writable, write_json

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
KINDS = ("climbing", "normal")
ROWS, HEAD_DIM, BLOCK_KV = 64, 64, 128
BROKEN = 2  # times the error of a smaller threshold
NAMES = ("inputs", "dtype", "length", "offset", "threshold")  # of a case


@dataclass
class Options:
    lengths: list[int] = default(1024, 8192, 32768)
    thresholds: list[float] = default(*range(17))
    offsets: list[float] = default(0, 4, 8)
    seeds: list[int] = default(0, 1, 2)
    device: Device = "auto"
    out: Path = Path("lazy_rescaling.json")

    def __post_init__(self) -> None:
        check_at_least(self, 2 * BLOCK_KV, "lengths")
        check_at_least(self, 0, "thresholds", "offsets", "seeds")
        if 0 not in self.thresholds:
            raise ValueError("thresholds= needs 0, which rescales at once: errors are shown by it")


@cache
def lazy(threshold: float, offset: float, dtype: torch.dtype) -> type[OnlineSoftmax]:
    """The streaming softmax with a threshold and an offset, in powers of two, and p in `dtype`."""
    largest = torch.finfo(dtype).max

    class Lazy(OnlineSoftmax):
        def next_max(self, tile_max: Tensor) -> Tensor:
            outgrown = tile_max > self.row_max + threshold * log(2)
            return torch.where(outgrown, tile_max, self.row_max)

        def update(self, scores: Tensor, v: Tensor) -> "Lazy":
            next_max = self.next_max(scores.amax(-1, keepdim=True))
            alpha = self.correction(next_max)
            p = torch.exp(scores - finite(next_max))
            # the conversion of a GPU saturates; that of PyTorch would give NaN or inf
            rounded = (p * 2**offset).clamp(max=largest).to(dtype).to(p.dtype) / 2**offset
            return replace(
                self,
                row_max=next_max,
                row_sum=alpha * self.row_sum + p.sum(-1, keepdim=True),
                acc=alpha * self.acc + rounded @ v,
            )

    return Lazy


def inputs(kind: str, length: int, threshold: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (1, R, D), k and v (1, M, D) in float32: the score of key j is the first feature of k, the
    same for each row, plus a little of the row's own.
    """
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(1, ROWS, HEAD_DIM, generator=draw) / 8
    k, v = (torch.randn(1, length, HEAD_DIM, generator=draw) for _ in range(2))
    if kind == "normal":
        score = 4 * torch.randn(length, generator=draw)
    else:
        # the first tile at 0; of the rest, 64 keys as high as the threshold lets pass
        score = torch.full((length,), -2.0)
        score[0] = 0
        high = BLOCK_KV + torch.randperm(length - BLOCK_KV, generator=draw)[:64]
        score[high] = (threshold - 0.05) * log(2)
        k[..., 1:] = 0
    q[..., 0], k[..., 0] = HEAD_DIM**0.5, score
    return q, k, v


def error(
    kind: str, length: int, threshold: float, offset: float, dtype: str, options: Options
) -> Row:
    """Relative error of out (root mean square) and the largest error of lse, beside float64; of the
    worst seed.
    """
    device = pick_device(options.device)
    drawn = [inputs(kind, length, threshold, seed) for seed in options.seeds]
    q, k, v = (torch.stack(each).to(device) for each in zip(*drawn, strict=True))
    backend = tile_loop_backend("lazy", softmax=lazy(threshold, offset, DTYPES[dtype]))
    backend = backend.configured(block_q=ROWS, block_kv=BLOCK_KV)
    out, lse = attention(q, k, v, backend=backend, causal=False)
    scores = q.double() @ k.double().mT * HEAD_DIM**-0.5
    expected = torch.softmax(scores, -1) @ v.double()
    relative = (out - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return {
        "out": float(relative.max()),
        "lse": float((lse - scores.logsumexp(-1)).abs().max()),
    }


@command("lazy_rescaling", Options)
def main(options: Options) -> None:
    check_writable(options.out)
    torch.set_num_threads(1)  # the tiles are small: threads would only wait for one another
    rows = []
    axes = (KINDS, DTYPES, options.lengths, options.offsets, options.thresholds)
    for kind, dtype, length, offset, threshold in tqdm(list(product(*axes)), disable=None):
        found = error(kind, length, threshold, offset, dtype, options)
        case = zip(NAMES, (kind, dtype, length, offset, threshold), strict=True)
        rows.append(dict(case) | found)
    regions = [region(rows, dtype, offset) for dtype in DTYPES for offset in options.offsets]
    for each in regions:
        print(
            f"p in {each['dtype']}, offset {each['offset']:g}: safe up to {each['last_safe']:g}, "
            f"predicted {each['predicted']:.2f}"
        )
    write_json(
        options.out,
        {"environment": measured_on(pick_device(options.device)), "seeds": options.seeds}
        | {"regions": regions, "runs": rows},
    )
    draw(rows, regions, options)


def region(rows: list[Row], dtype: str, offset: float) -> Row:
    """The largest threshold up to which no length of climbing inputs has BROKEN times the error of
    a smaller threshold; and the prediction, log2 of the dtype's largest number less the offset.
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
    thresholds = {row["threshold"] for row in rows}
    return {
        "dtype": dtype,
        "offset": offset,
        "last_safe": max(each for each in thresholds if first is None or each < first),
        "first_broken": first,
        "predicted": log2(torch.finfo(DTYPES[dtype]).max) - offset,
    }


def draw(rows: list[Row], regions: list[Row], options: Options) -> None:
    """Error against threshold at the longest length, one line an offset, with the prediction."""
    figure, panels = new_figure(2, len(DTYPES), size=(12, 5.5), sharex=True, sharey="row")
    longest = max(options.lengths)
    for line, kind in zip(panels, KINDS, strict=True):
        for axes, dtype in zip(line, DTYPES, strict=True):
            for number, offset in enumerate(options.offsets):
                mine = [
                    row
                    for row in rows
                    if (row["inputs"], row["dtype"]) == (kind, dtype)
                    and (row["offset"], row["length"]) == (offset, longest)
                ]
                xs, ys = ([row[name] for row in mine] for name in ("threshold", "out"))
                axes.semilogy(xs, ys, ".-", color=f"C{number}", label=f"offset {offset:g}")
                limit = next(
                    each["predicted"]
                    for each in regions
                    if (each["dtype"], each["offset"]) == (dtype, offset)
                )
                if 0 < limit <= max(options.thresholds):
                    axes.axvline(limit, color=f"C{number}", linestyle=":")
            axes.set_title(f"p in {dtype}, {kind} scores", size=9)
            axes.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    for axes in panels[1]:
        axes.set_xlabel("threshold (powers of two)")
    for line in panels:
        line[0].set_ylabel(f"relative error of out, {longest:,} keys")
    for_both_papers(save_figure(figure, options.out.with_suffix(".png"), dpi=110))


if __name__ == "__main__":
    main()
