"""Reading the settings of a run that an older version wrote."""

import pytest
from omegaconf import OmegaConf

from config import RunConfig
from training.loop.trained import read_run_config


def written(folder, *settings):
    """config.yaml of a run with these settings, among them keys of an older version."""
    config = OmegaConf.create(OmegaConf.to_yaml(OmegaConf.structured(RunConfig)))
    OmegaConf.save(
        OmegaConf.merge(config, OmegaConf.from_dotlist(list(settings))), folder / "config.yaml"
    )


def test_keys_that_went_and_were_not_used_are_left_out(tmp_path):
    """A regression test: every run of the version before had such keys, and no script read it."""
    old = "model.chunk_tokens=null", "model.offload=false"
    written(tmp_path, *old, "seq_len=77", "attention.options.dropped=false")
    found = read_run_config(tmp_path)
    assert (found.seq_len, found.attention.options) == (77, {"dropped": False})


def test_a_key_that_went_and_was_used_is_named(tmp_path):
    written(tmp_path, "model.offload=true")
    with pytest.raises(ValueError, match="offload"):
        read_run_config(tmp_path)
