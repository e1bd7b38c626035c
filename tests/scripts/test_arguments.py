"""The one reader of key=value arguments."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from scripts.arguments import Count, default, read_settings


@dataclass
class Options:
    run: Path
    attention: list[str] = default("naive")
    seq_len: list[Count] = default(8)
    dtype: Literal["fp32", "bf16"] | None = None
    prompt: str = ""
    out: Path | None = None
    causal: bool = True
    rate: float = 0.5


@dataclass
class Files:
    paths: list[Path]
    out: Path | None = None


@dataclass
class Training:
    warmup: int = 0
    overrides: list[str] = default()


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
    # a folder may have an equals sign in its name
    paths = ["multirun/a", "multirun/attention=tiled,seed=1"]
    assert read_settings(Files, [*paths, "out=x"]) == Files([Path(x) for x in paths], Path("x"))
    typed = ["model.num_layers=2", "warmup=3", "steps=5"]
    assert read_settings(Training, typed) == Training(3, ["model.num_layers=2", "steps=5"])


# the argument, and what its refusal names: the key or value, and the way out
REFUSED = {
    "colour=red": ("colour=red", "run, attention, seq_len"),
    "--seq-len=8": ("--seq-len", "run, attention, seq_len"),
    "naive": ("naive", "KEY=VALUE", "run, attention, seq_len"),
    "seq_len=8,x": ("seq_len=8,x", "integer"),
    "seq_len=0": ("seq_len=0", "greater than 0"),
    "dtype=fp64": ("dtype=fp64", "fp32", "bf16"),
    "causal=perhaps": ("causal=perhaps", "boolean"),
    "out=": ("out=",),
    "run=y": ("run=y", "twice"),
}


@pytest.mark.parametrize(("argument", "names"), REFUSED.items(), ids=REFUSED)
def test_a_wrong_argument_is_refused_with_the_way_out(argument, names):
    with pytest.raises(ValueError) as error:
        read_settings(Options, ["run=x", argument])
    assert all(name in str(error.value) for name in names), error.value


@pytest.mark.parametrize(
    ("options", "argument", "named"),
    [(Options, "out=x", "run="), (Files, "out=x", "file.*--help"), (Training, "step=3", "steps")],
)
def test_a_missing_key_or_a_wrong_setting_is_named(options, argument, named):
    with pytest.raises(ValueError, match=named):
        read_settings(options, [argument])
