"""`python -m scripts.verify`: the matrix it prints and writes, and its exit code."""

import json
import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention import get_backend
from conformance.properties import PROPERTIES
from scripts import verify
from scripts.arguments import read_settings

ROOT = Path(__file__).resolve().parents[2]
USERS = "tests.user_backends"
MODEST = replace(get_backend("naive"), name="modest", breaks=frozenset({"saved bytes", "forward"}))


@pytest.fixture
def run_verify(monkeypatch, capsys):
    """run_verify("key=value", ..., only=NAMES): exit code or complaint, and what it printed, on a
    machine without a GPU.
    """
    # half a second of compiling a backend for nothing
    monkeypatch.delitem(PROPERTIES, "compiled = eager")

    def run(*arguments: str, only: Iterable[str] = PROPERTIES) -> tuple[str | int | None, str]:
        monkeypatch.setattr(verify, "PROPERTIES", {name: PROPERTIES[name] for name in only})
        code = 0
        try:
            verify.main(["cases=2", *arguments])
        except SystemExit as stopped:
            code = stopped.code
        return code, capsys.readouterr().out

    return run


def marks_of(printed: str, name: str) -> str:
    """The marks of a property, one for each backend."""
    return re.search(rf"^{re.escape(name)} +(\S(?:  \S)*)$", printed, re.MULTILINE)[1]


def test_an_exact_and_a_broken_backend_are_as_documented(run_verify, tmp_path):
    """In a property that holds, one that a CPU lacks, one without features, and all that break."""
    red = get_backend("zero_init_max").breaks
    expected = {"forward": "+  +", "streams and graphs": ".  .", "cache and pages": "+  ."}
    expected |= dict.fromkeys(red, "+  x")
    asked = ("attention=tiled,zero_init_max", f"out={tmp_path / 'found.json'}")
    code, out = run_verify(*asked, only=expected)
    assert code == 0 and {name: marks_of(out, name) for name in expected} == expected

    data = json.loads((tmp_path / "found.json").read_text())
    assert list(data["backends"]) == ["tiled", "zero_init_max"]
    assert list(data["properties"]) == list(expected)
    assert data["random_cases"] == {"number": 2, "seed": 0} and data["dtypes"] == ["fp32"]
    assert data["environment"]["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert str(ROOT) not in json.dumps(data)
    tiled, broken = data["backends"].values()
    assert 0 < tiled["worst_multiple_of_naive"] < 3 and tiled["checks"] > 30
    cells = [cell for cell in tiled["cells"] if cell["property"] != "streams and graphs"]
    assert all(cell["status"] == "green" and cell["worst_share"] <= 1 for cell in cells)
    assert {cell["property"] for cell in broken["cells"] if cell["documented"]} == red


def test_an_older_file_stays_until_the_end_and_where_a_run_is_stopped(run_verify, tmp_path):
    path, out = tmp_path / "found.json", f"out={tmp_path / 'found.json'}"
    run_verify("attention=tiled", out, only=["forward"])
    before = path.read_bytes()
    assert run_verify(f"attention={USERS}:PRESSES_CTRL_C", out, only=["forward"])[0] == 130
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["found.json"]
    # several dtypes share a column
    asked = ("attention=no_scale,naive", "dtype=fp32,bf16", out)
    code, printed = run_verify(*asked, only=["forward"])
    assert code == 0 and marks_of(printed, "forward") == "x  +"
    data = json.loads(path.read_text())
    assert [*data["backends"]] == ["no_scale", "naive"] and data["dtypes"] == ["fp32", "bf16"]


def test_a_column_for_each_name_and_for_the_kernels_of_a_defect_where_they_run(monkeypatch):
    with_options, own = "tiled:block_q=16,block_kv=32", f"{USERS}:RIGHT"
    typed = f"attention={with_options},no_max,{own},tiled"
    names = read_settings(verify.Options, [typed]).attention
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    found = verify.pick_backends(names, torch.device("cpu"))
    assert list(found) == [with_options, "no_max", own, "tiled"]
    assert [found[name].options["block_q"] for name in (with_options, "tiled")] == [16, 128]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = verify.pick_backends(names, torch.device("cpu"))
    assert list(found) == [with_options, "no_max", "no_max (triton)", own, "tiled"]


def test_wrong_backends_of_the_users_fail_and_say_where(run_verify):
    names = [f"{USERS}:{name}" for name in ("WRONG", "RAISES")]
    code, out = run_verify(f"attention={','.join(names)},tiled", only=["forward"])
    assert code.startswith("verify: ") and marks_of(out, "forward") == "!  !  +"
    assert re.search(rf"^! {names[0]}, forward.* B\S+-fp32: ", out, re.MULTILINE)
    assert "KeyError" in out and "my kernel's table" in out


def test_a_property_that_is_green_but_documented_as_red_fails(run_verify):
    modest = f"{__name__}:MODEST"
    code, out = run_verify(f"attention={modest}", only=["forward", "saved bytes"])
    assert re.match(r"verify: 1 \w", code)
    assert re.search(f"^! {modest}, forward.*green", out, re.MULTILINE)


def test_a_backend_that_cannot_run_here_is_not_verified(run_verify, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, out = run_verify("attention=triton")
    assert code.startswith("verify: ")
    assert ". triton: " in out and "TRITON_INTERPRET=1" in out


def test_pytorchs_remarks_on_flex_attention_are_not_printed_and_others_are(
    run_verify, monkeypatch, recwarn
):
    def remark(subject):
        for words in ("return_lse is deprecated and will be removed", "something is wrong"):
            warnings.warn(words, FutureWarning, stacklevel=1)

    monkeypatch.setitem(PROPERTIES, "forward", remark)
    run_verify("attention=naive", only=["forward"])
    assert [str(warning.message) for warning in recwarn] == ["something is wrong"]


@pytest.mark.slow
def test_an_exact_backend_is_green_in_every_property(capsys):
    verify.main(["attention=tiled"])
    out = capsys.readouterr().out
    assert {marks_of(out, name) for name in PROPERTIES if name != "streams and graphs"} == {"+"}
