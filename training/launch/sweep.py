"""A sweep as a whole: its index, its table, its exit code.

`SweepSummary` is a Hydra callback, named in conf/config.yaml under hydra.callbacks.
SWEEP/index.jsonl has one line a job from the start; the callback fills it in, and prints the table
at the end. Diverged and out-of-memory runs are results and leave the exit code at 0. A failed run
makes it 1.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import IO, Any, NoReturn

from hydra.experimental.callback import Callback
from omegaconf import read_write

from config import BACKEND_OPTIONS, FUNCTION_SETTINGS, RunConfig
from training.launch.command_line import as_written
from training.loop.ranks import of_environment
from training.own_modules import ROOT
from training.record.files import Row, parse_rows, read_metrics, strict, try_folder, write_file
from training.record.names import differing_settings, name_run, name_runs
from training.record.retention import LATEST, load_json, newest_first
from training.record.starts import changes_in_words, load_yaml
from training.record.text_table import text_table

log = logging.getLogger("tilegpt")

RUN_FILES = ("summary.json", "metrics.jsonl", "config.yaml")
INDEX, LOCK, TABLE = "index.jsonl", ".lock", "table.txt"
# folders of a run or a sweep that hold no runs
OTHER_FOLDERS = ("wandb", "checkpoint", "report_figures", "tensorboard")
# {title in the summary table: (key of a run, format)}
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


class SweepSummary(Callback):
    """Locks the folders, keeps index.jsonl, prints the table and sets the exit code.

    The exit code is raised as SystemExit, because Hydra turns every ordinary exception of a
    callback into a warning, and returns nothing from its main function.
    """

    folder: Path | None = None  # of the sweep; None in a single run

    def __init__(self) -> None:
        self.locks: dict[Path, IO] = {}  # closing a file unlocks its folder
        self.away = False  # whether this is a copy in the process of one job

    def __getstate__(self) -> Row:
        # a launcher pickles the callback for its jobs; locks stay with the first process
        return {"folder": self.folder, "locks": {}, "away": True}

    def release(self) -> None:
        """Unlock the folders."""
        for file in self.locks.values():
            file.close()

    def on_run_start(self, config: Any, **kwargs: Any) -> None:
        named = folder = own_folder(config, "run")
        mark = None if config.resume else "metrics.jsonl"
        # pathlib would raise an error if the name is too long
        saved = os.path.isdir(folder / LATEST)
        command = shlex.quote(f"resume={folder}")
        go_on = f"go on with it by {command}" if saved else "delete it, as it saved nothing"
        for number in count(2):
            try:
                self.locks[folder] = claim(folder, mark, "hydra.run.dir", f"{go_on}, or ")
                break
            except Taken:
                # several runs may start in the same second
                if "${now:" not in as_written(config.hydra.run)["dir"]:
                    raise
                folder = named.with_name(f"{named.name}-{number}")
        if folder != named:
            with read_write(config):
                config.hydra.run.dir = str(folder)

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        if of_environment().several:
            raise SystemExit(
                "error: torchrun starts the ranks of one run, and -m asks for several runs: start "
                "each by a torchrun of its own, or all of them by python train.py -m"
            )
        self.folder = own_folder(config, "sweep").absolute()
        self.locks[self.folder] = claim(self.folder, INDEX, "hydra.sweep.dir")
        (self.folder / INDEX).touch()

    def on_job_start(self, config: Any, **kwargs: Any) -> None:
        if self.folder is not None:
            # the first job loads torch; a sweep that is refused does not
            from training.record.memory import in_use_gib

            folder = Path(config.hydra.runtime.output_dir)
            self.locks[folder] = claim(folder, "metrics.jsonl", "hydra.sweep.subdir")
            self.at_start_gib = in_use_gib()

    def on_job_end(self, config: Any, job_return: Any, **kwargs: Any) -> None:
        if self.folder is None:
            return
        run_dir = Path(job_return.hydra_cfg.hydra.runtime.output_dir)
        more = {"memory/at_start_gib": self.at_start_gib}  # left by the jobs before
        try:
            _ = job_return.return_value
        except Exception as error:  # what the job raised
            more |= {"status": "failed", "error": str(error)}
        overrides = list(job_return.overrides)
        row = record_job(self.folder, config.hydra.job.num, overrides, run_dir, **more)
        # Ctrl-C ends the whole sweep, not only the job that caught it
        if row["status"] == "interrupted" or row.get("stopped"):
            if self.away:
                raise KeyboardInterrupt
            finish_sweep(self.folder, 130)

    def on_multirun_end(self, config: Any, **kwargs: Any) -> None:
        finish_sweep(self.folder, exit_code(read_sweep(self.folder)))

    def on_run_end(self, config: Any, job_return: Any, **kwargs: Any) -> None:
        """Print the table of a single run and set its exit code, by what main() returned."""
        sweep = Path(config.hydra.run.dir).absolute().parent
        # a job that goes on alone, or runs later, joins its sweep
        if (sweep / INDEX).is_file() and (sweep / TABLE).is_file():
            with contextlib.suppress(OSError):  # the run itself is saved
                write_table(sweep)
        if job_return.status.name != "COMPLETED":
            return
        result = job_return.return_value
        if result.status == "completed":
            table = summary_table([read_run(Path(config.hydra.run.dir))])
            log.info(f"\n{table}")  # logged, so that train.log has it too
        if result.status == "failed" or (result.status == "oom" and of_environment().several):
            raise SystemExit(1)  # torchrun ends the other ranks too
        if result.status == "interrupted" or result.stopped:
            raise SystemExit(130)


def begin_sweep(folder: Path, jobs: list[Row]) -> None:
    """Write index.jsonl with every job as not started, and the command that runs it alone.

    A job has its overrides, the entries that name it (attention, variant, seq_len, seed, starts),
    and `ranks` if torchrun starts it.
    """
    rows = []
    for number, job in enumerate(jobs):
        ranks = job.get("ranks", 1)
        start = (
            ["torchrun", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else ["python"]
        )
        # an experiment may set hydra.mode=MULTIRUN, but this is a single run
        own = ["hydra.mode=RUN", f"hydra.run.dir={folder.absolute() / str(number)}"]
        command = shlex.join([*start, "train.py", *job["overrides"], *own])
        rows.append({"job": number, **job, "status": "not started", "command": command})
    _write_index(folder, rows)


def forget_sweep(folder: Path) -> None:
    """Remove the folder of a sweep that was refused, unless something else is in it."""
    if {path.name for path in folder.iterdir()} <= {INDEX, LOCK}:
        shutil.rmtree(folder, ignore_errors=True)


def write_index_row(folder: Path, row: Row) -> None:
    """Replace a job's line in index.jsonl. Jobs of several processes take turns."""
    with (folder / ".index.lock").open("a") as turn:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.lockf(turn, fcntl.LOCK_EX)
        rows = [row if each.get("job") == row["job"] else each for each in index_rows(folder)]
        _write_index(folder, rows if row in rows else [*rows, row])


def record_job(folder: Path, number: int, overrides: list[str], run_dir: Path, **more: Any) -> Row:
    """Write what a job's folder holds, and `more`, to its line in index.jsonl; returns the line."""
    rows = index_rows(folder)
    row = next((as_planned(row) for row in rows if row.get("job") == number), {})
    row |= {"job": number, "overrides": overrides} | read_run(run_dir) | more
    row["dir"] = str(run_dir.relative_to(folder))
    write_index_row(folder, row)
    return row


def finish_sweep(folder: Path, code: int) -> NoReturn:
    """Print the table and the jobs that were not started; exit with this code."""
    folder = folder.absolute()
    rows = index_rows(folder)
    for row in rows:
        run_dir = folder / str(row.get("job"))
        # a launcher that was stopped gives its jobs no time to report how they ended
        if row.get("status") == "not started" and run_dir.is_dir():
            write_index_row(folder, as_planned(row) | read_run(run_dir) | {"dir": run_dir.name})
    table = write_table(folder)  # first: printing may fail
    print(f"\n{table}")
    if missing := not_started(folder):
        print(f"{len(missing)} of {len(rows)} jobs not started")
    if jobs_left(folder):
        print(f"go on: python train.py {shlex.quote(f'resume={folder}')}")
    print(f"{folder}\nreport: python -m scripts.report {shlex.quote(str(folder))}")
    if any((folder / "wandb").glob("offline-run-*")):
        print(f"wandb: wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*")
    raise SystemExit(code)


def write_table(folder: Path) -> str:
    """Write the table of a sweep to its file; returns it."""
    table = summary_table(read_sweep(folder))
    write_file(folder / TABLE, f"{table}\n")
    return table


def as_planned(row: Row) -> Row:
    """The part of an index line that was known before the job began."""
    keys = ("job", "overrides", "attention", "variant", "seq_len", "seed", "starts", "ranks")
    return {key: row[key] for key in keys if key in row}


def own_folder(config: Any, kind: str) -> Path:
    """hydra.run.dir or hydra.sweep.dir. Ends the program for a folder that holds other files.

    These are the current folder, the folder of this program, and all folders above that.
    """
    key = f"hydra.{kind}.dir"
    try:
        folder = config.hydra[kind].dir
    except ValueError as error:  # an interpolation of an unknown name
        raise SystemExit(
            f"error: {key}: {str(error).splitlines()[0]}; name a folder, as {key}=outputs/NAME"
        ) from None
    place = Path(os.path.realpath(folder))
    resumes = kind == "run" and config.resume
    if not resumes and place in (Path.cwd(), ROOT, *ROOT.parents):
        raise SystemExit(
            f"error: {key}={folder} is {place}, which holds other files; name a folder of its "
            f"own, as {key}=outputs/NAME"
        )
    return Path(folder)


class Taken(SystemExit):
    """Another run or sweep has the folder."""


def claim(folder: Path, mark: str | None, key: str, go_on: str = "") -> IO:
    """Create and lock the folder of a run or sweep, before Hydra writes to it.

    Ends the program if that fails, or if the folder holds the file `mark` of an earlier run;
    mark=None allows a resume. `key` is the setting that names the folder, `go_on` another way out
    for a folder in use.
    """
    way_out = f"choose another {key}" if mark else "copy it, and resume the copy"
    try:
        try_folder(folder, 2**16)
        file = lock(folder, way_out)
    except OSError as error:
        raise SystemExit(
            f"error: the folder {folder} cannot be written to: {error}; {way_out}"
        ) from None
    # after locking: the process that held the lock may have finished its run
    if mark and (folder / mark).exists():
        raise Taken(f"error: {folder} holds a run or sweep already; {go_on}{way_out}")
    return file


def lock(folder: Path, way_out: str) -> IO:
    """Keep other processes out of the folder until the returned file is closed.

    The system unlocks it however this process ends.
    """
    file = (folder / LOCK).open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise Taken(
            f"error: another process is writing to {folder} right now; wait for it, or {way_out}"
        ) from None
    except OSError:  # a file system without locks
        pass
    return file


def exit_code(rows: list[Row]) -> int:
    """1 if a run failed, else 130 if a signal stopped one, else 0: a sweep may well look for
    divergence and lack of memory.
    """
    statuses = {row["status"] for row in rows}
    return 1 if "failed" in statuses else 130 if "interrupted" in statuses else 0


def read_sweep(folder: Path) -> list[Row]:
    """Every run below `folder`, in order: a run directory, a sweep, or a folder of either.

    A run is its summary.json plus "dir" and "evaluated_step". A run that never wrote a summary is
    "unfinished", with the content of its index line, config and metrics.
    """
    rows = []
    for run_dir in _run_dirs(folder):
        indexed = _index(run_dir.parent).get(run_dir.name, {})
        row = indexed | read_run(run_dir)
        # if a job died before its summary, only the index has its status
        if row["status"] == "unfinished":
            row["status"] = indexed.get("status", "unfinished")
        rows.append(row)
    return rows


def not_started(folder: Path) -> list[Row]:
    """The lines of a sweep's index for the jobs that an interrupted sweep has not begun."""
    return [
        row
        for row in index_rows(folder)
        if row.get("status") == "not started" and not (folder / str(row.get("job"))).is_dir()
    ]


def jobs_left(folder: Path) -> list[tuple[Row, bool]]:
    """The lines of a sweep's index for the jobs that did not begin, were stopped or failed, and
    whether they saved something to go on from. Divergence and lack of memory are results.
    """
    left = []
    for row in index_rows(folder):
        run_dir = folder / row.get("dir", str(row.get("job")))
        # without metrics.jsonl, which read_run() reads: a sweep may have many long runs
        now = load_json(run_dir / "summary.json") if run_dir.is_dir() else row
        if now.get("status") not in ("completed", "diverged", "oom"):
            left.append((row, bool(list(newest_first(run_dir)))))
    return left


def read_run(run_dir: Path) -> Row:
    """One run directory as a dictionary; never fails on a half-written one."""
    try:
        rows = read_metrics(run_dir / "metrics.jsonl")
    except OSError:
        rows = []
    evaluated_step = max((row["step"] for row in rows if "val/loss" in row), default=None)
    own = {"evaluated_step": evaluated_step, "dir": str(run_dir)}
    summary = load_json(run_dir / "summary.json")
    if "status" in summary:
        return summary | own
    config = load_yaml(run_dir / "config.yaml")
    attention = config.get("attention")
    attention = attention if isinstance(attention, dict) else {"name": attention}
    last = {key: value for row in rows for key, value in row.items() if value is not None}
    figures = (
        "tokens",
        "val/loss",
        "val/loss_exact",
        "tokens_per_sec",
        "step_tokens_per_sec",
        "memory/peak_gib",
    )
    run = {
        "status": "unfinished",
        "attention": attention.get("name"),
        "options": {key: attention[key] for key in BACKEND_OPTIONS if key in attention} or None,
        "function": {key: attention[key] for key in FUNCTION_SETTINGS if key in attention} or None,
        "seq_len": config.get("seq_len"),
        "seed": config.get("seed"),
        "steps_done": last.get("step"),
        **{key: last.get(key) for key in figures},
        **own,
    }
    return {key: value for key, value in run.items() if value is not None}


def summary_table(rows: list[Row]) -> str:
    """The runs as plain text, and below the table a line for every run that needs a remark.

    The first columns are what the runs are called; see training.record.names:

        variant             seed  status     val/loss  val/loss_exact  tokens/s  ...
        tiled block_kv=16   0     completed    1.7345          1.7345    12,410

    tokens/s is by the wall clock. "steps alone" is the speed by which variants are compared; see
    training.record.throughput.WallClock.
    """
    columns = COLUMNS
    # only the synthetic task has an accuracy
    if not any(row.get("val/accuracy") is not None for row in rows):
        columns = {
            title: column for title, column in COLUMNS.items() if "accuracy" not in column[0]
        }
    names = name_runs(rows)
    settings = differing_settings(rows)
    sizes = [key for key in ("seq_len", "seed") if any(key in setting for setting in settings)]
    table = [["variant", *sizes, *columns]]
    remarks = []
    for row, name, setting in zip(rows, names, settings, strict=True):
        cells = [_cell(row, *column) for column in columns.values()]
        table.append([name.variant, *(setting.get(key, "-") for key in sizes), *cells])
        if text := remark(row):
            # what all seeds left out is shown once
            who = name.variant if row["status"] == "completed" else name.run
            remarks.append(f"{who}: {row['status']}{when(row)}: {text}")
    # variant, settings and status are words
    lines = text_table(table, words=len(sizes) + 2).splitlines()
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([*lines, *dict.fromkeys(remarks)])


def _cell(row: Row, key: str, form: str) -> str:
    # the peak before memory ran out is not what the run needs
    hidden = key == "memory/peak_gib" and row["status"] == "oom"
    hidden = hidden or (key.startswith("val/") and is_stale(row))
    return "-" if hidden or row.get(key) is None else form.format(row[key])


def is_stale(row: Row) -> bool:
    """Whether a run made steps after its last evaluation, so that it is not their result."""
    evaluated, done = row.get("evaluated_step"), row.get("steps_done")
    return isinstance(evaluated, int) and isinstance(done, int) and evaluated < done


def when(row: Row) -> str:
    return "" if row.get("first_bad_step") is None else f" at step {row['first_bad_step']}"


def remark(row: Row) -> str:
    """Why a run ended early, what was left out, and what a resume changed, in one line; else ""."""
    found = row.get("diagnosis") or row.get("oom") or {}
    reason = str(found.get("message") or row.get("error") or "")
    left_out = [f"without {key}: {why}" for key, why in (row.get("left_out") or {}).items()]
    parts = [reason.strip().split("\n")[0], *left_out, changes_in_words(row)]
    return "; ".join(filter(None, parts))


def _run_dirs(folder: Path) -> Iterator[Path]:
    # a job that failed at once left only its line in the index
    indexed = _index(folder.parent).get(folder.name, {})
    if any((folder / name).is_file() for name in RUN_FILES) or "dir" in indexed:
        yield folder
        return
    below = [
        path
        for path in folder.iterdir()
        if path.is_dir() and not path.name.startswith(".") and path.name not in OTHER_FOLDERS
    ]
    for path in sorted(below, key=lambda path: in_order(path.name)):
        yield from _run_dirs(path)


def in_order(name: str) -> list[int | str]:
    """A key that sorts block_kv=16 before block_kv=128."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _index(folder: Path) -> dict[str, Row]:
    """The lines of a sweep's index.jsonl by the name of the run's folder.

    A job that has not reported its end has only what was planned: its settings, not its status.
    """
    rows = index_rows(folder)
    ended = {Path(row["dir"]).name: row for row in rows if isinstance(row.get("dir"), str)}
    return {str(row.get("job")): as_planned(row) for row in rows} | ended


def index_rows(folder: Path) -> list[Row]:
    if not (folder / INDEX).is_file():
        return []
    return list(parse_rows((folder / INDEX).read_text(errors="replace").splitlines()))


def _write_index(folder: Path, rows: list[Row]) -> None:
    write_file(folder / INDEX, "".join(json.dumps(strict(row), default=str) + "\n" for row in rows))


def job_names(run_dir: Path, summary: Row, config: RunConfig) -> Row:
    """What a logger is told of this job, besides its metrics: names, folder, tags and settings.

    Among the settings, `variant` is the run's name without its sizes. Runs with the same `curve`
    differ only in their seed; a chart shows their mean as one line.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    job, sweep = HydraConfig.get(), run_dir.parent
    # a job that is resumed alone, or runs later, still belongs to its sweep
    in_sweep = job.mode == RunMode.MULTIRUN or (sweep / INDEX).is_file()
    rows = {str(row.get("job")): row for row in index_rows(sweep)}
    names = name_run(summary | {"steps_done": None})  # with the switch that is still to come
    if run_dir.name in rows:
        names = dict(zip(rows, name_runs(list(rows.values())), strict=True))[run_dir.name]
    left_out = (f"{key}: {why}" for key, why in (summary.get("left_out") or {}).items())
    chosen = config.attention
    own = (chosen.name, chosen.switch_to, config.model.name, config.data.source)
    return {
        "name": names.run,
        "group": group_name(sweep, job.runtime.choices.get("experiment")) if in_sweep else None,
        "wandb_dir": sweep if in_sweep else run_dir,
        # wandb takes no tag of more than 64 characters
        "tags": [tag[:64] for tag in (*filter(None, own), f"seq{config.seq_len}")],
        "run_config": asdict(config)
        | {"variant": names.variant, "curve": f"{names.variant} seq_len={config.seq_len}"}
        | {"left_out": "; ".join(left_out)},
        "resume": config.resume is not None,
    }


def group_name(sweep: Path, experiment: str | None) -> str:
    """2026-11-22_21-09-10 break_it: when a sweep began, its folder's own name, and its recipe."""
    stamp = f"{sweep.parent.name}_{sweep.name}"
    if not re.fullmatch(r"[\d-]{10}_[\d-]{8}", stamp):
        # the lock is as old as the sweep
        began = time.localtime((sweep / LOCK).stat().st_mtime)
        stamp = f"{time.strftime('%Y-%m-%d_%H-%M-%S', began)} {sweep.name}"
    return f"{stamp} {experiment or ''}".strip()
