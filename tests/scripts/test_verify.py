"""`python -m scripts.verify`: the matrix it prints and writes, its exit code, and one line for each
thing that can be wrong.
"""

import json
import os
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

from attention import BACKENDS, Backend, register
from conformance.properties import PROPERTIES
from scripts import verify
from scripts.arguments import read_settings
from tests import processes
from tests.user_backends import RIGHT

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_verify(monkeypatch, capsys):
    """run_verify("key=value", ...): (exit code or complaint, what it printed), on a machine without
    a GPU.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # half a second of compiling a backend for nothing
    monkeypatch.delitem(PROPERTIES, "compiled = eager")

    def run(*arguments: str) -> tuple[str | int | None, str]:
        monkeypatch.setattr(sys, "argv", ["verify", "cases=2", *arguments])
        code = 0
        try:
            verify.main()
        except SystemExit as stopped:
            code = stopped.code
        return code, capsys.readouterr().out

    return run


def test_an_exact_and_a_broken_backend_are_as_documented(run_verify, tmp_path):
    code, out = run_verify("attention=tiled,zero_init_max", f"out={tmp_path / 'found.json'}")
    assert code == 0
    marks = {
        name: re.search(rf"^{re.escape(name)} +(.)  (.)$", out, re.MULTILINE).groups()
        for name in PROPERTIES
    }
    red = {"logits - 120", "every length", "rows without a key", "wider calls"}
    expected = {name: ("+", "x" if name in red else "+") for name in PROPERTIES}
    not_asked = {"streams and graphs": (".", "."), "cache and pages": ("+", ".")}
    assert marks == expected | not_asked
    assert "tiled            98 fixed and 2 random cases" in out

    data = json.loads((tmp_path / "found.json").read_text())
    assert list(data["backends"]) == ["tiled", "zero_init_max"] and list(
        data["properties"]
    ) == list(PROPERTIES)
    assert data["random_cases"] == {"number": 2, "seed": 0} and data["dtypes"] == ["fp32"]
    assert data["environment"]["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert str(ROOT) not in json.dumps(data)
    tiled = data["backends"]["tiled"]
    assert 0 < tiled["worst_multiple_of_naive"] < 3 and tiled["tried"]["checks"] > 150
    cells = [cell for cell in tiled["cells"] if cell["property"] != "streams and graphs"]
    assert all(cell["status"] == "green" and cell["worst_share"] <= 1 for cell in cells)
    assert {
        cell["property"]
        for cell in data["backends"]["zero_init_max"]["cells"]
        if cell["documented"]
    } == red


def test_an_older_file_is_replaced_at_the_end_and_stays_where_a_run_is_stopped(
    run_verify, monkeypatch, tmp_path
):
    monkeypatch.setattr(verify, "PROPERTIES", {"forward": PROPERTIES["forward"]})
    path = tmp_path / "found.json"
    run_verify("attention=tiled", f"out={path}")
    before = path.read_bytes()

    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(verify, "examine", pressed)
        code, out = run_verify("attention=naive", f"out={path}")
    assert code == 130 and out == f"{path} will be replaced\n"
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["found.json"]
    run_verify("attention=no_scale,naive", f"out={path}")
    assert list(json.loads(path.read_text())["backends"]) == ["no_scale", "naive"]


def test_kernels_of_a_defect_get_their_own_column_where_they_run(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("with a GPU they run")
    device = torch.device("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert list(verify.pick_backends(["no_max", "tiled"], device)) == [
        "no_max",
        "no_max (triton)",
        "tiled",
    ]
    monkeypatch.delenv("TRITON_INTERPRET")
    assert list(verify.pick_backends(["no_max", "tiled"], device)) == ["no_max", "tiled"]


def test_options_follow_the_name():
    typed = "attention=tiled:block_q=16,block_kv=32,naive,tests.user_backends:RIGHT,tiled"
    names = read_settings(verify.Options, [typed]).attention
    found = verify.pick_backends(names, torch.device("cpu"))
    assert list(found) == [
        "tiled:block_q=16,block_kv=32",
        "naive",
        "tests.user_backends:RIGHT",
        "tiled",
    ]
    assert (
        found["tiled:block_q=16,block_kv=32"].options["block_q"],
        found["tiled"].options["block_q"],
    ) == (16, 128)


def test_a_wrong_backend_of_the_users_fails_and_says_where(run_verify):
    code, out = run_verify("attention=tests.user_backends:WRONG")
    assert re.fullmatch(r"verify: \d+ cells are not as documented", code)
    assert re.search(r"^forward +!$", out, re.MULTILINE)
    assert re.search(
        r"^! tests.user_backends:WRONG, forward, fp32: red, out of B\S+-fp32: \S+ where "
        r"\S+ is allowed$",
        out,
        re.MULTILINE,
    )


def test_a_backend_that_raises_does_not_end_the_run(run_verify):
    code, out = run_verify("attention=tests.user_backends:RAISES,tiled")
    assert "cells are not as documented" in code
    assert '! tests.user_backends:RAISES, forward, fp32: red, KeyError: "my kernel\'s table"' in out
    assert re.search(r"^forward +!  \+$", out, re.MULTILINE)


def test_a_registered_backend_and_what_it_documents(run_verify):
    memory = frozenset({"saved bytes", "largest tensor"})
    try:
        register(Backend("mine", RIGHT.fn, breaks=memory))
        register(Backend("modest", RIGHT.fn, breaks=memory | {"forward"}))
        assert run_verify("attention=mine")[0] == 0
        code, out = run_verify("attention=modest")
        assert code == "verify: 1 cells are not as documented"
        assert "! modest, forward, fp32: green, but the backend documents it as red" in out
    finally:
        BACKENDS.pop("mine", None)
        BACKENDS.pop("modest", None)


def test_what_is_refused_altogether_is_not_verified(run_verify, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, out = run_verify("attention=triton")
    assert code == "verify: nothing was verified"
    assert ". triton: " in out and "set TRITON_INTERPRET=1" in out


def test_several_dtypes_share_a_column(run_verify):
    code, out = run_verify("attention=sdpa", "dtype=fp32,bf16", "cases=0")
    assert code == 0 and re.search(r"^forward +\+$", out, re.MULTILINE)
    assert "146 fixed and 0 random cases" in out


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("attention=flash", "verify: attention=flash is not known; valid: naive, tiled"),
        (
            "attention=no_such:BACKEND",
            "verify: attention=no_such:BACKEND cannot be loaded: ModuleNotFoundError",
        ),
        ("attention=tiled:block_kv=abc", "verify: block_kv=abc must be a whole number, at least 1"),
        ("dtype=int8", "verify: dtype=int8 is not one of: auto, fp32, bf16, fp16"),
        ("device=cuda", "verify: device=cuda, but PyTorch sees no GPU here"),
        ("cases=many", "verify: cases=many must be a whole number"),
        ("cases=-1", "verify: cases=-1 must be at least 0"),
        ("seed=9999999999999", "verify: seed=9999999999999 must be at most 1000000000000"),
        (
            "attention=tiled:block_q=[",
            "verify: 'block_q=[' has no value that can be read; write block_q=16",
        ),
        ("out=nowhere/found.json", "verify: out=nowhere/found.json: its folder does not exist"),
        (
            "backend=tiled",
            "verify: backend=tiled: there is no key 'backend'; the keys are: attention, device, "
            "dtype, cases, seed, out",
        ),
    ],
)
def test_complaints(run_verify, argument, message):
    code, out = run_verify(argument)
    assert code.startswith(message) and "\n" not in code and out == ""


def test_pytorchs_remarks_on_flex_attention_are_not_printed_and_others_are(
    run_verify, monkeypatch, recwarn
):
    forward = PROPERTIES["forward"]

    def remark(subject):
        warnings.warn("return_lse is deprecated and will be removed", FutureWarning, stacklevel=1)
        warnings.warn(
            "flex_attention called without torch.compile() - this is slow",
            UserWarning,
            stacklevel=1,
        )
        warnings.warn("something is wrong", UserWarning, stacklevel=1)
        return forward(subject)

    monkeypatch.setattr(verify, "PROPERTIES", {"forward": forward})
    monkeypatch.setitem(PROPERTIES, "forward", remark)
    run_verify("attention=naive", "cases=0")
    assert [str(warning.message) for warning in recwarn] == ["something is wrong"]


@pytest.mark.slow
def test_the_line_in_help_runs_as_typed(monkeypatch, capsys):
    help_text = processes.run("-m", "scripts.verify", "--help").stdout
    (line,) = re.findall(r"^    python -m scripts\.verify (.*)$", help_text, re.MULTILINE)
    monkeypatch.setattr(sys, "argv", ["verify", *line.split()])
    verify.main()
    out = capsys.readouterr().out
    assert re.search(r"^compiled = eager +\+$", out, re.MULTILINE), out
