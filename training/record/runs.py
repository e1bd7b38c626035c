"""Reads runs from their folders, one or all of a sweep, and shows them as a table.

SWEEP/index.jsonl is the plan of a sweep, a line a job: its folder, its overrides, and what names
it. How a job went is told by its own folder alone.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from training.record.files import Row, read_lines, read_mapping, read_metrics
from training.record.names import differing_settings, name_runs
from training.record.starts import changes_in_words
from training.record.text_table import text_table

RUN_FILES = ("summary.json", "metrics.jsonl", "config.yaml")
INDEX = "index.jsonl"
# {title in a table: (key of a run, format)}
COLUMNS = {
    "status": ("status", "{}"),
    "val/loss": ("val/loss", "{:.4f}"),
    "val/loss_exact": ("val/loss_exact", "{:.4f}"),
    "accuracy": ("val/accuracy", "{:.1%}"),
    "exact": ("val/accuracy_exact", "{:.1%}"),
    "tokens/s": ("tokens_per_sec", "{:,.0f}"),
    "steps alone": ("step_tokens_per_sec", "{:,.0f}"),
    "peak GiB": ("memory/peak_gib", "{:.3g}"),
}


def read_sweep(folder: Path) -> list[Row]:
    """Every run below `folder`, in order: a run directory, a sweep, or a folder of either.

    A run is its index line, its summary.json, "dir" and "evaluated_step". One that runs or was
    killed is "unfinished", with the last value of each metric.
    """
    sweep = sweep_of(folder)
    return list(_runs(folder, planned_jobs(sweep) if sweep else {}))


def sweep_of(run_dir: Path) -> Path | None:
    """The folder of the sweep that a run belongs to."""
    return next((folder for folder in run_dir.parents if (folder / INDEX).is_file()), None)


def planned_jobs(sweep: Path) -> dict[Path, Row]:
    """The lines of a sweep's index.jsonl by the folders of the jobs."""
    return {sweep / str(row.get("dir")): row for row in read_lines(sweep / INDEX)}


def not_started(sweep: Path) -> list[Row]:
    """The lines of a sweep's index.jsonl for the jobs that have not begun."""
    return [row for run_dir, row in planned_jobs(sweep).items() if not run_dir.is_dir()]


def _runs(folder: Path, planned: dict[Path, Row]) -> Iterator[Row]:
    # a job that died at once left only its line in the index
    if folder in planned or any((folder / name).is_file() for name in RUN_FILES):
        yield planned.get(folder, {}) | read_run(folder)
        return
    planned = planned | planned_jobs(folder)
    around = {folder.resolve(), *folder.resolve().parents}  # a link to one of them is a circle
    below = [
        path
        for path in folder.iterdir()
        # wandb/ has files of the same names
        if path.is_dir() and not path.name.startswith(".") and path.name != "wandb"
        if path.resolve() not in around
    ]
    for path in sorted(below, key=lambda path: in_order(path.name)):
        yield from _runs(path, planned)


def in_order(name: str) -> list[int | str]:
    """A key that sorts block_kv=16 before block_kv=128."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def read_run(run_dir: Path) -> Row:
    """One run directory as a dictionary; never fails on a half-written one."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    evaluated_step = max((row["step"] for row in rows if "val/loss" in row), default=None)
    run = {"status": "unfinished"} | read_mapping(run_dir / "summary.json")
    if run["status"] == "unfinished":
        last = {key: value for row in rows for key, value in row.items()}
        run |= {"steps_done": last.pop("step", 0)} | last
    return run | {"evaluated_step": evaluated_step, "dir": str(run_dir)}


def summary_table(rows: list[Row]) -> str:
    """The runs as plain text, and below the table a line for every run that needs a remark.

    The first columns are what the runs are called; see training.record.names:

        variant             seed  status     val/loss  val/loss_exact  tokens/s  ...
        tiled block_kv=16   0     completed    1.7345          1.7345    12,410

    tokens/s is by the wall clock. "steps alone" is the speed by which variants are compared; see
    training.record.clock.WallClock.
    """
    # only the synthetic tasks have an accuracy
    columns = [
        (title, key, form)
        for title, (key, form) in COLUMNS.items()
        if "accuracy" not in key or any(row.get(key) is not None for row in rows)
    ]
    settings = differing_settings(rows)
    sizes = [key for key in ("seq_len", "seed") if any(key in setting for setting in settings)]
    table = [["variant", *sizes, *(title for title, _, _ in columns)]]
    remarks: dict[str, None] = {}
    for row, name, setting in zip(rows, name_runs(rows), settings, strict=True):
        cells = [_cell(row, key, form) for _, key, form in columns]
        table.append([name.variant, *(setting.get(key, "-") for key in sizes), *cells])
        if text := remark(row):
            # what all seeds have in common is shown once
            who = name.variant if row["status"] == "completed" else name.run
            when = f" at step {row['first_bad_step']}" if "first_bad_step" in row else ""
            remarks[f"{who}: {row['status']}{when}: {text}"] = None
    # variant, settings and status are words
    head, *lines = text_table(table, words=len(sizes) + 2).splitlines()
    return "\n".join([head, "-" * len(head), *lines, *remarks])


def _cell(row: Row, key: str, form: str) -> str:
    # the peak before memory ran out is not what the run needs
    hidden = key == "memory/peak_gib" and row["status"] == "oom"
    hidden = hidden or (key.startswith("val/") and is_stale(row))
    return "-" if hidden or row.get(key) is None else form.format(row[key])


def is_stale(row: Row) -> bool:
    """Whether a run made steps after its last evaluation, so that it is not their result."""
    evaluated, done = row.get("evaluated_step"), row.get("steps_done")
    return isinstance(evaluated, int) and isinstance(done, int) and evaluated < done


def remark(row: Row) -> str:
    """Why a run ended early, and what a resume changed, in one line; else ""."""
    found = row.get("diagnosis") or row.get("oom") or {}
    reason = found.get("message") or row.get("error") or ""
    return "; ".join(filter(None, [reason.strip().split("\n")[0], changes_in_words(row)]))
