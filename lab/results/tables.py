"""Helpers for the sections of results/README.md: reading files, tables, and the provenance of
figures.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scripts.tables import Row, mean_and_deviation

FOLDER = Path(__file__).resolve().parents[2] / "results"


def load(name: str) -> Row:
    return json.loads((FOLDER / f"{name}.json").read_text())


def provenance(data: Row) -> str:
    environment = data["environment"]
    hardware, versions = environment["hardware"], environment["versions"]
    chip = hardware["gpu"] or f"{hardware['cpu']}, {hardware['cpu_cores']} cores"
    names = ("torch", "triton", "transformers", "flash-attn-4", "python")
    packages = ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))
    # runs of one table may come from several commits; then each run names its own
    runs = data.get("runs") or data.get("speed") or [{}]
    commits = {run.get("commit") or environment.get("commit") or "unknown" for run in runs}
    short = ", ".join(sorted(commit[:7] for commit in commits))
    return f"Measured on {chip}; {packages}; commit {short}."


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def formatted(columns: str, rows: Iterable[Row]) -> str:
    """A table. `columns` has a line for each: its title, two or more spaces, and the format of its
    cells, as in "peak GiB  {memory/peak_gib:.2f}". A missing figure becomes a dash.
    """
    lines = (re.split(" {2,}", line.strip()) for line in columns.strip().splitlines())
    forms = {"".join(title): form for *title, form in lines}

    def cell(form: str, row: Row) -> str:
        try:
            return form.format_map(row)
        except (KeyError, TypeError):  # absent, or None
            return "-"

    return table(forms, ([cell(form, row) for form in forms.values()] for row in rows))


def section(data: Row, *parts: str) -> str:
    return "\n\n".join((provenance(data), *parts))


def spread(values: list[float], form: str = "{:.3f}") -> str:
    """Mean; for several values also the standard deviation and their number."""
    text = mean_and_deviation(values, form)
    return text if len(values) == 1 else f"{text} (n={len(values)})"


def rounded(value: float) -> str:
    """Three digits of a small figure, one decimal of a large one: 0.523, 1.5, 52.3, 1,024,
    2,048.1.
    """
    return f"{value:.3g}" if abs(value) < 10 else f"{value:,.1f}".removesuffix(".0")


def best_in_bold(figures: Mapping[str, float], names: Iterable[str]) -> list[str]:
    """The cells of a line, without decimals; a dash for a name without a figure."""
    best = max(figures.values(), default=None)
    cells = {name: f"{x:.0f}" if x != best else f"**{x:.0f}**" for name, x in figures.items()}
    return [cells.get(name, "-") for name in names]


def plain(name: str) -> str:
    """A backend and its options as a heading: sdpa cudnn, triton portable."""
    return re.sub(r"[:,]\w+=", " ", name)


def finite(runs: Iterable[Row], name: str) -> list[float]:
    return [run[name] for run in runs if run.get(name) is not None]


def joined(values: Iterable[Any], form: str = "{}") -> str:
    """The same figure of several runs: 12.1/13.0/12.7."""
    return "/".join(map(form.format, values))
