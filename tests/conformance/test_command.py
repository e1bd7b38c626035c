"""`attn-conform`: what it says of a backend, and that its wheel needs torch and numpy alone."""

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from conformance import command
from conformance.properties import PROPERTIES, SLOW

ROOT = Path(__file__).resolve().parents[2]
MINE = """
from attention import Backend, get_backend

naive = get_backend("naive").fn

def right(q, k, v, *, causal, scale):
    return naive(q, k, v, causal=causal, scale=scale)

RIGHT = Backend("right", right)
"""


@pytest.fixture
def attn_conform(monkeypatch, capsys):
    """attn_conform(argument, ...): (exit code or complaint, what it printed)."""

    def run(*arguments: str) -> tuple[str | int | None, str]:
        monkeypatch.setattr(sys, "argv", ["attn-conform", *arguments, "--device", "cpu"])
        with pytest.raises(SystemExit) as stopped:
            command.main()
        return stopped.value.code, capsys.readouterr().out

    return run


def test_a_backend_that_is_red_as_documented_passes(attn_conform):
    code, out = attn_conform("zero_init_max", "--quick", "--cases=2")
    lines = out.splitlines()
    assert code == 0 and len(lines) == len(PROPERTIES) - len(SLOW)
    assert [line.partition(":")[0] for line in lines if "green" not in line] == [
        "fp32  logits - 120          red, as documented",
        "fp32  every length          red, as documented",
        "fp32  rows without a key    red, as documented",
        "fp32  wider calls           red, as documented",
        "fp32  streams and graphs    n/a",
    ]


def test_a_wrong_backend_is_red(attn_conform):
    code, out = attn_conform("tests.user_backends:WRONG", "--quick", "--cases=2", "--dtype=fp16")
    assert re.fullmatch(r"attn-conform: \d+ of 27 are not as documented", code)
    assert re.search(r"^fp16  forward +red: out of .* is allowed$", out, re.MULTILINE)
    assert re.search(r"^fp16  grouped heads +n/a: it does not support gqa", out, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["nope"], "attn-conform: attention=nope is not known; valid: naive, tiled"),
        (["tests.user_backends:RIGHT_IN_FP32", "--dtype=bf16"], "nothing was verified"),
    ],
)
def test_what_cannot_be_verified(attn_conform, arguments, complaint):
    code, _ = attn_conform(*arguments, "--quick", "--cases=0")
    assert complaint in code


def needed(distribution: str) -> set[str]:
    """This distribution and the installed ones that it needs, without Triton."""
    names = {distribution}
    for requirement in importlib.metadata.requires(distribution) or ():
        name = re.match(r"[\w.-]+", requirement)[0]
        if name != "triton" and "extra ==" not in requirement:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # another system's
                names |= needed(name)
    return names


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A virtual environment that holds the wheel, torch, numpy and what these need."""
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
    for name in needed("torch") | needed("numpy"):
        for file in importlib.metadata.files(name):
            top = file.parts[0]
            if top != ".." and not (site / top).exists():
                (site / top).symlink_to(Path(sysconfig.get_path("purelib")) / top)
    return environment


def test_the_wheel_beside_a_users_own_modules(environment, tmp_path):
    """The command runs in a folder with a config.py and a data/ of the user, and imports none."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "data").mkdir()
    for file in ("config.py", "data/__init__.py", "model.py"):
        (tmp_path / file).write_text("raise RuntimeError('the user has not asked for this')")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [environment / "bin/attn-conform", "mine:RIGHT", "--quick", "--cases=0"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "fp32  forward               green" in done.stdout


def test_every_module_and_table_is_in_the_wheel(environment, tmp_path):
    """All that needs neither Triton nor transformers is imported from there, and the tables stand
    beside it.
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
