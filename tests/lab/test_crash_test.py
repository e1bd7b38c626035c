"""lab.crash_test: what it calls the same, and that the harm it does never goes unseen."""

import copy
import json
import random
import re
from pathlib import Path

import pytest
import torch

from lab.crash_test import damage, is_one_line, main, same
from tests.command import load_checkpoint
from tests.training.test_checkpoint import save
from training.record.checkpoint import CheckpointError
from training.record.files import newest_first


def test_one_bit_makes_another_run():
    state = {
        "weights": {"w": torch.zeros(3)},
        "training": {"optimizer": [{"step": torch.tensor(3.0)}, (1, 2)]},
    }
    other, third = copy.deepcopy(state), copy.deepcopy(state)
    assert same(state, other)
    other["weights"]["w"].view(torch.int32)[1].add_(1)
    third["training"]["optimizer"][1] = (1, 3)
    assert not same(state, other) and not same(state, third)


@pytest.mark.parametrize("seed", range(5))
def test_no_harm_goes_unseen(tmp_path, seed):
    save(tmp_path)
    said = damage(newest_first(tmp_path)[0].iterdir(), random.Random(seed))
    with pytest.raises(CheckpointError):
        # everything is verified before anything of these is used
        load_checkpoint(Path(tmp_path), model=None, optimizer=None, scaler=None, config={})
    files = r"model\.safetensors|training\.pt|metrics\.jsonl|meta\.json"
    assert re.fullmatch(rf"({files}) (removed|(truncated|altered) at byte \d+)", said)


def test_a_traceback_is_no_refusal():
    assert is_one_line("going\nerror: no\n") and not is_one_line("error: no\nerror: no\n")
    assert not is_one_line("Traceback (most recent call last)\nerror: no\n")


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_if_nothing_had_happened(tmp_path):
    main(["kills=1", "harms=0", f"out={tmp_path}/kills.json"])
    found = json.loads((tmp_path / "kills.json").read_text())
    assert found["outcomes"] == {"kills": {"identical": 1}, "harms": {}}
