"""The README's commands run, with trainings shrunk to two steps of the tiniest model."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from tests import processes
from tests.command import ROOT, TINY, environment, index, run, summary

README = (ROOT / "README.md").read_text()
BASH = "\n".join(re.findall(r"```bash\n(.+?)```", README, re.DOTALL))
COMMANDS = [line.partition("#")[0].strip() for line in BASH.splitlines() if line]
# CI makes its environment and runs the tests by make; test_examples.py runs the notebook
ELSEWHERE = [x for x in COMMANDS if x.startswith(("make ", "pip ", "uv ", "jupyter "))]
TRAININGS, SCRIPTS, ON_RANKS = (
    [x for x in COMMANDS if x.startswith(start)]
    for start in ("python train.py ", "python -m scripts.", "torchrun ")
)
SMALLER = {each.partition("=")[0]: each for each in (*TINY, "steps=2", "seed=0")}


def shrunk(command: str) -> list[str]:
    """The arguments behind train.py, where what makes a run small takes the place of its sizes."""
    arguments = shlex.split(command.partition("train.py")[2])
    return [x for x in arguments if x.partition("=")[0] not in SMALLER] + [*SMALLER.values()]


@pytest.fixture(scope="module")
def own_attention(tmp_path_factory) -> Path:
    """A folder with the README's my_attention.py."""
    folder = tmp_path_factory.mktemp("own")
    code = re.search(r"```python\n# my_attention\.py\n(.+?)```", README, re.DOTALL)[1]
    (folder / "my_attention.py").write_text(code)
    return folder


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """The folder of the sweep that the report is of."""
    (command,) = (x for x in TRAININGS if "experiment=" in x)
    folder = tmp_path_factory.mktemp("sweep")
    done = run(*shrunk(command), f"hydra.sweep.dir={folder}")
    assert done.code == 0, done.output
    assert [row["status"] for row in index(folder)] == ["completed"] * 2
    return folder


def test_every_command_is_tried():
    assert {*COMMANDS} == {*ELSEWHERE, *TRAININGS, *SCRIPTS, *ON_RANKS}
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {x.removeprefix("make ") for x in ELSEWHERE if x.startswith("make ")} <= {*targets}


@pytest.mark.parametrize("command", [x for x in TRAININGS if "experiment=" not in x])
def test_a_training_completes(command, own_attention, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(own_attention)
    jobs = "sweep" if " -m " in command else "run"
    done = run(*shrunk(command), f"hydra.{jobs}.dir={tmp_path}")
    assert done.code == 0, done.output
    ended = index(tmp_path) if jobs == "sweep" else [summary(tmp_path)]
    assert {each["status"] for each in ended} == {"completed"}


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_script_runs(command, sweep, own_attention, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(own_attention)
    monkeypatch.chdir(tmp_path)
    name, *arguments = shlex.split(command.removeprefix("python -m "))
    main = ".__main__" if (ROOT / name.replace(".", "/")).is_dir() else ""
    given = [x.replace("multirun/DAY/TIME", str(sweep)) for x in arguments]
    given += ["cases=1"] * (name == "scripts.verify")
    import_module(name + main).main(given)  # it ends in SystemExit where it fails


@pytest.mark.slow
@pytest.mark.parametrize("command", ON_RANKS)
def test_one_run_on_two_processes(command, tmp_path):
    launcher = shlex.split(command.removeprefix("torchrun ").partition("train.py")[0])
    arguments = ["-m", "torch.distributed.run", *launcher, "train.py", *shrunk(command)]
    processes.run(*arguments, f"hydra.run.dir={tmp_path}", check=True, env=environment())
    assert summary(tmp_path)["status"] == "completed"
