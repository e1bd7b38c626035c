"""Every file of conf/model composes and is what it says."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from attention import get_backend
from config import ModelConfig, register
from model import GPT
from training.throughput import count_parameters

CONF = Path(__file__).resolve().parents[2] / "conf"
NAMES = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))


def compose_model(*overrides: str) -> ModelConfig:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_object(compose("config", overrides=list(overrides))).model


@pytest.mark.parametrize("name", NAMES)
def test_composes_under_its_name_with_room_for_seq_len(name):
    config = compose_model(f"model={name}", "seq_len=384")
    assert (config.name, config.max_seq_len) == (name, 384)


PARAMETERS = {
    "tiny": (257, 957_312),
    "small": (257, 11_139_456),
    "gpt2": (50257, 124_439_808),
    "gpt2_medium": (50257, 354_823_168),
    "modern": (257, 9_639_552),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_number_of_parameters(name):
    vocab_size, parameters = PARAMETERS[name]
    config = compose_model(f"model={name}", "seq_len=1024")
    with torch.device("meta"):
        model = GPT(config, vocab_size=vocab_size, backend=get_backend("naive"))
    assert count_parameters(model) == parameters


@pytest.mark.parametrize("name", [name for name in NAMES if name != "modern"])
def test_key_heads_follow_query_heads(name):
    """If the schema's four heads stayed, a changed num_heads would mean grouped-query attention."""
    config = compose_model(f"model={name}", "model.num_heads=8")
    assert (config.num_heads, config.kv_heads) == (8, 8)


def test_modern_is_modern():
    config = compose_model("model=modern")
    assert (config.positions, config.norm, config.qk_norm) == ("rope", "rmsnorm", True)
    assert (config.activation, config.bias, config.tie_embeddings) == ("swiglu", False, False)
    assert (config.num_heads, config.kv_heads) == (6, 2)
