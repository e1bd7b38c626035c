"""`attn-conform`: its output for a backend, and what its wheel holds."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from attention import get_backend
from conformance.outside import command
from conformance.properties import PROPERTIES, SLOW
from tests import processes

ROOT = Path(__file__).resolve().parents[3]
QUICK = ("device=cpu", "quick=true", "cases=0")
ATTENTIONS = "tests.user_attentions"
PACKAGES = ("attention", "conformance")
# nothing of this folder is found by its environment
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


@pytest.fixture
def attn_conform(monkeypatch, capsys):
    """attn_conform(argument, ...): (exit code or complaint, what it printed), without a GPU."""

    def run(*arguments: str) -> tuple[str | int | None, str]:
        monkeypatch.setattr(sys, "argv", ["attn-conform", *arguments])
        with pytest.raises(SystemExit) as stopped:
            command.main()
        return stopped.value.code, capsys.readouterr().out

    return run


def marks(printed: str) -> dict[str, str]:
    """The mark of each property in the table of one attention."""
    return dict(re.findall(r"^(\S+(?: \S+)*) {2,}([+x!.])$", printed, re.MULTILINE))


def test_a_backend_that_is_red_as_documented_passes(attn_conform):
    code, out = attn_conform("run", "zero_init_max", *QUICK)
    found = marks(out)
    assert code == 0 and found.keys() == PROPERTIES.keys() - SLOW
    assert {name for name in found if found[name] == "x"} == get_backend("zero_init_max").breaks
    absent = {name for name in found if found[name] == "."}
    assert absent == {"streams and graphs", "cache and pages"}


def test_a_wrong_backend_is_red(attn_conform):
    code, out = attn_conform("run", "tests.user_backends:WRONG", *QUICK, "dtype=fp16")
    assert re.match(r"attn-conform: \d+ \w", code) and marks(out)["forward"] == "!"
    assert re.search(r"^! .*, forward, fp16: red: .*B\S+-fp16", out, re.MULTILINE)
    assert re.search(r"^\. .*, grouped heads, .*gqa", out, re.MULTILINE)


# arguments, and what the refusal names: a key or value, and the way out
REFUSED = {
    "run nope": ("nope", "naive, tiled"),
    "run tests.user_backends:RIGHT_IN_FP32 dtype=bf16": ("attn-conform: ",),
    "run tests.user_backends:RIGHT dialect=fa": ("Backend",),
    "run naive device=cuda cases=0": ("device=cuda", "cpu"),
    "run ATTENTIONS:flash": ("attn-conform probe ATTENTIONS:flash",),
    "run ATTENTIONS:flash dialect=fa3": ("dialect=fa3", "backend, fa"),
    "run ATTENTIONS:masked more_mask_forms=additive,half": (
        "more_mask_forms=additive,half",
        "bool",
    ),
    "run ATTENTIONS:flash dialect=fa mask=bias": ("mask=bias", "softmax_scale"),
    "run ATTENTIONS:flash dialect=fa cases=two": ("cases=two",),
    "run ATTENTIONS:flash dialect=fa quik=true": ("quik",),
    "run ATTENTIONS:flash dialect=fa out=tests": ("out=tests", ".json"),
    "run ATTENTIONS:flash dialect=fa multiple=0": ("multiple=0",),
    "run ATTENTIONS:flash dialect=fa head_dims=abc": ("head_dims=abc", "64,128"),
    "run nope:attend dialect=fa": ("nope:attend", "ModuleNotFoundError"),
    "run ATTENTIONS:flash dialect=sdpa causal=always constants=dropout=0.0": ("'dropout'",),
    "run ATTENTIONS:masked constants=causal=True": ("causal=True", "repeated"),
    "run ATTENTIONS:flash dialect=fa returns=out": ("returns=out", "attn-conform probe"),
    "run ATTENTIONS:lse_is_none dialect=backend": ("NoneType", "returns=out,lse"),
    "run ATTENTIONS:gives_a_dict layout=BHND": ("a dict", "returns=out"),
    "run ATTENTIONS:scales_in_place layout=BHND": ("changes its inputs",),
    "fuzz naive seed=10000000000000": ("seed=10000000000000", "1000000000000"),
    "run ATTENTIONS:torch.nn.Linear dialect=fa": ("class",),
    "mine.py:attend": ("mine:attend",),
    "probe ATTENTIONS:math.pi": ("float",),
    "probe": ("pkg.module:NAME",),
    "probe ATTENTIONS:in_tiles": ("TypeError", "'k_tile'"),
    "probe ATTENTIONS:gives_a_dict": ("(2, 2, 6, 8)", "a dict"),
    "probe tests.user_backends:exits": ("SystemExit",),
    "run naive tiled": ("naive tiled", "run, probe, fuzz"),
}


@pytest.mark.parametrize(("arguments", "names"), REFUSED.items(), ids=REFUSED)
def test_refused(attn_conform, arguments, names):
    words = arguments.replace("ATTENTIONS", ATTENTIONS).split()
    more = QUICK if words[0] == "run" and "cases=" not in arguments else ()
    code, _ = attn_conform(*words, *more)
    assert all(name.replace("ATTENTIONS", ATTENTIONS) in code for name in names), code


def test_a_module_of_this_folder_that_another_hides(attn_conform, tmp_path, monkeypatch):
    """A regression test: an attention.py of the user was not found, or ours was tested instead."""
    (tmp_path / "attention.py").write_text("def attend(q, k, v): return q")
    (tmp_path / "torch.py").write_text("raise RuntimeError('the user has not asked for this')")
    monkeypatch.chdir(tmp_path)
    code, _ = attn_conform("run", "attention:attend", "layout=BHND")
    assert "attention:attend" in code and "attention.py" in code
    assert attn_conform("fuzz", SDPA, "dialect=sdpa", "device=cpu", "calls=2")[0] == 0


def test_a_reader_that_has_read_enough(monkeypatch):
    """A regression test: `attn-conform run ... | head -1` ended with a traceback."""
    monkeypatch.setattr(sys, "argv", ["attn-conform", "naive", *QUICK])
    before = os.dup(1)
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.close(writer)
    try:
        with open(1, "w", closefd=False) as stdout, pytest.raises(SystemExit) as stopped:
            monkeypatch.setattr(sys, "stdout", stdout)
            command.main()
    finally:
        os.dup2(before, 1)
        os.close(before)
    assert stopped.value.code == 141


def test_a_disk_that_fills_up_leaves_the_old_file(attn_conform, tmp_path):
    file = tmp_path / "found.json"
    file.write_text("old")
    with processes.limited(resource.RLIMIT_FSIZE, 100):
        code, _ = attn_conform("run", "naive", *QUICK, f"out={file}")
    assert code.startswith("attn-conform: ") and file.read_text() == "old"


def test_both_distributions_bring_the_command_and_its_packages():
    """A regression test: the README's install did not provide the attn-conform that it names."""
    for folder in (ROOT, ROOT / "packaging/attn-conform"):
        found = tomllib.loads((folder / "pyproject.toml").read_text())
        assert found["project"]["scripts"] == {"attn-conform": "conformance.outside.command:main"}
    files = [file for name in PACKAGES for file in (ROOT / name).rglob("*.py")]
    folders = {".".join(file.parent.relative_to(ROOT).parts) for file in files}
    assert {*found["tool"]["setuptools"]["packages"]} == folders


SDPA = "torch.nn.functional:scaled_dot_product_attention"
# attention, and what the command that a probe prints says of it
PROBED = {
    f"{ATTENTIONS}:flash": "layout=BNHD scale=softmax_scale returns=out,lse lse_gradient=false",
    f"{ATTENTIONS}:top_left": "corner=top_left",
    f"{ATTENTIONS}:base_2": "lse_base=2",
    f"{ATTENTIONS}:flash_varlen": "layout=THD lse=HT lse_flag=return_attn_probs",
    f"{ATTENTIONS}:out_alone": "layout=BNHD gqa=no window=window_size",
    f"{ATTENTIONS}:Student": "causal=3 corner=top_left scale= gqa=no",
    f"{ATTENTIONS}:masked": "mask=mask scale=",
    f"{ATTENTIONS}:keywords": "lse_base=2 returns=out,lse",
    SDPA: "causal=is_causal gqa=enable_gqa mask=attn_mask more_mask_forms=additive,float32 "
    "corner=top_left",
}
# test_dialects runs these in the dialects that have a name
GREEN = {SDPA, *(f"{ATTENTIONS}:{name}" for name in ("flash", "flash_varlen", "Student"))}


@pytest.mark.parametrize(("name", "wanted"), PROBED.items(), ids=PROBED)
def test_a_probe_finds_the_conventions(attn_conform, name, wanted):
    code, out = attn_conform("probe", name, "device=cpu")
    command, verb, *words = out.splitlines()[-1].split()
    assert (code, command, verb, words[0]) == (0, "attn-conform", "run", name)
    assert {*wanted.split()} <= {*words}
    if name not in GREEN:
        assert attn_conform(verb, *words, *QUICK)[0] == 0


def test_a_probe_of_a_leak_cannot_tell_the_corner(attn_conform):
    code, out = attn_conform("probe", f"{ATTENTIONS}:leaks", "device=cpu")
    assert code == 0 and re.search(r"^corner +could not tell", out, re.MULTILINE)


@pytest.mark.slow
def test_what_a_probe_says_of_a_kernel_is_enough_to_run_it(attn_conform):
    """The kernel takes no fp32, only one head dim and whole tiles, and has no backward pass."""
    _, out = attn_conform("probe", f"{ATTENTIONS}:tensor_cores", "device=cpu", "dtype=fp32,bf16")
    line = out.splitlines()[-1]
    for word in ("multiple=64", "head_dims=64", "dtypes=bf16", "lse_base=2", "backward=false"):
        assert word in line.split()
    code, out = attn_conform(*line.split()[1:], *QUICK, "dtype=bf16")
    found = marks(out)
    assert code == 0 and list(found.values()).count("+") > 10 and found["ragged tails"] == "."


# attention, dialect, the property that is red, and what the first line of its script names
SCRIPTS = [
    ("top_left", "fa", "N != M", ["N1-M2-D1"]),
    ("base_2", "fa", "lse", ["lse", "N1-D1"]),
    ("leaks", "sdpa causal=causal corner=bottom_right", "no leak (outputs)", ["out", "N2-D1"]),
]
RUN_ALL = """
import contextlib, runpy, sys
for file in sys.argv[1:]:
    with contextlib.suppress(AssertionError):
        runpy.run_path(file)
        print("passes:", file)
print("ours:", {"attention", "conformance"} & sys.modules.keys())
"""


def test_the_file_and_the_smallest_failing_calls(attn_conform, tmp_path, monkeypatch):
    """Each script fails in a process that imports only the attention and torch, and its case is
    small.
    """
    monkeypatch.chdir(tmp_path)
    for name, dialect, property, parts in SCRIPTS:
        words = f"run {ATTENTIONS}:{name} dialect={dialect} out={name}.json minimise=true"
        code, _ = attn_conform(*words.split(), *QUICK)
        assert code.startswith("attn-conform: ")
        found = json.loads(Path(f"{name}.json").read_text())
        (column,) = found["backends"].values()
        cells = {cell["property"]: cell for cell in column["cells"]}
        assert found["dialect"] and found["environment"]["torch"] == torch.__version__
        assert cells[property]["status"] == "red" and cells[property]["worst_share"] > 1
        first = Path(cells[property]["script"]).read_text().splitlines()[0]
        assert all(part in first for part in parts), first
    scripts = [str(file) for file in tmp_path.glob("*.py")]
    assert len(scripts) > 8
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests/user_attentions.py", tmp_path / "tests")
    words = [sys.executable, "-c", RUN_ALL, *scripts]
    done = subprocess.run(words, capture_output=True, text=True, env=CLEAN)
    assert done.returncode == 0, done.stderr
    *failures, ours = done.stdout.splitlines()
    assert ours == "ours: set()" and len(failures) == len(scripts)
    assert all("error" in line and "passes" not in line for line in failures)


IMPORTS = """
import sys, attention, conformance.outside.command
assert not {'triton', 'hydra', 'wandb', 'training'} & sys.modules.keys()
print(attention.__path__[0], conformance.__path__[0], sep='\\n')
"""


@pytest.mark.slow
def test_the_wheel_beside_a_users_own_modules(tmp_path):
    """It holds every file, and needs no triton, hydra, wandb or checkout. The command and the
    pytest plugin run on a user's attention, in a folder with the user's own config.py and data/,
    and import neither of them.
    """
    source, site, mine = (tmp_path / name for name in ("source", "site", "mine"))
    for name in (*PACKAGES, "packaging"):
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    shutil.copy(ROOT / "LICENSE", source)
    how = ("--no-deps", "--no-index", "--no-build-isolation", "--target", str(site))
    project = str(source / "packaging/attn-conform")
    processes.run("-m", "pip", "install", "-q", *how, project, check=True)
    shutil.rmtree(source)

    (mine / "data").mkdir(parents=True)
    shutil.copy(ROOT / "tests/user_attentions.py", mine / "mine.py")
    for file in ("config.py", "data/__init__.py", "model.py"):
        (mine / file).write_text("raise RuntimeError('the user has not asked for this')")
    (mine / "test_mine.py").write_text("def test_mine(): pass")

    def run(*arguments: str) -> str:
        done = processes.run(*arguments, cwd=mine, env=CLEAN | {"PYTHONPATH": str(site)})
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for name, found in zip(PACKAGES, run("-c", IMPORTS).splitlines(), strict=True):
        assert found == str(site / name)
        files, installed = (
            {str(x.relative_to(at)) for x in at.rglob("*") if x.suffix not in ("", ".pyc")}
            for at in (ROOT / name, site / name)
        )
        assert files == installed
    out = run(str(site / "bin/attn-conform"), "run", "mine:flash", "dialect=fa", *QUICK)
    assert marks(out)["forward"] == "+"
    words = ("--attention=mine:flash", "--dialect=fa", "-q", "-k", "mine or forward or block")
    out = run("-m", "pytest", "-p", "no:cacheprovider", "-rs", *words)
    assert "2 passed, 1 skipped" in out and "block_q" in out
