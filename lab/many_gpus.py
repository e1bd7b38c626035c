"""How much faster ranks train than one GPU: train.py with torchrun and alone, in turns.

    python -m lab.many_gpus cases=context_131072 out=results/many_gpus_h100.json

Takes train.py's settings, which replace those of a case, and:

    cases   names in CASES, separated by commas (all)
    ranks   GPUs of a run with several (2)
    rounds  runs of each way (3), in turns: alone, then each way on ranks
    limit   seconds after which no further run begins (500)
    out     the JSON file to write; other cases in an existing file stay

"Alone" means a separate run on every GPU, at the same time. Ranks are compared with the slowest of
these runs, because the slowest GPU sets their pace. The speed is measured from outside, by the
times at which rows arrive in metrics.jsonl after compilation, so it includes metrics. The rows also
give the losses; those of two runs alone show the noise of one GPU. lab.steps_on_ranks measures only
the steps, and compares with PyTorch's own methods.
"""

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from lab.looking import QUIET
from lab.wall import by_arrival, timed_run
from scripts.arguments import Count, Json, command, default
from scripts.tables import Row
from training.device import pick_device
from training.environment import ROOT, measured_on
from training.files import read_metrics, write_json
from training.sweep import load_json


class Case(NamedTuple):
    """Settings to compare: `alone` on one GPU, and each of `ways` on ranks."""

    settings: str
    ways: dict[str, str]
    alone: str = ""


CONTEXT = {
    "heads": "parallel.context={ranks} parallel.how=heads",
    "ring": "parallel.context={ranks} parallel.how=ring",
}
PAIRS = {"pairs": "parallel.context=2 batch_size={pairs}"}  # two of several ranks share a sequence
CASES = {
    "data": Case(
        "seq_len=1024 steps=130 log_every=20",
        {"same tokens": "batch_size=32", "more tokens": "batch_size={sequences}"},
        alone="batch_size=32",
    ),
    "context_32768": Case("seq_len=32768 batch_size=1 steps=45 log_every=8", CONTEXT),
    "losses": Case(
        "model=small seq_len=2048 batch_size=4 steps=200 log_every=10",
        {"data": "", "heads": CONTEXT["heads"], "ring": CONTEXT["ring"]},
    ),
    "context_131072": Case("seq_len=131072 batch_size=1 steps=13 log_every=3", CONTEXT | PAIRS),
}


@dataclass
class Options:
    cases: list[Literal[tuple(CASES)]] = default(*CASES)
    ranks: Count = 2
    rounds: Count = 3
    limit: Count = 500
    out: Json = Json("many_gpus.json")
    overrides: list[str] = default()


class Jobs:
    """Runs of train.py that share options and a folder."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.options, self.folder, self.count = options, folder, 0

    def run(self, way: str, settings: str) -> list[Row]:
        """One run on ranks; or, alone, one on each GPU at the same time."""
        if way != "alone":
            ranks = ["-m", "torch.distributed.run", "--standalone"]
            ranks += [f"--nproc-per-node={self.options.ranks}"]
            return [self._run(settings, [*ranks, "train.py"])]
        places = [{"CUDA_VISIBLE_DEVICES": str(place)} for place in range(self.options.ranks)]
        with ThreadPoolExecutor(len(places)) as pool:
            runs = [pool.submit(self._run, settings, ["train.py"], **place) for place in places]
            return [each.result() for each in runs]

    def _run(self, settings: str, program: list[str], **variables: str) -> Row:
        self.count += 1
        run_dir = self.folder / str(self.count)
        ranks = self.options.ranks
        asked = settings.format(ranks=ranks, pairs=ranks // 2, sequences=32 * ranks).split()
        given = [*QUIET, *asked, *self.options.overrides]
        run = timed_run(ROOT, run_dir, given, program, **variables)
        losses = {row["step"]: row["train/loss"] for row in read_metrics(run_dir / "metrics.jsonl")}
        return {
            "tokens_per_sec": by_arrival(run),
            "step_tokens_per_sec": run.get("step_tokens_per_sec"),
            "memory/peak_gib": run.get("memory/peak_gib"),
            "seconds": run["seconds"],
            "losses": losses,
        }


def ways_of(case: Case, ranks: int) -> dict[str, str]:
    """Each way and its settings."""
    ways = {"alone": case.alone} | case.ways
    if ranks == 2:  # all ranks are one pair, so that "pairs" would be "heads" again
        ways.pop("pairs", None)
    return ways


def turns(options: Options) -> Iterator[tuple[str, str, str]]:
    """The runs, in order: case, way, and all of its settings."""
    for _ in range(options.rounds):
        for name in options.cases:
            for way, settings in ways_of(CASES[name], options.ranks).items():
                yield name, way, f"{CASES[name].settings} {settings}"


def compared(runs: dict[str, list[list[Row]]]) -> Row:
    """The speed of each way on ranks, divided by that of the slowest GPU alone, for each round."""
    slowest = [min(run["tokens_per_sec"] for run in each) for each in runs["alone"]]
    found = {}
    for way, rounds in runs.items():
        if way != "alone":
            of_rounds = zip(rounds, slowest, strict=False)
            found[way] = [run["tokens_per_sec"] / alone for (run,), alone in of_rounds]
    return found


@command
def main(options: Options) -> None:
    where, began = measured_on(pick_device("auto")), time.perf_counter()
    rows = load_json(options.out).get("cases", {})
    runs: dict[str, dict[str, list[list[Row]]]] = {
        name: defaultdict(list) for name in options.cases
    }
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(options, Path(folder))
        for name, way, settings in turns(options):
            if time.perf_counter() - began > options.limit:
                sys.exit(f"many_gpus: stopped after limit={options.limit} seconds")
            runs[name][way].append(jobs.run(way, settings))
            ratios = compared(runs[name])
            if way in ratios:
                print(f"{name}, {way}: {ratios[way][-1]:.3f} times one GPU", flush=True)
            ways = ways_of(CASES[name], options.ranks)
            asked = {"settings": CASES[name].settings, "ways": ways}
            rows[name] = asked | {"times_one_gpu": ratios, "runs": runs[name]}
            head = {"environment": where, "overrides": options.overrides, "ranks": options.ranks}
            write_json(options.out, head | {"cases": rows})


if __name__ == "__main__":
    main()
