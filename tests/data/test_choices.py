"""conf/data and conf/tokenizer hold one file per choice; importing data loads nothing heavy."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from config import DataConfig, TokenizerConfig

CONF = Path(__file__).parents[2] / "conf"
SOURCES = ["hub", "last_write", "needle", "recall", "stdlib", "text", "torch_source"]


def compose(schema, file, **overrides):
    return OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.load(file), overrides)
    )


def test_every_choice_has_its_file():
    assert sorted(file.stem for file in (CONF / "data").glob("*.yaml")) == SOURCES
    assert sorted(file.stem for file in (CONF / "tokenizer").glob("*.yaml")) == [
        "bpe",
        "byte",
        "gpt2",
    ]


@pytest.mark.parametrize("source", SOURCES)
def test_data_choice(source):
    needed = {"text": {"path": "x"}, "hub": {"name": "org/x"}}.get(source, {})
    needed |= {"num_keys": 4095, "num_values": 4096} if source == "recall" else {}
    assert compose(DataConfig, CONF / "data" / f"{source}.yaml", **needed) == DataConfig(
        source=source, **needed
    )


@pytest.mark.parametrize("name", ["byte", "bpe", "gpt2"])
def test_tokenizer_choice(name):
    assert compose(TokenizerConfig, CONF / "tokenizer" / f"{name}.yaml") == TokenizerConfig(name)


@pytest.mark.parametrize(
    "source, message", [("text", "data=text needs data.path"), ("hub", "data=hub needs data.name")]
)
def test_the_choice_alone_says_what_else_it_needs(source, message):
    with pytest.raises(ValueError, match=message):
        compose(DataConfig, CONF / "data" / f"{source}.yaml")


def test_importing_loads_no_heavy_library():
    modules = "data, data.tokenizer, data.corpora, data.token_store, data.batches, data.synthetic"
    code = (
        f"import sys, {modules}; print(*sorted({{'torch', 'datasets', 'tiktoken'}} & "
        "set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "\n"
    )
