"""`python -m scripts.runs`: the runs below a folder, newest first, and damaged ones by name."""

import json
from pathlib import Path

import pytest

from tests import processes

LONG = f"pkg.module:{'N' * 120}"


def write(folder: Path, started: float, **summary: object) -> None:
    folder.mkdir(parents=True)
    start = {"step": 0, "started": started, "attention": [], "changed": {}}
    known = {"status": "completed", "variant": "tiled", "steps_done": 9, "starts": [start]}
    (folder / "summary.json").write_text(json.dumps(known | summary))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    losses = {"val/loss": 1.25, "val/loss_exact": 2.5}
    write(tmp_path / "outputs/a", 1e9, **losses)
    write(tmp_path / "multirun/0", 3e9, variant=LONG, status="oom")
    write(tmp_path / "multirun/1", 2e9, variant="<b>\x1b[2J")
    return tmp_path


def test_newest_first_with_its_losses_and_path(folder, typed):
    head, *lines = typed("runs").out.splitlines()
    assert "val/loss_exact" in head and len(lines) == 3
    assert LONG in lines[0] and "<b>\\x1b[2J" in lines[1]
    assert all(word in lines[0] for word in ("2065-01-24", "oom", "multirun/0"))
    assert all(word in lines[2] for word in ("completed", "9", "1.2500", "2.5000", "outputs/a"))


# a file of a run, and what is wrong with it
DAMAGED = [
    ("summary.json", '{"status": "comp'),
    ("summary.json", '{"status": "completed", "starts": 3}'),
    ("summary.json", '{"status": "completed", "val/loss": "low", "starts": []}'),
    ("config.yaml", "attention: ["),
]


def test_a_damaged_folder_is_one_line(folder, typed):
    for number, (file, content) in enumerate(DAMAGED):
        write(folder / f"outputs/z{number}", 1.0)
        (folder / f"outputs/z{number}" / file).write_text(content)
    _, good, *damaged = typed("runs", "outputs").out.splitlines()
    assert "outputs/a" in good and len(damaged) == len(DAMAGED)
    for number, line in enumerate(damaged):
        assert line.startswith(f"damaged: outputs/z{number}: ")


def test_a_killed_run_has_the_time_of_its_files(folder, typed):
    (folder / "killed").mkdir()
    (folder / "killed/metrics.jsonl").write_text('{"step": 3, "val/loss": 2.0}\n')
    (line,) = typed("runs", "killed").out.splitlines()[1:]
    assert "unfinished" in line and "2.0000" in line and " 3 " in line


def test_it_imports_no_torch():
    code = "import sys; from scripts import runs; print('torch' in sys.modules)"
    assert processes.run("-c", code, check=True).stdout == "False\n"
