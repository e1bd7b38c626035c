"""Measure recall by length: up to which length and distance a trained run finds its answer.

    python -m scripts.recall multirun/2026-01-31_12-00-00 lengths=64,128,256,512

This is for runs on data=last_write, recall or needle. Each run's checkpoint answers held-out
questions of its task, newly drawn for each length, with its own attention. The arguments are runs,
sweeps or folders of either, and

    lengths    tokens of a sequence (64,128,256,512)
    sequences  held-out sequences of each length (as many as the run itself: its eval_sequences)
    device     auto, cpu or cuda (auto)
    out        the JSON file (recall.json in the folder of the runs)

It prints the accuracy of each variant and length, and the first length at which less than half is
right. The JSON file gets the settings of the runs, and for each run and length a row with the
correct answers by distance between question and answer. The figures beside it have a light and a
dark version. Runs that failed, ran out of memory or never ended are left out, with a line each.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from config import SYNTHETIC_SOURCES, RunConfig
from data import build_data
from data.interface import to_batch
from data.synthetic import SyntheticData
from scripts.arguments import Count, Device, command, default
from scripts.cross_eval import Checkpoint, load_checkpoints
from scripts.drawing import for_both_papers, new_figure, save_figure
from scripts.tables import Row, by, mean_and_deviation, text_table
from training.loop.device import pick_device
from training.loop.trained import Trained, load_trained
from training.record.environment import measured_on
from training.record.files import check_writable, write_json
from training.record.memory import release_memory
from training.record.palette import INK, variant_colors


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
    base = Path(os.path.commonpath([folder.resolve() for folder in options.paths]))
    out = options.out or base / "recall.json"
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
    print(in_text(rows))
    draw(rows, picture := out.with_suffix(".png"))
    for_both_papers(picture)
    print(f"{out}, {picture.name} and {out.stem}_dark.png")


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


def accuracies(rows: Sequence[Row]) -> dict[int, list[float]]:
    """The accuracy of each seed, by length."""
    by_length = by(sorted(rows, key=itemgetter("length")), "length")
    return {length: [row["accuracy"] for row in own] for length, own in by_length.items()}


def lost_at(rows: Sequence[Row]) -> int | None:
    """The first length at which the mean accuracy over seeds is below one half."""
    found = accuracies(rows).items()
    return next((length for length, values in found if fmean(values) < 0.5), None)


def in_text(rows: Sequence[Row]) -> str:
    lengths = sorted({row["length"] for row in rows})
    lines = [["accuracy at", *map(str, lengths), "below one half at"]]
    for name, own in by(rows, "variant").items():
        by_length = accuracies(own)
        cells = [mean_and_deviation(by_length.get(x, []), "{:.1%}") for x in lengths]
        lines.append([name, *cells, str(lost_at(own) or "none of them")])
    return text_table(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw accuracy against length, and at the longest length against the distance of the answer.
    Lines are means over seeds, dots are single seeds.
    """
    longest = max(row["length"] for row in rows)
    by_variant = by(rows, "variant")
    colors = variant_colors({name: own[0]["attention"] for name, own in by_variant.items()})
    figure, (by_length, by_distance) = new_figure(1, 2, size=(10, 4), sharey=True)
    for name, own in by_variant.items():
        plot(by_length, accuracies(own), color=colors[name], label=name)
        distances: dict[int, list[float]] = {}
        for row in own:
            for doubling, (right, asked) in enumerate(zip(row["right"], row["asked"], strict=True)):
                if asked and row["length"] == longest:
                    distances.setdefault(2**doubling, []).append(right / asked)
        plot(by_distance, dict(sorted(distances.items())), color=colors[name])
    trained_at = sorted({row["trained_at"] for row in rows})
    data = ", ".join(sorted({row["data"] for row in rows}))
    by_length.set(title=f"{data}, trained at {', '.join(map(str, trained_at))} tokens")
    by_length.set(xlabel="tokens of a sequence", ylabel="questions answered rightly")
    by_distance.set(
        title=f"at {longest:,} tokens", xlabel="tokens from answer to question, at least"
    )
    for axes in (by_length, by_distance):
        axes.axhline(0.5, color=INK, linestyle=":", linewidth=0.8)
        axes.set(xscale="log", ylim=(-0.03, 1.03))
        ticks = sorted({round(x) for line in axes.lines[:-1] for x in line.get_xdata()})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    by_length.legend(fontsize=8)
    save_figure(figure, path, dpi=150)


def plot(axes: Any, values: dict[int, list[float]], **style: Any) -> None:
    axes.plot(list(values), list(map(fmean, values.values())), **style)
    for x, each in values.items():
        axes.plot([x] * len(each), each, "o", color=style["color"], markersize=4, alpha=0.6)


if __name__ == "__main__":
    main()
