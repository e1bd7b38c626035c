"""A run or a sweep writes only into a folder that is new, empty or its own."""

import resource

import pytest

from tests import processes
from tests.command import contents, run, tiny, tiny_sweep
from training.launch.folders import check_names, claim


@pytest.mark.parametrize("arguments", [tiny, tiny_sweep], ids=["run", "sweep"])
@pytest.mark.parametrize("name", ["checkpoint/precious.pt", "config.yaml", "summary.json"])
def test_a_folder_with_somebodys_files_is_refused_untouched(tmp_path, arguments, name):
    """A regression test: a run removed checkpoint/ and wrote over config.yaml."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    before = contents(tmp_path)
    answer = run(*arguments(tmp_path)).complaint()
    assert f"dir={tmp_path}" in answer and name.partition("/")[0] in answer
    assert contents(tmp_path) == before and not (tmp_path / "train.log").exists()


def test_one_process_at_a_time(tmp_path):
    """The system frees the folder when the file is closed."""
    program = "import sys; from pathlib import Path; from training.launch.folders import claim\n"
    program += f"claim(Path({str(tmp_path)!r}), 'hydra.run.dir', goes_on=True)"
    with claim(tmp_path / "new", "hydra.run.dir"), claim(tmp_path, "hydra.run.dir", goes_on=True):
        other = processes.run("-c", program)
        assert other.returncode == 1 and f"{tmp_path} right now" in other.stderr
    assert processes.run("-c", program).returncode == 0


def test_too_many_open_files_are_named_as_such(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(SystemExit, match="Too many open files"):
            claim(tmp_path / "new", "hydra.run.dir")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "names", [["0", "0"], ["a", "a/b"], ["../a"], ["/a"], ["."], ["a" * 300], ["a", "b", "a/"]]
)
def test_folders_that_jobs_cannot_have(names):
    with pytest.raises(SystemExit, match="hydra.sweep.subdir=") as refused:
        check_names(names)
    assert any(name in str(refused.value) for name in names)


def test_folders_that_jobs_can_have():
    check_names(["a/0", "a/1", "b", "attention=tiled,seed=0"])
