"""Settings that nothing in a run reads: which they are, and that they are refused or left out,
never ignored.
"""

import pytest

from config import AttentionConfig, DataConfig, RunConfig
from training.launch.settings import settle, unread_settings


def test_a_setting_is_read_under_some_choices_alone():
    data = DataConfig("text", path="books")
    unread = unread_settings(RunConfig(AttentionConfig("naive", block_kv=16), data=data))
    assert list(unread) == ["attention.block_kv"]
    assert "attention=naive" in unread["attention.block_kv"]
    assert unread_settings(RunConfig()) == {}


def test_what_was_asked_for_is_refused_and_what_a_recipe_sets_is_left_out():
    def config() -> RunConfig:
        return RunConfig(AttentionConfig("sdpa", block_kv=16), data=DataConfig(num_pairs=5))

    for asked, named in (
        (["attention", "attention.block_kv"], "attention.block_kv=16 .*attention=sdpa"),
        (["data.num_pairs"], "data.num_pairs=5 .*data=recall"),
    ):
        with pytest.raises(ValueError, match=named):
            settle(config(), asked=asked)
    settled = config()
    assert list(settle(settled, asked=["attention"])) == ["data.num_pairs", "attention.block_kv"]
    assert settled.attention.block_kv is None and settled.data.num_pairs is None


def test_options_of_ones_own():
    own = AttentionConfig("tests.user_backends:WITH_AN_OPTION", options={"a": 2.0, "b": 1})
    assert list(settle(RunConfig(own), asked=[])) == ["attention.options.b"]
    assert own.options == {"a": 2.0}


def test_a_tokenizer_is_asked_for_by_its_group():
    config = RunConfig(data=DataConfig("last_write"))
    config.tokenizer.name = "gpt2"
    with pytest.raises(ValueError, match="tokenizer.name=gpt2 .*data=last_write"):
        settle(config, asked=["tokenizer"])
