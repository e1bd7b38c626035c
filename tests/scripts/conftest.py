"""A command of scripts/ as a user types it."""

from importlib import import_module
from typing import NamedTuple

import pytest

from tests.command import cache_folder


class Written(NamedTuple):
    out: str
    err: str


@pytest.fixture
def typed(monkeypatch, capsys):
    """typed("plan", "key=value", ...): what `python -m scripts.plan` wrote, on a machine without a
    GPU. SystemExit carries its complaint.
    """
    monkeypatch.setenv("TILEGPT_CACHE", cache_folder())

    def run(command: str, *arguments: str) -> Written:
        import_module(f"scripts.{command}").main(arguments)
        return Written(*capsys.readouterr())

    return run
