"""`python -m scripts.verify`: the matrix it prints and writes, its exit code, and one line for each
thing that can be wrong.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from attention import BACKENDS, Backend, register
from conformance.properties import PROPERTIES
from scripts import verify
from scripts.arguments import read_settings
from tests import forked
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


def test_columns_measured_alike_come_together_in_one_file(run_verify, monkeypatch, tmp_path):
    # two properties are enough to see it
    monkeypatch.setattr(
        verify, "PROPERTIES", {name: PROPERTIES[name] for name in ("forward", "lse")}
    )
    path = tmp_path / "found.json"

    def backends() -> list[str]:
        return list(json.loads(path.read_text())["backends"])

    run_verify("attention=tiled", f"out={path}")
    run_verify("attention=naive,no_scale", f"out={path}")
    assert backends() == ["naive", "tiled", "no_scale"]
    run_verify("attention=tests.user_backends:RIGHT", f"out={path}")
    assert backends() == ["naive", "tiled", "no_scale", "tests.user_backends:RIGHT"]
    # other cases are another measurement
    _, said = run_verify("attention=sdpa", "seed=1", f"out={path}")
    assert f"{path}: its columns will be replaced, because random_cases.seed was 0 and is 1" in said
    assert backends() == ["sdpa"]
    path.write_text("{")
    run_verify("attention=sdpa", f"out={path}")
    assert backends() == ["sdpa"]


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


def here(function, jobs, limit):
    """in_processes() without processes."""
    return ((job, function(*job)) for job in jobs)


@pytest.mark.slow
def test_parts_of_a_column_come_together(run_verify, monkeypatch, tmp_path):
    """As from one process. Several dtypes: test_a_run_that_is_cut_short_goes_on()."""
    both = "attention=naive,no_scale", "dtype=fp32"
    paths = [tmp_path / "alone.json", tmp_path / "parts.json"]
    assert run_verify(*both, f"out={paths[0]}")[0] == 0
    monkeypatch.setattr(verify, "in_processes", here)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    assert run_verify(*both, "processes=2", f"out={paths[1]}")[0] == 0
    alone, parts = (json.loads(path.read_text())["backends"] for path in paths)
    for column in (*alone.values(), *parts.values()):
        del column["seconds"]
    assert alone == parts


FEW = ("forward", "lse", "rows sum to one", "block sizes")


def test_a_process_that_dies_is_named(run_verify, monkeypatch):
    monkeypatch.setattr(verify, "PROPERTIES", {name: PROPERTIES[name] for name in FEW})
    monkeypatch.setattr(verify, "PARTS", 1)
    code, _ = run_verify("attention=naive,tests.user_backends:DIES", "processes=2")
    said = r"a process died that examined tests.user_backends:DIES in fp32 \(.*\): find it with "
    assert re.search(said + "attention=tests.user_backends:DIES processes=1$", code)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_is_cut_short_goes_on(run_verify, monkeypatch, tmp_path, processes):
    """The file has the cells so far and says what it lacks; then only that is examined, and all is
    as without a stop. A column once was lost unless all of its parts had come.
    """
    monkeypatch.setattr(verify, "PROPERTIES", {name: PROPERTIES[name] for name in FEW})
    monkeypatch.setattr(verify, "PARTS", 2)
    monkeypatch.setattr(verify, "in_processes", here)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    examine, examined = verify.examined, []

    def until(stop: int):
        def run(backend, dtype, options, device, properties, *done):
            if len(examined) == stop:
                raise KeyboardInterrupt
            examined.extend((backend.name, dtype, name) for name in properties)
            return examine(backend, dtype, options, device, properties, *done)

        return run

    asked = "attention=naive,tiled,no_scale", "dtype=fp32,bf16", f"processes={processes}"
    whole, path = tmp_path / "whole.json", tmp_path / "cut.json"
    told = run_verify(*asked, f"out={whole}")
    assert told[0] == 0
    cells = 3 * 2 * len(FEW)
    monkeypatch.setattr(verify, "examined", until(10 if processes > 1 else 12))
    assert run_verify(*asked, f"out={path}")[0] == 130
    cut = json.loads(path.read_text())
    assert list(cut["backends"]) == ["naive", "tiled"] and "cases" not in cut["backends"]["naive"]
    half = ["fp32: lse, block sizes", "bf16"] if processes > 1 else ["bf16"]
    assert cut["missing"] == {"tiled": half, "no_scale": ["fp32", "bf16"]}
    # another column, measured alike, leaves them as they are
    monkeypatch.setattr(verify, "examined", examine)
    assert run_verify("attention=sdpa", *asked[1:], f"out={path}")[0] == 0
    more = json.loads(path.read_text())
    assert more["missing"] == cut["missing"]
    assert more["backends"].pop("sdpa") and more["backends"] == cut["backends"]

    monkeypatch.setattr(verify, "examined", until(-1))
    assert run_verify(*asked, f"out={path}") == told
    assert len(examined) == len(set(examined)) == cells
    gone_on, expected = (json.loads(each.read_text()) for each in (path, whole))
    assert "missing" not in gone_on and gone_on["backends"].pop("sdpa")
    for column in (*gone_on["backends"].values(), *expected["backends"].values()):
        del column["seconds"]
    assert gone_on == expected
    # whole, it is measured anew
    run_verify(*asked, f"out={path}")
    assert len(examined) == 2 * cells


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_one_sentence_and_leaves_no_process(tmp_path, number):
    """Ctrl-C goes to every process of a terminal, SIGTERM to the first alone."""
    path = tmp_path / "found.json"
    asked = ("attention=naive,tiled", "device=cpu", "dtype=fp32,bf16", "processes=2")
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.verify", *asked, f"out={path}"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while process.poll() is None and not path.exists():
        time.sleep(0.01)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    began = time.monotonic()
    said = process.communicate(timeout=60)[1]  # when no process holds the pipe any more
    assert time.monotonic() - began < 5
    assert process.returncode == 130 and said == "verify: stopped by Ctrl-C\n", said
    assert json.loads(path.read_text())["missing"]


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
            "dtype, cases, seed, context, how, target, layout, processes, out",
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
def test_processes_share_every_sequence(run_verify):
    code, out = run_verify("attention=tiled,ring_no_rescale", "context=4")
    assert code == 0 and "ring_no_rescale on 4" in out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("target=tests.user_rings:RIGHT",), "is called in several processes: add context=2"),
        (("context=0",), "context=0 must be at least 1"),
        (("context=2", "how=star"), "how=star is not one of: ring, heads, gather"),
        (("context=2", "attention=sdpa"), "attention=sdpa cannot attend to a part of the keys"),
    ],
)
def test_what_processes_cannot_share_is_refused(run_verify, arguments, said):
    complaint, _ = run_verify(*arguments)
    assert said in complaint


@pytest.mark.slow
def test_the_line_in_help_runs_as_typed(monkeypatch, capsys):
    help_text = forked.run("-m", "scripts.verify", "--help").stdout
    (line,) = re.findall(r"^    python -m scripts\.verify (.*)$", help_text, re.MULTILINE)
    monkeypatch.setattr(sys, "argv", ["verify", *line.split()])
    verify.main()
    out = capsys.readouterr().out
    assert re.search(r"^compiled = eager +\+$", out, re.MULTILINE), out
