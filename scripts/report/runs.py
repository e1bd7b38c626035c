"""Read the runs of a report from their files: complete, interrupted, damaged, or never started."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.runs import runs_below
from scripts.tables import Row
from training.record.files import read_mapping, read_metrics
from training.record.names import Names, name_runs
from training.record.runs import is_stale

Curve = dict[float, float]  # values by tokens


@dataclass(eq=False)
class Run:
    """One training run."""

    summary: Row
    metrics: list[Row]
    env: Row
    eval_sequences: float  # held-out sequences behind its losses; 0 is unknown
    place: str  # its folder, relative to the report's folder
    variant: str  # the variant's name; see training.record.names
    name: str  # variant, seq_len and seed; unique in a report

    @property
    def status(self) -> str:
        return str(self.summary["status"])

    @property
    def ending(self) -> str:
        return f"{self.status} at step {self.figure('steps_done') or 0:,.0f}"

    @property
    def seed(self) -> str:
        return str(self.summary.get("seed"))

    @property
    def attention(self) -> str:
        return str(self.summary.get("attention") or self.variant)

    @property
    def is_defect(self) -> bool:
        return bool(self.summary.get("defect"))

    @property
    def is_softmax(self) -> bool:
        """Whether it computes softmax attention, or is a defect of it. A run that failed at once
        does not record this, and passes for one.
        """
        return self.is_defect or self.summary.get("exact") is not False

    @property
    def judged_by(self) -> str:
        return "val/loss_exact" if self.is_softmax else "val/loss"

    @property
    def tokens(self) -> float:
        return self.figure("tokens") or 0

    @property
    def seq_len(self) -> int:
        return int(self.figure("seq_len") or 0)

    @property
    def data(self) -> str:
        return str(self.env.get("data_fingerprint"))

    @property
    def machine(self) -> str | None:
        on = self.env.get("hardware")
        return str(on.get("gpu") or on.get("cpu")) if isinstance(on, dict) else None

    def figure(self, name: str) -> float | None:
        """A finite number of the summary that a table has room for, or None."""
        return _number(self.summary.get(name), below=1e15)

    def curve(self, metric: str) -> Curve:
        """Values by tokens. Leaves out whatever is no finite number."""
        points = ((_number(row.get("tokens")), _number(row.get(metric))) for row in self.metrics)
        return dict(sorted((x, y) for x, y in points if None not in (x, y)))


def _number(value: Any, below: float = 1e300) -> float | None:
    # larger ones leave no room for an axis
    return value if isinstance(value, (int, float)) and abs(value) < below else None


def completed(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.status == "completed"]


def measured(runs: Iterable[Run], name: str) -> list[float]:
    """The figure `name` of each completed run that has it. A run that broke has no result."""
    return [value for run in completed(runs) if (value := run.figure(name)) is not None]


def load_runs(dirs: Sequence[Path]) -> list[Run]:
    """Every run below `dirs`. Raises ValueError if there is none."""
    summaries = runs_below(dirs)
    if not summaries:
        raise ValueError(
            f"no runs below {', '.join(map(str, dirs))}: a run is a folder with a summary.json or "
            "a metrics.jsonl"
        )
    runs, top = [], dirs[0].resolve()
    for path, names in zip(summaries, name_runs(list(summaries.values())), strict=True):
        # no path of this machine, because reports are passed on
        place = str(path.relative_to(top)) if len(dirs) == 1 and path != top else path.name
        runs.append(_load(path, summaries[path], place, names))
    return runs


def _load(path: Path, summary: Row, place: str, names: Names) -> Run:
    """A run without the figures that are no result."""
    # only a completed run has evaluated its last step
    if summary["status"] != "completed" and is_stale(summary):
        summary = {key: value for key, value in summary.items() if not key.startswith("val/")}
    if summary["status"] == "oom":
        # the peak is from before the memory ran out
        summary.pop("memory/peak_gib", None)
    if summary["status"] == "damaged":
        return Run(summary, [], {}, 0, place, *names)
    config, env = read_mapping(path / "config.yaml"), read_mapping(path / "env.json")
    sequences = _number(config.get("eval_sequences")) or 0
    return Run(summary, read_metrics(path / "metrics.jsonl"), env, sequences, place, *names)
