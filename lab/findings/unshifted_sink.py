"""A sink that is not shifted by the maximum: when training shows it, and a test that finds it.

    python train.py experiment=unshifted_sink hydra.sweep.dir=multirun/sinks
    python -m lab.findings.unshifted_sink multirun/sinks out=unshifted_sink.json

The second command takes runs of that recipe, or folders of them, and out= the JSON file to write;
the figure is written beside it.

A sink is a term exp(sink) in the denominator of the softmax; a sink of 0 is softmax plus one. The
streaming softmax keeps sums of exp(score - row_max), so the term there is exp(sink - row_max):

    exact      acc / (row_sum + exp(sink - row_max))
    unshifted  acc / (row_sum + exp(sink))

BACKEND is the unshifted one: wrong with attention.sinks=true or zero, exact without sinks.

Dimensions: B sequences, H heads, N tokens, D head dim.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from attention import attention, get_backend
from attention.defects import WRONG
from attention.online_softmax import OnlineSoftmax, finite
from attention.tiled import tile_loop_backend
from lab.findings.captured import Captured, Weights, capture, weights_of
from lab.findings.finding import (
    EXACT,
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
from scripts.tables import Row, by, least, listed, most, spread, table

SEQUENCES = 8  # held-out sequences
SCORES = (0.0, 0.1, 1.0, 5.0)  # of the test with one query and one key
SHOWS = 0.02  # difference of losses that counts as visible, in nats


class UnshiftedSink(OnlineSoftmax):
    """Sinks are merged using lse. To make the mistake, lse lacks the maximum: log(row_sum)."""

    def finalize(self) -> tuple[Tensor, Tensor]:
        out, lse = super().finalize()
        return out, lse - finite(self.row_max).squeeze(-1)


BACKEND = tile_loop_backend(
    "unshifted_sink",
    softmax=UnshiftedSink,
    defect="a sink is added to sums of exp(score - maximum) without the maximum: it counts as if "
    "the best key of every row had the score 0; exact without sinks",
    breaks=WRONG - {"forward"},
)
VARIANTS = {"exact": get_backend("tiled"), "unshifted": BACKEND}


@finding
def main(paths: list[Path], device: torch.device) -> Row:
    training, tests = [], []
    runs = completed_runs(paths, "unshifted_sink", "function.sinks", OWN, EXACT)
    for run, summary in runs.items():
        name = "exact" if summary["attention"] == "tiled" else "unshifted"
        curve, trained = curves(run, OWN, EXACT), weights_of(run, SEQUENCES, device)
        sinks = {"true": "learned", "zero": "zero"}[summary["function"]["sinks"]]
        row = {"seed": summary["seed"], "attention": name, "sinks": sinks, "own": summary[OWN]}
        row |= {"exact": summary[EXACT], "curves": curve, "shows_at": shows_at(curve)}
        training.append(row | shares(trained))
        if name == "unshifted" and sinks == "learned":
            initial = weights_of(run, SEQUENCES, device, initial=True)
            tests += [
                {"seed": summary["seed"], "inputs": inputs, "difference": difference(weights)}
                for inputs, weights in (("initial weights", initial), ("trained weights", trained))
            ]
    if not tests:
        raise ValueError("no run was trained with the unshifted sink")
    found = {"training": training, "tests": tests + drawn_tests(device)}
    found["smallest"] = [smallest(score, device) for score in SCORES]
    return {"shows": SHOWS, "red": sorted(BACKEND.breaks)} | found


def shows_at(curve: Row) -> int | None:
    """The first step from which on the exact loss exceeds the own loss by SHOWS."""
    found = None
    for step, own, exact in zip(curve["step"], curve[OWN], curve[EXACT], strict=True):
        shown = exact > own + SHOWS
        found = (step if found is None else found) if shown else None
    return found


def sinks_of(weights: Weights) -> list[Tensor]:
    """The sinks (H,) of each layer."""
    return [block.attention.sinks.detach() for block in weights.model.blocks]


def shares(weights: Weights) -> Row:
    """The mean share of a row's weight in its sink, exact and unshifted, and the mean sink."""
    layers, sinks = capture(weights, get_backend("tiled")), sinks_of(weights)

    def share(lse_of: Callable[[Captured], Tensor]) -> float:
        pairs = zip(layers, sinks, strict=True)
        return fmean(float((sink[:, None] - lse_of(x)).sigmoid().mean()) for x, sink in pairs)

    found = {
        f"share_{name}": share(lambda x, to=each: attention(*x[:3], backend=to).lse)
        for name, each in VARIANTS.items()
    }
    return found | {"sink": fmean(float(x.mean()) for x in sinks)}


def difference(weights: Weights) -> float:
    """The largest difference between exact and unshifted out of a layer, with its sinks."""
    layers = capture(weights, get_backend("tiled"))
    return max(
        unlike(*layer[:3], sinks) for layer, sinks in zip(layers, sinks_of(weights), strict=True)
    )


def unlike(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> float:
    exact, unshifted = (
        attention(q, k, v, backend=backend, sinks=sinks).out for backend in VARIANTS.values()
    )
    return float((exact - unshifted).abs().max())


def drawn_tests(device: torch.device) -> list[Row]:
    """Differences for normal q, k and v with sinks of 0, by the number of keys."""
    rows = []
    for length in (1, 16, 128, 1024):
        draw = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 8, length, 64, generator=draw).to(device) for _ in range(3))
        sinks = torch.zeros(8, device=device)
        rows.append({"inputs": f"normal, {length} keys", "difference": unlike(q, k, v, sinks)})
    return rows


def smallest(score: float, device: torch.device) -> Row:
    """out for one query, one key, a value of 1 and a sink of 0."""
    one = torch.ones(1, 1, 1, 1, device=device)
    sinks = torch.zeros(1, device=device)
    found = {
        name: float(attention(one, one, one, backend=backend, scale=score, sinks=sinks).out)
        for name, backend in VARIANTS.items()
    }
    return {"score": score} | found


def variants(found: Row) -> dict[str, list[Row]]:
    """The rows of training, by how sinks are computed and whether they are learned."""
    groups = by(found["training"], "attention", "sinks")
    return {f"{name} sinks, {sinks}": groups[name, sinks] for name, sinks in sorted(groups)}


def in_text(found: Row) -> str:
    names = ("own", "exact", "share_exact", "share_unshifted", "sink")
    columns = {name: spread(name, "{:.3f}") for name in names}
    columns[f"shows by {SHOWS} at step"] = listed("shows_at")
    small = {f"{row['score']:g}": [row] for row in found["smallest"]}
    return "\n\n".join(
        (
            table("sinks", variants(found), columns),
            table(
                "largest difference of out",
                by(found["tests"], "inputs"),
                {"least": least("difference"), "most": most("difference")},
            ),
            table(
                "one query, one key: score",
                small,
                {name: spread(name, "{:.4f}") for name in VARIANTS},
            ),
        )
    )


def draw(found: Row, path: Path) -> None:
    """Held-out losses over training: own, and with the exact sink for the same weights."""
    figure, (left, right) = new_figure(1, 2, size=(11, 3.8))
    runs = variants(found)
    own = {name: [losses(row) for row in rows] for name, rows in runs.items()}
    more = {
        name: [apart(losses(row, EXACT), losses(row)) for row in rows]
        for name, rows in runs.items()
    }
    colors = ("C0", "C9", "C3", "C1")
    plot_groups(left, own, *colors)
    plot_groups(right, more, *colors)
    left.set(xlabel="step", ylabel="held-out loss, own attention", ylim=(None, 2.9))
    right.set(xlabel="step", ylabel="loss with the exact sink less own")
    finish(figure, path)


if __name__ == "__main__":
    main()
