"""Reading the settings of a run that an older version made, out of its checkpoint."""

from dataclasses import asdict
from pathlib import Path

import pytest

from config import RunConfig
from tests.training.test_checkpoint import save
from training.loop.trained import read_run_config


def saved(folder: Path, **groups: dict) -> Path:
    """A checkpoint whose settings have these too."""
    settings = asdict(RunConfig(seq_len=77))
    for name, changed in groups.items():
        settings[name] |= changed
    save(folder, config=settings | {"keep": 3})
    return folder


def test_keys_that_went_are_left_out_if_the_weights_do_not_mean_another_model(tmp_path):
    """A regression test: every run of the version before had such keys, and no script read it."""
    former = {"model": {"gone": False, "init_std": 0.02}, "optim": {"gone": 0.5}}
    run = saved(tmp_path, **former, attention={"options": {"dropped": False}})
    found = read_run_config(run)
    assert (found.seq_len, found.attention.options) == (77, {"dropped": False})


@pytest.mark.parametrize("key, value", [("model.gone", True), ("attention.gone", [8, None])])
def test_a_key_that_went_and_was_used_is_named(tmp_path, key, value):
    group, _, name = key.partition(".")
    with pytest.raises(ValueError, match=key):
        read_run_config(saved(tmp_path, **{group: {name: value}}))
