"""`python -m scripts.sample`: what it writes, and one line for each thing that can be wrong."""

import shutil

import pytest
import torch

from config import AttentionConfig, DataConfig, RunConfig
from data import build_tokenizer
from model import sample_text
from scripts import sample
from tests.run_folder import write_run


@pytest.fixture
def run_sample(monkeypatch, capsys):
    """run_sample("key=value", ...): what it printed, on a machine without a GPU; SystemExit carries
    its complaint.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments: str) -> tuple[str, str]:
        sample.main(arguments)
        return tuple(capsys.readouterr())

    return run


@pytest.mark.parametrize("cache", [["cache=true"], ["cache=FALSE"], []], ids=str)
def test_prints_prompt_and_continuation(run_sample, tmp_path, cache):
    model = write_run(tmp_path / "run")
    prompt = "x = \x1b]0;title\x07\x9b2J\r\x00\t\n"
    drawn = (f"prompt={prompt}", "tokens=40", "seed=5", "temperature=1.5", "top_k=0")
    out, err = run_sample(f"run={tmp_path}/run", *drawn, *cache)
    how = {"max_new_tokens": 40, "temperature": 1.5, "seed": 5}
    text = sample_text(model, build_tokenizer(RunConfig().tokenizer), prompt, **how)
    for char in map(chr, {*range(32), *range(127, 160)} - {*b"\t\n"}):
        text = text.replace(char, f"\\x{ord(char):02x}")  # nothing drives the terminal
    assert (out, err) == (text + "\n", "")


def test_the_attention_is_the_runs_with_its_options_or_another(run_sample, tmp_path):
    """no_rescale is exact with one tile and wrong with many: the text tells which options were in
    force.
    """
    texts = {}
    for block_kv in (2, 64):
        run = tmp_path / str(block_kv)
        write_run(run, attention=AttentionConfig("no_rescale", block_kv=block_kv))
        asked = (f"run={run}", "prompt=def main():", "tokens=10")
        texts[block_kv], said = run_sample(*asked)
        assert said == ""
    exact, said = run_sample(*asked, "attention=naive")
    assert texts[64] == exact != texts[2]
    assert "attention=naive" in said and "attention=no_rescale" in said


# an argument, and what the refusal names
REFUSED = {
    "temperature=-1": "temperature=-1.0",
    "attention=magic": "attention=magic",
    "device=cuda": "device=cuda",
    "run={}/nowhere": "nowhere",
    "run={}": "{}/run",  # it holds a run
    "run={}/task": "last_write",  # whose tokens are no text
    "run={}/begun": "checkpoint",
}


@pytest.mark.parametrize(("argument", "named"), REFUSED.items(), ids=REFUSED)
def test_refused_in_one_line(run_sample, tmp_path, argument, named):
    write_run(tmp_path / "run")
    write_run(tmp_path / "task", data=DataConfig(source="last_write"))
    shutil.copytree(tmp_path / "run", tmp_path / "begun", ignore=lambda *_: ["checkpoint"])
    run = () if argument.startswith("run=") else (f"run={tmp_path}/run",)
    with pytest.raises(SystemExit) as ended:
        run_sample(*run, argument.format(tmp_path))
    line = ended.value.code
    assert line.startswith("sample: ") and "\n" not in line and named.format(tmp_path) in line


@pytest.mark.parametrize("name", ["checkpoint.best", "checkpoint.previous"])
def test_a_checkpoint_is_chosen_by_its_folder(run_sample, tmp_path, name):
    """Its weights write, not the latest's."""
    drawn = ("temperature=0", "tokens=8")
    write_run(tmp_path / "run")
    wanted = run_sample(f"run={tmp_path}/run", *drawn)
    (tmp_path / "run/checkpoint").rename(tmp_path / "run" / name)
    write_run(tmp_path / "other", seed=1)
    (tmp_path / "other/checkpoint").rename(tmp_path / "run/checkpoint")
    assert run_sample(f"run={tmp_path}/run/{name}", *drawn) == wanted
    assert run_sample(f"run={tmp_path}/run", *drawn) != wanted
