"""What is said of a run in several starts."""

import importlib
import math
import re

import pytest

import tests.user_backends  # noqa: F401  code_of() finds it
from config import AttentionConfig
from training.record.names import attention_in_words
from training.record.starts import changes_in_words, code_of, differences, resumed_starts


def start(step: int, *attention: tuple[int, str], **changed: list) -> dict:
    return {
        "step": step,
        "attention": [list(each) for each in attention],
        "changed": {key.replace("__", "."): pair for key, pair in changed.items()},
    }


SWITCHED = {"attention": "no_rescale", "switch_at": 40, "switch_to": "tiled"}


FIRST, SECOND = start(0, (0, "tiled")), start(5, (5, "sdpa"))
ONCE = start(0, (0, "no_rescale"), (40, "tiled"))
TWICE = [start(0, (0, "naive"), (40, "tiled")), start(30, (30, "sdpa"), (50, "flex"))]
TILED = {"attention": "tiled", "steps_done": 9}
SDPA = {"attention": "sdpa", "starts": [FIRST, SECOND]}


# the attentions and the steps between them, in the order of their words
WORDS = re.compile(r"no_rescale|naive|tiled|sdpa|flex|\d+")


@pytest.mark.parametrize(
    "row, named",
    [
        ({"attention": "tiled"}, "tiled"),
        (TILED | {"starts": [FIRST]}, "tiled"),
        (SDPA | {"steps_done": 9}, "tiled sdpa 5"),
        (SDPA | {"steps_done": 5}, "tiled"),
        (
            {"attention": "tiled", "steps_done": 9, "starts": [FIRST, start(5, (5, "tiled"))]},
            "tiled",
        ),
        (SWITCHED | {"steps_done": 60, "starts": [ONCE]}, "no_rescale tiled 40"),
        (SWITCHED | {"steps_done": 40, "starts": [ONCE]}, "no_rescale"),
        (SWITCHED | {"steps_done": 60, "starts": TWICE}, "naive sdpa 30 flex 50"),
        # of an earlier version, unfinished, or of another program
        (SWITCHED | {"steps_done": 60}, "no_rescale tiled 40"),
        (SWITCHED | {"steps_done": 9}, "no_rescale"),
        (SWITCHED, "no_rescale tiled 40"),
        ({"attention": "tiled", "starts": 5}, "tiled"),
        ({"attention": "tiled", "starts": [{"step": 3}]}, "tiled"),
        ({"attention": "tiled", "steps_done": "many", "starts": [None]}, "tiled"),
    ],
)
def test_the_attention_in_words(row, named):
    said = attention_in_words(row)
    assert WORDS.findall(said) == named.split()
    assert said == named or " " in named


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
    assert differences({"lr": math.inf}, {"lr": math.inf}) == {}


def test_an_option_at_its_default_is_no_difference():
    """conf/attention/ holds the defaults; an attention without an option has None."""

    def settings(name: str, **options: object) -> dict:
        return {"attention": {"name": name, "block_kv": None, "softmax_dtype": None} | options}

    default = settings("tiled", block_kv=64, softmax_dtype="float32")
    assert differences(settings("tiled"), default) == differences(default, settings("tiled")) == {}
    assert differences(default, settings("naive")) == {"attention.name": ["tiled", "naive"]}
    smaller = settings("tiled", block_kv=16)
    assert differences(default, smaller) == {"attention.block_kv": [None, 16]}


def test_changed_code_of_an_own_attention_is_noted(tmp_path, monkeypatch, caplog):
    def now(code: dict[str, str]) -> dict:
        return start(0, (0, "my_kernel:A")) | {"data": "abc", "code": code}

    (tmp_path / "my_kernel.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("my_kernel")
    chosen = AttentionConfig(name="my_kernel:A", score_mod="tests.user_backends:NONE")
    first = code_of(chosen)
    assert first.keys() == {"my_kernel", "tests.user_backends"}
    assert code_of(AttentionConfig(name="tiled")) == {}
    meta = {"step": 2, "config": {}, "starts": [now(first)]}
    config = {"resume": "RUN", "steps": 4, "attention": {"switch_at": None}}
    again = now(first)
    assert resumed_starts(meta, config, again)[-1]["changed"] == {} and not caplog.messages

    (tmp_path / "my_kernel.py").write_text("A = 2\n")
    second = code_of(chosen)
    *_, newest = resumed_starts(meta, config, now(second))
    pair = [first["my_kernel"], second["my_kernel"]]
    ((changed, values),) = newest["changed"].items()
    assert "my_kernel" in changed and values == pair and pair[0] != pair[1]
    (said,) = caplog.messages
    assert "my_kernel" in said
