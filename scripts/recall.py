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
JSON file gets a row for each run and length, with the accuracy by distance. Runs that
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
from scripts.tables import Cell, Row, by, spread, table, values
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
    config = run.config
    if config.data.source not in SYNTHETIC_SOURCES:
        tasks = ", ".join(SYNTHETIC_SOURCES)
        raise ValueError(f"data={config.data.source} asks nothing; train on one of: {tasks}")
    config.data.check_length(lengths[0])
    # the held-out questions do not depend on the seed
    tasks = [SyntheticData(config.data, seq_len=length, seed=0) for length in lengths]
    trained = load_trained(run.folder, config, tasks[0].vocab_size)
    for length, task in zip(lengths, tasks, strict=True):
        # as many tokens per pass as in training
        size = max(1, config.batch_size * config.seq_len // length)
        yield {
            "data": task.fingerprint,
            "step": trained.step,
            "length": length,
        } | ask(trained, task, sequences=sequences or config.eval_sequences, batch_size=size)


@torch.no_grad()
def ask(trained: Trained, data: SyntheticData, *, sequences: int, batch_size: int) -> Row:
    """The accuracy over all held-out questions, and that by the distance between question and
    answer in doublings: "4" has those of 4 to 7.
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
    return {
        "questions": len(right),
        "accuracy": right.mean().item(),
        "by_distance": {
            str(2**each): right[doublings == each].mean().item()
            for each in np.unique(doublings).tolist()
        },
    }


def in_text(rows: Sequence[Row]) -> str:
    """The accuracy by length, and the first length at which its mean over seeds is below one
    half.
    """
    lengths = sorted({row["length"] for row in rows})
    columns: dict[str, Cell] = {str(length): spread(str(length), "{:.1%}") for length in lengths}
    columns["below one half at"] = partial(lost_at, lengths)
    rows = [row | {str(row["length"]): row["accuracy"]} for row in rows]
    return table("accuracy at", by(rows, "variant"), columns)


def lost_at(lengths: Sequence[int], rows: Sequence[Row]) -> str:
    means = {length: fmean(values(rows, str(length))) for length in lengths}
    return next((str(length) for length, mean in means.items() if mean < 0.5), "none of them")


def distances_in_text(rows: Sequence[Row]) -> str:
    """The accuracy at the longest length, by the distance between question and answer."""
    longest = max(row["length"] for row in rows)
    rows = [row | row["by_distance"] for row in rows if row["length"] == longest]
    distances = sorted({key for row in rows for key in row["by_distance"]}, key=int)
    columns = {distance: spread(distance, "{:.1%}") for distance in distances}
    return table(f"at {longest}, from this distance on", by(rows, "variant"), columns)


if __name__ == "__main__":
    main()
