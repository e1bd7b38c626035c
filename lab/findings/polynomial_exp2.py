"""How a polynomial in place of exp2 changes the output, lse, and a trained model.

    python -m lab.findings.polynomial_exp2 multirun/agree/{0,1,2} out=polynomial_exp2.json

The arguments are one or more runs (such as several seeds), and

    degrees  of the polynomial (1,2,3,4,5)
    eighths  share of keys whose exponential is the polynomial, in eighths (1,2,4,8)
    dtype    of the matrix products: fp32, bf16, fp16 or auto, the run's own (fp32)
    out      the JSON file to write

A GPU has few units for exp2, so FlashAttention-4 and cuDNN compute part of the exponentials by
multiplication: 2^x = 2^n 2^f with n = floor(x), and a polynomial for 2^f on [0, 1). Ours
interpolates 2^f at Chebyshev points and is evaluated in float32 by Horner's rule.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import log2
from pathlib import Path

import numpy as np
import torch
from numpy.polynomial import Chebyshev, Polynomial
from torch import Tensor
from tqdm import tqdm

from attention import Backend, attention, get_backend
from attention.online_softmax import OnlineSoftmax, finite, weighted_sum
from attention.tiled import tile_loop_backend
from lab.claims.inputs import relative
from scripts.agree import compare, load, read
from scripts.arguments import Count, Dtype, Json, command, default
from scripts.tables import Row, by, mean, spread, table
from training.device import pick_device
from training.files import write_json

SEQUENCES = 16  # held-out sequences, also used as prompts


@dataclass
class Options:
    paths: list[Path]
    degrees: list[Count] = default(1, 2, 3, 4, 5)
    eighths: list[Count] = default(1, 2, 4, 8)
    dtype: Dtype = "fp32"
    out: Json = Json("polynomial_exp2.json")

    def __post_init__(self) -> None:
        if max(self.eighths) > 8:
            raise ValueError(f"eighths={max(self.eighths)} must be at most 8, which is all keys")


@cache
def coefficients(degree: int) -> tuple[float, ...]:
    """Coefficients of the polynomial for 2^f on [0, 1), highest power first."""
    found = Chebyshev.interpolate(np.exp2, degree, domain=[0, 1])
    return tuple(found.convert(kind=Polynomial).coef[::-1])


def exp2(x: Tensor, degree: int) -> Tensor:
    """2^x by the polynomial; 0 for x < -126."""
    whole = x.clamp(min=-126).floor()
    fraction = (x - whole).clamp(max=1)
    value = torch.zeros_like(x)
    for each in coefficients(degree):
        value = value * fraction + each
    return torch.where(x < -126, 0.0, torch.ldexp(value, whole.int()))


def polynomial(degree: int, eighths: int) -> Backend:
    """Tiled attention, exact except for the exponentials of `eighths` of every eight keys."""

    class PolynomialExp2(OnlineSoftmax):
        def update(self, scores: Tensor, v: Tensor) -> "PolynomialExp2":
            next_max = self.next_max(scores.amax(-1, keepdim=True))
            alpha, shifted = self.correction(next_max), scores - finite(next_max)
            chosen = torch.arange(scores.shape[-1], device=scores.device) % 8 < eighths
            p = torch.where(chosen, exp2(shifted * log2(np.e), degree), shifted.exp())
            row_sum = alpha * self.row_sum + p.sum(-1, keepdim=True)
            acc = alpha * self.acc + weighted_sum(p, v)
            return replace(self, row_max=next_max, row_sum=row_sum, acc=acc)

    return tile_loop_backend(f"degree {degree}, {eighths}/8", softmax=PolynomialExp2)


def errors(backend: Backend) -> Row:
    """Errors of out (relative, root mean square) and lse (largest) in float32 against float64, for
    scores of standard deviation 4 and 4,096 keys.
    """
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, 64, generator=draw) for length in (64, 4096, 4096))
    q = 4 * q
    found = attention(q, k, v, backend=backend, causal=False)
    scores = q.double() @ k.double().mT / 8
    exact = scores.softmax(-1) @ v.double()
    return {
        "out": relative(found.out, exact),
        "lse": float((found.lse - scores.logsumexp(-1)).abs().max()),
    }


@command
def main(options: Options) -> None:
    runs = [ask(folder, options) for folder in options.paths]
    print(in_text(runs))
    write_json(options.out, {"runs": runs})


def ask(folder: Path, options: Options) -> Row:
    """Compare a run's model with each polynomial to the same model with exact exponentials."""
    trained, *held_out, about = load(folder, pick_device("auto"), options.dtype, SEQUENCES)
    tokens = about["seq_len"] // 2
    exact = read(trained, "tiled", get_backend("tiled"), *held_out, tokens)
    rows = [{"degree": None, "eighths": 0, **errors(get_backend("tiled")), "loss_change": 0.0}]
    for degree, eighths in tqdm(list(product(options.degrees, options.eighths)), disable=None):
        backend = polynomial(degree, eighths)
        reading = read(trained, backend.name, backend, *held_out, tokens)
        change = float((exact.log_p - reading.log_p).mean())
        case = {"degree": degree, "eighths": eighths, "loss_change": change}
        rows.append(case | errors(backend) | compare(exact, reading))
    return about | {"tokens": tokens, "rows": rows}


def in_text(runs: list[Row]) -> str:
    rows = [
        row
        | {
            "mean": row["log_p"]["mean"],
            "part": sum(each < run["tokens"] for each in row["equal_tokens"]),
        }
        for run in runs
        for row in run["rows"][1:]
    ]
    groups = {
        f"{degree}, {eighths}/8": same
        for (degree, eighths), same in by(rows, "degree", "eighths").items()
    }
    columns = {
        "error of out": mean("out"),  # of the same random call for every run
        "of lse": mean("lse"),
        "loss": spread("loss_change", "{:+.1e}"),
        "mean |d log p|": spread("mean", "{:.1e}"),
        "other token": spread("other_token", "{:.2%}"),
        "prompts that part": spread("part", "{:.3g}"),
    }
    return table("degree, share", groups, columns)


if __name__ == "__main__":
    main()
