"""Figures of the pages on agreeing kernels and on polynomial exp2, from JSON files.

    python -m lab.findings.agreement agree.json out=agree.png

The arguments are JSON files of scripts.agree, of lab.findings.polynomial_exp2, or of both, and

    out  the figure to write (agreement.png)

With files of both, a band around the changes by polynomials shows how far exact kernels differ.

Only reads these files. results/kernels_agree.png was drawn from results/agree_*.json, and
results/polynomial_exp2.png from results/polynomial_exp2_*.json and results/agree_*_cpu.json.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from lab.findings.finding import finish
from scripts.arguments import command
from scripts.drawing import new_figure
from scripts.tables import Row, by, grouped
from training.sweep import load_json

IN_FLOAT32 = " in float32"  # ends the name of the attention without autocast


@dataclass
class Options:
    paths: list[Path]
    out: Path = Path("agreement.png")


@command
def main(options: Options) -> None:
    runs = [run for path in options.paths for run in runs_in(path)]
    agreeing = [run for run in runs if "pairs" in run]
    polynomials = [run for run in runs if "pairs" not in run]
    if polynomials:
        draw_polynomials(polynomials, agreeing, options.out)
    else:
        draw_pairs(agreeing, options.out)
    print(options.out)


def runs_in(path: Path) -> list[Row]:
    """The runs that a file describes. Raises ValueError if it is missing or of another command."""
    runs = load_json(path).get("runs")
    if not runs or not all("pairs" in run or "rows" in run for run in runs):
        raise ValueError(
            f"{path} is missing, or no result of scripts.agree or lab.findings.polynomial_exp2"
        )
    return runs


def kind_of(run: Row) -> str:
    """The dtype and the machine of a run."""
    return f"{run['dtype']}, {run['environment']['hardware']['gpu'] or 'CPU'}"


def between_kernels(run: Row) -> list[Row]:
    """The pairs of attentions of the run's own dtype."""
    return [pair for pair in run["pairs"] if not pair["a"].endswith(IN_FLOAT32)]


def means(run: Row) -> list[float]:
    """The mean difference of log p of each of these pairs."""
    return [pair["log_p"]["mean"] for pair in between_kernels(run)]


def draw_pairs(runs: list[Row], path: Path) -> None:
    """How far each pair differs, and how many greedy texts are still equal after some tokens."""
    figure, (distance, texts) = new_figure(1, 2, size=(11, 3.8))
    kinds = dict(sorted(grouped(runs, kind_of).items()))
    for place, same in enumerate(kinds.values()):
        for run in same:
            rounded = [
                pair["log_p"]["mean"]
                for pair in run["pairs"]
                if pair["a"].endswith(IN_FLOAT32) and run["dtype"] != "float32"
            ]
            decoded = [
                row["mean"] for row in run["decoding"] if not row["attention"].endswith(IN_FLOAT32)
            ]
            dots(distance, means(run), place + 0.2, "C0", "two kernels")
            dots(distance, decoded, place, "C1", "decoding, prefill")
            dots(distance, rounded, place - 0.2, "C3", "bfloat16, float32")
    distance.set_yticks(range(len(kinds)), list(kinds), fontsize=8)
    distance.set(xlabel="mean difference of log p, nats a token", xscale="log")
    distance.legend(*unique(distance), fontsize=8)
    for number, (name, same) in enumerate(kinds.items()):
        for run in same:
            equal = list(chain(*(pair["equal_tokens"] for pair in between_kernels(run))))
            left = [sum(each >= n for each in equal) / len(equal) for n in range(run["tokens"] + 1)]
            texts.plot(left, color=f"C{number}", label=name, linewidth=1)
    texts.set(xlabel="greedy tokens", ylabel="share of texts still equal", ylim=(None, 1.01))
    texts.legend(*unique(texts), fontsize=8)
    finish(figure, path)


def draw_polynomials(runs: list[Row], agreeing: list[Row], path: Path) -> None:
    """Change of log p by degree, a panel for each dtype, beside the differences of `agreeing`."""
    by_dtype, kernels = by(runs, "dtype"), by(agreeing, "dtype")
    width = 5.5 * len(by_dtype)
    figure, (panels,) = new_figure(1, len(by_dtype), size=(width, 3.8), squeeze=False)
    for axes, (dtype, same) in zip(panels, by_dtype.items(), strict=True):
        rows = [row for run in same for row in run["rows"] if row["degree"]]
        for number, (eighths, some) in enumerate(by(rows, "eighths").items()):
            degrees = [row["degree"] + (number - 1.5) / 12 for row in some]
            changes = [row["log_p"]["mean"] for row in some]
            axes.plot(degrees, changes, ".", color=f"C{number}", label=f"{eighths}/8 of the keys")
        if exact := list(chain(*map(means, kernels.get(dtype, ())))):
            axes.axhspan(min(exact), max(exact), color="C7", alpha=0.3, label="two exact kernels")
        axes.set(title=dtype, xlabel="degree", ylabel="mean change of log p, nats a token")
        axes.set_yscale("log")
    finish(figure, path)


def dots(axes: Any, values: Iterable[float], place: float, color: str, label: str) -> None:
    found = list(values)
    axes.plot(found, [place] * len(found), ".", color=color, label=label if found else None)


def unique(axes: Any) -> tuple[list[Any], list[str]]:
    """The legend's lines and texts, each text once."""
    lines, texts = axes.get_legend_handles_labels()
    once = dict(zip(texts, lines, strict=True))
    return list(once.values()), list(once)


if __name__ == "__main__":
    main()
