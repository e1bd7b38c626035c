"""Measure recall by length: up to which length a trained run finds its answer.

    python -m scripts.recall multirun/2026-01-31/12-00-00 lengths=64,128,256,512

This is for runs on data=last_write, recall or needle. Each run's checkpoint answers held-out
questions of its task, newly drawn for each length, with its own attention. The arguments are runs,
sweeps or folders of either, and

    lengths    tokens of a sequence (64,128,256,512)
    sequences  held-out sequences of each length (as many as the run itself: its eval_sequences)
    dtype      of the matrix products: fp32, bf16, fp16 or auto, the run's own (auto)
    device     auto, cpu or cuda (auto)
    out        the JSON file (recall.json in the first folder)

It prints the accuracy of each variant and length, and the first length at which less than half is
right. The JSON file gets a row for each run and length. Runs that failed, ran out of memory or
never ended, or that these lengths do not fit, are left out, with a line each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from config import SYNTHETIC_SOURCES, RunConfig
from data.interface import TrainingData
from data.synthetic import SyntheticData
from scripts.arguments import Count, command, default
from scripts.cross_eval import Evaluation, evaluate_runs, trained_runs
from scripts.tables import Row, by, spread, table
from training.loop.evaluate import evaluate_under
from training.loop.trained import Trained


@dataclass
class Options(Evaluation):
    lengths: list[Count] = default(64, 128, 256, 512)


@command
def main(options: Options) -> None:
    evaluate = partial(ask, options=options)
    evaluate_runs(options, trained_runs(options), evaluate, "recall.json", in_text)


def ask(
    config: RunConfig, data: TrainingData, trained: Trained, *, options: Options
) -> Iterator[Row]:
    """One row for each length. Raises ValueError if the run's model or task does not allow one."""
    if config.data.source not in SYNTHETIC_SOURCES:
        tasks = ", ".join(SYNTHETIC_SOURCES)
        raise ValueError(f"data={config.data.source} asks nothing; train on one of: {tasks}")
    for length in sorted(set(options.lengths)):
        config.data.check_length(length)
        # the held-out questions do not depend on the seed
        task = SyntheticData(config.data, seq_len=length, seed=0)
        _, accuracy = evaluate_under(
            trained.model,
            trained.model.backend,
            *task.val_batch(options.sequences or config.eval_sequences),
            # as many tokens per pass as in training
            batch_size=max(1, config.batch_size * config.seq_len // length),
            autocast=trained.autocast,
            accuracy=True,
        )
        yield {"data": task.fingerprint, "length": length, "accuracy": accuracy}


def in_text(rows: Sequence[Row]) -> str:
    """The accuracy by length, and the first length with less than half right."""
    lengths = sorted({row["length"] for row in rows})
    columns = {str(length): spread(str(length), "{:.1%}") for length in lengths}
    rows = [row | {str(row["length"]): row["accuracy"]} for row in rows]
    return table("accuracy at", by(rows, "variant"), columns | {"below one half at": lost_at})


def lost_at(rows: Sequence[Row]) -> str:
    """The first length at which the mean over seeds is below one half."""
    for length, own in sorted(by(rows, "length").items()):
        if fmean(row["accuracy"] for row in own) < 0.5:
            return str(length)
    return "none of them"


if __name__ == "__main__":
    main()
