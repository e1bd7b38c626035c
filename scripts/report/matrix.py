"""The matrices of scripts.cross_eval as tables with coloured cells."""

from collections.abc import Sequence
from pathlib import Path

from scripts.cross_eval_matrix import Matrix, build_matrices, read_rows, reasons
from scripts.report.page import Table, Text
from scripts.tables import Row
from training.resume import load_yaml
from training.sweep import load_json


def cross_blocks(dirs: Sequence[Path]) -> list[Table | Text]:
    """The contents of every DIR/cross_eval.json, or a note that it cannot be read."""
    rows: list[Row] = []
    doubts: list[str] = []
    for folder in dirs:
        path = folder / "cross_eval.json"
        if not path.is_file():
            continue
        try:
            found = read_rows(path)
            build_matrices(found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # not the reason, which would name a path of this machine
            doubts.append(
                "cross_eval.json cannot be read: it is not what scripts.cross_eval writes, or "
                "only half of it; run that again."
            )
            continue
        rows += found
        if older := trained_on(folder, found):
            doubts.append(
                f"cross_eval.json is older than the checkpoints of {', '.join(older)}: "
                "run cross_eval again."
            )
        if others := judged_on(folder, found):
            doubts.append(
                f"cross_eval judged on other held-out sequences than {', '.join(others)}. Run it "
                "again for the same figures."
            )
    blocks: list[Table | Text] = [Text(text, warning=True) for text in doubts]
    if not rows:
        return blocks
    about = (
        "A row a training, a column an attention that its weights are evaluated under; means and "
        "standard deviations over runs. The stronger the colour, the worse; framed: the attention "
        "of the training."
    )
    tables = map(_table, build_matrices(rows))
    return [*blocks, Text(about), *tables, *map(Text, reasons(rows))]


def _run_dir(folder: Path, run: str) -> Path | None:
    """The folder of a row's run; None if it is not here."""
    if (folder / run).is_dir():
        return folder / run
    # the file of a single run is in the run's own folder
    return folder if run == folder.resolve().name else None


def trained_on(folder: Path, rows: list[Row]) -> list[str]:
    """The runs of the rows, below `folder`, whose training continued after they were judged."""
    found = []
    for run, step in dict.fromkeys((row["run"], row["step"]) for row in rows):
        if (run_dir := _run_dir(folder, run)) is None:
            continue
        summary = load_json(run_dir / "summary.json")
        # a diverged run has done more steps than its checkpoint; a copied run may lack the
        # checkpoint
        now = load_json(run_dir / "checkpoint" / "meta.json").get("step", summary.get("steps_done"))
        if now not in (None, step):
            found.append(f"{run} (step {now}, judged at {step})")
    return found


def judged_on(folder: Path, rows: list[Row]) -> list[str]:
    """The runs that were judged on another number of sequences than their own evaluation uses."""
    found = []
    for run, sequences in dict.fromkeys((row["run"], row["sequences"]) for row in rows):
        run_dir = _run_dir(folder, run)
        own = load_yaml(run_dir / "config.yaml").get("eval_sequences") if run_dir else None
        if None not in (own, sequences) and own != sequences:
            found.append(f"{run} ({own}, judged on {sequences})")
    return found


def _table(matrix: Matrix) -> Table:
    low, high = matrix.scale
    # a high loss is bad, and so is a low accuracy
    good, bad = (low, high) if matrix.metric == "loss" else (high, low)
    shares = [
        [(cell.mean - good) / (bad - good) if cell.values else None for cell in row]
        for row in matrix.cells.values()
    ]
    rows = [
        [label, *(cell.text(matrix.form) if any(cell) else "-" for cell in row)]
        for label, row in matrix.cells.items()
    ]
    framed = [matrix.own[label] for label in matrix.cells]
    return Table([matrix.metric, *matrix.judges], rows, shares=shares, framed=framed)
