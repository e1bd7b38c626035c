"""Measure recall by length: up to which length and distance a trained run finds its answer.

    python -m scripts.recall multirun/2026-01-31/12-00-00 lengths=64,128,256,512

This is for runs on data=last_write, recall or needle. Each run's checkpoint answers held-out
questions of its task, newly drawn for each length, with its own attention. The arguments are runs,
sweeps or folders of either, and

    lengths    tokens of a sequence (64,128,256,512)
    sequences  held-out sequences of each length (as many as the run itself: its eval_sequences)
    device     auto, cpu or cuda (auto)
    out        the JSON file (recall.json in the first folder)

It prints the accuracy of each variant and length, and the first length at which less than half is
right. Below is the accuracy at the longest length, by the distance between question and answer. The
JSON file gets a row for each run and length, with the correct answers by distance. Runs that
failed, ran out of memory or never ended, or that these lengths do not fit, are left out, with a
line each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from config import SYNTHETIC_SOURCES
from data.interface import to_batch
from data.synthetic import SyntheticData
from scripts.arguments import Count, Device, command, default
from scripts.cross_eval import TrainedRun, evaluate_runs, trained_runs
from scripts.tables import Cell, Row, by, mean_and_deviation, table
from training.loop.trained import Trained, load_trained
from training.record.text_table import printable


@dataclass
class Options:
    paths: list[Path]
    lengths: list[Count] = default(64, 128, 256, 512)
    sequences: Count | None = None
    device: Device = "auto"
    out: Path | None = None


@command
def main(options: Options) -> None:
    runs = trained_runs(options.paths, options.device)
    lengths = sorted(set(options.lengths))
    out = options.out or options.paths[0] / "recall.json"
    rows = evaluate_runs(runs, out, partial(ask_all, lengths=lengths, sequences=options.sequences))
    print(printable(f"{in_text(rows)}\n\n{distances_in_text(rows)}\n{out}"))


def ask_all(run: TrainedRun, lengths: Sequence[int], sequences: int | None) -> Iterator[Row]:
    """One row for each length. Raises ValueError if the run's model or task does not allow one."""
    config, model = run.config, run.config.model
    if config.data.source not in SYNTHETIC_SOURCES:
        tasks = ", ".join(SYNTHETIC_SOURCES)
        raise ValueError(f"data={config.data.source} asks nothing; train on one of: {tasks}")
    if model.positions == "learned" and lengths[-1] > model.max_seq_len:
        raise ValueError(
            f"lengths={lengths[-1]} is more than its learned positions for {model.max_seq_len} "
            "tokens; train with model.positions=rope or alibi"
        )
    config.data.check_length(lengths[0])
    # the held-out questions do not depend on the seed
    tasks = [SyntheticData(config.data, seq_len=length, seed=0) for length in lengths]
    trained = load_trained(run.folder, config, tasks[0].vocab_size)
    for length, task in zip(lengths, tasks, strict=True):
        # as many tokens per pass as in training
        size = max(1, config.batch_size * config.seq_len // length)
        yield {
            "attention": trained.model.backend.name,
            "data": task.fingerprint,
            "step": trained.step,
            "length": length,
        } | ask(trained, task, sequences=sequences or config.eval_sequences, batch_size=size)


@torch.no_grad()
def ask(trained: Trained, data: SyntheticData, *, sequences: int, batch_size: int) -> Row:
    """The number of held-out questions and of right answers, by distance between question and
    answer in doublings (1, 2 to 3, 4 to 7, ...), and the accuracy over all.
    """
    drawn, right = data.held_out(sequences), []
    model, device = trained.model.eval(), next(trained.model.parameters()).device
    inputs, targets = (x.split(batch_size) for x in to_batch(*drawn[:2]))
    with trained.autocast:
        for x, y in zip(inputs, targets, strict=True):
            right.append(model(x.to(device), None).logits.argmax(-1).cpu() == y)
    where = np.nonzero(drawn.sources >= 0)
    right = torch.cat(right).numpy()[where]
    doublings = np.log2(where[1] - drawn.sources[where]).astype(int)
    asked, answered = np.bincount(doublings), np.bincount(doublings, weights=right).astype(int)
    return {"accuracy": right.mean().item(), "asked": asked.tolist(), "right": answered.tolist()}


def in_text(rows: Sequence[Row]) -> str:
    """The accuracy by length, and the first length at which its mean over seeds is below one
    half.
    """
    lengths = sorted({row["length"] for row in rows})
    columns: dict[str, Cell] = {str(length): partial(at_length, length) for length in lengths}
    columns["below one half at"] = lost_at
    return table("accuracy at", by(rows, "variant"), columns)


def at_length(length: int, rows: Sequence[Row]) -> str:
    found = [row["accuracy"] for row in rows if row["length"] == length]
    return mean_and_deviation(found, "{:.1%}")


def lost_at(rows: Sequence[Row]) -> str:
    for length, found in sorted(by(rows, "length").items()):
        if fmean(row["accuracy"] for row in found) < 0.5:
            return str(length)
    return "none of them"


def distances_in_text(rows: Sequence[Row]) -> str:
    """The accuracy at the longest length, by the distance between question and answer."""
    longest = max(row["length"] for row in rows)
    rows = [row for row in rows if row["length"] == longest]
    doublings = range(max(len(row["asked"]) for row in rows))
    columns = {str(2**doubling): partial(at_distance, doubling) for doubling in doublings}
    return table(f"at {longest}, from this distance on", by(rows, "variant"), columns)


def at_distance(doubling: int, rows: Sequence[Row]) -> str:
    found = [row for row in rows if sum(row["asked"][doubling : doubling + 1])]
    shares = [row["right"][doubling] / row["asked"][doubling] for row in found]
    return mean_and_deviation(shares, "{:.1%}")


if __name__ == "__main__":
    main()
