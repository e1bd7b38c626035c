"""What is said of a run in several starts."""

import math

from training.record.starts import changes_in_words, differences


def start(step: int, *attention: tuple[int, str], **changed: list) -> dict:
    return {
        "step": step,
        "attention": [list(each) for each in attention],
        "changed": {key.replace("__", "."): pair for key, pair in changed.items()},
    }


def test_changes_in_words():
    starts = [
        start(0, (0, "tiled")),
        start(5, (5, "sdpa"), attention__name=["tiled", "sdpa"], optim__lr=[None, 0.1]),
        start(8, (8, "sdpa"), log_every=[2, 3], logger__name=["wandb", "none"]),
        start(9, (9, "sdpa"), deterministic=[False, True]),
    ]
    said = changes_in_words({"starts": starts})
    for word in ("step 5", "attention.name=sdpa (tiled", "optim.lr=0.1 (null", "step 9"):
        assert word in said
    assert "deterministic=true (false" in said and "log_every" not in said and "step 8" not in said
    assert changes_in_words({"starts": starts[:1]}) == changes_in_words({}) == ""


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
