"""The exercises of attn-conform quiz: red as written, green after the edit is undone."""

import ast
import re
import sys
from pathlib import Path

import pytest

from conformance import command
from conformance.quiz import EXERCISES, judge, red_cells, write
from conformance.quiz_exercises import SOURCE

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = range(1, len(EXERCISES) + 1)


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[] if n % 30 == 1 else [pytest.mark.slow]) for n in NUMBERS],
)
def test_is_red_as_it_is_and_green_when_mended(number, tmp_path, capsys):
    exercise = EXERCISES[number - 1]
    file, symptoms = write(number, exercise, tmp_path)
    assert exercise.shows in {cell.property for cell in red_cells(file, (exercise.shows,))}
    assert judge(exercise, file)
    assert f"red  {exercise.shows}" in symptoms.read_text()
    start = SOURCE.index(exercise.before)
    source = exercise.source
    assert source[start:].startswith(exercise.after)
    mended = source[:start] + exercise.before + source[start + len(exercise.after) :]
    file.write_text(mended)
    capsys.readouterr()
    assert judge(exercise, file) is None
    assert exercise.says in capsys.readouterr().out


def test_there_are_enough_and_no_two_are_alike():
    assert len({each.source for each in EXERCISES} - {SOURCE}) == len(EXERCISES) >= 40
    assert len({each.says for each in EXERCISES}) == len(EXERCISES)
    for each in EXERCISES:
        assert each.function in ("attend", "tiles", "positions", "visible", "key_tiles") or (
            each.function in ("tile_scores", "FlashAttention.forward", "FlashAttention.backward")
        )


def test_an_exercise_needs_torch_alone():
    names = {
        alias.name
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert names == {"torch"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(ast.parse(SOURCE)))


def quiz(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["attn-conform", "quiz", *words])
    with pytest.raises(SystemExit) as ended:
        command.main()
    return ended.value.code


def test_the_command(monkeypatch, tmp_path, capsys):
    assert quiz(monkeypatch) == 0
    assert f"to {len(EXERCISES)}  hard" in capsys.readouterr().out
    assert quiz(monkeypatch, "1", f"out={tmp_path}", "hint=true") == 0
    out = capsys.readouterr().out
    assert "Look at tile_scores()" in out
    file = tmp_path / "exercise_01.py"
    assert f"quiz 1 fix={file}" in file.read_text()
    text = (tmp_path / "exercise_01.txt").read_text()
    assert " out head 0  .####" in text  # the first query sees one key, whatever the scale
    assert "properties still red: " in quiz(monkeypatch, "1", f"fix={file}")
    file.write_text(SOURCE)
    assert quiz(monkeypatch, "1", f"fix={file}") == 0


@pytest.mark.slow
def test_the_package_page_shows_what_the_judge_prints(monkeypatch, tmp_path, capsys):
    """Budgets, and so the worst case, depend on the rounding of the CPU."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "packaging/attn-conform/README.md").read_text()
    number, shown, end = re.search(
        r"fix=exercise_(\d+)\.py\n((?:red  .+\n)+)attn-conform: (.+)\n", page
    ).groups()
    quiz(monkeypatch, number, "out=.")
    capsys.readouterr()
    assert quiz(monkeypatch, number, f"fix=exercise_{number}.py") == f"attn-conform: {end}"
    form = r"red  (.+?) +(\w+) of (\S+): (\S+) where (\S+) is allowed"
    printed = re.findall(form, capsys.readouterr().out)
    for a, b in zip(re.findall(form, shown), printed, strict=True):
        assert a[:2] == b[:2]  # property and tensor
        if a[2] == b[2]:  # the same case
            assert float(a[3]) == pytest.approx(float(b[3]), rel=0.01)
            assert 1 / 3 < float(a[4]) / float(b[4]) < 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["0", "hint=true"], "no exercise 0; they go from 1 to"),
        (["one", "hint=true"], "no exercise one"),
        (["99"], "no exercise 99; they go from 1 to"),  # said what else a number needs
        (["1"], "quiz takes a number, and with it"),
        (["1", "into=x"], "no key 'into'; the keys are: out, fix, hint"),
        (["1", "out=nowhere"], "out=nowhere is not a folder"),
        (["1", "fix=nowhere.py"], "nowhere.py is not a Python file"),
        (["1", "hint=maybe"], "hint=maybe must be true or false"),
    ],
)
def test_what_cannot_be_done_is_said(words, says, monkeypatch):
    assert says in quiz(monkeypatch, *words)


def test_a_file_that_does_not_load_is_named(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("def attend(:")
    with pytest.raises(ValueError, match=r"broken\.py: SyntaxError"):
        red_cells(file)
    file.write_text("x = 1")
    with pytest.raises(ValueError, match="has no attribute 'attend'"):
        red_cells(file)
