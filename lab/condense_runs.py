"""Condense runs into one small JSON file that can be committed: their settings, outcomes, curves
and environment.

    python -m lab.condense_runs multirun/DAY/TIME out=results/break_it_cpu.json

The arguments are sweeps, runs, or folders of either, and

    out  the JSON file to write

Only reads run directories.
"""

from dataclasses import dataclass
from pathlib import Path

from scripts.arguments import Json, command
from scripts.runs import runs_below
from training.record.files import read_mapping, read_metrics, write_json

# columns of metrics.jsonl
CURVES = (
    "train/loss",
    "val/loss",
    "val/loss_exact",
    "val/accuracy",
    "val/accuracy_exact",
    "attention/max_score",
    "grad_norm",
)


@dataclass
class Options:
    paths: list[Path]
    out: Json


def condense(run_dir: Path) -> dict:
    """step and CURVES as one list each; null if a row has no value. Curves without any value are
    left out.
    """
    rows = read_metrics(run_dir / "metrics.jsonl")
    curves = {"step": [row["step"] for row in rows]}
    for name in CURVES:
        values = [row.get(name) for row in rows]
        if any(value is not None for value in values):
            curves[name] = [None if value is None else round(value, 6) for value in values]
    return curves


@command
def main(options: Options) -> None:
    found = runs_below(options.paths)
    if not found:
        raise ValueError(f"no runs in {', '.join(map(str, options.paths))}")
    runs = []
    for run_dir, run in found.items():
        del run["dir"]
        runs.append(run | {"curves": condense(run_dir)})
    # the runs of one sweep usually share their environment
    environments = [read_mapping(run_dir / "env.json") for run_dir in found]
    first, *others = list(filter(None, environments)) or [{}]
    common = {key: first[key] for key in first if all(x.get(key) == first[key] for x in others)}
    if "commit" not in common:  # a new commit was made during the sweep
        for run, environment in zip(runs, environments, strict=True):
            run["commit"] = environment.get("commit")
    write_json(options.out, {"environment": common, "runs": runs})
    print(f"{options.out}: {len(runs)} runs")


if __name__ == "__main__":
    main()
