"""Every file of conf/model is the model that it says."""

from pathlib import Path

import pytest
import torch
import yaml

from attention import get_backend
from model import GPT
from training.launch.command_line import compose
from training.loop.flops import count_parameters

FILES = Path(__file__).resolve().parents[2].glob("conf/model/*.yaml")
CHOICES = {path.stem: yaml.safe_load(path.read_text()) for path in FILES}
# the rows of its embedding, and its parameters
SIZES = {
    "tiny": (257, 957_312),
    "small": (257, 11_139_456),
    "gpt2": (50257, 124_439_808),
    "gpt2_medium": (50257, 354_823_168),
    "modern": (257, 9_639_552),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_model_has_its_number_of_parameters_and_room_for_seq_len(name):
    vocab_size, parameters = SIZES[name]
    config = compose(f"model={name}", "seq_len=1024").model
    assert (config.name, config.max_seq_len) == (name, 1024)
    with torch.device("meta"):
        model = GPT(config, vocab_size=vocab_size, backend=get_backend("naive"))
    assert count_parameters(model) == parameters


def test_key_heads_follow_query_heads():
    """If the schema's four heads stayed, a changed num_heads would mean grouped-query attention."""
    config = compose("model=small", "model.num_heads=8").model
    assert (config.num_heads, config.kv_heads) == (8, 8)


def test_modern_is_modern(modern):
    assert modern.items() <= CHOICES["modern"].items()
