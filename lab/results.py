"""Write the tables of results/README.md from the JSON files beside it.

    python -m lab.results

Measures nothing. A table of the page stands between the lines `<!-- NAME -->` and `<!-- end -->`,
where NAME is one of TABLES, and only these lines change. Above each table stands the
hardware, the versions and the commit of its figures.
"""

import json
import re
from collections.abc import Iterable
from statistics import median

from lab.peers import DIRECTIONS, summary
from scripts.arguments import NoOptions, command
from scripts.tables import Row, by, grouped, mean_and_deviation
from training.record.environment import ROOT
from training.record.files import write_file

FOLDER = ROOT / "results"
PACKAGES = ("torch", "triton", "flash-attn-4", "python")
PEERS = {"triton": "ours", "lab.peers:FLASH_ATTENTION_4": "FA4", "sdpa:backend=cudnn": "cuDNN"}
# the file of each matrix, and what its edits change
MISTAKES = {
    "mutants": "tile loop",
    "mutants_states": "merge of two states",
    "mutants_decoding": "decoding and caches",
    "mutants_kernels": "Triton kernels",
}
PLACE = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def load(name: str) -> Row:
    return json.loads((FOLDER / f"{name}.json").read_text())


def measured(data: Row) -> str:
    """Where and with what a file was measured."""
    environment = data["environment"]
    hardware, versions = environment["hardware"], environment["versions"]
    chip = hardware["gpu"] or f"{hardware['cpu']}, {hardware['cpu_cores']} cores"
    packages = ", ".join(f"{name} {versions[name]}" for name in PACKAGES if versions.get(name))
    # runs of one file may come from several commits; then each run names its own
    commits = {run.get("commit") or environment["commit"] for run in data.get("runs", [{}])}
    return f"{chip}; {packages}; commit {', '.join(sorted(commit[:7] for commit in commits))}."


def table(head: str, rows: Iterable[str]) -> str:
    """A table whose cells are separated by bars."""
    rule = " | ".join("---" for _ in head.split("|"))
    return "\n".join(f"| {line} |" for line in (head, rule, *rows))


def spread(rows: Iterable[Row], name: str, form: str = "{:.3f}") -> str:
    """Mean, standard deviation and number of runs."""
    found = [row[name] for row in rows]
    return f"{mean_and_deviation(found, form)} (n={len(found)})"


def between(middle: float, least: float, most: float, form: str) -> str:
    return f"{form} ({form} to {form})".format(middle, least, most)


def laptop() -> Iterable[str]:
    data = load("laptop")
    yield measured(data)
    yield table("what | figure", (f"{what} | {x}" for what, x in data["figures"].items()))


def headline() -> Iterable[str]:
    data = load("headline_h200")
    rows = []
    for (name, dtype), runs in by(data["runs"], "attention", "dtype").items():
        died = [str(run["first_bad_step"]) for run in runs if run.get("first_bad_step")]
        own = f"died at step {', '.join(died)}" if died else spread(runs, "val/loss")
        exact, score = spread(runs, "val/loss_exact"), spread(runs, "max_score", "{:.1f}")
        rows.append(f"{name} | {dtype} | {own} | {exact} | {score}")
    yield measured(data)
    yield table("attention | dtype | own loss | under exact attention | largest score", rows)


def retrieval() -> Iterable[str]:
    data = load("defects_retrieval")
    whole = [run for run in data["runs"] if run["status"] == "completed"]
    tiles = grouped(whole, lambda run: (run["attention"], run["options"]["block_kv"]))
    rows = [
        f"{name} | {block_kv} | {spread(runs, 'val/accuracy', '{:.1%}')}"
        for (name, block_kv), runs in sorted(tiles.items())
    ]
    yield measured(data)
    yield table("attention | block_kv | accuracy", rows)


def memory() -> Iterable[str]:
    data = load("memory_h200")
    lengths = sorted({row["seq_len"] for row in data["rows"]})
    rows = []
    for name, own in by(data["rows"], "attention").items():
        cells = dict.fromkeys(lengths, "-")
        for row in own:
            peak = row.get("training_bytes")
            cells[row["seq_len"]] = f"{peak / 2**30:.3g}" if peak else "oom"
        rows.append(" | ".join([name.replace(":", " "), *cells.values()]))
    yield measured(data)
    yield table(" | ".join(["GiB", *(f"{length:,}" for length in lengths)]), rows)


def peers() -> Iterable[str]:
    data = load("peers_h200")
    found = [row for row in data["rows"] if row["attention"] in PEERS]
    found = [row | {"attention": PEERS[row["attention"]]} for row in found]
    head, *means = map(" | ".join, summary(found))
    yield measured(data)
    yield table(head, (line for line in means if line.startswith("all")))
    rows = []
    for shape, own in by(found, "shape").items():
        cells = [shape]
        for name in DIRECTIONS:
            speeds = (row.get(f"{name}_tflops") for row in own)
            cells.append(", ".join(f"{speed:.0f}" if speed else "-" for speed in speeds))
        rows.append(" | ".join(cells))
    yield table("TFLOP/s: ours, FA4, cuDNN | forward | backward", rows)


def decoding() -> Iterable[str]:
    data = load("generation_h200")
    rows = [
        f"{row['variant']} | {row['batch']} | "
        + between(row["tokens_per_second"], row["least"], row["most"], "{:,.0f}")
        + f" | {row['rounds']} | {row['same']:.2f}"
        for row in data["generation"]
    ]
    yield measured(data)
    yield table("model | sequences | tokens/s | n | same tokens", rows)


def nanogpt() -> Iterable[str]:
    rows = []
    for name in ("nanogpt_wall_defaults_h200", "nanogpt_wall_h100"):
        data = load(name)
        yield measured(data)
        runs = by(data["runs"], "seq_len", "who")
        chip = data["environment"]["hardware"]["gpu"].split()[1]
        chip += ", defaults" * ("defaults" in name)
        for ratio in data["ratios"]:
            both = [runs[ratio["seq_len"], who] for who in ("nanogpt", ratio["who"])]
            cold, *warm = ratio["seconds"]["rounds"]
            steps = ratio["tokens_per_sec"]["rounds"]
            steps = steps[1:] or steps  # empty caches do not matter to the steps alone
            speeds = (median(run["tokens_per_sec"] for run in each[1:] or each) for each in both)
            rows.append(
                f"{chip}, {ratio['seq_len']:,} | {1 + len(warm)} | "
                + (between(median(warm), min(warm), max(warm), "{:.2f}") if warm else "-")
                + f" | {cold:.2f} | {between(median(steps), min(steps), max(steps), '{:.2f}')} | "
                + "{:,.0f}, {:,.0f} | ".format(*speeds)
                + ", ".join(f"{each[0]['val/loss']:.3f}" for each in both)
            )
    head = "GPU, tokens | n | whole runs | with empty caches | steps alone | tokens/s | loss"
    yield table(head, rows)


def several_gpus() -> Iterable[str]:
    rows = []
    for gpus, name in {2: "two_gpus_h200", 4: "four_gpus_h200"}.items():
        data = load(name)
        alone = {x["seq_len"]: x for x in data["rows"] if x["who"] == "ours:alone"}
        for row in data["rows"]:
            times = (1e3 * x for x in (row["seconds"], *row["least_and_most"]))
            faster = row["tokens_per_sec"] / alone[row["seq_len"]]["tokens_per_sec"]
            rows.append(
                f"{gpus} | {row['who']} | {row['seq_len']:,} | {row['batch']} | "
                f"{between(*times, '{:,.0f}')} | {faster:.2f} | {row['peak_gib']:.1f}"
            )
        yield measured(data)
    head = "GPUs | who | tokens | sequences | ms a step | times one GPU | peak GiB"
    yield table(head, rows)


def mistakes() -> Iterable[str]:
    found = {what: load(name) for name, what in MISTAKES.items()}
    rows, harmless = [], []
    for what, data in found.items():
        edits = data["mutants"]
        harmless += [row["name"] for row in edits if not row["killed_by"]]
        rows.append(f"{what} | {len(edits)} | {sum(bool(row['killed_by']) for row in edits)}")
    number = sum(len(data["mutants"]) for data in found.values())
    yield measured(found["tile loop"])
    yield table("edits of | number | caught", [*rows, f"all | {number} | {number - len(harmless)}"])
    yield f"The other {len(harmless)}: {', '.join(harmless)}."


def killed() -> Iterable[str]:
    data = load("kills")
    words = {False: "killed while it trains", True: "killed while it saves"}
    ended = grouped(data["kills"], lambda each: words[each["in_a_save"]])
    ended |= grouped(data["harms"], lambda each: each["harm"])
    rows = []
    for what, runs in ended.items():
        outcomes = [each["outcome"] for each in runs]
        same, refused = (outcomes.count(word) for word in ("identical", "refused"))
        rows.append(f"{what} | {len(runs)} | {same} | {refused}")
    yield measured(data)
    yield table("what happened | n | identical | refused", rows)
    same, number = data["outcomes"]["kills"]["identical"], len(data["kills"])
    yield f"Of the killed runs {same} of {number} are identical."


TABLES = {
    each.__name__: each
    for each in (laptop, headline, retrieval, memory, peers, decoding)
    + (nanogpt, several_gpus, mistakes, killed)
}


def written(place: re.Match) -> str:
    """The table that belongs here, between its two lines."""
    parts = "\n\n".join(TABLES[place[1]]())
    return f"<!-- {place[1]} -->\n\n{parts}\n\n<!-- end -->"


@command
def main(options: NoOptions) -> None:
    page = FOLDER / "README.md"
    write_file(page, PLACE.sub(written, page.read_text()))
    print(f"{page} is written")


if __name__ == "__main__":
    main()
