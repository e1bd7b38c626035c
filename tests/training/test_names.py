"""Names of variants and runs: from settings, and from summaries."""

import pytest

from attention import BACKENDS
from config import BACKEND_OPTIONS, AttentionConfig
from training.record.names import attention_in_words, attention_names, belies_exact, name_runs

NAMES = {
    "tiled": AttentionConfig("tiled", block_kv=64, softmax_dtype="float32"),
    "no_rescale block_kv=16": AttentionConfig("no_rescale", block_kv=16),
    "naive window=16 softcap=50": AttentionConfig("naive", window=16, softcap=50.0),
    # a user's attention may have another default
    "a.b:C cap=2.5 block_kv=64": AttentionConfig("a.b:C", block_kv=64, options={"cap": 2.5}),
}


def test_an_attention_is_named_by_what_is_not_at_its_default():
    for name, chosen in NAMES.items():
        assert attention_names(chosen) == [(0, name)]
    chosen = AttentionConfig("tiled", window=8, switch_at=4, switch_to="naive:block_kv=16")
    assert attention_names(chosen) == [(0, "tiled window=8"), (4, "naive block_kv=16 window=8")]


def test_the_defaults_are_those_of_the_backends():
    for name, backend in BACKENDS.items():
        for option, value in backend.options.items():
            assert BACKEND_OPTIONS[option] == value, name


def row(attention: str, *overrides: str, **values) -> dict:
    """A summary or an index line; `attention` is named with its options."""
    return {"variant": attention, "overrides": list(overrides), "dir": "0"} | values


def test_runs_are_named_by_what_differs():
    """A regression test: wandb's names held every override, those that all share included."""
    shared = ("model.num_layers=1", "steps=20", "device=cpu")
    small = "tiled block_kv=16"
    rows = [
        row(small, *shared, "attention.block_kv=16", seq_len=32, seed=0),
        row(small, *shared, "attention.block_kv=16", seq_len=32, seed=1),
        row("naive", *shared, seq_len=64, seed=0),
        row("naive", *shared, "optim.lr=0.01", seq_len=64, seed=0),
    ]
    assert name_runs(rows) == [
        (small, f"{small} seq_len=32 seed=0"),
        (small, f"{small} seq_len=32 seed=1"),
        ("naive", "naive seq_len=64 seed=0"),
        ("naive lr=0.01", "naive lr=0.01 seq_len=64 seed=0"),
    ]
    assert name_runs(rows[:1]) == [(small, small)]
    # beside nothing, all that a run asks for
    alone = f"{small} num_layers=1 steps=20 device=cpu seq_len=32 seed=0"
    assert name_runs([rows[0], {}])[0].run == alone


def test_a_written_name_stays_and_is_added_to_where_sweeps_differ():
    """A job keeps the name of its sweep when it is shown alone. Two sweeps that differ in a setting
    which all jobs of each share are told apart: their runs are no seeds of one variant.
    """
    sweep = [row(f"tiled lr={lr}", f"optim.lr={lr}", "steps=9", seed=0) for lr in (0.1, 0.15)]
    assert [name.variant for name in name_runs(sweep[:1])] == ["tiled lr=0.1"]
    assert [name.variant for name in name_runs(sweep)] == ["tiled lr=0.1", "tiled lr=0.15"]
    other = row("tiled", "optim.lr=0.1", "steps=5", seed=1)
    assert [name.run for name in name_runs([*sweep, other])] == [
        "tiled lr=0.1 steps=9 seed=0",
        "tiled lr=0.15 steps=9 seed=0",
        "tiled lr=0.1 steps=5 seed=1",
    ]


def test_a_name_is_as_a_person_writes_it_and_tells_the_same_runs_apart():
    """A regression test: sweepers put a backslash before each colon."""
    rows = [row("mine:BACKEND", r"data.path=a\,b"), row("tiled", "data.path=c")]
    assert [name.run for name in name_runs(rows)] == ["mine:BACKEND path=a,b", "tiled path=c"]
    rows = [row("tiled", dir=f"outputs/{name}") for name in "ab"]
    assert [name.run for name in name_runs(rows)] == ["tiled (a)", "tiled (b)"]


def start(step: int, *attention: tuple[int, str]) -> dict:
    return {"step": step, "attention": [list(each) for each in attention], "changed": {}}


STARTS = {
    "tiled": [start(0, (0, "tiled")), start(5, (5, "tiled"))],
    "tiled, sdpa after step 5": [start(0, (0, "tiled")), start(5, (5, "sdpa"))],
    "no_rescale, tiled after step 40": [start(0, (0, "no_rescale"), (40, "tiled"))],
    # a switch to the same attention is an experiment of its own
    "tiled, tiled after step 40": [start(0, (0, "tiled"), (40, "tiled"))],
    # the first start did not come to its switch
    "naive, sdpa after step 30, flex after step 50": [
        start(0, (0, "naive"), (40, "tiled")),
        start(30, (30, "sdpa"), (50, "flex")),
    ],
}


@pytest.mark.parametrize("words", STARTS)
def test_a_run_is_named_by_every_attention_of_its_starts(words):
    starts = STARTS[words]
    assert attention_in_words({"starts": starts}) == words
    # of several, a summary may name one
    last = starts[-1]["attention"][0][1]
    named = name_runs([row(last, "seed=0", starts=starts), row("flex", "seed=1")])
    assert [name.run for name in named] == [f"{words} seed=0", "flex seed=1"]


def test_an_attention_that_is_not_as_exact_as_labelled():
    losses = {"val/loss": 1.5, "val/loss_exact": 1.6}
    assert belies_exact(losses)
    for exact in (1.5005, None):
        assert not belies_exact(losses | {"val/loss_exact": exact})
    for label in ({"defect": True}, {"exact": False}):
        assert not belies_exact(losses | label)
