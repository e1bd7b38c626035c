"""Measure the cost of metrics: each row needs the largest score of every layer and head.

    python -m lab.looking attention=triton model=gpt2 tokenizer.vocab_size=50304
    out=results/looking_h200.json

Takes train.py's settings, and:

    seq_len  lengths of a sequence, separated by commas (1024,8192,32768)
    tokens   tokens of a step (32768), in one pass
    segment  steps of a segment (100)
    pairs    segments with rows, and as many without (6)
    out      the JSON file to write

One run alternates between a segment with a row every log_every steps, and a segment with only the
row at its end that gives its time. The first of each kind compiles, and does not count.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any
from unittest.mock import patch

from config import Due, RunConfig
from lab.lengths import LengthOptions
from scripts.arguments import Count, Json, command
from scripts.tables import Row
from training.files import read_metrics
from training.run import run

QUIET = [
    "eval_every=0",
    "diagnose_every=0",
    "checkpoint_every=1000000",
    "sample_tokens=0",
    "logger=none",
]


@dataclass
class Options(LengthOptions):
    segment: Count = 100
    pairs: Annotated[int, 2] = 6
    out: Json = Json("looking.json")


def due_in_turns(segment: int) -> Any:
    """RunConfig.due with rows in every other segment, and a row at the end of each segment."""
    plain = RunConfig.due

    def due(config: RunConfig, step: int, **outcome: Any) -> Due:
        found = plain(config, step, **outcome)
        quiet = (step - 1) // segment % 2 == 1
        return found._replace(log=step % segment == 0 or (found.log and not quiet))

    return due


def speeds(rows: list[Row], segment: int) -> list[Row]:
    """Rows and tokens per second (wall clock) of each segment after the first two."""
    found = []
    ends = [row for row in rows if row["step"] % segment == 0]
    for begin, end in zip(ends, ends[1:], strict=False):
        inside = [row for row in rows if begin["step"] < row["step"] <= end["step"]]
        seconds = end["seconds"] - begin["seconds"]
        speed = (end["tokens"] - begin["tokens"]) / seconds
        found.append({"rows": len(inside), "tokens_per_sec": speed})
    return found[1:]


def ratios(segments: list[Row]) -> list[float]:
    """For each pair of segments, the speed with rows divided by the speed without."""
    pairs = zip(segments[::2], segments[1::2], strict=False)
    return [looking["tokens_per_sec"] / quiet["tokens_per_sec"] for looking, quiet in pairs]


@command
def main(options: Options) -> None:
    rows = []
    for seq_len in options.seq_len:
        steps = 2 * options.segment * (options.pairs + 1)
        size = [*options.shape(seq_len), f"steps={steps}"]
        with (
            tempfile.TemporaryDirectory() as folder,
            patch.object(RunConfig, "due", due_in_turns(options.segment)),
        ):
            run(*QUIET, *options.overrides, *size, f"hydra.run.dir={folder}/run")
            segments = speeds(read_metrics(Path(folder, "run", "metrics.jsonl")), options.segment)
        found = ratios(segments)
        row = {"seq_len": seq_len, "ratio": geometric_mean(found), "of_pairs": found}
        rows.append(row | {"segment": options.segment, "segments": segments})
        print(
            f"seq_len={seq_len}: with rows {row['ratio']:.3f} of the speed without "
            f"({min(found):.3f} to {max(found):.3f}, n={len(found)})"
        )
        options.write(rows)


if __name__ == "__main__":
    main()
