"""How fast a run is for the user who waits: wall time of whole runs of several lengths, compared
with the speeds that they report.

    python -m lab.wall attention=triton model=gpt2 tokenizer.vocab_size=50304
    out=results/wall_h200.json

Takes train.py's settings, and:

    seq_len   lengths of a sequence, separated by commas (1024,8192,32768)
    tokens    tokens of a step (32768), in one pass
    steps     numbers of steps of a run (20,120,220): the slope of wall time against steps excludes
              start-up and end
    trees     checkouts of the project to run in turns, separated by commas (only this one)
    out       the JSON file to write

Both speeds are measured from outside the run: by that slope, and by the times at which rows arrive
in metrics.jsonl.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import linear_regression
from typing import Any

from lab.lengths import LengthOptions
from scripts.arguments import Count, Json, command, default
from scripts.tables import Row
from training.environment import ROOT
from training.files import read_metrics
from training.sweep import load_json


@dataclass
class Options(LengthOptions):
    steps: list[Count] = default(20, 120, 220)
    trees: list[Path] = default(ROOT)
    out: Json = Json("wall.json")

    def __post_init__(self) -> None:
        if len(set(self.steps)) < 2:
            raise ValueError(
                f"steps={self.steps[0]} must be two different lengths of a run or more, such as "
                "steps=20,120,220"
            )


def timed_run(
    tree: Path,
    run_dir: Path,
    overrides: list[str],
    program: Sequence[str] = ("train.py",),
    **variables: str,
) -> Row:
    """One run of train.py, or of another program with its settings: total seconds, arrival of each
    row, and what it reports. `variables` are added to its environment. Raises ValueError with the
    end of its output if it does not complete.
    """
    log = run_dir.with_suffix(".log")

    def steps() -> list[int]:
        return [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")]

    arguments = [*program, *overrides, f"hydra.run.dir={run_dir}"]
    _, seconds, arrivals = watch(arguments, log, steps, cwd=tree, env=os.environ | variables)
    summary = load_json(run_dir / "summary.json")
    if summary.get("status") != "completed":
        raise ValueError(
            f"train.py {' '.join(overrides)} in {tree} ended {summary.get('status')}: "
            f"{log.read_text()[-500:]}"
        )
    names = ("tokens", "tokens_per_sec", "step_tokens_per_sec", "memory/peak_gib", "val/loss")
    reported = {key: summary[key] for key in names if key in summary}
    return {"steps": summary["steps_done"], "seconds": seconds, "arrivals": arrivals} | reported


def watch(
    arguments: Sequence[str], log: Path, steps: Callable[[], Iterable[int]], **where: Any
) -> tuple[int, float, dict[int, float]]:
    """Run `python ARGUMENTS` with its output in `log`. Returns its exit code, its seconds, and the
    seconds from its start to the arrival of each step that `steps` finds.
    """
    begin, seconds, arrivals = time.perf_counter(), 0.0, {}
    with log.open("w") as output:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, **where, stdout=output, stderr=output)
        running = True
        while running:
            time.sleep(0.02)
            running = process.poll() is None
            seconds = time.perf_counter() - begin
            for step in steps():
                arrivals.setdefault(step, seconds)
    return process.returncode, seconds, arrivals


def slope(runs: list[Row]) -> Row:
    """Tokens per second from the difference between longer and shorter runs: least squares over all
    runs, and the least and most of any two.
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


def by_arrival(run: Row) -> float:
    """Tokens per second from the third row, when everything is compiled, to the last. Raises
    ValueError if these arrived at once.
    """
    _, _, (first, begin), *_, (last, end) = run["arrivals"].items()
    if end == begin:
        raise ValueError(f"the rows of steps {first} to {last} arrived at once; take more steps")
    return (last - first) * run["tokens"] / run["steps"] / (end - begin)


@command
def main(options: Options) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seq_len in options.seq_len:
            runs = measure(options, seq_len, Path(folder))
            for tree, each in runs.items():
                row = {"tree": tree.name, "seq_len": seq_len, "slope": slope(each)}
                rows.append(row | {"by_arrival": by_arrival(each[-1]), "each": each})
                print(
                    f"{tree.name:12} seq_len={seq_len}: "
                    f"{row['slope']['tokens_per_sec']:,.0f} tokens/s by whole runs, "
                    f"{rows[-1]['by_arrival']:,.0f} by arrival of rows; reported "
                    f"{each[-1].get('tokens_per_sec'):,.0f}"
                )
            options.write(rows)


def measure(options: Options, seq_len: int, folder: Path) -> dict[Path, list[Row]]:
    """The runs of every checkout at one sequence length, shortest first; checkouts take turns."""
    runs: dict[Path, list[Row]] = {tree: [] for tree in options.trees}
    lengths = sorted(options.steps)
    # the first run of each tree fills the compilers' caches and does not count
    for number, steps in enumerate([lengths[0], *lengths]):
        for place, tree in enumerate(options.trees):
            settings = [*options.overrides, *options.shape(seq_len), f"steps={steps}"]
            run = timed_run(tree, folder / f"{seq_len}-{number}-{place}", settings)
            if number:
                runs[tree].append(run)
    return runs


if __name__ == "__main__":
    main()
