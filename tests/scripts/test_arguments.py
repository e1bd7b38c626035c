"""The one reader of key=value arguments."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from scripts.arguments import Count, command, read_settings


@dataclass
class Options:
    run: Path
    attention: list[str] = field(default_factory=lambda: ["naive"])
    seq_len: list[Count] | None = None
    dtype: Literal["fp32", "bf16"] | None = None
    prompt: str = ""
    out: Path | None = None
    causal: bool = True
    rate: float = 0.5


@dataclass
class Files:
    paths: list[Path]
    out: Path | None = None


def test_every_kind_of_value():
    typed = ["run=a/b", "seq_len=8,16", "dtype=bf16", "prompt=", "causal=False", "rate=2e-3"]
    options = read_settings(Options, [*typed, "attention=sdpa,tiled:block_q=8,block_kv=4,m:X"])
    assert options == Options(
        run=Path("a/b"),
        attention=["sdpa", "tiled:block_q=8,block_kv=4", "m:X"],
        seq_len=[8, 16],
        dtype="bf16",
        causal=False,
        rate=2e-3,
    )


def test_pytorchs_names_of_dtypes_mean_the_short_ones():
    assert read_settings(Options, ["run=a", "attention=m:X", "dtype=bfloat16"]).dtype == "bf16"


# the argument, and what its refusal names: the key or value, and the way out
REFUSED = {
    "sequ_len=8": ("sequ_len", "seq_len?"),
    "colour=red": ("colour", "run, attention, "),
    "--seq-len=8": ("seq_len=8",),
    "--out": ("out=VALUE",),
    "naive": ("'naive'", "run, attention, "),
    "seq_len=8,x": ("seq_len=x",),
    "seq_len=0": ("seq_len=0", "1"),
    "dtype=fp64": ("dtype=fp64", "fp32, bf16"),
    "causal=perhaps": ("causal=perhaps", "true", "false"),
    "out=": ("out=",),
}


@pytest.mark.parametrize(("argument", "names"), REFUSED.items(), ids=REFUSED)
def test_a_wrong_argument_is_refused_with_the_way_out(argument, names):
    with pytest.raises(ValueError) as error:
        read_settings(Options, ["run=x", argument])
    assert all(name in str(error.value) for name in names), error.value


def test_a_key_without_a_default_must_be_given():
    with pytest.raises(ValueError, match="run="):
        read_settings(Options, [])
    with pytest.raises(ValueError, match="file.*--help"):
        read_settings(Files, ["out=x"])


def test_paths_may_be_bare_even_with_an_equals_sign_in_them():
    paths = ["multirun/a", "multirun/attention=tiled,seed=1"]
    assert read_settings(Files, [*paths, "out=x"]) == Files([Path(x) for x in paths], Path("x"))


def test_help_is_the_docstring_and_errors_are_one_line(capsys):
    @command
    def main(options: Files) -> None:
        raise ValueError(f"{options.paths[0]}\n  is gone")

    main(["--help"])
    assert capsys.readouterr().out == f"{__doc__}\n"
    with pytest.raises(SystemExit, match="^test_arguments: a is gone$"):
        main(["a"])
