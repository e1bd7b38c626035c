"""`python -m scripts.verify`: the matrix it prints and writes, its exit code, and one line for each
thing that can be wrong.
"""

import json
import os
import re
import warnings
from pathlib import Path

import pytest
import torch

from attention import BACKENDS, Backend, get_backend, register
from conformance.properties import PROPERTIES
from scripts import verify
from scripts.arguments import read_settings
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
        code, few = 0, ["cases=2"] * ("cases=" not in str(arguments))
        try:
            verify.main([*few, *arguments])
        except SystemExit as stopped:
            code = stopped.code
        return code, capsys.readouterr().out

    return run


def marks_of(printed: str, name: str) -> str:
    """The marks of a property, one for each backend."""
    return re.search(rf"^{re.escape(name)} +(\S(?:  \S)*)$", printed, re.MULTILINE)[1]


def test_an_exact_and_a_broken_backend_are_as_documented(run_verify, tmp_path):
    code, out = run_verify("attention=tiled,zero_init_max", f"out={tmp_path / 'found.json'}")
    assert code == 0
    red = get_backend("zero_init_max").breaks
    expected = {name: "+  x" if name in red else "+  +" for name in PROPERTIES}
    not_asked = {"streams and graphs": ".  .", "cache and pages": "+  ."}
    assert {name: marks_of(out, name) for name in PROPERTIES} == expected | not_asked

    data = json.loads((tmp_path / "found.json").read_text())
    assert list(data["backends"]) == ["tiled", "zero_init_max"]
    assert list(data["properties"]) == list(PROPERTIES)
    assert data["random_cases"] == {"number": 2, "seed": 0} and data["dtypes"] == ["fp32"]
    assert data["environment"]["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert str(ROOT) not in json.dumps(data)
    tiled, broken = data["backends"].values()
    assert 0 < tiled["worst_multiple_of_naive"] < 3 and tiled["checks"] > 150
    cells = [cell for cell in tiled["cells"] if cell["property"] != "streams and graphs"]
    assert all(cell["status"] == "green" and cell["worst_share"] <= 1 for cell in cells)
    assert {cell["property"] for cell in broken["cells"] if cell["documented"]} == red


def test_an_older_file_is_replaced_at_the_end_and_stays_where_a_run_is_stopped(
    run_verify, monkeypatch, tmp_path
):
    monkeypatch.setattr(verify, "PROPERTIES", {"forward": PROPERTIES["forward"]})
    path = tmp_path / "found.json"
    run_verify("attention=tiled", f"out={path}")
    before = path.read_bytes()
    code, _ = run_verify("attention=tests.user_backends:PRESSES_CTRL_C", f"out={path}")
    assert code == 130
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["found.json"]
    run_verify("attention=no_scale,naive", f"out={path}")
    assert list(json.loads(path.read_text())["backends"]) == ["no_scale", "naive"]


def test_kernels_of_a_defect_get_their_own_column_where_they_run(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("with a GPU they run")
    picked = {}
    for interpret in "10":
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        backends = verify.pick_backends(["no_max", "tiled"], torch.device("cpu"))
        picked[interpret] = list(backends)
    assert picked["1"] == ["no_max", "no_max (triton)", "tiled"]
    assert picked["0"] == ["no_max", "tiled"]


def test_options_follow_the_name():
    with_options, own = "tiled:block_q=16,block_kv=32", "tests.user_backends:RIGHT"
    typed = f"attention={with_options},naive,{own},tiled"
    names = read_settings(verify.Options, [typed]).attention
    found = verify.pick_backends(names, torch.device("cpu"))
    assert list(found) == [with_options, "naive", own, "tiled"]
    assert found[with_options].options["block_q"] == 16
    assert found["tiled"].options["block_q"] == 128


def test_wrong_backends_of_the_users_fail_and_say_where(run_verify):
    names = [f"tests.user_backends:{name}" for name in ("WRONG", "RAISES")]
    code, out = run_verify(f"attention={','.join(names)},tiled")
    assert code.startswith("verify: ") and marks_of(out, "forward") == "!  !  +"
    assert re.search(rf"^! {names[0]}, forward.* B\S+-fp32: ", out, re.MULTILINE)
    assert "KeyError" in out and "my kernel's table" in out


def test_a_registered_backend_and_its_documented_breaks(run_verify):
    memory = frozenset({"saved bytes", "largest tensor"})
    try:
        register(Backend("mine", RIGHT.fn, breaks=memory))
        register(Backend("modest", RIGHT.fn, breaks=memory | {"forward"}))
        assert run_verify("attention=mine")[0] == 0
        code, out = run_verify("attention=modest")
        assert re.match(r"verify: 1 \w", code)
        assert re.search("^! modest, forward.*green", out, re.MULTILINE)
    finally:
        BACKENDS.pop("mine", None)
        BACKENDS.pop("modest", None)


def test_a_backend_that_cannot_run_here_is_not_verified(run_verify, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, out = run_verify("attention=triton")
    assert code.startswith("verify: ")
    assert ". triton: " in out and "TRITON_INTERPRET=1" in out


def test_several_dtypes_share_a_column(run_verify):
    code, out = run_verify("attention=sdpa", "dtype=fp32,bf16", "cases=0")
    assert code == 0 and marks_of(out, "forward") == "+"


# an argument, and what the refusal names
REFUSED = {
    "attention=flash": ("attention=flash", "naive, tiled"),
    "attention=no_such:BACKEND": ("attention=no_such:BACKEND", "ModuleNotFoundError"),
    "attention=tiled:block_kv=abc": ("block_kv=abc",),
    "attention=tiled:block_q=[": ("attention=tiled:block_q=[",),
    "dtype=int8": ("dtype=int8", "fp32, bf16, fp16"),
    "device=cuda": ("device=cuda",),
    "cases=many": ("cases=many",),
    "cases=-1": ("cases=-1", "0"),
    "seed=9999999999999": ("seed=9999999999999", "1000000000000"),
    "backend=tiled": ("backend=tiled", "attention, device"),
}


@pytest.mark.parametrize(("argument", "names"), REFUSED.items(), ids=REFUSED)
def test_refused_in_one_line(run_verify, argument, names):
    code, out = run_verify(argument)
    assert code.startswith("verify: ") and "\n" not in code and out == ""
    assert all(name in code for name in names), code


def test_pytorchs_remarks_on_flex_attention_are_not_printed_and_others_are(
    run_verify, monkeypatch, recwarn
):
    forward = PROPERTIES["forward"]

    def remark(subject):
        for words in ("return_lse is deprecated and will be removed", "something is wrong"):
            warnings.warn(words, FutureWarning, stacklevel=1)
        return forward(subject)

    monkeypatch.setattr(verify, "PROPERTIES", {"forward": remark})
    run_verify("attention=naive", "cases=0")
    assert [str(warning.message) for warning in recwarn] == ["something is wrong"]


@pytest.mark.slow
def test_compiled_is_among_the_properties(capsys):
    verify.main(["attention=tiled"])
    assert marks_of(capsys.readouterr().out, "compiled = eager") == "+"
