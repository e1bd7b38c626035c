"""Evaluate trained weights under every attention: the matrix trained-under x evaluated-under.

    python -m scripts.cross_eval multirun/2026-01-31/12-00-00

A broken attention can have a loss curve as good as exact attention's, but weights that are useless
under any other attention. This command shows it. It evaluates each run's checkpoint under exact
attention and under every attention that some run was trained with. The arguments are runs, sweeps
or folders of either, and

    under      judge by these instead: sdpa,no_rescale:block_kv=16,pkg.module:BACKEND
    sequences  held-out sequences to evaluate on (as many as the run itself: its eval_sequences)
    dtype      of the matrix products: fp32, bf16, fp16 or auto, the run's own (auto)
    device     auto, cpu or cuda (auto)
    out        the JSON file (cross_eval.json in the first folder)

It prints the means over seeds as a matrix. The JSON file gets a row for each run and judge. Runs
that failed, ran out of memory or never ended are left out, with a line each.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from attention import Backend, dtype_name
from attention.look.blame import is_foreign, with_place
from config import SYNTHETIC_SOURCES, RunConfig
from data.interface import Batch, TrainingData
from scripts.arguments import Count, Device, Dtype, check_out, command, default, parse_backend
from scripts.runs import runs_below
from scripts.tables import Row, by, spread, table
from training.loop.device import pick_device
from training.loop.evaluate import evaluate_under, exact_attention
from training.loop.schedule import chosen_attention, needed_features
from training.loop.trained import Trained, load_trained, read_run_config, trained_data
from training.record.environment import measured_on
from training.record.files import read_meta, write_json
from training.record.memory import is_out_of_memory, release_memory
from training.record.names import attention_name, name_runs
from training.record.runs import remark
from training.record.text_table import first_line, printable

# the weights of a diverged run are those before its bad step
EVALUATED = ("completed", "diverged", "interrupted")
FORMS = {"loss": "{:.3f}", "accuracy": "{:.1%}"}


@dataclass
class Evaluation:
    """What commands that evaluate trained runs have in common."""

    paths: list[Path]
    sequences: Count | None = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    out: Path | None = None  # else a file in the first folder


@dataclass
class Options(Evaluation):
    under: list[str] = default()


class TrainedRun(NamedTuple):
    """A run whose weights can be loaded."""

    folder: Path
    config: RunConfig  # with the device and the dtype to evaluate on
    status: str
    variant: str  # with its seq_len, if the runs differ in it


Evaluate = Callable[[RunConfig, TrainingData, Trained], Iterable[Row]]


@command
def main(options: Options) -> None:
    runs = trained_runs(options)
    # one that is named twice would count as two seeds
    asked = {named(each): each for each in map(parse_backend, options.under)}
    judges = [*asked.values()] or usual_judges(runs)
    evaluate = partial(judge, judges=judges, sequences=options.sequences)
    evaluate_runs(options, runs, evaluate, "cross_eval.json", in_text)


def trained_runs(options: Evaluation) -> list[TrainedRun]:
    """Every run below the folders whose weights can be loaded; the others are left out with a line
    each. Raises ValueError if there is none.
    """
    device = pick_device(options.device).type
    configs, summaries, why = [], [], "there is none"
    for summary in runs_below(options.paths).values():
        folder = Path(summary["dir"])
        try:
            if summary["status"] not in EVALUATED:
                raise ValueError(f"{summary['status']}: {remark(summary)}".rstrip(": "))
            config = read_run_config(folder)
            chosen_attention(config)  # raises ValueError for one that is gone
            # the weights are named by their own checkpoint
            summaries.append(summary | {"starts": read_meta(folder)["starts"]})
            dtype = config.dtype if options.dtype == "auto" else options.dtype
            configs.append(replace(config, device=device, dtype=dtype))
        except (ValueError, OSError) as error:
            why = leave_out(folder, error)
    if not configs:
        paths = ", ".join(map(str, options.paths))
        raise ValueError(f"no run below {paths} can be evaluated: {why}")
    runs, lengths = [], {config.seq_len for config in configs}
    for config, summary, name in zip(configs, summaries, name_runs(summaries), strict=True):
        length = f" seq_len={config.seq_len}" if len(lengths) > 1 else ""
        folder = Path(summary["dir"])
        runs.append(TrainedRun(folder, config, summary["status"], name.variant + length))
    return runs


def evaluate_runs(
    options: Evaluation,
    runs: Sequence[TrainedRun],
    evaluate: Evaluate,
    name: str,
    in_text: Callable[[list[Row]], str],
) -> None:
    """Write the rows of every run to the JSON file, which is called `name` if the user names none,
    and print them. A run for which `evaluate` raises ValueError, OSError or ArithmeticError is left
    out with a line. Raises ValueError, and writes nothing, if that leaves none.
    """
    out = options.out or options.paths[0] / name
    check_out(out)
    rows, why, device = [], "", runs[0].config.device
    for number, run in enumerate(runs, 1):
        print(printable(f"{number} of {len(runs)}: {run.folder} ({run.status})"), flush=True)
        try:
            rows += evaluated(run, evaluate)
        # damaged weights, a missing corpus, or logits that are not finite
        except (ValueError, OSError, ArithmeticError) as error:
            why = leave_out(run.folder, error)
        release_memory(device)
    if not rows:
        raise ValueError(f"no run could be evaluated, and nothing is written: {why}")
    write_json(out, {"environment": measured_on(device), "rows": rows})
    print(printable(f"{in_text(rows)}\n{out}"))


def evaluated(run: TrainedRun, evaluate: Evaluate) -> list[Row]:
    """The rows of one run, whose model is gone from memory afterwards."""
    config, data = run.config, trained_data(run.folder, run.config)
    trained = load_trained(run.folder, config)
    common = {
        "run": str(run.folder),
        "variant": run.variant,
        "run_status": run.status,
        "seed": config.seed,
        "seq_len": config.seq_len,
        "step": trained.step,
        "dtype": dtype_name(trained.dtype),
        "data": data.fingerprint,
    }
    return [common | row for row in evaluate(config, data, trained)]


def leave_out(folder: Path, error: Exception) -> str:
    """Say why a run is left out; returns it in one line."""
    why = first_line(error)
    print(printable(f"left out: {folder}: {why}"), file=sys.stderr)
    return why


def usual_judges(runs: Iterable[TrainedRun]) -> list[Backend]:
    """Exact attention, and every attention that a run was trained with; each once, and those that
    are not exact last.
    """
    judges: dict[str, Backend] = {}
    for config in (run.config for run in runs):
        shape = config.model.head_dim, torch.device(config.device), needed_features(config)
        for backend in (exact_attention(*shape), *chosen_attention(config).values()):
            judges.setdefault(named(backend), backend)
    return sorted(judges.values(), key=lambda backend: not backend.exact)


def named(backend: Backend) -> str:
    return attention_name(backend.name, backend.options)


def judge(
    config: RunConfig,
    data: TrainingData,
    trained: Trained,
    *,
    judges: Iterable[Backend],
    sequences: int | None,
) -> list[Row]:
    """One row per judge. Raises ValueError if they all refuse the run."""
    count = sequences or config.eval_sequences
    common = {
        "trained_under": named(trained.model.backend),
        "sequences": count,
        "metric": "loss" if data.tokenizer else "accuracy",
    }
    batch = data.val_batch(count)
    rows = [
        common | {"evaluated_under": named(each)} | outcome(trained, each, batch, config)
        for each in judges
    ]
    if all(row["status"].startswith("refused") for row in rows):
        why = (f"{row['evaluated_under']} {row['status']}" for row in rows)
        raise ValueError("; ".join(why))
    return rows


def outcome(trained: Trained, backend: Backend, batch: Batch, config: RunConfig) -> Row:
    """loss, accuracy and status of one judge. One that cannot take this model has the status
    "refused" with the reason.
    """
    nothing = {"loss": None, "accuracy": None}
    try:
        loss, accuracy = evaluate_under(
            trained.model,
            backend,
            *batch,
            batch_size=config.batch_size,
            autocast=trained.autocast,
            accuracy=config.data.source in SYNTHETIC_SOURCES,
        )
    except Exception as error:
        if is_foreign(error):  # the user looks for its line
            return nothing | {"status": f"refused: {with_place(error)}"}
        if isinstance(error, ValueError) or is_out_of_memory(error):
            return nothing | {"status": f"refused: {first_line(error)}"}
        raise
    if not math.isfinite(loss):
        return nothing | {"status": "non-finite"}
    return {"loss": loss, "accuracy": accuracy, "status": "ok"}


def in_text(rows: Sequence[Row]) -> str:
    """A matrix of losses for runs on text, and one of accuracies for runs on a synthetic task, with
    a column per judge. Then what the means leave out.
    """
    blocks = []
    for metric, own in by(rows, "metric").items():
        judges = dict.fromkeys(row["evaluated_under"] for row in own)
        columns = {judge: spread(judge, FORMS[metric]) for judge in judges}
        judged = [row for row in own if row["status"] == "ok"]
        lines = by((row | {row["evaluated_under"]: row[metric]} for row in judged), "variant")
        blocks.append(table(f"held-out {metric}: trained under", lines, columns))
    missing = Counter(
        f"{row['variant']} under {row['evaluated_under']}: {row['status']}"
        for row in rows
        if row["status"] != "ok"
    )
    remarks = "\n".join(f"{where} (runs: {count})" for where, count in missing.items())
    return "\n\n".join(filter(None, [*blocks, remarks]))


if __name__ == "__main__":
    main()
