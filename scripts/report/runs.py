"""The runs of a report, as their files tell them: whole, broken off, or never begun."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.tables import Row
from training.files import read_metrics
from training.names import attention_steps, name_runs
from training.resume import load_yaml
from training.sweep import is_stale, load_json, read_sweep

MIN_POINTS = 2  # of a curve


def number(value: Any) -> float | None:
    """`value` where it is a number that training could have written, else None: a half-written or
    foreign file may hold anything.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # also false for NaN; nothing is computed beyond float32's range
    return value if is_number and abs(value) < 3.5e38 else None


def in_order(name: str) -> list[Any]:
    """A key that sorts block_kv=16 before block_kv=128."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


@dataclass(eq=False)
class Run:
    """One training run."""

    summary: Row
    metrics: list[Row] = field(default_factory=list)
    env: Row = field(default_factory=dict)
    place: str = ""  # its folder, relative to the folder reported on
    variant: str = ""  # what is compared; see training.names
    eval_sequences: int = 0  # held-out sequences that its losses are means over; 0: not known
    damage: str = ""  # what is missing of its files, or of what is in them
    name: str = ""  # the variant, seq_len and seed: no two runs of a report share one

    @property
    def status(self) -> str:
        return str(self.summary["status"])

    @property
    def is_defect(self) -> bool:
        return bool(self.summary.get("defect"))

    @property
    def claims_exact(self) -> bool:
        """Older runs do not say it; of these every one without a defect does."""
        return not self.is_defect and self.summary.get("exact") is not False

    @property
    def is_softmax(self) -> bool:
        """Whether it computes softmax attention, or is a defect of it."""
        return self.is_defect or self.claims_exact

    @property
    def judged_by(self) -> str:
        return "val/loss_exact" if self.is_softmax else "val/loss"

    @property
    def tokens(self) -> float:
        return self.figure("tokens") or 0

    @property
    def compares_by(self) -> tuple[Any, ...]:
        """Runs compare where this is equal, besides the seeds."""
        trained = self.tokens or self.figure("steps_done") or 0
        data = str(self.env.get("data_fingerprint"))
        return self.seq_len, trained, self.eval_sequences, data

    @property
    def seq_len(self) -> int:
        seq_len = self.figure("seq_len") or 0
        return int(seq_len) if 0 < seq_len < 2**53 else 0

    def figure(self, name: str) -> float | None:
        """A number of the summary, or None."""
        return number(self.summary.get(name))

    @property
    def peak_gib(self) -> float | None:
        """Peak memory of training; None for a run that ran out of it, whose peak is that of what
        came before.
        """
        return self.figure("memory/peak_gib") if self.status != "oom" else None

    @property
    def switches(self) -> set[float]:
        """Training tokens after which another attention took over."""
        points = [(number(row.get("step")) or 0, number(row.get("tokens"))) for row in self.metrics]
        first = set()
        for step, _ in attention_steps(self.summary)[1:]:
            first.add(next((tokens for at, tokens in points if at >= step), None))
        return first - {None}

    @cached_property
    def logged(self) -> list[str]:
        """The names of all metrics with enough values for a curve, in order of appearance."""
        names = dict.fromkeys(name for row in self.metrics for name in row)
        return [name for name in names if len(self.curve(name)) >= MIN_POINTS]

    def curve(self, metric: str) -> dict[float, float]:
        """Values by tokens. What was not finite is not in the file as a number, and not here."""
        points = ((number(row.get("tokens")), number(row.get(metric))) for row in self.metrics)
        return dict(sorted(point for point in points if None not in point))


def ended(runs: Iterable[Run], *statuses: str) -> list[Run]:
    return [run for run in runs if run.status in statuses]


def load_runs(dirs: Sequence[Path]) -> list[Run]:
    """Every run below `dirs`. Raises ValueError where none is."""
    for folder in dirs:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
    # a run below two of the folders counts once
    summaries = {Path(row["dir"]).resolve(): row for folder in dirs for row in read_sweep(folder)}
    if not summaries:
        raise ValueError(
            f"no runs below {', '.join(map(str, dirs))}: a run is a folder with a summary.json or "
            "a metrics.jsonl"
        )
    runs = [_load(path, row) for path, row in summaries.items()]
    for run, names in zip(runs, name_runs([run.summary for run in runs]), strict=True):
        run.variant, run.name = names
    top = dirs[0].resolve()
    for run, path in zip(runs, summaries, strict=True):
        # without the path of this machine: a report is passed on
        run.place = str(path.relative_to(top)) if len(dirs) == 1 and path != top else path.name
    return runs


def _load(path: Path, summary: Row) -> Run:
    # a value of another type counts as absent: everything below may rely on these
    overrides = summary.get("overrides")
    overrides = overrides if isinstance(overrides, list) else []
    summary["overrides"] = [x for x in overrides if isinstance(x, str)]
    for key, kind in (("attention", str), ("oom", dict)):
        if not isinstance(summary.get(key), kind):
            summary.pop(key, None)
    # a completed run has evaluated its last step
    if summary["status"] != "completed" and is_stale(summary):
        summary = {key: value for key, value in summary.items() if not key.startswith("val/")}
    try:
        metrics = read_metrics(path / "metrics.jsonl")
    except OSError as error:
        metrics = []
        summary.setdefault("error", f"metrics.jsonl cannot be read: {error.strerror}")
    damage = "; ".join(_damages(path, summary, metrics))
    judged_on = number(load_yaml(path / "config.yaml").get("eval_sequences"))
    env = load_json(path / "env.json")
    return Run(summary, metrics, env, damage=damage, eval_sequences=int(judged_on or 0))


def _damages(path: Path, summary: Row, metrics: list[Row]) -> Iterator[str]:
    """What a run's files lack that training wrote; a line in the sweep's index may still say how it
    ended.
    """
    ran = summary["status"] not in ("failed", "unfinished", "oom")
    summary_exists = (path / "summary.json").exists()
    if "status" not in load_json(path / "summary.json") and (ran or summary_exists):
        yield f"summary.json is {'unreadable' if summary_exists else 'missing'}"
    if not ran:
        return
    file = path / "metrics.jsonl"
    lines = file.read_bytes().count(b"\n") if file.is_file() else 0
    steps = [int(step) for row in metrics if (step := number(row.get("step"))) is not None]
    done = number(summary.get("steps_done")) or 0
    # the last step need not be logged, but it follows the last row as closely as rows follow one
    # another
    usual = max((b - a for a, b in pairwise(steps)), default=0)
    if not steps and done:
        yield "metrics.jsonl is empty or missing"
    elif steps and done - steps[-1] > usual > 0:
        yield f"metrics.jsonl ends at step {steps[-1]:,} of {done:,.0f}"
    elif lines != len(metrics):
        yield "a line of metrics.jsonl is torn"
