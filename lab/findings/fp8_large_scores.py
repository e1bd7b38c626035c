"""An fp8 forward pass with large scores: how its backward pass fails, and what training does then.

    python train.py experiment=fp8_large_scores hydra.sweep.dir=multirun/fp8scores
    python -m lab.findings.fp8_large_scores multirun/fp8scores out=fp8_large_scores.json

The second command takes runs of that recipe, or folders of them, and out= the JSON file to write;
the figure is written beside it.

The attention is BACKEND of lab.findings.fp8_forward. The backward pass rebuilds the weights, p =
exp(score - lse), with the lse of the rounded q and k. If its own scores come from unrounded q and
k, a row of p sums to exp(the difference of the two lse) instead of 1. Rounding changes a score by a
share of it, so this factor grows exponentially with the scores, and the gradient with it.

Dimensions: B sequences, H heads, N tokens, D head dim.
"""

from itertools import product
from pathlib import Path

import torch

from lab.claims.inputs import relative
from lab.findings.captured import Captured, called, scores_of
from lab.findings.finding import OWN, check_recipe, curves, finding, finish, plot_groups
from lab.findings.fp8_forward import BACKEND, BACKWARD
from scripts.drawing import new_figure
from scripts.runs import runs_below
from scripts.tables import Row, by, mean, most, spread, table

ENDED = ("completed", "diverged", "interrupted")
SCORE, GRADIENT = "attention/max_score", "grad_norm"
SIZES = (1, 2, 4, 8, 16, 32)  # standard deviations of the scores
SEEDS = range(3)


@finding
def main(paths: list[Path], device: torch.device) -> Row:
    runs = {run: row for run, row in sorted(runs_below(paths).items()) if row["status"] in ENDED}
    if not runs:
        raise ValueError(f"no run that trained in {', '.join(map(str, paths))}")
    check_recipe(runs, "fp8_large_scores", "options.scaling")
    training = [described(run, summary) for run, summary in runs.items()]
    calls = [
        {"size": size, "seed": seed} | row
        for size, seed in product(SIZES, SEEDS)
        for row in errors(drawn(size, seed, device))
    ]
    return {"training": training, "calls": calls}


def described(run: Path, summary: Row) -> Row:
    """How a run was rounded and how it went."""
    options = summary["options"]
    found, losses = curves(run, SCORE, GRADIENT), curves(run, OWN)
    return {
        "variant": "bf16" if options["scaling"] == "bf16" else options.get("backward", BACKWARD[0]),
        "seed": summary["seed"],
        "parameters": summary["parameters"],
        "on": summary["starts"][0]["on"],
        "status": summary["status"],
        "steps": summary["steps_done"],
        "largest_score": max(found[SCORE]),
        "largest_gradient": max(found[GRADIENT]),
        "loss": losses[OWN][-1],
        "curves": {"step": found["step"], "score": found[SCORE], "gradient": found[GRADIENT]},
        "losses": losses,
    }


def drawn(size: float, seed: int, device: torch.device) -> Captured:
    """Normal inputs of 1,024 tokens whose scores have this standard deviation."""
    draw = torch.Generator().manual_seed(seed)
    q, *others = (torch.randn(1, 4, 1024, 64, generator=draw) for _ in range(4))
    return Captured(*(x.to(device) for x in (size * q, *others)))


def errors(layer: Captured) -> list[Row]:
    """A row for each way of the backward pass: the largest score, and the relative error of dq
    against float64 on the same bfloat16 inputs. The unrounded one also has the largest sum of a row
    of p that it rebuilds.
    """
    exact, scores = called(layer, "naive", torch.float64), scores_of(layer.q, layer.k)
    rows = []
    for backward in BACKWARD:
        found = called(layer, BACKEND.configured(backward=backward), torch.float32)
        row = {"backward": backward, "score": float(scores.max())}
        row |= {"dq": relative(found["dq"], exact["dq"])}
        if backward == "unrounded":
            row["row_sum"] = float((scores - found["lse"][..., None]).exp().sum(-1).max())
        rows.append(row)
    return rows


def in_text(found: Row) -> str:
    names = {"score": "{:.0f}", "row_sum": "{:.1f}"}
    calls = by(found["calls"], "backward", "size")
    columns = {name: spread(name, form) for name, form in names.items()} | {"dq": mean("dq")}
    training = {
        "largest score": spread("largest_score", "{:.0f}"),
        "largest gradient": most("largest_gradient"),
        "held-out loss": spread("loss", "{:.3f}"),
    }
    return "\n\n".join(
        (
            table("backward, size", calls, columns),
            table("parameters, variant", by(found["training"], "parameters", "variant"), training),
        )
    )


def draw(found: Row, path: Path) -> None:
    """The largest score over training, by model; the error of dq, and the rebuilt rows, by largest
    score.
    """
    by_model = dict(sorted(by(found["training"], "parameters").items()))
    figure, (*models, error, sums) = new_figure(1, len(by_model) + 2, size=(16, 3.6))
    for axes, (parameters, rows) in zip(models, by_model.items(), strict=True):
        groups = {
            name: [
                dict(zip(row["curves"]["step"], row["curves"]["score"], strict=True)) for row in own
            ]
            for name, own in by(rows, "variant").items()
        }
        plot_groups(axes, groups)
        axes.set(xlabel=f"step, {parameters:,} parameters", ylabel="largest score", yscale="log")
    for backward, rows in by(found["calls"], "backward").items():
        error.loglog(*zip(*sorted((row["score"], row["dq"]) for row in rows), strict=True), ".-")
        error.lines[-1].set_label(f"backward pass {backward}")
    error.set(xlabel="largest score", ylabel="relative error of dq")
    rebuilt = sorted((row["score"], row["row_sum"]) for row in found["calls"] if "row_sum" in row)
    sums.loglog(*zip(*rebuilt, strict=True), ".-")
    sums.set(xlabel="largest score", ylabel="largest sum of a rebuilt row of p")
    finish(figure, path)


if __name__ == "__main__":
    main()
