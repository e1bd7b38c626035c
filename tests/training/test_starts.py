"""In what the settings of two starts differ."""

import math

from training.record.starts import differences


def test_differences():
    custom = {"name": "custom", "options": {"a": 1}}
    then = {"steps": 4, "gone": 1, "attention": custom, "resume": None}
    now = {"steps": 6, "new": 2, "attention": custom | {"options": {}}, "resume": "RUN"}
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
