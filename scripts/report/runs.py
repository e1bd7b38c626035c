"""The runs of a report, as their files tell them: whole, broken off, or never begun."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.runs import runs_below
from scripts.tables import Row
from training.files import read_metrics
from training.names import attention_steps, name_runs
from training.resume import load_yaml
from training.sweep import is_stale, load_json

MIN_POINTS = 2  # of a curve


@dataclass(eq=False)
class Run:
    """One training run."""

    summary: Row
    metrics: list[Row] = field(default_factory=list)
    env: Row = field(default_factory=dict)
    eval_sequences: int = 0  # held-out sequences that its losses are means over; 0: not known
    damage: str = ""  # what is missing of its files
    place: str = ""  # its folder, relative to the folder reported on
    variant: str = ""  # what is compared; see training.names
    name: str = ""  # the variant, seq_len and seed: no two runs of a report share one

    @property
    def status(self) -> str:
        return self.summary["status"]

    @property
    def is_defect(self) -> bool:
        return bool(self.summary.get("defect"))

    @property
    def claims_exact(self) -> bool:
        """A run that failed at once does not say it, and counts by its defect."""
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
        return self.summary.get("seq_len") or 0

    def figure(self, name: str) -> float | None:
        """A number of the summary, or None."""
        return self.summary.get(name)

    @property
    def switches(self) -> set[float]:
        """Training tokens after which another attention took over."""
        first = set()
        for step, _ in attention_steps(self.summary)[1:]:
            first.add(
                next((row.get("tokens") for row in self.metrics if row["step"] >= step), None)
            )
        return first - {None}

    @cached_property
    def logged(self) -> list[str]:
        """The names of all metrics with enough values for a curve, in order of appearance."""
        names = dict.fromkeys(name for row in self.metrics for name in row)
        return [name for name in names if len(self.curve(name)) >= MIN_POINTS]

    def curve(self, metric: str) -> dict[float, float]:
        """Values by tokens. What was not finite is null in the file, and not here."""
        points = ((row.get("tokens"), row.get(metric)) for row in self.metrics)
        return dict(sorted(point for point in points if None not in point and is_number(point[1])))


def is_number(value: Any) -> bool:
    """Rows hold lists too: the largest score of each head, and the names of what was not finite."""
    return isinstance(value, (int, float))


def ended(runs: Iterable[Run], *statuses: str) -> list[Run]:
    return [run for run in runs if run.status in statuses]


def measured(runs: Iterable[Run], name: str) -> list[float]:
    """A figure of each run that has it."""
    return [value for run in runs if (value := run.figure(name)) is not None]


def load_runs(dirs: Sequence[Path]) -> list[Run]:
    """Every run below `dirs`. Raises ValueError where none is."""
    summaries = runs_below(dirs)
    if not summaries:
        raise ValueError(
            f"no runs below {', '.join(map(str, dirs))}: a run is a folder with a summary.json or "
            "a metrics.jsonl"
        )
    runs = [_load(path, row) for path, row in summaries.items()]
    top = dirs[0].resolve()
    names = name_runs([run.summary for run in runs])
    for run, path, own in zip(runs, summaries, names, strict=True):
        run.variant, run.name = own
        # without the path of this machine: a report is passed on
        run.place = str(path.relative_to(top)) if len(dirs) == 1 and path != top else path.name
    return runs


def _load(path: Path, summary: Row) -> Run:
    # a completed run has evaluated its last step
    if summary["status"] != "completed" and is_stale(summary):
        summary = {key: value for key, value in summary.items() if not key.startswith("val/")}
    if summary["status"] == "oom":
        # the peak is that of what came before
        summary.pop("memory/peak_gib", None)
    metrics = read_metrics(path / "metrics.jsonl")
    return Run(
        summary,
        metrics,
        load_json(path / "env.json"),
        load_yaml(path / "config.yaml").get("eval_sequences") or 0,
        "; ".join(_damages(path, summary, metrics)),
    )


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
    steps = [row["step"] for row in metrics]
    done = summary.get("steps_done") or 0
    # the last step need not be logged, but it follows the last row as closely as rows follow one
    # another
    usual = max((b - a for a, b in pairwise(steps)), default=0)
    if not steps and done:
        yield "metrics.jsonl is empty or missing"
    elif steps and done - steps[-1] > usual > 0:
        yield f"metrics.jsonl ends at step {steps[-1]:,} of {done:,.0f}"
    elif lines != len(metrics):
        yield "a line of metrics.jsonl is torn"
