"""Every file of conf/model composes and is what it says."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from attention import get_backend
from config import ModelConfig, register
from model import GPT
from training.loop.flops import count_parameters

CONF = Path(__file__).resolve().parents[2] / "conf"


def compose_model(*overrides: str) -> ModelConfig:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_object(compose("config", overrides=list(overrides))).model


PARAMETERS = {
    "tiny": (257, 957_312),
    "small": (257, 11_139_456),
    "gpt2": (50257, 124_439_808),
    "gpt2_medium": (50257, 354_823_168),
    "modern": (257, 9_639_552),
}


def test_every_model_has_its_number_of_parameters():
    assert sorted(path.stem for path in (CONF / "model").glob("*.yaml")) == sorted(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_composes_under_its_name_with_room_for_seq_len(name):
    vocab_size, parameters = PARAMETERS[name]
    config = compose_model(f"model={name}", "seq_len=1024")
    assert (config.name, config.max_seq_len) == (name, 1024)
    with torch.device("meta"):
        model = GPT(config, vocab_size=vocab_size, backend=get_backend("naive"))
    assert count_parameters(model) == parameters


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name != "modern"])
def test_key_heads_follow_query_heads(name):
    """If the schema's four heads stayed, a changed num_heads would mean grouped-query attention."""
    config = compose_model(f"model={name}", "model.num_heads=8")
    assert (config.num_heads, config.kv_heads) == (8, 8)


def test_modern_is_modern(modern):
    config = compose_model("model=modern")
    assert modern | {"num_kv_heads": 2} == {key: getattr(config, key) for key in modern}
