"""The documents' claims: measured again on small sizes they have the committed verdicts, and the
page is what the figures say.
"""

import ast
import contextlib
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.claims import __main__ as command
from lab.claims import render
from lab.claims.claim import DOCUMENTS, FAILS, HOLDS, Claim, distribution
from lab.claims.inputs import inputs
from lab.claims.speed import milliseconds
from lab.claims.topics import CLAIMS
from lab.claims.topics import FIRST as MISTAKES
from lab.results.tables import load
from tests import forked

ROOT = Path(__file__).resolve().parents[2]
MEASURED = [claim for claim in CLAIMS.values() if not claim.reads]
READ = [claim for claim in CLAIMS.values() if claim.reads]
TIMED = {"small_calls", "tiled_speed_on_a_cpu"}


def ids(claims: list[Claim]) -> dict:
    return {"argvalues": claims, "ids": [claim.name for claim in claims]}


@pytest.fixture(scope="module")
def committed() -> dict:
    return load("claims")["claims"]


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


@pytest.mark.parametrize("claim", **ids([claim for claim in MEASURED if claim.name not in TIMED]))
def test_measured_again_the_verdict_stands(claim, committed):
    figures = claim.measure()
    assert figures.keys() == committed[claim.name].keys()
    assert claim.verdict(figures) == claim.verdict(committed[claim.name])


def test_times_are_measured_call_by_call():
    calls = []
    times = milliseconds(lambda: calls.append(1), repeats=3)
    assert len(calls) == 4 and times["n"] == 3 and 0 < times["min"] <= times["max"]


def test_every_measured_claim_is_committed(committed):
    assert committed.keys() == {claim.name for claim in MEASURED}


def test_the_committed_page_is_what_the_figures_say(monkeypatch, tmp_path):
    monkeypatch.setattr(render, "PAGE", tmp_path / "claims.md")
    render.write_page()
    assert (ROOT / "docs/claims.md").read_text() == (tmp_path / "claims.md").read_text(), (
        "python -m lab.results writes it"
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


@pytest.mark.parametrize("claim", **ids(MEASURED))
def test_the_verdict_depends_on_the_figures(claim, committed):
    """Some other figures give another verdict: none is written down in advance."""
    figures = committed[claim.name]
    candidates = [all_numbers(figures, number) for number in (0, 1, 0.3, 1e9)] + [*changed(figures)]
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
    verdicts = {claim.verdict(committed[claim.name]) for claim in MEASURED}
    conditions = verdicts - {HOLDS, FAILS}
    assert {HOLDS, FAILS} < verdicts
    assert all(verdict.startswith("holds only if ") for verdict in conditions)


@pytest.mark.parametrize("claim", **ids(READ))
def test_what_is_read_names_its_file(claim, monkeypatch):
    """Each such claim comes from the file it names."""
    asked = []

    def record(name):
        asked.append(name)
        raise FileNotFoundError(name)

    monkeypatch.setitem(claim.measure.__globals__, "load", record)
    monkeypatch.setattr("lab.claims.memory.load", record)  # speed asks it for the rows
    with pytest.raises(FileNotFoundError):
        render.figures_of(claim)
    assert asked == [claim.reads]


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
    monkeypatch.setattr("lab.results.tables.FOLDER", tmp_path)
    speed = CLAIMS["tiled_speed_on_a_gpu"]
    assert speed.verdict(speed.measure()) == "holds only if the tiles are much larger"
    text = render.describe(speed, speed.measure())
    assert "| tokens | 1024 | 2048 | 8192 |" in text and "| tiles 256 | - | - | 1,000 |" in text
    small, large = CLAIMS["wall_of_8_gigabytes_on_a_gpu"], CLAIMS["longest_on_40_gigabytes"]
    assert small.verdict(small.measure()) == HOLDS
    assert "6,000 and 500,000" in render.describe(small, small.measure())
    assert large.verdict(large.measure()) == FAILS
    assert "naive 30,000 tokens" in render.describe(large, large.measure())


def test_every_document_is_answered():
    assert {
        document for claim in CLAIMS.values() for document in claim.documents.split(", ")
    } == set(DOCUMENTS)


def test_the_page_opens_with_ten_mistakes():
    page = (ROOT / "docs/claims.md").read_text()
    first = page.split("\n## ")[1]
    assert [f"### {CLAIMS[name].says}" for name in MISTAKES] == re.findall("^### .*", first, re.M)
    assert len(MISTAKES) == 10 and not re.search(r"^\*\*Holds\.", first, re.M)
    assert page.count("\n### ") == len(CLAIMS)


def test_no_figure_is_typed_into_a_measured_sentence():
    """What was measured comes from the figures: a sentence without a place for one would be an
    assertion.
    """
    for claim in CLAIMS.values():
        assert "{" in claim.words[2] or claim.table, claim.name


def test_neither_page_nor_record_holds_a_path_of_a_machine():
    for path in ("docs/claims.md", "results/claims.json"):
        assert not re.search(r"/(work|root|home|tmp|Users)/", (ROOT / path).read_text()), path


def test_run_prints_claims_and_writes_nothing(run_claims, monkeypatch):
    monkeypatch.setattr(render, "write_page", lambda: pytest.fail("run= only prints"))
    out = run_claims("run=clamped_sum,first_correction")
    assert "**Does not hold.** Measured: 44.5% NaN" in out
    assert "0 after a tile with a key, NaN after a tile without" in out


@pytest.fixture
def only(monkeypatch):
    """only(claim): it is the one claim there is."""

    def leave(claim: Claim) -> None:
        monkeypatch.setattr("lab.claims.topics.CLAIMS", {"first_correction": claim})
        monkeypatch.setattr(render, "CLAIMS", {"first_correction": claim})

    return leave


FIRST = CLAIMS["first_correction"]
NEVER_MEASURED = replace(FIRST, measure=lambda: pytest.fail("it is measured"))


def test_a_measurement_is_recorded_and_the_page_written(run_claims, monkeypatch, only, tmp_path):
    monkeypatch.setattr("lab.results.tables.FOLDER", tmp_path)
    monkeypatch.setattr(render, "PAGE", tmp_path / "claims.md")
    only(FIRST)
    out = run_claims().splitlines()
    assert out[0] == f"first_correction: {FIRST.verdict(FIRST.measure())}"
    record = json.loads((tmp_path / "claims.json").read_text())
    assert record["claims"] == {"first_correction": FIRST.measure()}
    assert record["environment"]["command"] == ["python", "-m", "lab.claims"]
    assert "1 of 83 measured statements" in (tmp_path / "claims.md").read_text()


def test_an_unwritable_page_is_refused_before_the_measurements(
    complaint, monkeypatch, only, tmp_path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(render, "PAGE", tmp_path / "file/claims.md")
    only(NEVER_MEASURED)
    assert " cannot be written: " in complaint()


def test_one_line_for_what_is_wrong(complaint):
    assert complaint("run=bit_by_bit").startswith(
        "claims: run=bit_by_bit is not a claim; valid: sums_of_tens, "
    )
    for argument in ("rnu=bit_for_bit", "render=yes"):
        assert complaint(argument).startswith("claims: ") and argument in complaint(argument)


def test_help_shows_a_line_that_runs(run_claims):
    """The command in --help works as typed, in a process of its own."""
    (line,) = re.findall(r"^    python (-m lab\.claims .*)$", run_claims("--help"), re.MULTILINE)
    done = forked.run(*line.split())
    assert done.returncode == 0, done.stderr
    assert "**Does not hold.** Measured: share of NaN outputs by tile size" in done.stdout


@pytest.mark.parametrize(
    ("template", "value", "text"),
    [
        ("{x:.2f}", 1.005, "1.00"),
        ("{x:.2f}", distribution([1.0, 3.0, 2.0]), "2.00 (1.00 to 3.00, n=3)"),
        ("{x:.1f}", distribution([2.0, 2.0]), "2.0"),
        ("{x:.0%}", {"a": 0.5, "b": "none"}, "a: 50%, b: none"),
        ("{x[y]:.1f}", {"y": 2.0}, "2.0"),
        ("{x}", 0.00123, "1.2e-03"),
        ("{x}", 12345, "12,345"),
        ("{x:.0e}", 0.0, "0"),
        ("{x}", "NaN", "NaN"),
    ],
)
def test_figures_in_sentences(template, value, text):
    assert render.sentence(template, {"x": value}) == text


def test_inputs_are_scaled_as_they_say():
    q, k, v = inputs(0, 4, 4, 256, 32, std=3)
    for x, std in ((q, 3), (k, 3), (v, 1)):
        assert x.std().item() == pytest.approx(std, rel=0.02) and x.dtype == torch.float32


def test_no_verdict_ignores_its_figures():
    """In the source: every criterion and every condition reads f, or is a function that does."""
    for file in sorted((ROOT / "lab/claims").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Lambda) and [a.arg for a in node.args.args] == ["f"]:
                names = {x.id for x in ast.walk(node.body) if isinstance(x, ast.Name)}
                assert "f" in names, ast.unparse(node)
