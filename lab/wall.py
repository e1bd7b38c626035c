"""How fast a run is for whoever waits for it: whole runs of several lengths by the wall clock,
beside the speeds they report.

    python -m lab.wall attention=triton model=gpt2 tokenizer.vocab_size=50304
    out=results/wall_h200.json

Takes train.py's own settings, and of its own:

    seq_len   lengths of a sequence, separated by commas (1024,8192,32768)
    tokens    tokens of a step (32768), in one pass
    steps     lengths of a run (20,120,220): the slope of wall time against steps leaves start-up
              and end out
    trees     checkouts of the project to run, separated by commas (the folder of this file alone);
              they take turns
    out       the JSON file to write

Two measures from outside, which no run can flatter: the slope, and the times at which rows arrive
in metrics.jsonl.
"""

import subprocess
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch

from training.interrupt import one_line
from training.metrics import check_writable, measured_on, read_metrics, write_json
from training.sweep import load_json

ROOT = Path(__file__).resolve().parent.parent
OWN = {
    "seq_len": "1024,8192,32768",
    "tokens": "32768",
    "steps": "20,120,220",
    "trees": str(ROOT),
    "out": "wall.json",
}


def timed_run(tree: Path, run_dir: Path, overrides: list[str]) -> dict[str, Any]:
    """One run of train.py in a process of its own: seconds of the whole, arrival of each row, and
    what it reports.
    """
    log = run_dir.with_suffix(".log")
    begin = time.perf_counter()
    arrivals: dict[int, float] = {}  # step to seconds since the start of the process
    with log.open("w") as output:
        command = [sys.executable, "train.py", *overrides, f"hydra.run.dir={run_dir}"]
        process = subprocess.Popen(command, cwd=tree, stdout=output, stderr=output)
        while process.poll() is None:
            for row in read_metrics(run_dir / "metrics.jsonl"):
                arrivals.setdefault(row["step"], time.perf_counter() - begin)
            time.sleep(0.02)
    seconds = time.perf_counter() - begin
    summary = load_json(run_dir / "summary.json")
    if summary.get("status") != "completed":
        sys.exit(
            f"wall: train.py {' '.join(overrides)} in {tree} ended {summary.get('status')}: "
            f"{log.read_text()[-500:]}"
        )
    speeds = {
        key: summary[key] for key in ("tokens_per_sec", "step_tokens_per_sec") if key in summary
    }
    return {
        "steps": summary["steps_done"],
        "tokens": summary["tokens"],
        "seconds": seconds,
        "arrivals": arrivals,
    } | speeds


def slope(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens a second of the steps that a longer run has more: least squares over all runs, and the
    least and most of any two.
    """
    by_pair = [
        (b["tokens"] - a["tokens"]) / (b["seconds"] - a["seconds"])
        for a, b in combinations(runs, 2)
    ]
    seconds, tokens = [run["seconds"] for run in runs], [run["tokens"] for run in runs]
    return {
        "tokens_per_sec": 1 / linear_regression(tokens, seconds).slope,
        "of_two": [min(by_pair), max(by_pair)],
    }


def by_arrival(run: dict[str, Any]) -> float:
    """Tokens a second between the second row after the start, when all is compiled, and the
    last.
    """
    (first, begin), (last, end) = (
        list(run["arrivals"].items())[2],
        list(run["arrivals"].items())[-1],
    )
    return (last - first) * run["tokens"] / run["steps"] / (end - begin)


@one_line("wall")
def main() -> None:
    own, overrides = dict(OWN), []
    for argument in sys.argv[1:]:
        key, _, value = argument.partition("=")
        if key in own:
            own[key] = value
        else:
            overrides.append(argument)
    trees, lengths = (
        [Path(tree) for tree in own["trees"].split(",")],
        sorted(map(int, own["steps"].split(","))),
    )
    if len(set(lengths)) < 2 or lengths[0] < 1:
        sys.exit(
            f"wall: steps={own['steps']} must be two different lengths of a run or more, such as "
            "steps=20,120,220"
        )
    check_writable(Path(own["out"]))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for seq_len in map(int, own["seq_len"].split(",")):
            runs: dict[Path, list[dict[str, Any]]] = {tree: [] for tree in trees}
            # the first run of each tree fills the compilers' caches, and does not count
            for number, steps in enumerate([lengths[0], *lengths]):
                for tree in trees:
                    settings = [
                        *overrides,
                        f"seq_len={seq_len}",
                        f"batch_size={int(own['tokens']) // seq_len}",
                        f"steps={steps}",
                    ]
                    run_dir = Path(folder, f"{seq_len}-{number}-{trees.index(tree)}")
                    measured = timed_run(tree, run_dir, settings)
                    if number:
                        runs[tree].append(measured)
            for tree in trees:
                measured = {"slope": slope(runs[tree]), "by_arrival": by_arrival(runs[tree][-1])}
                found.append(
                    {"tree": tree.name, "seq_len": seq_len} | measured | {"each": runs[tree]}
                )
                print(
                    f"{tree.name:12} seq_len={seq_len}: "
                    f"{measured['slope']['tokens_per_sec']:,.0f} tokens/s by whole runs, "
                    f"{measured['by_arrival']:,.0f} by arrival of rows; reported "
                    f"{runs[tree][-1].get('tokens_per_sec'):,.0f}"
                )
            write_json(
                Path(own["out"]),
                {
                    "environment": measured_on("cuda" if torch.cuda.is_available() else "cpu"),
                    "overrides": overrides,
                    "runs": found,
                },
            )


if __name__ == "__main__":
    main()
