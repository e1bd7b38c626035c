"""Measure recall by length: up to which length and distance a trained run finds its answer.

    python -m scripts.recall multirun/2026-01-31/12-00-00 lengths=64,128,256,512

This is for runs on data=last_write, recall or needle. Each run's checkpoint answers held-out
questions of its task, newly drawn for each length, with its own attention. The arguments are runs,
sweeps or folders of either, and

    lengths    tokens of a sequence (64,128,256,512)
    sequences  held-out sequences of each length (as many as the run itself: its eval_sequences)
    device     auto, cpu or cuda (auto)
    out        the JSON file (recall.json in the folder of the runs)

It prints the accuracy of each variant and length, and the first length at which less than half is
right. Below is the accuracy at the longest length, by the distance between question and answer. The
JSON file gets the settings of the runs, and for each run and length a row with the correct answers
by distance. Runs that failed, ran out of memory or never ended are left out, with a line each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from config import SYNTHETIC_SOURCES, RunConfig
from data import build_data
from data.interface import to_batch
from data.synthetic import SyntheticData
from scripts.arguments import Count, Device, command, default
from scripts.cross_eval import Checkpoint, common_folder, load_checkpoints
from scripts.tables import Cell, Row, by, mean_and_deviation, table
from training.loop.device import pick_device
from training.loop.trained import Trained, load_trained
from training.record.environment import measured_on
from training.record.files import check_writable, write_json
from training.record.memory import release_memory
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
    device = pick_device(options.device)
    checkpoints = load_checkpoints(options.paths)
    out = options.out or common_folder(options.paths) / "recall.json"
    check_writable(out)
    lengths = sorted(set(options.lengths))
    # check all runs before the first one answers
    configs = [[config_at(each, length) for length in lengths] for each in checkpoints]
    rows = []
    for checkpoint, at_lengths in zip(checkpoints, configs, strict=True):
        print(checkpoint.folder, flush=True)
        for row in measure(checkpoint, at_lengths, options.sequences, device):
            rows.append({"variant": checkpoint.variant} | row)
        release_memory(device)
    runs = [
        {key: each.summary.get(key) for key in ("variant", "seed", "data", "overrides")}
        for each in checkpoints
    ]
    write_json(out, {"environment": measured_on(device), "runs": runs, "rows": rows})
    print(printable(f"{in_text(rows)}\n\n{distances_in_text(rows)}\n{out}"))


def measure(
    checkpoint: Checkpoint,
    configs: Sequence[RunConfig],
    sequences: int | None,
    device: torch.device,
) -> Iterator[Row]:
    """One row for each of `configs`, which have one length each."""
    own = checkpoint.config
    data = [build_data(each.data, each.tokenizer, seq_len=each.seq_len, seed=0) for each in configs]
    trained = load_trained(checkpoint.folder, replace(own, device=device.type), data[0].vocab_size)
    for config, task in zip(configs, data, strict=True):
        # as many tokens per pass as in training
        size = max(1, own.batch_size * own.seq_len // config.seq_len)
        yield {
            "attention": trained.model.backend.name,
            "data": own.data.source,
            "trained_at": own.seq_len,
            "seed": own.seed,
            "step": trained.step,
            "length": config.seq_len,
        } | ask(trained, task, sequences=sequences or own.eval_sequences, batch_size=size)


def config_at(checkpoint: Checkpoint, length: int) -> RunConfig:
    """The settings of a run with sequences of another length. Raises ValueError if its model or
    task does not allow it.
    """
    config, model = checkpoint.config, checkpoint.config.model
    if config.data.source not in SYNTHETIC_SOURCES:
        raise ValueError(
            f"{checkpoint.folder} was trained on data={config.data.source}, which asks nothing; "
            f"train on one of: {', '.join(SYNTHETIC_SOURCES)}"
        )
    if model.positions == "learned" and length > model.max_seq_len:
        raise ValueError(
            f"{checkpoint.folder} has learned positions for {model.max_seq_len} tokens, and "
            f"lengths={length} needs more: leave it out, or train with model.positions=rope or "
            "alibi"
        )
    longer = replace(model, max_seq_len=max(model.max_seq_len, length))
    # another length need not divide the training's tokens_per_step
    return replace(config, model=longer, seq_len=length, tokens_per_step=None)


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
    by_length = by(sorted(rows, key=itemgetter("length")), "length")
    for length, found in by_length.items():
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
