"""Read the runs of a report from their files: complete, interrupted, or never started."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.runs import runs_below
from scripts.tables import Row
from training.record.files import read_mapping, read_metrics
from training.record.names import attention_steps, name_runs
from training.record.runs import is_stale

MIN_POINTS = 2  # least points of a curve


@dataclass(eq=False)
class Run:
    """One training run."""

    summary: Row
    metrics: list[Row] = field(default_factory=list)
    env: Row = field(default_factory=dict)
    eval_sequences: int = 0  # held-out sequences behind its losses; 0 is unknown
    damage: str = ""  # what its files lack
    place: str = ""  # its folder, relative to the report's folder
    variant: str = ""  # the variant's name; see training.record.names
    name: str = ""  # variant, seq_len and seed; unique in a report

    @property
    def status(self) -> str:
        return self.summary["status"]

    @property
    def is_defect(self) -> bool:
        return bool(self.summary.get("defect"))

    @property
    def claims_exact(self) -> bool:
        """Whether it claims to be exact. A run that failed at once does not record this; only its
        defect counts.
        """
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
        """Runs with equal values here and equal seeds are comparable."""
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
        """Names of all metrics with enough values for a curve, in order of appearance."""
        names = dict.fromkeys(name for row in self.metrics for name in row)
        return [name for name in names if len(self.curve(name)) >= MIN_POINTS]

    def curve(self, metric: str) -> dict[float, float]:
        """Values by tokens. Leaves out lists, and nulls: values that were not finite."""
        points = ((row.get("tokens"), row.get(metric)) for row in self.metrics)
        return dict(sorted(x for x in points if all(isinstance(y, (int, float)) for y in x)))


def ended(runs: Iterable[Run], *statuses: str) -> list[Run]:
    return [run for run in runs if run.status in statuses]


def measured(runs: Iterable[Run], name: str) -> list[float]:
    """The figure `name` of each run that has it."""
    return [value for run in runs if (value := run.figure(name)) is not None]


def load_runs(dirs: Sequence[Path]) -> list[Run]:
    """Every run below `dirs`. Raises ValueError if there is none."""
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
        # no path of this machine, because reports are passed on
        run.place = str(path.relative_to(top)) if len(dirs) == 1 and path != top else path.name
    return runs


def _load(path: Path, summary: Row) -> Run:
    # only a completed run has evaluated its last step
    if summary["status"] != "completed" and is_stale(summary):
        summary = {key: value for key, value in summary.items() if not key.startswith("val/")}
    if summary["status"] == "oom":
        # the peak is from before the memory ran out
        summary.pop("memory/peak_gib", None)
    metrics = read_metrics(path / "metrics.jsonl")
    return Run(
        summary,
        metrics,
        read_mapping(path / "env.json"),
        read_mapping(path / "config.yaml").get("eval_sequences") or 0,
        "; ".join(_damages(path, summary, metrics)),
    )


def _damages(path: Path, summary: Row, metrics: list[Row]) -> Iterator[str]:
    """What is missing in a run's files. The sweep's index may still say how the run ended."""
    ran = summary["status"] not in ("failed", "unfinished", "oom")
    summary_exists = (path / "summary.json").exists()
    if "status" not in read_mapping(path / "summary.json") and (ran or summary_exists):
        yield f"summary.json is {'unreadable' if summary_exists else 'missing'}"
    if not ran:
        return
    file = path / "metrics.jsonl"
    lines = file.read_bytes().count(b"\n") if file.is_file() else 0
    steps = [row["step"] for row in metrics]
    done = summary.get("steps_done") or 0
    # the last step need not be logged, but its distance from the last row is at most that between
    # rows
    usual = max((b - a for a, b in pairwise(steps)), default=0)
    if not steps and done:
        yield "metrics.jsonl is empty or missing"
    elif steps and done - steps[-1] > usual > 0:
        yield f"metrics.jsonl ends at step {steps[-1]:,} of {done:,.0f}"
    elif lines != len(metrics):
        yield "a line of metrics.jsonl is torn"
