"""What every section of results/README.md is made with: reading, tables, and where and on what a
figure was measured.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "results"


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def load_all(*names: str) -> list[dict[str, Any]]:
    """Those of the files that are there. Raises FileNotFoundError where none is."""
    return [load(name) for name in names if (FOLDER / f"{name}.json").is_file()] or [load(names[0])]


def provenance(data: dict[str, Any]) -> str:
    environment = data["environment"]
    hardware, versions = environment["hardware"], environment["versions"]
    chip = hardware["gpu"] or f"{hardware['cpu']}, {hardware['cpu_cores']} cores"
    packages = ", ".join(
        f"{name} {versions[name]}"
        for name in ("torch", "triton", "flash-attn-4", "python")
        if versions.get(name)
    )
    # runs of one table may come from several commits; then each says its own
    runs = data.get("runs") or data.get("speed") or [{}]
    commits = {run.get("commit") or environment.get("commit") or "unknown" for run in runs}
    return (
        f"Measured on {chip}; {packages}; commit "
        f"{', '.join(sorted(commit[:7] for commit in commits))}."
    )


def table(head: list[str], rows: Iterable[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def section(data: dict[str, Any], *parts: str) -> str:
    return "\n\n".join((provenance(data), *parts))


def spread(values: list[float], form: str = "{:.3f}") -> str:
    """Mean and, of several, the standard deviation and their number."""
    if len(values) == 1:
        return form.format(values[0])
    return f"{form.format(fmean(values))} ± {form.format(stdev(values))} (n={len(values)})"


def rounded(value: float) -> str:
    """Three digits of a small figure, one decimal of a large one: 0.523, 1.5, 52.3, 1,024,
    2,048.1.
    """
    return f"{value:.3g}" if abs(value) < 10 else f"{value:,.1f}".removesuffix(".0")


def plain(name: str) -> str:
    """A backend and its options as a heading: sdpa cudnn, triton portable."""
    return re.sub(r"[:,]\w+=", " ", name)


def groups(
    runs: list[dict[str, Any]], key: Callable[[dict[str, Any]], Any]
) -> dict[Any, list[dict[str, Any]]]:
    found: dict[Any, list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return found


def finite(runs: list[dict[str, Any]], name: str) -> list[float]:
    return [run[name] for run in runs if run.get(name) is not None]
