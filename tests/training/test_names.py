"""Names of variants and runs: from settings, and from summaries."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from attention import BACKENDS
from config import BACKEND_OPTIONS
from training.launch.command_line import compose
from training.record.names import attention_in_words, attention_names, name_run, name_runs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["attention=naive"], [(0, "naive")]),
        (["attention=tiled", "attention.block_kv=64"], [(0, "tiled")]),
        (["attention=no_rescale", "attention.block_kv=16"], [(0, "no_rescale block_kv=16")]),
        (["attention=sdpa", "attention.backend=flash"], [(0, "sdpa backend=flash")]),
        (
            ["attention=triton", "attention.window=256", "attention.pattern=SSSL"],
            [(0, "triton window=256 pattern=SSSL")],
        ),
        (
            ["attention=naive", "attention.window=16", "attention.softcap=50"],
            [(0, "naive window=16 softcap=50")],
        ),
        (
            ["attention.window=8", "attention.switch_at=4", "attention.switch_to=naive"],
            [(0, "tiled window=8"), (4, "naive window=8")],
        ),
        # defaults that are written out
        (["attention=no_max", "attention.softmax_dtype=float32"], [(0, "no_max")]),
        (["attention=triton", "attention.kernel=auto"], [(0, "triton")]),
        (["attention=my_attention:BACKEND"], [(0, "my_attention:BACKEND")]),
        # a user's attention may have another default
        (
            ["attention=my_attention:BACKEND", "attention.block_kv=64"],
            [(0, "my_attention:BACKEND block_kv=64")],
        ),
        (
            ["attention=a.b:C", "+attention.options.cap=2.5"],
            [(0, "a.b:C cap=2.5")],
        ),
        (
            ["experiment=rescue", "attention=no_rescale", "attention.switch_at=400"],
            [(0, "no_rescale block_kv=8"), (400, "tiled block_kv=8")],
        ),
    ],
)
def test_an_attention_is_named_by_what_is_not_at_its_default(overrides, names):
    assert attention_names(compose(*overrides).attention) == names


def test_the_defaults_are_those_of_the_backends():
    for name, backend in BACKENDS.items():
        for option, value in backend.options.items():
            assert BACKEND_OPTIONS[option] == value, name


def row(attention: str, *overrides: str, variant: str | None = None, **values) -> dict:
    named = {} if variant is None else {"variant": variant}
    return {"attention": attention, "overrides": list(overrides), "dir": "0"} | named | values


def test_runs_are_named_by_what_differs():
    """A regression test: wandb's names held every override, those that all share included."""
    shared = ("model.num_layers=1", "steps=20", "device=cpu")
    rows = [
        row("tiled", *shared, variant="tiled block_kv=16", seq_len=32, seed=0),
        row("tiled", *shared, variant="tiled block_kv=16", seq_len=32, seed=1),
        row("naive", *shared, "left_out=[attention.block_kv]", seq_len=64, seed=0),
        row("naive", *shared, "optim.lr=0.01", seq_len=64, seed=0),
    ]
    small = "tiled block_kv=16"
    assert name_runs(rows) == [
        (small, f"{small} seq_len=32 seed=0"),
        (small, f"{small} seq_len=32 seed=1"),
        ("naive", "naive seq_len=64 seed=0"),
        ("naive lr=0.01", "naive lr=0.01 seq_len=64 seed=0"),
    ]
    assert name_runs(rows[:1]) == [(small, small)]
    # all that a single run asks for, except what does not change what it learns
    alone = name_run(rows[0] | {"overrides": [*shared, "log_every=5", "logger=none", "seed=0"]})
    assert alone == (small, f"{small} num_layers=1 steps=20 seq_len=32 seed=0")


def test_a_name_is_as_a_person_writes_it():
    """A regression test: sweepers put a backslash before each colon."""
    asked = r"attention=my_attention\:BACKEND"
    rows = [row("my_attention:BACKEND", asked, r"data.path=a\,b"), row("tiled", "data.path=c")]
    assert [name.run for name in name_runs(rows)] == [
        "my_attention:BACKEND path=a,b",
        "tiled path=c",
    ]


def test_a_dtype_has_one_name():
    rows = [row("tiled", f"dtype={name}") for name in ("bfloat16", "float16")]
    assert [name.run for name in name_runs(rows)] == ["tiled dtype=bf16", "tiled dtype=fp16"]


def test_runs_whose_training_never_began_are_named_too():
    """Their summaries hold the options in force, and no starts."""
    options = {"block_q": 128, "block_kv": 16, "softmax_dtype": "float32"}
    refused = row("no_max", "attention=no_max", options=options)
    assert attention_in_words(refused) == "no_max block_kv=16"
    switched = {"switch_at": 40, "switch_to": "tiled"}
    assert re.findall(r"no_max|tiled|\d+", attention_in_words(row("no_max") | switched)) == [
        "no_max",
        "tiled",
        "40",
    ]
    asked = row("tiled", "attention.block_kv=8", "attention.switch_at=null")
    assert [name.variant for name in name_runs([asked, row("tiled")])] == [
        "tiled block_kv=8",
        "tiled",
    ]
    # a setting that the run did not read is none of its own
    left_out = row("naive", "attention.block_kv=16", left_out={"attention.block_kv": "no option"})
    assert attention_in_words(left_out) == "naive"


def test_a_change_of_options_is_a_change_of_attention():
    starts = [
        {"step": 0, "attention": [[0, "tiled"]], "changed": {}},
        {"step": 50, "attention": [[50, "tiled block_kv=16"]], "changed": {}},
    ]
    resumed = row("tiled", variant="tiled block_kv=16", starts=starts, steps_done=60)
    words = re.findall(r"tiled|block_kv=16|50", attention_in_words(resumed))
    assert words == ["tiled", "tiled", "block_kv=16", "50"]


def test_a_switch_to_the_same_attention_is_a_variant_of_its_own():
    rows = [row("tiled", f"attention.switch_at={at}", variant="tiled") for at in ("null", 400)]
    assert [name.variant for name in name_runs(rows)] == ["tiled", "tiled switch_at=400"]


def test_names_need_no_torch():
    code = "import training.record.names, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
