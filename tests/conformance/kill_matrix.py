"""The kill matrix of a group of the gallery, results/mutants*.json: which property catches what."""

import json
from pathlib import Path
from typing import Any

import torch

from conformance.cases import SHORT
from conformance.properties import PROPERTIES, SLOW
from tests.conformance.gallery import ROOMS, gallery
from tests.conformance.mutation import Mutant
from training.record.environment import measured_on
from training.record.files import write_json

RESULTS = Path(__file__).resolve().parents[2] / "results"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where it is measured
EVERYTHING = [name for name in PROPERTIES if name not in SLOW]


def matrix_of(group: str) -> dict[str, Any]:
    name = "mutants" if group == "loop" else f"mutants_{group}"
    return json.loads((RESULTS / f"{name}.json").read_text())


def row(mutant: Mutant, killed_by: list[str]) -> dict[str, Any]:
    return {
        "name": mutant.name,
        "says": mutant.says,
        "dtype": SHORT[mutant.dtype],
        "survives": mutant.survives,
        "killed_by": killed_by,
    }


def write_matrix(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows in the gallery's order, with the environment and the properties."""
    order = [mutant.name for group in ROOMS for mutant in gallery(group)]
    rows = sorted(rows, key=lambda row: order.index(row["name"]))
    data = {
        "environment": measured_on(DEVICE),
        "properties": EVERYTHING,
        "mutants": rows,
    }
    write_json(path, data)
