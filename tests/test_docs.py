"""What the lesson shows is what its commands print."""

import math
import re
from pathlib import Path

import pytest

from scripts import trace

ROOT = Path(__file__).resolve().parents[1]
LESSON = (ROOT / "docs/how-tiles-work.md").read_text()
CONSOLE = re.findall(r"```console\n\$ python -m scripts\.trace ?(.*)\n((?:.+\n)+)```", LESSON)
CODE = re.findall(r"```python\n(.+?)```(?:\n\n```text\n(.+?)```)?", LESSON, re.DOTALL)


def same(shown: str, printed: str) -> bool:
    """Word for word, but for the last digits of numbers and for rounding errors."""

    def close(a: str, b: str) -> bool:
        try:
            return math.isclose(float(a), float(b), rel_tol=2e-3, abs_tol=1e-6)
        except ValueError:
            return a == b

    pair = shown.split(), printed.split()
    return len(pair[0]) == len(pair[1]) and all(map(close, *pair))


@pytest.mark.parametrize("arguments, shown", CONSOLE, ids=[each for each, _ in CONSOLE])
def test_a_replay_prints_what_the_page_shows(arguments, shown, tmp_path, capsys):
    trace.main([*arguments.split(), f"out={tmp_path / 'page.html'}"])
    printed = capsys.readouterr().out.splitlines()
    for line in shown.splitlines():
        assert any(same(line, each) for each in printed), line


def test_the_code_prints_what_the_page_shows(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert len(CODE) == 3
    for code, shown in CODE:
        exec(code, {})
        assert capsys.readouterr().out == shown


INLINE = re.findall(r"`python\s-m\sscripts\.trace\s([^`]+)`", LESSON)


@pytest.mark.parametrize("arguments", INLINE)
def test_what_the_page_says_is_right_comes_out_right(arguments, tmp_path, capsys):
    trace.main([*arguments.split(), f"out={tmp_path / 'page.html'}"])
    assert re.search(r"every row .*exact", capsys.readouterr().out, re.IGNORECASE)
