"""bfloat16 accumulators: which of their errors are a bias, and how the bias affects training.

    python train.py experiment=bf16_accumulators hydra.sweep.dir=multirun/bf16
    python -m lab.findings.bf16_accumulators multirun/bf16 out=bf16_accumulators.json

The second command takes runs, or folders of runs, and out= the JSON file to write; the figure is
written beside it.

arXiv:2510.04212 traces a failure of low-precision training to flash attention. There the rounding
errors of the output are biased, and enter the backward pass through delta = rowsum(d_out * out).
Its code keeps out and the sums in bfloat16; kernels keep them in float32 and round out once.
BACKEND is attention in bfloat16 inside a float32 model, with these options:

    narrow  what is rounded to bfloat16 after each tile: out, sums, both or neither
    delta   which out delta uses: rounded, as returned, or exact, never rounded

Dimensions: B sequences, H heads, N queries, M keys, D head dim.
"""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from attention import AttentionOutput, Backend, attention, get_backend
from attention.online_softmax import OnlineSoftmax, finite, weighted_sum
from attention.tiled import TileLoop, make_loop
from lab.claims.inputs import relative
from lab.findings.captured import (
    Captured,
    Weights,
    called,
    capture,
    in_bfloat16,
    scores_of,
    weights_of,
)
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
from scripts.drawing import new_figure
from scripts.tables import Cell, Row, by, mean, spread, table

NARROW, DELTA = ("neither", "out", "sums", "both"), ("rounded", "exact")
RELATIVE = ("out", "dq", "dk", "dv")  # tensors with relative errors
REPEATED = (0, 0.1, 0.5, 0.9)  # shares of keys
SEQUENCES = 64  # held-out sequences; each gives a gradient


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


@cache
def accumulators(narrow: str) -> type[OnlineSoftmax]:
    """The streaming softmax with out, sums, both or neither rounded to bfloat16."""

    def kept(x: Tensor, name: str) -> Tensor:
        return rounded(x) if narrow in (name, "both") else x

    class Narrow(OnlineSoftmax):
        def update(self, scores: Tensor, v: Tensor) -> "Narrow":
            next_max = self.next_max(scores.amax(-1, keepdim=True))
            alpha = self.correction(next_max)
            p = torch.exp(scores - finite(next_max))
            # each operation rounds, as with bfloat16 tensors
            row_sum = kept(alpha * self.row_sum, "sums") + kept(p.sum(-1, keepdim=True), "sums")
            acc = kept(alpha * self.acc, "out") + kept(weighted_sum(p, v), "out")
            return replace(
                self, row_max=next_max, row_sum=kept(row_sum, "sums"), acc=kept(acc, "out")
            )

    return Narrow


class ExactDelta(TileLoop):
    """A backward pass with delta from an out of float32 sums that was never rounded."""

    def backward_from_lse(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *others: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = (x.to(self.dtype) for x in (q, k, v))
        out, _ = replace(self, softmax=OnlineSoftmax).forward(*wide)
        return super().backward_from_lse(q, k, v, out, *others)


def loop(q: Tensor, k: Tensor, *, narrow: str, delta: str, **settings: Any) -> TileLoop:
    if narrow not in NARROW or delta not in DELTA:
        raise ValueError(f"{narrow=} must be one of {NARROW}, and {delta=} of {DELTA}")
    made = make_loop(q, k, softmax=accumulators(narrow), **settings)
    return ExactDelta(**vars(made)) if delta == "exact" else made


BACKEND = Backend(
    "bf16_accumulators",
    in_bfloat16(loop),
    features=frozenset({"gqa", "non_causal", "cross_length", "lse"}),
    options={"block_q": 128, "block_kv": 16, "narrow": "both", "delta": "rounded"},
    exact=False,
    traceable=False,
)


@finding
def main(paths: list[Path], device: torch.device) -> Row:
    training, calls, gradients = [], [], []
    needed = ("options.narrow", "options.delta", OWN)
    for run, summary in completed_runs(paths, "bf16_accumulators", *needed).items():
        chosen = {name: summary["options"][name] for name in ("narrow", "delta")}
        training.append({"seed": summary["seed"]} | chosen | {"curves": curves(run, OWN)})
        if chosen == {"narrow": "neither", "delta": "exact"}:
            weights = weights_of(run, SEQUENCES, device)
            tiles = {name: summary["options"][name] for name in ("block_q", "block_kv")}
            backends = variants(**tiles)
            for layer, each in enumerate(capture(weights, get_backend("tiled"))):
                case = {"seed": summary["seed"], "layer": layer, "ties": maxima_that_tie(each)}
                calls += [case | row for row in errors_of_calls(each, backends)]
            gradients += [
                {"seed": summary["seed"]} | row for row in errors_of_gradients(weights, backends)
            ]
    if not gradients:
        raise ValueError("no run has narrow=neither delta=exact, whose weights are asked")
    repeated = [
        row
        for share, seed in product(REPEATED, range(3))
        for row in errors_where_repeated(share, seed, device)
    ]
    found = {"calls": calls, "gradients": gradients, "training": training, "repeated": repeated}
    return {"sequences": SEQUENCES} | found


def variants(**tiles: int) -> dict[tuple[str, str], Backend]:
    return {
        (narrow, delta): BACKEND.configured(narrow=narrow, delta=delta, **tiles)
        for narrow, delta in product(NARROW, DELTA)
    }


def coherence(errors: Tensor) -> float:
    """The norm of the sum of errors (B, ...) over B, divided by its value for orthogonal errors. It
    is 1 for orthogonal errors, and sqrt(B) if all errors are equal.
    """
    errors = errors.flatten(1)
    return float(errors.sum(0).norm() / errors.norm(dim=1).square().sum().sqrt())


def errors_of_calls(layer: Captured, backends: dict[tuple[str, str], Backend]) -> list[Row]:
    """Relative errors (root mean square) of out, dq, dk and dv of one layer, against float64 on the
    same bfloat16 inputs; coherence of the error of out; mean and deviation of the error of lse.
    """
    exact, rows = called(layer, "naive", torch.float64), []
    for (narrow, delta), backend in backends.items():
        found = called(layer, backend, torch.float32)
        row = {name: relative(found[name], exact[name]) for name in RELATIVE}
        off = found["lse"] - exact["lse"]
        row |= {"lse_mean": float(off.mean()), "lse_std": float(off.std())}
        row |= {"out_coherence": coherence(found["out"] - exact["out"])}
        rows.append({"narrow": narrow, "delta": delta} | row)
    return rows


def errors_of_gradients(weights: Weights, backends: dict[tuple[str, str], Backend]) -> list[Row]:
    """Errors of the gradient of all qkv weights, one gradient per sequence, against float64
    attention on the same rounded q, k and v: mean relative error, and coherence.
    """
    model, inputs, targets = weights
    names = [name for name, _ in model.named_parameters() if name.endswith("qkv.weight")]

    def gradients(backend: Backend) -> Tensor:
        found = []
        with model.use_backend(backend):
            for x, y in zip(inputs, targets, strict=True):
                model(x[None], y[None]).loss.backward()
                own = [model.get_parameter(name).grad for name in names]
                found.append(torch.cat([x.flatten().double() for x in own if x is not None]))
                model.zero_grad()
        return torch.stack(found)

    exact, rows = gradients(REFERENCE), []
    for (narrow, delta), backend in backends.items():
        errors = gradients(backend) - exact
        sizes = errors.norm(dim=1) / exact.norm(dim=1)
        row = {"error": float(sizes.mean()), "coherence": coherence(errors)}
        rows.append({"narrow": narrow, "delta": delta} | row)
    return rows


def in_float64(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> AttentionOutput:
    """Exact attention on q, k and v rounded to bfloat16; their gradients are not rounded."""
    wide = (x.double() + (rounded(x) - x).double().detach() for x in (q, k, v))
    out, lse = attention(*wide, backend="naive", **settings)
    return AttentionOutput(out.to(q.dtype), lse.to(torch.float32))


REFERENCE = Backend("float64", in_float64, features=frozenset({"lse"}), exact=False)


def maxima_that_tie(layer: Captured) -> float:
    """The share of rows in which at least two keys have p = 1 after rounding to bfloat16."""
    scores = scores_of(layer.q, layer.k)
    p = (scores - scores.amax(-1, keepdim=True)).exp().bfloat16()
    return float(((p == 1).sum(-1) > 1).float().mean())


def errors_where_repeated(share: float, seed: int, device: torch.device) -> list[Row]:
    """Errors of out if a share of 1,024 keys repeats one token, with one k and one v, that takes
    most of every row. The 16 sequences differ in everything else.
    """
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(16, 1, n, 64, generator=draw) for n in (64, 1024, 1024))
    of_token = torch.randn(64, generator=draw)
    # the first feature of k is the score; the others add a little that differs by row
    q[..., 0], k = 8, k / 8
    k[..., 0] = 0
    is_token = torch.rand(16, 1, 1024, 1, generator=draw) < share
    k = torch.where(is_token, 6 * torch.eye(64)[0], k)
    v = torch.where(is_token, of_token, v)
    q, k, v = (x.to(device) for x in (q, k, v))
    wide = (x.bfloat16().double() for x in (q, k, v))
    exact = attention(*wide, backend="naive", causal=False).out
    rows = []
    for narrow in NARROW:
        backend = BACKEND.configured(narrow=narrow, block_kv=64)
        out = attention(q, k, v, backend=backend, causal=False).out.double()
        row = {"out": relative(out, exact), "out_coherence": coherence(out - exact)}
        rows.append({"share": share, "seed": seed, "narrow": narrow} | row)
    return rows


def in_text(found: Row) -> str:
    """A line for each variant: means over layers and seeds."""
    training = [row | {"loss": row["curves"][OWN][-1]} for row in found["training"]]
    variants = by([*found["calls"], *found["gradients"], *training], "narrow", "delta")
    columns = {name: mean(name) for name in RELATIVE} | {"gradient": mean("error")}
    columns |= {"coherence": spread("coherence", "{:.2f}"), "loss": spread("loss", "{:.4f}")}
    shares = {f"{share:.0%}": rows for share, rows in by(found["repeated"], "share").items()}

    def repeated(narrow: str) -> Cell:
        def cell(rows: list[Row]) -> str:
            own = by(rows, "narrow")[narrow]
            return f"{mean('out')(own)} ({fmean(row['out_coherence'] for row in own):.1f})"

        return cell

    second = table("repeated token", shares, {narrow: repeated(narrow) for narrow in NARROW})
    return f"{table('narrow, delta', variants, columns)}\n\n{second}"


def draw(found: Row, path: Path) -> None:
    """Coherence of the gradients' errors, and the held-out loss minus that of exact delta and
    float32 sums with the same seed.
    """
    figure, (left, right) = new_figure(1, 2, size=(11, 3.8))
    names = {variant: ", ".join(variant) for variant in product(NARROW, DELTA)}
    for row in found["gradients"]:
        left.plot(names[row["narrow"], row["delta"]], row["coherence"], "o", color="C0")
    always = found["sequences"] ** 0.5
    left.axhline(1, linestyle=":", color="gray")
    left.axhline(always, linestyle="--", color="gray")
    left.set_xticks(range(len(names)), list(names.values()), rotation=30, ha="right")
    left.set_ylim(0, 1.1 * always)
    left.set_title("errors of the gradient: coherence (dotted: chance, dashed: always the same)")
    training = by(found["training"], "narrow", "delta")
    plain = {row["seed"]: losses(row) for row in training["neither", "exact"]}
    groups = {
        name: [apart(losses(row), plain[row["seed"]]) for row in training.get(variant, ())]
        for variant, name in names.items()
    }
    plot_groups(right, groups)
    right.set_title("held-out loss less that of neither, exact")
    right.set_xlabel("step")
    for axes in (left, right):
        axes.title.set_size(9)
    finish(figure, path)


if __name__ == "__main__":
    main()
