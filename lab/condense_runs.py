"""Condense runs into one small JSON file that can be committed: settings, outcome and curves of
each, and where they ran.

    python -m lab.condense_runs multirun/DAY/TIME out=results/break_it_cpu.json

The arguments are sweeps, runs, or folders of either, and

    out      the JSON file to write
    columns  columns of metrics.jsonl to keep (losses, accuracies, attention/max_score, grad_norm)

Only reads run directories.
"""

from dataclasses import dataclass, field
from pathlib import Path

from scripts.arguments import command
from training.files import check_writable, read_metrics, write_json
from training.sweep import load_json, read_sweep

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
    out: Path
    columns: list[str] = field(default_factory=lambda: list(CURVES))


def condense(run_dir: Path, columns: list[str]) -> dict:
    """step and the columns, each as one list with null where a row has no such figure; columns
    without any figure are left out.
    """
    rows = read_metrics(run_dir / "metrics.jsonl")
    curves = {"step": [row["step"] for row in rows]}
    for name in columns:
        values = [row.get(name) for row in rows]
        if any(value is not None for value in values):
            curves[name] = [None if value is None else round(value, 6) for value in values]
    return curves


@command("condense_runs", Options)
def main(options: Options) -> None:
    for folder in options.paths:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
    check_writable(options.out)
    runs, environments = [], []
    for folder in options.paths:
        for run in read_sweep(folder):
            run_dir = Path(run.pop("dir"))
            environment = load_json(run_dir / "env.json")
            if environment and environment not in environments:
                environments.append(environment)
            runs.append(run | {"curves": condense(run_dir, options.columns)})
    if not runs:
        raise ValueError(f"no runs in {', '.join(map(str, options.paths))}")
    # runs of one sweep differ in nothing but the command line
    common = {}
    for key, value in environments[0].items() if environments else ():
        if all(other.get(key) == value for other in environments):
            common[key] = value
    write_json(options.out, {"environment": common, "runs": runs})
    print(f"{options.out}: {len(runs)} runs, {options.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
