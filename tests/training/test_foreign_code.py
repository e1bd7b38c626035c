"""Reading somebody's run, or resuming it, runs no code from its folder."""

import importlib
import sys
from pathlib import Path

import pytest
import yaml

from attention import get_backend
from config import AttentionConfig
from scripts import sample
from tests.command import environment
from tests.run_folder import write_run
from training.launch.command_line import replay_overrides
from training.record.files import write_json

CODE = """
from dataclasses import replace
from pathlib import Path
from attention import get_backend
Path("ran").touch()
BACKEND = replace(get_backend("naive"), name="theirs")
"""
READERS = {
    "sample": ["run={run}", "tokens=1"],
    "export": ["run={run}", "out=out"],
    "trace": ["run={run}"],
    "agree": ["{run}", "under=naive,tiled", "sequences=1"],
    "cross_eval": ["{run}", "under=naive", "sequences=1"],
    "recall": ["{run}"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, from which Python imports the user's modules."""
    monkeypatch.setenv("TILEGPT_CACHE", environment()["TILEGPT_CACHE"])
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(run: Path, attention: str, module: Path) -> None:
    """A run that names an attention, and the module that has it."""
    write_run(run, attention=AttentionConfig(attention))
    write_json(run / "summary.json", {"status": "completed", "attention": attention})
    module.write_text(CODE)


@pytest.mark.parametrize(
    "command, job", [(each, "") for each in READERS] + [("sample", "0"), ("agree", "a/0")]
)
def test_code_in_the_folder_is_not_run(folder, capsys, command, job):
    own = f"{command}_{len(job)}"  # Python imports a module once
    run, module = folder / own / job, folder / own / "payload.py"
    write(run, f"{own}.payload:BACKEND", module)
    if job:
        (folder / own / "index.jsonl").touch()
    arguments = [each.format(run=run) for each in READERS[command]]
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"scripts.{command}").main(arguments)
    said = capsys.readouterr().err + ended.value.code
    assert f"{own}.payload:BACKEND" in said and str(module) in said
    assert not (folder / "ran").exists()


def test_resume_runs_none_either(folder):
    write(folder / "resumed", "resumed.payload:BACKEND", folder / "resumed/payload.py")
    overrides = ["attention=resumed.payload:BACKEND"]
    (folder / "resumed/overrides.yaml").write_text(yaml.safe_dump(overrides))
    replay_overrides([f"resume={folder}/resumed"])
    with pytest.raises(ValueError, match="resumed.payload:BACKEND"):
        get_backend("resumed.payload:BACKEND")
    assert not (folder / "ran").exists()


def test_code_elsewhere_is_named_and_run(folder, caplog):
    write(folder / "run", "beside_the_run:BACKEND", folder / "beside_the_run.py")
    sample.main([f"run={folder}/run", "tokens=1"])
    assert "beside_the_run:BACKEND" in caplog.text and (folder / "ran").exists()
