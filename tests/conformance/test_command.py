"""`attn-conform`: its output for a backend, and that its wheel needs only torch and numpy."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from conformance import command
from conformance.properties import PROPERTIES, SLOW

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("device=cpu", "quick=true", "cases=0")
ATTENTIONS = "tests.user_attentions"
# nothing of this folder is found by its environment
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


@pytest.fixture
def attn_conform(monkeypatch, capsys):
    """attn_conform(argument, ...): (exit code or complaint, what it printed)."""

    def run(*arguments: str) -> tuple[str | int | None, str]:
        monkeypatch.setattr(sys, "argv", ["attn-conform", *arguments])
        with pytest.raises(SystemExit) as stopped:
            command.main()
        return stopped.value.code, capsys.readouterr().out

    return run


def test_a_backend_that_is_red_as_documented_passes(attn_conform):
    code, out = attn_conform("run", "zero_init_max", *QUICK)
    lines = out.splitlines()
    assert code == 0 and len(lines) == len(PROPERTIES) - len(SLOW)
    assert [line.partition(":")[0] for line in lines if "green" not in line] == [
        "fp32  logits - 120          red, as documented",
        "fp32  every length          red, as documented",
        "fp32  rows without a key    red, as documented",
        "fp32  wider calls           red, as documented",
        "fp32  streams and graphs    n/a",
        "fp32  cache and pages       n/a",
    ]


def test_a_wrong_backend_is_red(attn_conform):
    code, out = attn_conform("run", "tests.user_backends:WRONG", *QUICK, "dtype=fp16")
    assert re.fullmatch(r"attn-conform: \d+ of 28 are not as documented", code)
    assert re.search(r"^fp16  forward +red: out of .* is allowed$", out, re.MULTILINE)
    assert re.search(r"^fp16  grouped heads +n/a: it does not support gqa", out, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ("run nope", "nope is not known: write pkg.module:NAME, or one of naive, tiled"),
        ("run tests.user_backends:RIGHT_IN_FP32 dtype=bf16", "nothing was verified"),
        ("run tests.user_backends:RIGHT dialect=fa", "is a Backend, which says itself how"),
        ("run ATTENTIONS:flash", "attn-conform probe tests.user_attentions:flash` finds out"),
        ("run ATTENTIONS:flash dialect=fa3", "dialect=fa3 is not known; valid: backend, fa"),
        ("run ATTENTIONS:flash layout=BDNH", "layout=BDNH is not one of: BHND, BNHD"),
        (
            "run ATTENTIONS:flash dialect=fa mask=bias",
            "mask=bias: tests.user_attentions:flash takes",
        ),
        ("run ATTENTIONS:flash dialect=fa cases=two", "cases=two must be a whole number"),
        ("run ATTENTIONS:flash dialect=fa quik=true", "there is no key 'quik'"),
        ("run ATTENTIONS:flash dialect=fa card=no/card.json", "its folder does not exist"),
        ("run ATTENTIONS:flash dialect=fa card=tests", "card=tests is a folder"),
        pytest.param(
            "run ATTENTIONS:flash dialect=fa card=/proc/self/card.json",
            "card=/proc/self/card.json cannot be written: No such file or directory; name another",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="a folder of Linux's"),
        ),
        ("run ATTENTIONS:flash dialect=fa multiple=0", "multiple=0 must be at least 1"),
        ("run nope:attend dialect=fa", "nope:attend cannot be loaded: ModuleNotFoundError"),
        (
            "run ATTENTIONS:flash dialect=sdpa causal=always constants=dropout=0.0",
            "flash does not fit the dialect: TypeError: ",
        ),
        ("run ATTENTIONS:masked constants=x", "no Python: positional argument follows keyword"),
        ("run ATTENTIONS:masked constants=causal=True", "no Python: keyword argument repeated"),
        (
            "run ATTENTIONS:flash dialect=fa returns=out",
            "it returned a tuple of 2, and the dialect says returns=out; `attn-conform probe",
        ),
        (
            "fuzz ATTENTIONS:flash dialect=fa returns=out device=cpu",
            "it returned a tuple of 2, and the dialect says returns=out; `attn-conform probe",
        ),
        (
            "run ATTENTIONS:lse_is_none dialect=backend",
            "does not fit the dialect: its lse is None; if it has none to return, add "
            "returns=out,_; `attn-conform probe",
        ),
        (
            "fuzz ATTENTIONS:lse_is_none dialect=backend lse=HT returns=out,lse,_ device=cpu",
            "its lse is None; if it has none to return, add returns=out,_,_; `attn-conform probe",
        ),
        ("fuzz naive seed=10000000000000", "seed=10000000000000 must be at most 1000000000000"),
        ("run ATTENTIONS:torch.nn.Linear dialect=fa", "it is a class: name an object of it"),
        ("run mine.py:attend", "mine.py:attend names a file; name its module: mine:attend"),
        ("run ATTENTIONS:scores", "cannot be loaded: AttributeError"),
        ("probe ATTENTIONS:math.pi", "must be a function or a Backend; it is a float"),
        ("probe", "got nothing where pkg.module:NAME is expected"),
        ("verify", "verify is not one of: run, probe, fuzz"),
    ],
)
def test_what_cannot_be_verified(attn_conform, arguments, complaint):
    words = arguments.replace("ATTENTIONS", ATTENTIONS).split()
    more = QUICK if words[0] == "run" and "cases=" not in arguments else ()
    code, _ = attn_conform(*words, *more)
    assert complaint in code


def test_a_gpu_that_is_not_there(attn_conform, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _ = attn_conform("run", "naive", "device=cuda", "cases=0")
    assert code == "attn-conform: device=cuda: PyTorch finds no GPU here; use device=cpu"


def test_ctrl_c_is_one_line(attn_conform, monkeypatch, capsys):
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "set_up", pressed)
    monkeypatch.setattr(sys, "argv", ["attn-conform", "run", "naive"])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "attn-conform: stopped by Ctrl-C\n"


def test_a_reader_that_has_read_enough():
    """A regression test: `attn-conform run ... | head -1` ended with a traceback."""
    words = [sys.executable, "-m", "conformance.command", "run", "naive", *QUICK]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(words, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_stdout_may_be_closed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["attn-conform", "fuzz", "naive", "device=cpu", "calls=1"])
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 0


def test_a_disk_that_fills_up_leaves_the_old_file(attn_conform, tmp_path):
    resource = pytest.importorskip("resource")
    file = tmp_path / "card.json"
    file.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        code, _ = attn_conform("fuzz", "naive", "device=cpu", "calls=1", f"card={file}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == f"attn-conform: {file} cannot be written: File too large"
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["card.json"]


def test_both_distributions_bring_the_command():
    """A regression test: the README's install did not provide the attn-conform that it names."""
    for folder in (ROOT, ROOT / "packaging/attn-conform"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["scripts"] == {"attn-conform": "conformance.command:main"}


@pytest.mark.parametrize(
    "name, says",
    [
        ("flash", "dialect=fa"),
        ("top_left", "dialect=fa corner=top_left"),
        ("base_2", "dialect=fa lse_base=2"),
        ("flash_varlen", "dialect=fa-varlen"),
        ("out_alone", "dialect=fa corner=top_left gqa=no returns=out lse_flag="),
        ("masked", "mask          mask=, bool"),
        ("no_scale", "scale         1, whatever it is given"),
        ("leaks", "could not tell: no causal mask in either corner"),
        ("Student", "causal        3=, top_left"),
    ],
)
def test_a_probe_finds_the_conventions(attn_conform, name, says):
    code, out = attn_conform("probe", f"{ATTENTIONS}:{name}", "device=cpu")
    assert code == 0 and says in out
    assert (out.splitlines()[-1].split(" ", 3)[-1] == says) == says.startswith("dialect")


@pytest.mark.slow
def test_what_a_probe_says_of_a_kernel_is_enough_to_run_it(attn_conform):
    """The kernel takes no fp32, only one head dim and whole tiles, and has no backward pass."""
    _, out = attn_conform("probe", f"{ATTENTIONS}:tensor_cores", "device=cpu", "dtype=fp32,bf16")
    line = out.splitlines()[-1]
    for word in ("multiple=64", "head_dims=64", "dtypes=bf16", "lse_base=2", "backward=false"):
        assert word in line.split()
    code, out = attn_conform(*line.split()[1:], *QUICK, "dtype=bf16")
    assert code == 0 and out.count("green") > 10
    assert re.search("ragged tails +n/a: it takes lengths that are multiples of 64", out)


def test_a_probe_of_a_function_that_needs_more_says_what_to_do(attn_conform):
    code, _ = attn_conform("probe", f"{ATTENTIONS}:in_tiles", "device=cpu")
    assert "missing 4 required" in code
    assert code.endswith("wrap it in a function that fills them in")


def test_a_probe_finds_a_dialect_by_its_name(attn_conform):
    function = "torch.nn.functional:scaled_dot_product_attention"
    _, out = attn_conform("probe", function, "device=cpu")
    assert out.endswith(f"attn-conform run {function} dialect=sdpa\n")


def test_the_card_and_the_smallest_failing_calls(attn_conform, tmp_path, monkeypatch):
    """Each script fails in a process that imports only the attention and torch, and its case is
    small.
    """
    monkeypatch.chdir(tmp_path)
    for name, dialect, property, most in (
        ("top_left", "fa", "N != M", {"N1-M2-D1"}),
        ("base_2", "fa", "lse", {"lse", "N1-D1"}),
        ("no_scale", "fa", "forward", {"out", "H1"}),
        ("leaks", "sdpa causal=causal corner=bottom_right", "no leak (outputs)", {"out", "N2-D1"}),
    ):
        words = (f"{ATTENTIONS}:{name}", f"dialect={dialect}", f"card={name}.json", "minimise=true")
        code, _ = attn_conform("run", *" ".join(words).split(), *QUICK)
        assert "are not as documented" in code
        card = json.loads(Path(f"{name}.json").read_text())
        cells = {cell["property"]: cell for cell in card["cells"]}
        assert card["dialect"] and card["environment"]["torch"] == torch.__version__
        assert cells[property]["status"] == "red" and cells[property]["worst_share"] > 1
        first = Path(cells[property]["script"]).read_text().splitlines()[0]
        assert all(part in first for part in most), first
    scripts = [str(file) for file in tmp_path.glob("*.py")]
    assert len(scripts) > 12
    source = (ROOT / "tests/user_attentions.py").read_text()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/user_attentions.py").write_text(source)
    program = (
        "import contextlib, runpy, sys\n"
        "for file in sys.argv[1:]:\n"
        "    with contextlib.suppress(AssertionError):\n"
        "        runpy.run_path(file)\n"
        "        print('passes:', file)\n"
        "print('ours:', {'attention', 'conformance'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *scripts], capture_output=True, text=True, env=CLEAN
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "passes" not in done.stdout and lines[-1] == "ours: set()"
    assert len(lines) == len(scripts) + 1 and all("error" in line for line in lines[:-1])


def needed(distribution: str) -> set[str]:
    """This distribution and its requirements on this system, without Triton."""
    names = {distribution}
    for text in importlib.metadata.requires(distribution) or ():
        requirement = Requirement(text)
        if requirement.name != "triton" and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            names |= needed(requirement.name)
    return names


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A virtual environment with the wheel, torch, numpy, pytest and their requirements."""
    folder = tmp_path_factory.mktemp("product")
    source = folder / "source"
    for name in ("attention", "conformance", "packaging"):
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    shutil.copy(ROOT / "LICENSE", source)
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    wheel = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder]
    subprocess.run([*pip, *wheel, source / "packaging/attn-conform"], check=True)
    (built,) = folder.glob("attn_conform-*.whl")
    install = ["--python", environment / "bin/python", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, *install, built], check=True)
    shutil.rmtree(source)

    site = next(environment.glob("lib/python*/site-packages"))
    for name in needed("torch") | needed("numpy") | needed("pytest"):
        for file in importlib.metadata.files(name):
            top = file.parts[0]
            if top != ".." and not (site / top).exists():
                (site / top).symlink_to(Path(sysconfig.get_path("purelib")) / top)
    return environment


@pytest.mark.slow
def test_the_wheel_beside_a_users_own_modules(environment, tmp_path):
    """The command and the pytest plugin run on a user's attention, in a folder with the user's own
    config.py and data/, and import neither of them.
    """
    shutil.copy(ROOT / "tests/user_attentions.py", tmp_path / "mine.py")
    (tmp_path / "data").mkdir()
    for file in ("config.py", "data/__init__.py", "model.py"):
        (tmp_path / file).write_text("raise RuntimeError('the user has not asked for this')")
    (tmp_path / "test_mine.py").write_text("def test_mine(): pass")

    def run(*command: str) -> str:
        command = (str(environment / "bin" / command[0]), *command[1:])
        done = subprocess.run(command, cwd=tmp_path, env=CLEAN, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    out = run("attn-conform", "run", "mine:flash", "dialect=fa", *QUICK)
    assert "fp32  forward               green" in out
    words = ("--attention=mine:flash", "--dialect=fa", "-q", "-k", "mine or forward or block")
    out = run("python", "-m", "pytest", "-p", "no:cacheprovider", "-rs", *words)
    assert "2 passed, 1 skipped" in out and "it has no block_q and block_kv to choose" in out


def test_every_module_and_table_is_in_the_wheel(environment, tmp_path):
    """Every module that needs neither Triton nor transformers can be imported from the wheel, and
    its tables are beside it.
    """
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in ("attention", "conformance")
        for file in (ROOT / package).glob("*.py")
        if file.name != "hf.py"
    ]
    program = (
        f"for name in {modules}: __import__(name)\n"
        "import sys, attention, conformance\n"
        "assert 'triton' not in sys.modules\n"
        "print(attention.__path__[0], conformance.__path__[0], sep='\\n')"
    )
    python = environment / "bin/python"
    done = subprocess.run(
        [python, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for package, folder in zip(("attention", "conformance"), done.stdout.splitlines(), strict=True):
        assert Path(folder).is_relative_to(environment)
        files, installed = (
            {str(x.relative_to(at)) for x in at.rglob("*") if x.suffix not in ("", ".pyc")}
            for at in (ROOT / package, Path(folder))
        )
        assert files == installed
