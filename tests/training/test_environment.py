"""The description of the machine, the commit and the versions."""

import json
import subprocess
import sys

import torch

import training.record.environment as environment_module
from training.record.environment import environment


def test_environment_says_where_the_run_ran():
    env = environment("abc123", "cpu")
    assert env["data_fingerprint"] == "abc123"
    # the wheel's metadata may lack the build tag
    assert env["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert env["hardware"]["cpu_cores"] >= 1 and env["hardware"]["gpu"] is None
    assert env["command"][1:] == sys.argv
    assert json.loads(json.dumps(env, allow_nan=False)) == env


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.check_output(["git", "-C", folder, *identity, *arguments], text=True).strip()


def test_commit_and_uncommitted_changes(tmp_path, monkeypatch):
    git(tmp_path, "init", "-q")
    (tmp_path / "copy").mkdir()
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "one")
    monkeypatch.setattr(environment_module, "ROOT", tmp_path.resolve())

    def found() -> tuple[str | None, bool | None]:
        described = environment("", "cpu")
        return described["commit"], described["dirty"]

    head = git(tmp_path, "rev-parse", "HEAD")
    assert found() == (head, False)
    (tmp_path / "file").write_text("two")
    assert found() == (head, True)
    # a copy of the program without .git inside another repository
    monkeypatch.setattr(environment_module, "ROOT", (tmp_path / "copy").resolve())
    assert found() == (None, None)


def test_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment("", "cpu")["commit"] is None
