"""Compare recipes that were run again with the figures of their pages.

    python -m lab.findings.repeated tile_size.json agree.json out=repeated.json

The arguments are the JSON files that the pages' commands write (out=), named as there; for
break_it, the file of lab.condense_runs. Each is compared with its file in results/, figure by
figure, and

    out  the JSON file to write (repeated.json)

A figure has one value for each seed, or for each pair or share where a page gives ranges. For three
or more seeds the table says how many repeats fall where one more seed would in 95 of 100 cases, if
seeds are normally distributed: mean ± t * deviation * sqrt(1 + 1/n), Student's t with n - 1 degrees
of freedom. Trains and measures nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from math import floor, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from lab.findings.agreement import between_kernels, means
from lab.findings.finding import EXACT, OWN
from lab.results.tables import FOLDER
from scripts.arguments import command
from scripts.report.ranking import student
from scripts.tables import Row, by, mean_and_deviation, text_table
from training.files import write_json
from training.sweep import load_json

SEEDS, RANGE = "by seed", "a range"

Values = list[Any]


class Figure(NamedTuple):
    name: str
    values: Values  # numbers; None for a run that survives
    form: str = "{:.3f}"
    kind: str = SEEDS


@dataclass
class Options:
    paths: list[Path]
    out: Path = Path("repeated.json")


@command
def main(options: Options) -> None:
    rows, sources = [], {}
    for path in options.paths:
        if path.stem not in FINDINGS:
            raise ValueError(f"{path} is none of {', '.join(f'{name}.json' for name in FINDINGS)}")
        source, figures = FINDINGS[path.stem]
        repeat = load_json(path)
        if not repeat:
            raise ValueError(f"{path} is missing, or holds no JSON object")
        sources[path.stem] = {"file": source, "environment": environment_of(repeat)}
        page = {each.name: each for each in figures(load_json(FOLDER / f"{source}.json"))}
        for each in figures(repeat):
            if each.values and each.name in page:
                rows.append({"recipe": path.stem} | compared(page[each.name], each))
    print(in_text(rows))
    write_json(options.out, {"recipes": sources, "figures": rows})


def environment_of(found: Row) -> Row:
    return found["environment"] if "environment" in found else found["runs"][0]["environment"]


def compared(page: Figure, repeat: Figure) -> Row:
    row = {"figure": page.name, "kind": page.kind, "form": page.form}
    row |= {"page": page.values, "repeat": repeat.values}
    if page.kind == SEEDS and len(page.values) > 2 and None not in page.values:
        low, high = interval(page.values)
        row["interval"] = [low, high]
        row["inside"] = sum(x is not None and low <= x <= high for x in repeat.values)
    return row


def interval(values: list[float]) -> tuple[float, float]:
    """Where one more value falls in 95 of 100 cases, if they are normally distributed."""
    count = len(values)
    reach = student(count) * stdev(values) * sqrt(1 + 1 / count)
    return fmean(values) - reach, fmean(values) + reach


def in_text(rows: list[Row]) -> str:
    lines = [["recipe", "figure", "page", "repeat", "inside"]]
    for row in rows:
        shown = shown_page(row), shown_values(row, row["repeat"])
        lines.append([row["recipe"], row["figure"], *shown, inside([row])])
    totals = [["recipe", "inside"]]
    totals += [[recipe, inside(same)] for recipe, same in by(rows, "recipe").items()]
    return f"{text_table(lines)}\n\n{text_table(totals)}"


def inside(rows: list[Row]) -> str:
    """How many repeats are inside, of those that have an interval."""
    judged = [row for row in rows if "inside" in row]
    if not judged:
        return "-"
    return f"{sum(row['inside'] for row in judged)} of {sum(len(row['repeat']) for row in judged)}"


def shown_page(row: Row) -> str:
    if row["kind"] == RANGE or None in row["page"] or len(row["page"]) == 1:
        return shown_values(row, row["page"])
    return f"{mean_and_deviation(row['page'], row['form'])} (n={len(row['page'])})"


def shown_values(row: Row, values: Values) -> str:
    """Every value, or for a range the least and the most."""
    if row["kind"] == RANGE and len(values) > 1:
        return " to ".join(row["form"].format(each) for each in (min(values), max(values)))
    return ", ".join("never" if x is None else row["form"].format(x) for x in values)


def last(row: Row) -> float:
    return row["curves"][OWN][-1]


def of_break_it(found: Row) -> list[Figure]:
    runs = [
        row
        for row in found["runs"]
        if row["attention"] == "no_rescale" and row["status"] == "completed"
    ]
    own, exact = ([row[name] for row in runs] for name in (OWN, EXACT))
    # another model than the page's: a repeat has the same direction, not the same value
    return [Figure("own loss", own, kind=RANGE), Figure("exact loss", exact, kind=RANGE)]


def of_tile_size(found: Row) -> list[Figure]:
    figures = []
    plain = {
        (row["layers"], row["seq_len"], row["block_kv"], row["seed"]): row
        for row in found["runs"]
        if row["switch_at"] is None
    }
    for tile in (16, 64):
        rows = [row for (*shape, _), row in plain.items() if shape == [2, 128, tile]]
        figures += [
            Figure(f"own loss, tiles of {tile}", [row["own"] for row in rows]),
            Figure(f"exact loss, tiles of {tile}", [row["exact"] for row in rows]),
            Figure(f"exact less own, tiles of {tile}", [row["exact"] - row["own"] for row in rows]),
        ]
    for name in ("tiled", "no_rescale"):
        chosen = by(found["detector"], "attention", "dtype", "inputs")
        apart = [row["difference"] for row in chosen[name, "float32", "trained weights"]]
        figures.append(Figure(f"two tile sizes differ, {name}", apart, "{:.1e}", RANGE))
    return figures


def of_unshifted_sink(found: Row) -> list[Figure]:
    learned = by(found["training"], "sinks")["learned"]
    exact, unshifted = (by(learned, "attention")[name] for name in ("exact", "unshifted"))
    return [
        Figure("own loss, exact sink", [row["own"] for row in exact]),
        Figure("own loss, unshifted", [row["own"] for row in unshifted]),
        Figure("exact loss, unshifted", [row["exact"] for row in unshifted]),
        Figure("exact less own, unshifted", [row["exact"] - row["own"] for row in unshifted]),
        Figure("shows at step", [row["shows_at"] for row in unshifted], "{:.0f}"),
        Figure("share of the unshifted sink", [row["share_unshifted"] for row in unshifted]),
    ]


def of_lazy_rescaling(found: Row) -> list[Figure]:
    predicted = sum(
        # fp16 ends a rounding below a power of two, and 16 is the largest threshold
        row["last_safe"] == min(16, floor(row["predicted"] + 1e-3))
        for row in found["regions"]
    )
    lse = max(row["lse"] for row in found["runs"])
    return [
        Figure("last safe threshold as predicted, of 12", [predicted], "{:.0f}"),
        Figure("largest error of lse", [lse], "{:.1e}"),
    ]


def of_bf16_accumulators(found: Row) -> list[Figure]:
    calls = by(found["calls"], "narrow", "delta")
    gradients = by(found["gradients"], "narrow", "delta")
    training = by(found["training"], "narrow", "delta")
    plain = {row["seed"]: last(row) for row in training["neither", "exact"]}
    figures = []
    for narrow in ("neither", "both"):
        rows = gradients[narrow, "rounded"]
        figures.append(Figure(f"coherence, {narrow}", [row["coherence"] for row in rows], "{:.2f}"))
        for name in ("out", "dq"):
            seeds = by(calls[narrow, "rounded"], "seed").values()
            errors = [fmean(row[name] for row in same) for same in seeds]
            figures.append(Figure(f"error of {name}, {narrow}", errors, "{:.1e}"))
    both = training["both", "rounded"]
    figures.append(Figure("loss, neither, exact delta", list(plain.values()), "{:.4f}"))
    figures.append(Figure("loss, both, rounded delta", [last(row) for row in both], "{:.4f}"))
    for narrow in ("neither", "both"):
        rows = training[narrow, "rounded"]
        apart = [last(row) - plain[row["seed"]] for row in rows]
        name = f"loss, {narrow}, rounded delta, less that of neither, exact"
        figures.append(Figure(name, apart, "{:+.4f}"))
    return figures


def of_fp8_forward(found: Row) -> list[Figure]:
    trained = by((row for row in found["calls"] if row["layer"] is not None), "scaling", "seed")
    training = by(found["training"], "scaling")
    plain = {row["seed"]: last(row) for row in training["bf16"]}
    figures = [Figure("loss of bfloat16", list(plain.values()))]
    for name in ("out", "dq"):
        errors = [
            fmean(row[name] for row in rows)
            for (scaling, _), rows in trained.items()
            if scaling == "tensor"
        ]
        figures.append(Figure(f"error of {name}, tensor", errors, "{:.1e}"))
    for scaling in ("tensor", "block", "hadamard"):
        more = [last(row) - plain[row["seed"]] for row in training[scaling]]
        figures.append(Figure(f"loss less bfloat16's, {scaling}", more, "{:+.3f}"))
    return figures


def of_fp8_large_scores(found: Row) -> list[Figure]:
    size = min(row["parameters"] for row in found["training"] if row["parameters"] > 500_000)
    runs = by((row for row in found["training"] if row["parameters"] == size), "variant")
    ends = [row["steps"] if row["status"] == "diverged" else None for row in runs["unrounded"]]
    figures = [Figure("diverges at step, unrounded", ends, "{:.0f}")]
    for name in ("bf16", "rounded"):
        figures.append(Figure(f"loss, {name}", [row["loss"] for row in runs[name]]))
    return figures


def of_agree(found: Row) -> list[Figure]:
    divergent = [
        sum(each < run["tokens"] for each in pair["equal_tokens"])
        for run in found["runs"]
        for pair in between_kernels(run)
    ]
    apart = list(chain(*map(means, found["runs"])))
    return [
        Figure("mean difference of log p", apart, "{:.1e}", RANGE),
        Figure("texts of 16 that diverge", divergent, "{:.0f}", RANGE),
    ]


def of_polynomial_exp2(found: Row) -> list[Figure]:
    figures = []
    for degree in (1, 3):
        rows = [row for run in found["runs"] for row in run["rows"] if row["degree"] == degree]
        changes = [row["log_p"]["mean"] for row in rows]
        figures.append(Figure(f"change of log p, degree {degree}", changes, "{:.1e}", RANGE))
    return figures


def of_stabilisers(found: Row) -> list[Figure]:
    figures = []
    dies = by(found["fuse"], "stabiliser")
    for name, rows in by(found["exact"], "stabiliser").items():
        scores = [row["largest_score"] for row in rows]
        figures.append(Figure(f"largest score, {name}", scores, "{:.1f}"))
        died = [row["died_at"] for row in dies.get(name, ())]
        figures.append(Figure(f"no_max dies at, {name}", died, "{:.0f}"))
    return figures


# by the name of a repeat's file: the file of the page's figures, and how to read both
FINDINGS: dict[str, tuple[str, Callable[[Row], list[Figure]]]] = {
    "break_it": ("headline_h200", of_break_it),
    "tile_size": ("tile_size", of_tile_size),
    "unshifted_sink": ("unshifted_sink", of_unshifted_sink),
    "lazy_rescaling": ("lazy_rescaling", of_lazy_rescaling),
    "bf16_accumulators": ("bf16_accumulators", of_bf16_accumulators),
    "fp8_forward": ("fp8_forward", of_fp8_forward),
    "fp8_large_scores": ("fp8_large_scores", of_fp8_large_scores),
    "polynomial_exp2": ("polynomial_exp2_bf16_cpu", of_polynomial_exp2),
    "agree": ("agree_bf16_cpu", of_agree),
    "agree_fp32": ("agree_fp32_cpu", of_agree),
    "stabilisers": ("stabilisers", of_stabilisers),
}


if __name__ == "__main__":
    main()
