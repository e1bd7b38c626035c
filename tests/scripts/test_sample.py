"""`python -m scripts.sample`: what it writes, under which attention and weights."""

import pytest

from config import AttentionConfig, RunConfig
from data import build_tokenizer
from model import sample_text
from tests.run_folder import write_run


def test_prints_prompt_and_continuation(typed, tmp_path):
    model = write_run(tmp_path / "run")
    prompt = "x = \x1b]0;title\x07\x9b2J\r\x00\t\n"
    drawn = (f"prompt={prompt}", "tokens=40", "seed=5", "temperature=1.5", "top_k=0")
    how = {"max_new_tokens": 40, "temperature": 1.5, "seed": 5}
    text = sample_text(model, build_tokenizer(RunConfig().tokenizer), prompt, **how)
    for char in map(chr, {*range(32), *range(127, 160)} - {*b"\t\n"}):
        text = text.replace(char, f"\\x{ord(char):02x}")  # nothing drives the terminal
    for cache in (["cache=true"], ["cache=FALSE"], []):
        assert typed("sample", f"run={tmp_path}/run", *drawn, *cache) == (text + "\n", "")


def test_the_attention_is_the_runs_with_its_options_or_another(typed, tmp_path):
    """no_rescale is exact with one tile and wrong with many: the text tells which options were in
    force.
    """
    texts = {}
    for block_kv in (2, 64):
        run = tmp_path / str(block_kv)
        write_run(run, attention=AttentionConfig("no_rescale", block_kv=block_kv))
        asked = (f"run={run}", "prompt=def main():", "tokens=10")
        texts[block_kv], said = typed("sample", *asked)
        assert said == ""
    exact, said = typed("sample", *asked, "attention=naive")
    assert texts[64] == exact != texts[2]
    assert "attention=naive" in said and "attention=no_rescale" in said


@pytest.mark.parametrize("name", ["checkpoint.best", "checkpoint.previous"])
def test_a_checkpoint_is_chosen_by_its_folder(typed, tmp_path, name):
    """Its weights write, not the latest's."""
    drawn = ("temperature=0", "tokens=8")
    write_run(tmp_path / "run")
    wanted = typed("sample", f"run={tmp_path}/run", *drawn)
    (tmp_path / "run/checkpoint").rename(tmp_path / "run" / name)
    write_run(tmp_path / "other", seed=1)
    (tmp_path / "other/checkpoint").rename(tmp_path / "run/checkpoint")
    assert typed("sample", f"run={tmp_path}/run/{name}", *drawn) == wanted
    assert typed("sample", f"run={tmp_path}/run", *drawn) != wanted
