"""An fp8 forward pass with a bfloat16 backward pass, emulated by rounding: error and training.

    python train.py experiment=fp8_forward hydra.sweep.dir=multirun/fp8
    python -m lab.findings.fp8_forward multirun/fp8 out=fp8_forward.json

The second command takes runs of that recipe, or folders of them, and out= the JSON file to write;
the figure is written beside it.

On a Hopper GPU fp8 speeds up only the forward pass. So a hybrid computes out and lse from q, k, v
and p in e4m3, and the gradients in bfloat16, from q, k and v as they were (backward=unrounded) or
as the forward pass rounded them (backward=rounded). BACKEND does this inside a float32 model; its
option `scaling` says which numbers share a scale before the rounding:

    bf16      nothing is rounded to e4m3
    tensor    all of q, all of k, all of v
    block     64 tokens of one head
    hadamard  as tensor, with q and k rotated by a random Hadamard matrix, which spreads outliers
    both      as block, with that rotation

FlashAttention-3 (2024, arXiv:2407.08608) has block and both. p is multiplied by 2^8 before it is
rounded; the sums use the unrounded p.

Dimensions: B sequences, H heads, N tokens, D head dim.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from attention import Backend, get_backend
from attention.tiled import TileLoop, make_loop
from lab.claims.inputs import relative
from lab.findings.captured import Captured, called, capture, in_bfloat16, weights_of
from lab.findings.finding import (
    OWN,
    apart,
    completed_runs,
    curves,
    finding,
    finish,
    losses,
    plot_groups,
)
from lab.findings.lazy_rescaling import lazy
from scripts.drawing import new_figure
from scripts.tables import Row, by, mean, spread, table

E4M3 = torch.float8_e4m3fn
SCALINGS = ("bf16", "tensor", "block", "hadamard", "both")
BACKWARD = ("unrounded", "rounded")  # q, k and v of the backward pass
BLOCK = 64  # tokens that share a scale
TENSORS = ("out", "dq", "dk", "dv")
SEQUENCES = 16  # held-out sequences for the errors


def shared_scale(x: Tensor) -> Tensor:
    """x (..., N, D) rounded to e4m3 with one scale for the whole tensor."""
    scale = x.abs().amax().clamp(min=1e-30) / torch.finfo(E4M3).max
    return (x / scale).to(E4M3).to(x.dtype) * scale


def scale_of_block(x: Tensor) -> Tensor:
    """x (..., N, D) rounded to e4m3 with one scale for BLOCK tokens of each head."""
    blocks = []
    for block in x.split(BLOCK, -2):
        scale = block.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30) / torch.finfo(E4M3).max
        blocks.append((block / scale).to(E4M3).to(x.dtype) * scale)
    return torch.cat(blocks, -2)


def hadamard(head_dim: int) -> Tensor:
    """(D, D), orthogonal: columns of Sylvester's matrix with fixed random signs."""
    if head_dim & (head_dim - 1):
        raise ValueError(f"{head_dim=} must be a power of two for a Hadamard matrix")
    made = torch.ones(1, 1)
    while len(made) < head_dim:
        made = torch.kron(made, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    signs = torch.randint(0, 2, (head_dim, 1), generator=torch.Generator().manual_seed(0))
    return made * (2 * signs - 1) / head_dim**0.5


@dataclass(frozen=True)
class Fp8Forward(TileLoop):
    """A loop whose forward pass rounds q, k and v to e4m3. The backward pass does so only with
    backward_of="rounded".
    """

    scaling: str = "bf16"
    backward_of: str = "unrounded"

    def rounded(self, *tensors: Tensor) -> list[Tensor]:
        """q, k and v in e4m3; q and k rotated by turn()."""
        wide = [x.to(self.dtype) for x in tensors]
        turn = self.turn(wide[0])
        if turn is not None:
            wide[:2] = [x @ turn for x in wide[:2]]
        narrow = scale_of_block if self.scaling in ("block", "both") else shared_scale
        return [narrow(x) for x in wide]

    def turn(self, q: Tensor) -> Tensor | None:
        """The rotation (D, D) of q and k; None without."""
        if self.scaling not in ("hadamard", "both"):
            return None
        return hadamard(q.shape[-1]).to(q)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.scaling == "bf16":
            return super().forward(q, k, v)
        out, lse = super().forward(*self.rounded(q, k, v))
        return out.to(q.dtype), lse

    def backward_from_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *others: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.scaling == "bf16" or self.backward_of == "unrounded":
            return super().backward_from_lse(q, k, v, *others)
        narrow = self.rounded(q, k, v)
        dq, dk, dv = super().backward_from_lse(*narrow, *others)
        turn = self.turn(narrow[0])
        if turn is not None:  # the gradients of the rotated q and k, turned back
            dq, dk = dq @ turn.mT, dk @ turn.mT
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def loop(q: Tensor, k: Tensor, *, scaling: str, backward: str, **settings: Any) -> TileLoop:
    if scaling not in SCALINGS or backward not in BACKWARD:
        raise ValueError(f"{scaling=} must be one of {SCALINGS}, and {backward=} of {BACKWARD}")
    if scaling != "bf16":
        settings["softmax"] = lazy(0, 8, E4M3)
    made = make_loop(q, k, **settings)
    return Fp8Forward(**vars(made), scaling=scaling, backward_of=backward)


BACKEND = Backend(
    "fp8_forward",
    in_bfloat16(loop),
    features=frozenset({"gqa", "non_causal", "cross_length", "lse"}),
    options={"block_q": 128, "block_kv": 64, "scaling": "tensor", "backward": "unrounded"},
    exact=False,
    traceable=False,
)


@finding
def main(paths: list[Path], device: torch.device) -> Row:
    training, calls = [], []
    for run, summary in completed_runs(paths, "fp8_forward", "options.scaling", OWN).items():
        case = {"seed": summary["seed"], "scaling": summary["options"]["scaling"]}
        training.append(case | {"curves": curves(run, OWN)})
        if case["scaling"] == "bf16":
            layers = capture(weights_of(run, SEQUENCES, device), get_backend("tiled"))
            for layer, each in enumerate(layers):
                about = {"inputs": "trained weights", "seed": summary["seed"], "layer": layer}
                calls += [about | row for row in errors(each)]
    for seed in range(3):
        for inputs, layer in drawn(seed, device).items():
            about = {"inputs": inputs, "seed": seed, "layer": None}
            calls += [about | row for row in errors(layer)]
    return {"calls": calls, "training": training}


def drawn(seed: int, device: torch.device) -> dict[str, Captured]:
    """Normal inputs of 1,024 tokens, and the same with outliers as in FlashAttention-3: to one
    number in a thousand, a normal number of standard deviation 10 is added.
    """
    draw = torch.Generator().manual_seed(seed)
    plain = [torch.randn(1, 4, 1024, 64, generator=draw) for _ in range(4)]
    peaks = [10 * torch.randn(x.shape, generator=draw) for x in plain[:3]]
    chosen = [torch.rand(x.shape, generator=draw) < 1e-3 for x in plain[:3]]
    rough = [torch.where(at, x + y, x) for x, y, at in zip(plain, peaks, chosen, strict=False)]
    cases = {"normal": plain, "outliers": [*rough, plain[3]]}
    return {name: Captured(*(x.to(device) for x in tensors)) for name, tensors in cases.items()}


def errors(layer: Captured) -> list[Row]:
    """Relative errors (root mean square) of out and the gradients by scaling, against float64 on
    the same bfloat16 inputs; and the mean error of lse.
    """
    exact, rows = called(layer, "naive", torch.float64), []
    for scaling in SCALINGS:
        found = called(layer, BACKEND.configured(scaling=scaling), torch.float32)
        row = {name: relative(found[name], exact[name]) for name in TENSORS}
        row |= {"lse": float((found["lse"] - exact["lse"]).mean())}
        rows.append({"scaling": scaling} | row)
    return rows


def in_text(found: Row) -> str:
    """Means over layers and seeds, and held-out losses."""
    calls = by(found["calls"], "inputs", "scaling")
    last = [row | {"loss": row["curves"][OWN][-1]} for row in found["training"]]
    plain = {row["seed"]: row["loss"] for row in last if row["scaling"] == "bf16"}
    training = [row | {"more": row["loss"] - plain[row["seed"]]} for row in last]
    columns = {
        "held-out loss": spread("loss", "{:.3f}"),
        "less that of bf16": spread("more", "{:+.3f}"),
    }
    errors = table("inputs, scaling", calls, {name: mean(name) for name in TENSORS})
    return f"{errors}\n\n{table('scaling', by(training, 'scaling'), columns)}"


def draw(found: Row, path: Path) -> None:
    """Errors of out and dq by scaling, and losses minus those of a bfloat16 forward pass."""
    figure, (left, middle, right) = new_figure(1, 3, size=(12, 3.8))
    for axes, name in ((left, "out"), (middle, "dq")):
        for inputs, rows in by(found["calls"], "inputs").items():
            own = by(rows, "scaling")
            means = [fmean(row[name] for row in own[scaling]) for scaling in SCALINGS]
            axes.semilogy(SCALINGS, means, "o-", label=inputs)
        axes.set(ylabel=f"relative error of {name}")
    by_scaling = by(found["training"], "scaling")
    plain = {row["seed"]: losses(row) for row in by_scaling["bf16"]}
    groups = {
        scaling: [apart(losses(row), plain[row["seed"]]) for row in rows]
        for scaling, rows in by_scaling.items()
    }
    plot_groups(right, groups | {"bf16": []})
    right.set(xlabel="step", ylabel="held-out loss less that of bfloat16")
    finish(figure, path)


if __name__ == "__main__":
    main()
