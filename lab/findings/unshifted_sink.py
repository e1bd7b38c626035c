"""A sink that is not shifted by the maximum: when training shows it, and the test that finds it.

    python train.py experiment=unshifted_sink hydra.sweep.dir=multirun/sinks
    python -m lab.findings.unshifted_sink multirun/sinks out=results/unshifted_sink.json

The arguments of the second are runs of that recipe, or folders of them, and

    sequences  held-out sequences to look at (8)
    device     auto, cpu or cuda (auto)
    out        the JSON file to write; the figure stands beside it

A sink is a term exp(sink) in the denominator of the softmax; a sink of 0 is softmax plus one. The
streaming softmax keeps sums of exp(score - row_max), so the term there is exp(sink - row_max):

    exact      acc / (row_sum + exp(sink - row_max))
    unshifted  acc / (row_sum + exp(sink))

BACKEND is the second one: with attention.sinks=true its out is that of the mistake, and without
sinks it is exact.

Dimensions: B sequences, H heads, N tokens, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from attention import attention, get_backend
from attention.defects import WRONG
from attention.online_softmax import OnlineSoftmax, finite
from attention.tiled import tile_loop_backend
from lab.findings.captured import Captured, Weights, capture, completed_runs, curves, weights_of
from scripts.arguments import Device, check_at_least, command
from scripts.drawing import for_both_papers, new_figure, save_figure
from scripts.tables import Row, grouped, mean_and_deviation, text_table
from training.device import pick_device
from training.environment import measured_on
from training.files import check_writable, write_json

OWN, EXACT = "val/loss", "val/loss_exact"
SCORES = (0.0, 0.1, 1.0, 5.0)  # of the test with one query and one key
SHOWS = 0.02  # nats


class UnshiftedSink(OnlineSoftmax):
    """Sinks are merged by lse, so that of the mistake lacks the maximum: it is log(row_sum)."""

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


@dataclass
class Options:
    paths: list[Path]
    sequences: int = 8
    device: Device = "auto"
    out: Path = Path("unshifted_sink.json")

    def __post_init__(self) -> None:
        check_at_least(self, 1, "sequences")


@command("unshifted_sink", Options)
def main(options: Options) -> None:
    check_writable(options.out)
    torch.set_num_threads(1)  # the tiles are small: threads would only wait for one another
    device = pick_device(options.device)
    training, tests = [], []
    for run, summary in completed_runs(options.paths).items():
        name = "exact" if summary["attention"] == "tiled" else "unshifted"
        case = {"seed": summary["seed"], "attention": name}
        row = case | {"own": summary[OWN], "exact": summary[EXACT]}
        row |= {"curves": curves(run, OWN, EXACT)}
        row |= {"shows_at": shows_at(row["curves"])}
        trained = weights_of(run, options.sequences, device)
        training.append(row | shares(trained))
        if name == "unshifted":
            initial = weights_of(run, options.sequences, device, initial=True)
            tests += [
                {"seed": summary["seed"], "inputs": inputs, "difference": difference(weights)}
                for inputs, weights in (("initial weights", initial), ("trained weights", trained))
            ]
    if not tests:
        raise ValueError("no run was trained with the unshifted sink")
    found = {"training": training, "tests": tests + drawn_tests(device)}
    found["smallest"] = [smallest(score, device) for score in SCORES]
    print(in_text(found))
    about = {"environment": measured_on(device), "shows": SHOWS, "red": sorted(BACKEND.breaks)}
    write_json(options.out, about | found)
    draw(found, options.out.with_suffix(".png"))


def shows_at(curve: Row) -> int | None:
    """The first step from which on the exact loss is higher than the own one by SHOWS."""
    found = None
    for step, own, exact in zip(curve["step"], curve[OWN], curve[EXACT], strict=True):
        shown = exact > own + SHOWS
        found = (step if found is None else found) if shown else None
    return found


def sinks_of(weights: Weights) -> list[Tensor]:
    """(H,) of each layer."""
    return [block.attention.sinks.detach() for block in weights.model.blocks]


def shares(weights: Weights) -> Row:
    """The mean share of a row that its sink takes, exact and unshifted, and the mean sink."""
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
    """The largest, of the two outs of one layer with the model's sinks."""
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
    """Of normal q, k and v with sinks of 0, by the number of keys."""
    rows = []
    for length in (1, 16, 128, 1024):
        draw = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 8, length, 64, generator=draw).to(device) for _ in range(3))
        sinks = torch.zeros(8, device=device)
        rows.append({"inputs": f"normal, {length} keys", "difference": unlike(q, k, v, sinks)})
    return rows


def smallest(score: float, device: torch.device) -> Row:
    """One query, one key, a value of 1 and a sink of 0: what out is."""
    one = torch.ones(1, 1, 1, 1, device=device)
    sinks = torch.zeros(1, device=device)
    found = {
        name: float(attention(one, one, one, backend=backend, scale=score, sinks=sinks).out)
        for name, backend in VARIANTS.items()
    }
    return {"score": score} | found


def in_text(found: Row) -> str:
    names = ("own", "exact", "share_exact", "share_unshifted", "sink")
    table = [["attention", *names, f"shows by {SHOWS} at step"]]
    for attention_name, rows in grouped(found["training"], lambda row: row["attention"]).items():
        cells = [mean_and_deviation([row[name] for row in rows], "{:.3f}") for name in names]
        cells.append("/".join(str(row["shows_at"]) for row in rows))
        table.append([attention_name, *cells])
    tests = [["largest difference of out", "least", "most"]]
    for inputs, rows in grouped(found["tests"], lambda row: row["inputs"]).items():
        values = [row["difference"] for row in rows]
        tests.append([inputs, f"{min(values):.1e}", f"{max(values):.1e}"])
    small = [["one query, one key: score", "exact", "unshifted"]]
    small += [
        [f"{row['score']:g}", f"{row['exact']:.4f}", f"{row['unshifted']:.4f}"]
        for row in found["smallest"]
    ]
    return "\n\n".join(map(text_table, (table, tests, small)))


def draw(found: Row, path: Path) -> None:
    """Held-out losses over training: own, and of the same weights with the exact sink."""
    figure, (left, right) = new_figure(1, 2, size=(11, 3.8))
    runs = grouped(found["training"], lambda row: row["attention"])
    for color, (name, rows) in zip(("C0", "C3"), runs.items(), strict=False):
        for row in rows:
            label = f"{name} sink" if row is rows[0] else None
            curve = row["curves"]
            left.plot(curve["step"], curve[OWN], color=color, label=label, linewidth=1)
            apart = [b - a for a, b in zip(curve[OWN], curve[EXACT], strict=True)]
            right.plot(curve["step"], apart, color=color, label=label, linewidth=1)
    left.set(xlabel="step", ylabel="held-out loss, own attention", ylim=(None, 2.9))
    right.set(xlabel="step", ylabel="loss with the exact sink less own")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    for_both_papers(save_figure(figure, path, dpi=110))


if __name__ == "__main__":
    main()
