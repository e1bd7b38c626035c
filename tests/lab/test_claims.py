"""The documents' claims: measured again on small sizes they have the committed verdicts, and the
pages are what the figures say.
"""

import ast
import contextlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.claims import CLAIMS, render
from lab.claims import __main__ as command
from lab.claims.asked import ASKED
from lab.claims.claim import (
    DOCUMENTS,
    FAILS,
    HOLDS,
    NOT_TESTABLE,
    Claim,
    cells,
    recorded,
    sentence,
    spread,
)
from lab.claims.questions import CHECKLIST, QUESTIONS

ROOT = Path(__file__).resolve().parents[2]
MEASURED = [claim for claim in CLAIMS.values() if claim.reads is None]
READ = [claim for claim in CLAIMS.values() if claim.reads is not None]


def ids(claims: list[Claim]) -> dict:
    return {"argvalues": claims, "ids": [claim.name for claim in claims]}


@pytest.fixture(scope="module")
def committed() -> dict:
    return recorded("claims")["claims"]


@pytest.fixture
def run_claims(monkeypatch, capsys):
    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["claims", *arguments])
        command.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def complaint(run_claims):
    """complaint("key=value", ...): the one line it ends with."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as error:
            run_claims(*arguments)
        assert "\n" not in error.value.code
        return error.value.code

    return run


@pytest.mark.parametrize("claim", **ids([claim for claim in MEASURED if claim.tiny is not None]))
def test_measured_again_the_verdict_stands(claim, committed):
    assert claim.verdict(claim.measure(**claim.tiny)) == claim.verdict(committed[claim.name])


def test_only_what_is_timed_is_not_measured_again():
    assert {claim.name for claim in MEASURED if claim.tiny is None} == {
        "small_calls",
        "tiled_speed_on_a_cpu",
    }


def test_every_measured_claim_is_committed(committed):
    assert list(committed) == [claim.name for claim in MEASURED]


@pytest.mark.parametrize("page", render.PAGES)
def test_the_committed_page_is_what_the_figures_say(page):
    assert (ROOT / "docs" / page).read_text() == render.PAGES[page](), (
        "python -m lab.claims render=true writes it"
    )


def all_numbers(value, number):
    """The same figures, each number this one."""
    if isinstance(value, dict):
        return {key: all_numbers(item, number) for key, item in value.items()}
    return number if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def changed(figures: dict) -> Iterator[dict]:
    """These figures with one number, at any depth, times many factors, or one word another."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from (figures | {name: inner} for inner in changed(value))
        elif isinstance(value, (str, bool)):
            yield from (
                figures | {name: other}
                for other in (0, 0.0, "none", "inf", "NaN", "finite", not value)
            )
        else:
            factors = (0, math.inf, *np.logspace(-9, 9, 700))
            yield from (figures | {name: value * factor} for factor in factors if value)
            yield from (figures | {name: other} for other in (0, 1, 1e9))


# what takes several figures at once to change: those of the guide's own table
ITS_OWN = {
    "standard": {"2048": 3.1, "4096": 12.4, "8192": 50, "65536": 3000},
    "tiled": {"2048": 0.5, "4096": 1.0, "8192": 2.0, "65536": 16.8},
}


@pytest.mark.parametrize("claim", **ids([claim for claim in MEASURED if claim.name != "latencies"]))
def test_the_verdict_depends_on_the_figures(claim, committed):
    """Some other figures give another verdict: none is written down in advance."""
    figures = committed[claim.name]
    candidates = [all_numbers(figures, number) for number in (0, 1, 0.3, 1e9)] + [*changed(figures)]
    if claim.name == "memory_table_of_the_guide":
        candidates = [ITS_OWN]
    verdicts = {claim.verdict(figures)}
    for other in candidates:
        with contextlib.suppress(
            TypeError, ValueError, OverflowError, ZeroDivisionError
        ):  # figures that cannot be
            verdicts.add(claim.verdict(other))
        if len(verdicts) > 1:
            return
    pytest.fail(f"always {verdicts}")


def test_both_verdicts_and_conditions_occur(committed):
    verdicts = [claim.verdict(committed[claim.name]) for claim in MEASURED]
    assert {HOLDS, FAILS, NOT_TESTABLE} <= set(verdicts)
    assert all(
        verdict in (HOLDS, FAILS, NOT_TESTABLE) or verdict.startswith("holds only if ")
        for verdict in verdicts
    )


@pytest.mark.parametrize("claim", **ids(READ))
def test_what_is_read_names_its_file(claim, monkeypatch):
    """Each such claim comes from the file it names, and is waiting where that file is missing."""
    asked = []

    def record(name):
        asked.append(name)
        raise FileNotFoundError(name)

    monkeypatch.setitem(claim.measure.__globals__, "recorded", record)
    monkeypatch.setattr("lab.claims.alive.recorded", record)  # speed asks it for the rows
    assert render.figures_of(claim) is None
    assert asked == [claim.reads]
    text, verdict = render.found(claim, None)
    assert verdict == render.NOT_YET and "python -m " in text


def test_files_of_the_benchmark_are_read_as_it_writes_them(monkeypatch, tmp_path):
    """Speeds by tile size, and the longest sequences on a card held to a smaller memory."""
    speeds = [
        {
            "attention": name,
            "seq_len": length,
            "forward_seconds": seconds * (length / 1024) ** power,
        }
        for name, seconds, power in (
            ("naive", 0.001, 2),
            ("tiled:block_q=64,block_kv=64", 0.1, 2),
            ("tiled:block_q=2048,block_kv=2048", 0.004, 1),
        )
        for length in (1024, 2048, 8192)
    ]
    speeds += [
        {"attention": "tiled:block_q=256,block_kv=256", "seq_len": 8192, "forward_seconds": 1.0},
        {"attention": "naive", "seq_len": 16384, "oom": {}},
    ]
    speeds += [
        {"attention": name, "seq_len": 8192, "forward_seconds": 0.5}
        for name in ("triton", "tiled:block_q=1024,block_kv=1024")
    ]
    walls = [
        {
            "attention": name,
            "pass": kind,
            "memory_gib": gib,
            "max_seq_len": longest,
            "limited_by": "memory",
        }
        for gib in (8.0, 40.0)
        for name, longest in (("naive", 750 * int(gib)), ("triton", 500_000))
        for kind in ("forward", "training")
    ]
    for name, rows in (("tile_speed_h200", speeds), ("longest_h200", walls)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr("lab.claims.claim.RESULTS", tmp_path)
    speed = CLAIMS["tiled_speed_on_a_gpu"]
    assert speed.verdict(speed.measure()) == "holds only if the tiles are much larger"
    assert (
        "naive 1024: 1.0, 2048: 4.0, 8192: 64.0; tiles of 64 1024: 100.0"
        in render.found(speed, speed.measure())[0]
    )
    small, large = CLAIMS["wall_of_8_gigabytes_on_a_gpu"], CLAIMS["longest_on_40_gigabytes"]
    assert small.verdict(small.measure()) == HOLDS and small.measure()["triton_training"] == 500_000
    assert (
        large.verdict(large.measure()) == FAILS
        and "naive 30,000 tokens" in render.found(large, large.measure())[0]
    )


def test_every_document_is_answered():
    assert {
        document for claim in CLAIMS.values() for document in claim.documents.split(", ")
    } == set(DOCUMENTS)
    assert len(CLAIMS) >= 70


def test_questions_show_only_figures_of_the_claims_they_name():
    for question in QUESTIONS:
        shown = set(
            re.findall(
                r"\{(\w+)", question.answer + "".join(template for _, template in question.rows)
            )
        )
        assert shown == set(question.uses), question.asks
        assert set(question.uses) <= set(CLAIMS)


def test_no_figure_is_typed_into_a_measured_sentence():
    """What was measured comes from the figures: a sentence without a place for one would be an
    assertion.
    """
    for claim in CLAIMS.values():
        assert "{" in claim.measured or claim.name == "latencies", claim.name


def commands() -> set[str]:
    texts = [(ROOT / "docs" / page).read_text() for page in render.PAGES] + [
        claim.also for claim in CLAIMS.values()
    ]
    return {
        module for text in texts for module in re.findall(r"python -m ((?:scripts|lab)\.\w+)", text)
    }


def test_what_the_pages_name_exists():
    for _, _, where in ASKED:
        assert (ROOT / where).exists(), where
    for _, where in CHECKLIST:
        assert where.startswith("python -m ") or (ROOT / where).exists(), where
    for module in commands():
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for names in re.findall(r"run=([\w,]+)", " ".join(where for _, where in CHECKLIST)):
        assert set(names.split(",")) <= set(CLAIMS)


def test_a_page_holds_no_path_of_a_machine():
    for path in (*(ROOT / "docs" / page for page in render.PAGES), ROOT / "results/claims.json"):
        assert not re.search(r"/(work|root|home|tmp|Users)/", path.read_text()), path


def test_run_prints_one_claim_and_writes_nothing(run_claims, monkeypatch):
    monkeypatch.setattr(render, "write_pages", lambda: pytest.fail("run= only prints"))
    out = run_claims("run=worked_example,score_table")
    assert (
        out.startswith("worked_example: holds\n") and "3.930" in out and "16,777,216 entries" in out
    )


def test_render_measures_nothing(run_claims, monkeypatch):
    written = []
    for claim in MEASURED:
        monkeypatch.setitem(
            CLAIMS,
            claim.name,
            replace(claim, measure=lambda: pytest.fail("render=true measures nothing")),
        )
    monkeypatch.setattr(render, "write_pages", lambda: written.append(True))
    run_claims("render=true")
    assert written


def test_says_which_files_it_has_changed(run_claims, monkeypatch, tmp_path):
    for folder in ("results", "docs"):
        (tmp_path / folder).mkdir()
    for page in ("results/claims.json", "docs/claims.md", "docs/questions.md"):
        (tmp_path / page).write_text("{}")
    monkeypatch.setattr("lab.claims.claim.RESULTS", tmp_path / "results")
    monkeypatch.setattr(render, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(render, "write_pages", lambda: None)
    assert run_claims("render=true").splitlines()[-1] == "no file has changed"
    monkeypatch.setattr(
        render, "write_pages", lambda: (tmp_path / "docs/claims.md").write_text("new")
    )
    assert (
        run_claims("render=true").splitlines()[-1]
        == "changed: docs/claims.md; git restore brings the committed ones back"
    )


def test_one_line_for_what_is_wrong(complaint):
    assert complaint("run=bit_by_bit").startswith(
        "claims: run=bit_by_bit is not a claim; valid: bit_for_bit, "
    )
    assert complaint("redner=true").startswith("claims: 'redner=true' is not understood")
    assert complaint("render=yes").startswith("claims: 'render=yes' is not understood")


def test_help_shows_a_line_that_runs(run_claims):
    """The command in --help works as typed, in a process of its own."""
    (line,) = re.findall(r"^    python (-m lab\.claims .*)$", run_claims("--help"), re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *line.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("causal_as_printed: does not hold")


@pytest.mark.parametrize(
    ("template", "value", "text"),
    [
        ("{x:.2f}", 1.005, "1.00"),
        ("{x:.2f}", spread([1.0, 3.0, 2.0]), "2.00 (1.00 to 3.00, n=3)"),
        ("{x:.1f}", spread([2.0, 2.0]), "2.0"),
        ("{x:.0%}", {"a": 0.5, "b": "none"}, "a: 50%, b: none"),
        ("{x[64]:.1f}", {"64": 2.0}, "2.0"),
        ("{x}", 0.00123, "1.2e-03"),
        ("{x}", 12345, "12,345"),
        ("{x:.0e}", 0.0, "0"),
        ("{x}", "NaN", "NaN"),
    ],
)
def test_figures_in_sentences(template, value, text):
    assert sentence(template, {"x": value}) == text


def test_a_row_of_a_table_is_one_figure_key_by_key():
    figures = {"a": {"x": {"1024": spread([1.0, 2.0, 3.0]), "2048": "none"}}}
    assert cells("{a[x]:.1f}", figures) == {"1024": "2.0 (1.0 to 3.0, n=3)", "2048": "none"}


def test_inputs_are_scaled_as_they_say():
    from lab.claims.inputs import inputs

    q, k, v = inputs(0, 4, 4, 256, 32, std=3)
    assert q.std().item() == pytest.approx(3, rel=0.02) and k.std().item() == pytest.approx(
        3, rel=0.02
    )
    assert v.std().item() == pytest.approx(1, rel=0.02) and q.dtype == torch.float32


def test_no_verdict_ignores_its_figures():
    """In the source: every verdict reads f, but for the one claim that cannot be tested here."""
    ignoring = []
    for file in sorted((ROOT / "lab/claims").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "verdict":
                uses = [
                    x for x in ast.walk(node.value.body) if isinstance(x, ast.Name) and x.id == "f"
                ]
                ignoring += [] if uses else [ast.unparse(node.value)]
    assert ignoring == ["lambda f: NOT_TESTABLE"]
