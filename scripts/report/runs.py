"""Read the runs of a report from their files: complete, interrupted, damaged, or never started."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from scripts.runs import runs_below
from scripts.tables import Row
from training.record.files import read_mapping, read_metrics
from training.record.names import belies_exact, name_runs
from training.record.runs import is_stale, remark

Curve = dict[float, float]  # values by tokens


@dataclass(eq=False)
class Run:
    """One training run."""

    summary: Row
    metrics: list[Row] = field(default_factory=list)
    env: Row = field(default_factory=dict)
    eval_sequences: int = 0  # held-out sequences behind its losses; 0 is unknown
    damages: list[str] = field(default_factory=list)  # what is wrong with its files
    place: str = ""  # its folder, relative to the report's folder
    variant: str = ""  # the variant's name; see training.record.names
    name: str = ""  # variant, seq_len and seed; unique in a report

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
    def compares_by(self) -> tuple[Any, ...]:
        """Runs with equal values here and equal seeds are comparable."""
        return self.seq_len, self.tokens, self.eval_sequences, self.data

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
    """The figure `name` of each run that has it. A loss of a run that broke is no result."""
    runs = completed(runs) if name.startswith("val/") else runs
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
    file = path / "metrics.jsonl"
    metrics = read_metrics(file)
    config, env = read_mapping(path / "config.yaml"), read_mapping(path / "env.json")
    damages = list(_unreadable(path, summary))
    lines = file.read_bytes().count(b"\n") if metrics else 0
    if lines > len(metrics):
        damages.append(f"{lines - len(metrics)} lines of metrics.jsonl are torn or no rows")
    try:
        name_runs([summary, {}])  # beside another, so that all its settings are read
        for reader in (remark, belies_exact):
            reader(summary)
        damages += _contradictions(summary, metrics, config)
    # what a damaged or foreign file holds may break any of it
    except Exception:
        damages.append("values in its files are of another type")
        summary = {"status": "unreadable", "dir": str(path)}
    # only a completed run has evaluated its last step
    if summary["status"] != "completed" and is_stale(summary):
        summary = {key: value for key, value in summary.items() if not key.startswith("val/")}
    if summary["status"] == "oom":
        # the peak is from before the memory ran out
        summary.pop("memory/peak_gib", None)
    return Run(summary, metrics, env, _number(config.get("eval_sequences")) or 0, damages)


def _unreadable(path: Path, summary: Row) -> Iterator[str]:
    """The run's files that are missing or cannot be read."""
    # a run that did not come far may not have written them
    began = summary["status"] not in ("failed", "unfinished")
    for name in ("summary.json", "env.json", "config.yaml"):
        exists = (path / name).exists()
        if (began or exists) and not read_mapping(path / name):
            yield f"{name} is {'unreadable' if exists else 'missing'}"


def _contradictions(summary: Row, metrics: list[Row], config: Row) -> Iterator[str]:
    """Where summary.json, metrics.jsonl and config.yaml cannot be of the same run."""
    ran = summary["status"] in ("completed", "diverged", "interrupted")
    steps = [row["step"] for row in metrics]
    gaps = list(pairwise([0, *steps, summary.get("steps_done", 0)] if ran else [0, *steps]))
    # a row is at most log_every steps after the one before it; a resume may have changed that
    usual = config.get("log_every", inf) if len(summary.get("starts", [])) < 2 else inf
    if missing := [gap for gap in gaps if gap[1] - gap[0] > usual]:
        yield "metrics.jsonl has no row between step {:,} and {:,}".format(*missing[0])
    for name in ("val/loss", "val/loss_exact"):
        last = [row[name] for row in metrics if row.get(name) is not None][-1:]
        told = summary.get(name)
        if ran and last and told is not None and last != [told]:
            yield f"{name} is {told:.6g} in summary.json, and {last[0]:.6g} in metrics.jsonl"
    was = config | {"attention": config.get("attention", {}).get("name")}
    for key in ("attention", "seq_len", "seed"):
        # no other type: a few lines of YAML can hold billions of values
        if isinstance(was.get(key), (str, int)) and was[key] != summary.get(key, was[key]):
            yield f"{key} is {summary[key]} in summary.json, and {was[key]} in config.yaml"
