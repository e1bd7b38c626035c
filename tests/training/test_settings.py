"""Settings. One that nothing in a run reads is refused or left out, never ignored. Those of two
starts are compared.
"""

import math

import pytest

from config import AttentionConfig, DataConfig, RunConfig
from training.launch.settings import settle, unread_settings
from training.record.starts import differences


def test_what_was_asked_for_is_refused_and_what_a_recipe_sets_is_left_out():
    """tests/test_bad_input.py has more that is refused."""

    def config() -> RunConfig:
        return RunConfig(AttentionConfig("sdpa", block_kv=16), data=DataConfig(num_pairs=5))

    unread = unread_settings(config())
    assert list(unread) == ["data.num_pairs", "attention.block_kv"]
    assert "attention=sdpa" in unread["attention.block_kv"]
    assert unread_settings(RunConfig()) == {}
    for asked, named in (
        (["attention", "attention.block_kv"], "attention.block_kv=16 .*attention=sdpa"),
        (["data.num_pairs"], "data.num_pairs=5 .*data=recall"),
    ):
        with pytest.raises(ValueError, match=named):
            settle(config(), asked=asked)
    settled = config()
    assert settle(settled, asked=["attention"]) == unread
    assert settled.attention.block_kv is None and settled.data.num_pairs is None


def test_options_of_ones_own():
    own = AttentionConfig("tests.user_backends:WITH_AN_OPTION", options={"a": 2.0, "b": 1})
    assert list(settle(RunConfig(own), asked=[])) == ["attention.options.b"]
    assert own.options == {"a": 2.0}


def test_differences():
    custom = {"name": "custom", "options": {"a": 1}}
    then = {"steps": 4, "attention": custom, "resume": None}
    now = {"steps": 6, "attention": custom | {"options": {}}, "resume": "RUN"}
    assert differences(then, now) == {"steps": [4, 6], "attention.options": [{"a": 1}, {}]}
    assert differences({"lr": math.nan}, {"lr": math.nan}) == {}


def test_an_option_at_its_default_is_no_difference():
    """conf/attention/ holds the defaults; an attention without an option has None."""

    def settings(name: str, **options: object) -> dict:
        return {"attention": {"name": name, "block_kv": None, "softmax_dtype": None} | options}

    default = settings("tiled", block_kv=64, softmax_dtype="float32")
    assert differences(settings("tiled"), default) == differences(default, settings("tiled")) == {}
    assert differences(default, settings("naive")) == {"attention.name": ["tiled", "naive"]}
    smaller = settings("tiled", block_kv=16)
    assert differences(default, smaller) == {"attention.block_kv": [None, 16]}
