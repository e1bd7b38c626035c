"""The notebook runs from its first cell to its last."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import environment

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples/break_attention.ipynb"


def sources(kind: str) -> list[str]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


@pytest.mark.slow
def test_every_cell_runs(tmp_path):
    """Its own assertions say what must come out."""
    (tmp_path / "cells.py").write_text("\n\n".join(sources("code")))
    done = subprocess.run(
        [sys.executable, "cells.py"],
        cwd=tmp_path,
        env=environment(MPLBACKEND="Agg", PYTHONPATH=str(NOTEBOOK.parents[1])),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs/losses.png").stat().st_size > 10_000
    assert "attention=leaky_attention:BACKEND is not causal" in done.stdout


def test_no_outputs_are_committed():
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
