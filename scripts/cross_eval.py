"""Evaluate trained weights under every attention: the matrix trained-under x evaluated-under.

    python -m scripts.cross_eval multirun/2026-01-31/12-00-00

A broken attention can have a loss curve as good as exact attention's, but weights that are useless
under any other attention. This command shows it. It evaluates each run's checkpoint under exact
attention (sdpa) and under every attention that some run was trained with. If no_rescale is among
them, it also uses half and double each of its tile sizes. The arguments are runs, sweeps or folders
of either, and

    under      judge by these instead: sdpa,no_rescale:block_kv=16,pkg.module:BACKEND
    sequences  held-out sequences to evaluate on (as many as the run itself: its eval_sequences)
    device     auto, cpu or cuda (auto)
    out        the JSON file (cross_eval.json in the folder of the runs)

It prints the means over seeds as a matrix, and writes every figure to the JSON file. Runs that
failed, ran out of memory or never ended are left out, with a line each. For a cross_eval.json as
argument it only prints.
"""

import math
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from attention import BACKENDS, Backend, dtype_name, get_backend
from attention.look.blame import is_foreign, with_place
from config import RunConfig
from data import Batch
from scripts.arguments import Count, Device, command, parse_backend
from scripts.runs import runs_below
from scripts.tables import Row, by, grouped, mean_and_deviation, table
from training.loop.device import pick_device
from training.loop.evaluate import evaluate_under, exact_attention
from training.loop.schedule import chosen_attention, needed_features
from training.loop.trained import Trained, data_of, load_trained, read_run_config
from training.record.environment import environment
from training.record.files import check_writable, read_mapping, read_meta, write_json
from training.record.memory import is_out_of_memory, release_memory
from training.record.names import attention_name, differing_settings, name_runs
from training.record.runs import remark
from training.record.text_table import first_line, printable

TILES = ("block_q", "block_kv")
# the weights of a diverged run are those before its bad step
JUDGED = ("completed", "diverged", "interrupted")
FORMS = {"loss": "{:.3f}", "accuracy": "{:.1%}"}


@dataclass
class Options:
    paths: list[Path]
    under: list[str] | None = None
    sequences: Count | None = None
    device: Device = "auto"
    out: Path | None = None


class Checkpoint(NamedTuple):
    """A run whose weights can be loaded."""

    folder: Path
    config: RunConfig
    summary: Row
    variant: str  # with its seq_len, if the runs differ in it
    backends: dict[int, Backend]  # attention by the step after which it was used


@command
def main(options: Options) -> None:
    written_before = len(options.paths) == 1 and options.paths[0].is_file()
    out = options.paths[0] if written_before else measure(options)
    print(printable(in_text(read_rows(out))))
    print(out)


def measure(options: Options) -> Path:
    """Evaluate and write the JSON file; returns its path."""
    device = pick_device(options.device)
    checkpoints = load_checkpoints(options.paths)
    base = common_folder(options.paths)
    out = options.out or base / "cross_eval.json"
    if options.under:
        judges = [parse_judge(text) for text in options.under]
    else:
        judges = default_judges(checkpoints, device)
    check_writable(out)
    rows, fingerprints = [], {}
    for number, checkpoint in enumerate(checkpoints, 1):
        print(f"{number} of {len(checkpoints)}: {checkpoint.folder}", flush=True)
        try:
            new_rows, fingerprint = judge(checkpoint, judges, base, options.sequences, device)
        except (ValueError, OSError) as error:  # damaged weights, or a missing corpus
            leave_out(checkpoint.folder, error)
            continue
        rows += new_rows
        fingerprints[fingerprint] = None
        release_memory(device)
    if not rows:
        raise ValueError("no checkpoint could be evaluated")
    # do not overwrite a file that has figures with one that has none
    if all(row["status"].startswith("refused") for row in rows):
        raise ValueError(f"nothing could be evaluated, nothing is written: {reasons(rows)[0]}")
    where = environment(" ".join(fingerprints), device)
    write_json(out, {"environment": where, "rows": rows})
    return out


def common_folder(folders: Sequence[Path]) -> Path:
    """The folder that has all of these, where the results of a command go."""
    return Path(os.path.commonpath([folder.resolve() for folder in folders]))


def load_checkpoints(folders: Sequence[Path]) -> list[Checkpoint]:
    """Every run below the folders whose weights can be loaded; the others are left out with a line
    each. Raises ValueError if there is none.
    """
    summaries = list(runs_below(folders).values())
    for summary in summaries:  # the weights are named by their own checkpoint
        with suppress(ValueError, OSError):
            starts = read_meta(Path(summary["dir"])).get("starts")
            summary["starts"] = starts or summary.get("starts")
    checkpoints = []
    settings = differing_settings(summaries)
    for summary, names, setting in zip(summaries, name_runs(summaries), settings, strict=True):
        folder, variant = Path(summary["dir"]), names.variant
        if "seq_len" in setting:
            variant += f" seq_len={setting['seq_len']}"
        try:
            checkpoints.append(load_checkpoint(folder, summary, variant))
        except (ValueError, OSError) as error:
            leave_out(folder, error)
    if not checkpoints:
        raise ValueError(f"no run with a checkpoint below {', '.join(map(str, folders))}")
    return checkpoints


def load_checkpoint(folder: Path, summary: Row, variant: str) -> Checkpoint:
    if summary["status"] not in JUDGED:
        why = ": ".join(filter(None, [summary["status"], remark(summary)]))
        raise ValueError(f"{why}; only runs that are {', '.join(JUDGED)} are evaluated")
    config = read_run_config(folder)
    return Checkpoint(folder, config, summary, variant, chosen_attention(config.attention))


def leave_out(folder: Path, error: Exception) -> None:
    print(printable(f"left out: {folder}: {first_line(error)}"), file=sys.stderr)


def parse_judge(text: str) -> Backend:
    try:
        return parse_backend(text)
    except ValueError as error:
        raise ValueError(f"under={text}: {error}") from error


def default_judges(checkpoints: Sequence[Checkpoint], device: torch.device) -> list[Backend]:
    """Exact attention, every attention that a run was trained under, and no_rescale at half and
    double its tiles; each once, the broken ones last and from small tiles to large.
    """
    shapes = {
        (each.config.model.head_dim, tuple(needed_features(each.config))) for each in checkpoints
    }
    exact = [exact_attention(head_dim, device, needed) for head_dim, needed in sorted(shapes)]
    used = [backend for checkpoint in checkpoints for backend in checkpoint.backends.values()]
    for backend in [backend for backend in used if backend.name == "no_rescale"]:
        tile = backend.options["block_kv"]
        used += [backend.configured(block_kv=size) for size in (tile // 2, 2 * tile) if size]
    used.sort(key=lambda each: (not each.exact, each.name, each.options.get("block_kv") or 0))
    unique: dict[str, Backend] = {}
    for backend in (*exact, *used):
        # another tile size changes the result only of a broken attention
        hidden = TILES if backend.exact else ()
        seen = {name: value for name, value in backend.options.items() if name not in hidden}
        unique.setdefault(attention_name(backend.name, seen), backend)
    return list(unique.values())


def described(backend: Backend) -> Row:
    return {"name": backend.name, "options": dict(backend.options)}


def judge(
    checkpoint: Checkpoint,
    judges: Iterable[Backend],
    base: Path,
    sequences: int | None,
    device: torch.device,
) -> tuple[list[Row], str]:
    """One row per judge, and the fingerprint of the data."""
    config = replace(checkpoint.config, device=device.type)
    data = data_of(config)
    trained = load_trained(checkpoint.folder, config, data.vocab_size, get_backend("sdpa"))
    (_, first), *later = checkpoint.backends.items()
    trained_under = described(first)
    for step, second in later:
        trained_under |= {"switch_at": step, "switch_to": described(second)}
    folder = checkpoint.folder.resolve()
    sequences = sequences or config.eval_sequences
    common = {
        "run": folder.name if folder == base else str(folder.relative_to(base)),
        "trained_under": trained_under,
        "variant": checkpoint.variant,
        "seed": config.seed,
        "step": trained.step,
        "trained": checkpoint.summary["status"],
        "dtype": dtype_name(trained.dtype),
        "sequences": sequences,
    }
    batch = data.val_batch(sequences)
    how = {"batch_size": config.batch_size, "accuracy": data.metric == "accuracy"}
    rows = [
        common | {"evaluated_under": described(each)} | outcome(trained, each, batch, **how)
        for each in judges
    ]
    return rows, data.fingerprint


def outcome(
    trained: Trained, backend: Backend, batch: Batch, *, batch_size: int, accuracy: bool
) -> Row:
    """loss, accuracy and status of one cell. A judge that cannot take this model gets the status
    "refused" with the reason.
    """
    nothing = {"loss": None, "accuracy": None}
    how = {"batch_size": batch_size, "accuracy": accuracy, "autocast": trained.autocast}
    try:
        loss, right = evaluate_under(trained.model, backend, *batch, **how)
    except Exception as error:
        return nothing | {"status": f"refused: {refusal(error)}"}
    if not math.isfinite(loss):
        return nothing | {"status": "non-finite"}
    return {"loss": loss, "accuracy": right, "status": "ok"}


def refusal(error: Exception) -> str:
    """Why a judge failed. Raises the error again if it is neither the judge nor the memory."""
    if is_out_of_memory(error):
        return "out of memory"
    if is_foreign(error):
        return with_place(error)
    if isinstance(error, ValueError):
        return str(error)
    raise error


def read_rows(path: Path) -> list[Row]:
    """The rows of a cross_eval.json. Raises ValueError for any other file."""
    rows = read_mapping(path).get("rows")
    needed = {"run", "variant", "trained_under", "evaluated_under", "status", "loss", "accuracy"}
    known = isinstance(rows, list) and [row for row in rows if isinstance(row, dict)]
    if not known or known != rows or not all(needed <= row.keys() for row in rows):
        raise ValueError(f"{path} is no cross_eval.json with rows in it")
    return rows


def in_text(rows: Sequence[Row]) -> str:
    """A matrix of losses for runs on text, and one of accuracies for runs on a synthetic task, with
    a column per judge. Then each reason why a judge refused.
    """
    # a run on a task has an exact judge, and so an accuracy
    scored = {row["run"] for row in rows if row["accuracy"] is not None}
    by_metric = grouped(rows, lambda row: "accuracy" if row["run"] in scored else "loss")
    blocks = []
    for metric, own in sorted(by_metric.items(), reverse=True):
        variants = by(own, "variant").items()
        lines = {f"{variant} ({count_of_runs(group)})": group for variant, group in variants}
        judges = dict.fromkeys(judge_of(row) for row in own)
        columns = {name: partial(cell, judge=name, metric=metric) for name in judges}
        head, *body = table(f"held-out {metric}: trained under", lines, columns).splitlines()
        blocks.append("\n".join([head, "-" * len(head), *body]))
    marked = ["* the attention of the training"] if any(map(is_own, rows)) else []
    return "\n\n".join([*blocks, *marked, *reasons(rows)])


def judge_of(row: Row) -> str:
    return attention_name(**row["evaluated_under"])


def cell(rows: Iterable[Row], judge: str, metric: str) -> str:
    """What the runs of one variant are worth under one judge: the mean of the finite results."""
    judged = [row for row in rows if judge_of(row) == judge]
    values = [row[metric] for row in judged if row["status"] == "ok"]
    others = [row["status"].partition(":")[0] for row in judged if row["status"] != "ok"]
    text = mean_and_deviation(values, FORMS[metric]) if values or not others else others[0]
    if values and others:
        text += f" ({len(others)} {others[0]})"
    return f"*{text}" if any(map(is_own, judged)) else text


def is_own(row: Row) -> bool:
    """Whether the judge is the attention of the training, the last one where it switched. Tile
    sizes do not matter for an exact one.
    """
    last = row["trained_under"].get("switch_to", row["trained_under"])
    judged = row["evaluated_under"]
    exact = judged["name"] in BACKENDS and BACKENDS[judged["name"]].exact
    return judged["name"] == last["name"] and (exact or judged["options"] == last["options"])


def count_of_runs(group: Sequence[Row]) -> str:
    """For example: 2 runs, 1 ended early: step 300"""
    steps = {row["run"]: row["step"] for row in group}
    early = {row["run"]: row["step"] for row in group if row["trained"] != "completed"}
    count = f"{len(steps)} run{'s' * (len(steps) > 1)}"
    if early:
        count += f", {len(early)} ended early: step {'/'.join(map(str, early.values()))}"
    return count


def reasons(rows: Iterable[Row]) -> list[str]:
    """The reasons why judges refused, each once."""
    refused = [row for row in rows if row["status"].startswith("refused")]
    return list(
        dict.fromkeys(f"{row['evaluated_under']['name']} {row['status']}" for row in refused)
    )


if __name__ == "__main__":
    main()
