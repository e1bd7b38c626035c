"""The help of each command shows a line to type, and the command takes that line's arguments.

The line of scripts.sample is run as typed in test_sample.py.
"""

import importlib
import re
import shlex

import pytest

from scripts.arguments import read_settings

COMMANDS = (
    "agree",
    "benchmark",
    "cross_eval",
    "dashboard",
    "export",
    "plan",
    "profile",
    "recall",
    "report",
    "trace",
    "train_bpe",
    "tune",
    "verify",
)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_the_help_is_read(name, capsys, monkeypatch, tmp_path):
    package = ".__main__" if name == "report" else ""
    module = importlib.import_module(f"scripts.{name}{package}")
    monkeypatch.chdir(tmp_path)
    module.main(["--help"])
    line = rf"^ +python -m scripts\.{name} ((?:.*\\\n)*.*)$"
    typed = re.findall(line, capsys.readouterr().out, re.MULTILINE)
    assert typed
    for arguments in typed:
        assert read_settings(module.Options, shlex.split(arguments))
