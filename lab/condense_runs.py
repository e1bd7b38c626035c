"""Condense runs into one small JSON file that can be committed: settings, outcome and curves of
each, and where they ran.

    python -m lab.condense_runs multirun/DAY/TIME --out results/break_it_cpu.json

Only reads run directories. Curves keep the rows of metrics.jsonl with the columns asked for.
"""

import argparse
import json
import sys
from pathlib import Path

from training.interrupt import one_line
from training.metrics import check_writable, read_metrics, write_file
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


def condense(run_dir: Path, columns: tuple[str, ...]) -> dict:
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


@one_line("condense_runs")
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="sweeps, runs, or folders of either"
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--columns", nargs="*", default=CURVES, help="columns of metrics.jsonl to keep"
    )
    options = parser.parse_args()
    for folder in options.folders:
        if not folder.is_dir():
            sys.exit(f"condense_runs: {folder} is not a folder")
    check_writable(options.out)
    runs, environments = [], []
    for folder in options.folders:
        for run in read_sweep(folder):
            run_dir = Path(run.pop("dir"))
            environment = load_json(run_dir / "env.json")
            if environment and environment not in environments:
                environments.append(environment)
            runs.append(run | {"curves": condense(run_dir, tuple(options.columns))})
    if not runs:
        sys.exit(f"condense_runs: no runs in {', '.join(map(str, options.folders))}")
    # runs of one sweep differ in nothing but the command line
    common = (
        {
            key: value
            for key, value in environments[0].items()
            if all(other.get(key) == value for other in environments)
        }
        if environments
        else {}
    )
    write_file(options.out, json.dumps({"environment": common, "runs": runs}, indent=1))
    print(f"{options.out}: {len(runs)} runs, {options.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
