"""The environment that tests start train.py in."""

import os

from tests.command import environment


def test_a_folder_of_modules_comes_before_those_that_are_there(monkeypatch):
    """It once took their place, and hydra was not found where it lay in one of them."""
    monkeypatch.setenv("PYTHONPATH", "packages")
    assert environment(PYTHONPATH="own")["PYTHONPATH"] == f"own{os.pathsep}packages"
    assert environment()["PYTHONPATH"] == "packages"
    monkeypatch.delenv("PYTHONPATH")
    assert environment(PYTHONPATH="own")["PYTHONPATH"] == "own"
    assert "PYTHONPATH" not in environment()
