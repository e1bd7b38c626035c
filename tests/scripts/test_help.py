"""The help of each command shows a line to type, and the command takes that line's arguments."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from scripts.arguments import read_settings

FOLDER = Path(__file__).resolve().parents[2] / "scripts"
COMMANDS = [path.stem for path in FOLDER.glob("*.py") if "@command\n" in path.read_text()]


@pytest.mark.parametrize("name", ["report", *sorted(COMMANDS)])
def test_the_line_of_the_help_is_read(name, capsys, monkeypatch, tmp_path):
    package = ".__main__" if name == "report" else ""
    module = importlib.import_module(f"scripts.{name}{package}")
    monkeypatch.chdir(tmp_path)
    module.main(["--help"])
    line = rf"^ +python -m scripts\.{name} ((?:.*\\\n)*.*)$"
    shown = capsys.readouterr().out
    # one screen
    assert max(map(len, shown.splitlines())) <= 100
    assert len(shown.splitlines()) <= 40 or name == "benchmark"
    typed = re.findall(line, shown, re.MULTILINE)
    assert typed
    for arguments in typed:
        assert read_settings(module.Options, shlex.split(arguments))
