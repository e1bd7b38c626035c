"""The matrix of scripts.cross_eval: the attention that weights were trained under against the one they are evaluated under."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.report.page import Table, Text
from scripts.report.runs import number
from scripts.report.sections import spread


def load_cross_eval(dirs: Sequence[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of every DIR/cross_eval.json, and what could not be read of them."""
    rows, complaints = [], []
    for path in (folder / "cross_eval.json" for folder in dirs):
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text())["rows"]
            # what the matrix is made of must be there
            rows += [row for row in found if row["trained_under"]["name"] and row["evaluated_under"]["name"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            complaints.append(f"cross_eval.json cannot be read ({type(error).__name__}: {error}); make it again with scripts.cross_eval.")
    return rows, complaints


def cross_tables(rows: list[dict[str, Any]]) -> list[Table | Text]:
    """The matrix trained-under x evaluated-under, once for the loss and once for the accuracy."""
    if not rows:
        return []
    names = {side: _attention_names([row[side] for row in rows]) for side in ("trained_under", "evaluated_under")}
    # checkpoints of several steps of one variant are rows of their own
    steps: dict[str, set[Any]] = {}
    for name, row in zip(names["trained_under"], rows, strict=True):
        steps.setdefault(name, set()).add(row.get("step"))
    trained = [
        f"{name}, step {row.get('step')}" if len(steps[name]) > 1 else name for name, row in zip(names["trained_under"], rows, strict=True)
    ]
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for key, row in zip(zip(trained, names["evaluated_under"], strict=True), rows, strict=True):
        cells.setdefault(key, []).append(row)
    blocks: list[Table | Text] = [
        Text("Rows are the attention the weights were trained under, columns the one they are evaluated under; means over seeds.")
    ]
    for metric, form, title in (("loss", "{:.3f}", "loss"), ("accuracy", "{:.1%}", "accuracy")):
        if any(number(row.get(metric)) is not None for row in rows):
            blocks.append(_matrix(cells, metric, form, title))
    return blocks


def _matrix(cells: dict[tuple[str, str], list[dict[str, Any]]], metric: str, form: str, title: str) -> Table:
    trained, evaluated = (list(dict.fromkeys(key[side] for key in cells)) for side in (0, 1))
    means: dict[tuple[str, str], float] = {}
    for key, group in cells.items():
        known = [row[metric] for row in group if number(row.get(metric)) is not None]
        if known:
            means[key] = fmean(known)
    # red is bad: a high loss, a low accuracy
    low, high = min(means.values()), max(means.values())
    badness = {key: (value - low) / (high - low or 1) for key, value in means.items()}
    badness = badness if metric == "loss" else {key: 1 - share for key, share in badness.items()}
    table = [[name, *(_cell(cells.get((name, other), []), metric, form) for other in evaluated)] for name in trained]
    shares = [[badness.get((name, other)) for other in evaluated] for name in trained]
    return Table([title, *evaluated], table, shares=shares)


def _cell(group: list[dict[str, Any]], metric: str, form: str) -> str:
    known = [row[metric] for row in group if number(row.get(metric)) is not None]
    others = [str(row.get("status")) for row in group if row.get("status") != "ok"]
    told = [f"{others.count(status)} x {status}" if len(group) > 1 else status for status in dict.fromkeys(others)]
    return "; ".join([spread(known, form)] * bool(known) + told) or "-"


def _attention_names(attentions: list[dict[str, Any]]) -> list[str]:
    """Each attention's name, with the options in which those of that name differ."""
    options = [attention.get("options") if isinstance(attention.get("options"), dict) else {} for attention in attentions]
    names = [str(attention["name"]) for attention in attentions]
    told = []
    for name, own in zip(names, options, strict=True):
        alike = [other for other_name, other in zip(names, options, strict=True) if other_name == name]
        keys = dict.fromkeys(key for other in alike for key in other)
        differing = [key for key in keys if any(other.get(key) != own.get(key) for other in alike)]
        told.append(" ".join([name, *(f"{key}={own.get(key)}" for key in differing)]))
    return told
