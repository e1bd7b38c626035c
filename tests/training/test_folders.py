"""A run or a sweep writes only into a folder that is new, empty or its own. Reading somebody's run,
or resuming it, runs no code from its folder.
"""

import importlib
import resource
import sys
from pathlib import Path

import pytest

from attention import get_backend
from config import AttentionConfig
from scripts import sample
from tests.command import contents, environment, run, tiny, tiny_sweep
from tests.processes import limited
from tests.run_folder import write_run
from training.launch.command_line import replay_overrides
from training.launch.folders import check_names, claim
from training.record.files import write_json

CODE = """
from dataclasses import replace
from pathlib import Path
from attention import get_backend
Path("ran").touch()
BACKEND = replace(get_backend("naive"), name="theirs")
"""
# what reads runs, and where the run lies in its sweep
READERS = [
    ("sample", "run={run} tokens=1", ""),
    ("sample", "run={run} tokens=1", "0"),
    ("trace", "run={run}", ""),
    ("agree", "{run} under=naive,tiled sequences=1", "a/0"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, from which Python imports the user's modules."""
    monkeypatch.setenv("TILEGPT_CACHE", environment()["TILEGPT_CACHE"])
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(run: Path, attention: str, module: Path) -> None:
    """A run that names an attention, and the module that has it."""
    own = {"attention": AttentionConfig(attention), "overrides": [f"attention={attention}"]}
    write_run(run, **own)
    write_json(run / "summary.json", {"status": "completed", "attention": attention})
    module.write_text(CODE)


@pytest.mark.parametrize("command, options, job", READERS)
def test_code_in_the_folder_is_not_run(folder, capsys, command, options, job):
    own = f"{command}_{len(job)}"  # Python imports a module once
    run, module = folder / own / job, folder / own / "payload.py"
    write(run, f"{own}.payload:BACKEND", module)
    if job:
        (folder / own / "index.jsonl").touch()
    arguments = options.format(run=run).split()
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"scripts.{command}").main(arguments)
    said = capsys.readouterr().err + ended.value.code
    assert f"{own}.payload:BACKEND" in said and str(module) in said
    assert not (folder / "ran").exists()


def test_resume_runs_none_either(folder):
    write(folder / "resumed", "resumed.payload:BACKEND", folder / "resumed/payload.py")
    replay_overrides([f"resume={folder}/resumed"])
    with pytest.raises(ValueError, match="resumed.payload:BACKEND"):
        get_backend("resumed.payload:BACKEND")
    assert not (folder / "ran").exists()


def test_code_elsewhere_is_named_and_run(folder, caplog):
    write(folder / "run", "beside_the_run:BACKEND", folder / "beside_the_run.py")
    sample.main([f"run={folder}/run", "tokens=1"])
    assert "beside_the_run:BACKEND" in caplog.text and (folder / "ran").exists()


@pytest.mark.parametrize(
    "arguments, name", [(tiny, "checkpoint/precious.pt"), (tiny_sweep, "summary.json")]
)
def test_a_folder_with_somebodys_files_is_refused_untouched(tmp_path, arguments, name):
    """A regression test: a run removed checkpoint/ and wrote over config.yaml."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    before = contents(tmp_path)
    answer = run(*arguments(tmp_path)).complaint()
    assert f"dir={tmp_path}" in answer and name.partition("/")[0] in answer
    assert contents(tmp_path) == before and not (tmp_path / "train.log").exists()


def test_a_run_that_cannot_go_on_in_its_folder_is_named_as_it_was_typed(tmp_path):
    """A regression test: the way out was hydra.run.dir=, which resume= refuses."""
    write_run(tmp_path / "run")
    (tmp_path / "run/.lock").mkdir()  # which cannot be opened for writing, even by root
    answer = run(f"resume={tmp_path}/run", "steps=9").complaint()
    assert f"resume={tmp_path}/run" in answer and "resume=COPY" in answer
    assert "hydra.run.dir" not in answer


def test_too_many_open_files_are_named_as_such(tmp_path):
    too_many = pytest.raises(SystemExit, match="Too many open files")
    with limited(resource.RLIMIT_NOFILE, 3), too_many:
        claim(tmp_path / "new", "hydra.run.dir")


@pytest.mark.parametrize(
    "names", [["0", "0"], ["a", "a/b"], ["../a"], ["/a"], ["."], ["a" * 300], ["a", "b", "a/"]]
)
def test_folders_that_jobs_can_have_and_cannot(names):
    check_names(["a/0", "a/1", "b", "attention=tiled,seed=0"])
    with pytest.raises(SystemExit, match="hydra.sweep.subdir=") as refused:
        check_names(names)
    assert any(name in str(refused.value) for name in names)
