"""lab.crash_test: what it calls the same, and that the harm it does never goes unseen."""

import copy
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from config import DataConfig, TokenizerConfig
from data import build_tokenizer
from data.token_store import DamagedStore, load, open_store
from lab.crash_test import damage, damage_tokens, is_one_line, same
from tests import forked
from tests.command import load_checkpoint
from tests.training.test_checkpoint import save
from training.checkpoint import CheckpointError
from training.retention import newest_first


def kills(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return forked.run("-m", "lab.crash_test", *arguments, env=environment)


def test_help_shows_a_line_to_type():
    assert re.search(
        r"^    python -m lab\.crash_test out=\S+$", kills("--help").stdout, re.MULTILINE
    )


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("kills=-1",), "kills=-1"),
        (("out={file}/kills.json",), "kills.json cannot be written"),
    ],
    ids=["n", "out"],
)
def test_bad_input_is_one_line_before_the_work(tmp_path, arguments, said):
    (tmp_path / "file").touch()
    done = kills(*(argument.format(file=tmp_path / "file") for argument in arguments))
    assert (
        done.returncode == 1
        and done.stderr.startswith("crash_test: ")
        and said in done.stderr
        and len(done.stderr.splitlines()) == 1
    )


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> Path:
    """The folder of a small token store."""
    folder = tmp_path_factory.mktemp("store")
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"text {number} " * (number + 1))
    open_store(
        DataConfig(source="text", path=f"{folder}/*.txt", cache_dir=f"{folder}/cache"),
        build_tokenizer(TokenizerConfig("byte")),
    )
    return next((folder / "cache").glob("text-*"))


def test_one_bit_makes_another_run():
    state = {
        "weights": {"w": torch.zeros(3)},
        "training": {"optimizer": [{"step": torch.tensor(3.0)}, (1, 2)]},
        "rows": 4,
    }
    assert same(state, copy.deepcopy(state))
    for change in (
        lambda other: other["weights"]["w"].view(torch.int32)[1].add_(1),
        lambda other: other["weights"].update(w=torch.zeros(3, dtype=torch.float64)),
        lambda other: other["training"]["optimizer"].append(1),
        lambda other: other["training"]["optimizer"].__setitem__(1, (1, 3)),
        lambda other: other.update(rows=5),
        lambda other: other.pop("rows"),
    ):
        other = copy.deepcopy(state)
        change(other)
        assert not same(state, other)


@pytest.mark.parametrize("seed", range(30))
def test_no_harm_goes_unseen(tmp_path, seed):
    save(tmp_path)
    said = damage(newest_first(tmp_path)[0].iterdir(), random.Random(seed))
    with pytest.raises(CheckpointError):
        # everything is verified before anything of these is used
        load_checkpoint(Path(tmp_path), model=None, optimizer=None, scaler=None, config={})
    assert re.fullmatch(
        r"(model\.safetensors|training\.pt|meta\.json) (removed|(truncated|altered) at byte \d+)",
        said,
    )


@pytest.mark.parametrize("seed", range(30))
def test_no_harm_to_a_store_goes_unseen(store, tmp_path, seed):
    folder = shutil.copytree(store, tmp_path / store.name)
    assert load(folder)
    said = damage_tokens(folder, random.Random(seed))
    with pytest.raises(DamagedStore):
        load(folder)
    files = r"(train|val)\.bin|meta\.json"
    assert re.fullmatch(
        rf"train\.bin is zeros|val\.bin is the beginning .*|({files}) "
        r"(removed|(truncated|altered) at byte \d+)",
        said,
    )


def test_a_traceback_is_no_refusal():
    assert is_one_line("going\nerror: no\n") and not is_one_line("error: no\nerror: no\n")
    assert not is_one_line("Traceback (most recent call last)\nerror: no\n") and not is_one_line(
        "fine\n"
    )
