"""`python -m scripts.sample`: what it writes, and one line for each thing that can be wrong."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from attention import get_backend
from config import AttentionConfig, DataConfig, ModelConfig, RunConfig
from data import build_tokenizer
from model import GPT, sample_text
from scripts import sample
from tests import processes
from tests.command import save_checkpoint
from tests.weights import with_weights

ROOT = Path(__file__).resolve().parents[2]


def write_run(run_dir: Path, *, checkpoint: bool = True, **fields) -> GPT:
    """A run directory as training leaves it, of a model with large random weights, so that its
    attention decides what it writes.
    """
    shape = ModelConfig(num_layers=1, num_heads=2, hidden_size=16, max_seq_len=32)
    config = RunConfig(model=shape, seq_len=32, **fields)
    plain = OmegaConf.to_container(OmegaConf.structured(config))
    run_dir.mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(plain), run_dir / "config.yaml")
    torch.manual_seed(config.seed)
    model = with_weights(GPT(config.model, vocab_size=257, backend=get_backend("tiled")), 1.0)
    if checkpoint:
        optimizer = torch.optim.AdamW(model.parameters())
        save_checkpoint(
            run_dir, model=model, optimizer=optimizer, scaler=None, step=1, tokens=32, config=plain
        )
    return model


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


@pytest.fixture
def complaint(run_sample):
    """complaint("key=value", ...): the one line it ends with."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as error:
            run_sample(*arguments)
        assert error.value.code.startswith("sample: ") and "\n" not in error.value.code
        return error.value.code

    return run


@pytest.mark.parametrize("cache", [["cache=true"], ["cache=FALSE"], []], ids=str)
def test_prints_prompt_and_continuation(run_sample, tmp_path, cache):
    model = write_run(tmp_path / "run")
    prompt = "x = \x1b]0;title\x07\x9b2J\r\x00\t\n"
    drawn = (f"prompt={prompt}", "tokens=40", "seed=5", "temperature=1.5", "top_k=0")
    out, err = run_sample(f"run={tmp_path}/run", *drawn, *cache)
    how = {"max_new_tokens": 40, "temperature": 1.5, "seed": 5}
    tokenizer = build_tokenizer(RunConfig().tokenizer)
    text = sample_text(model, tokenizer, prompt, **how)
    for char in map(chr, {*range(32), *range(127, 160)} - {*b"\t\n"}):
        text = text.replace(char, f"\\x{ord(char):02x}")  # nothing drives the terminal
    assert out == text + "\n"
    assert err == ""


def test_another_attention_is_said_and_used(run_sample, tmp_path):
    write_run(tmp_path / "run")
    arguments = (f"run={tmp_path}/run", "prompt=def", "tokens=20")
    with_naive, said = run_sample(*arguments, "attention=naive")
    assert "attention=naive" in said and "attention=tiled" in said
    assert with_naive == run_sample(*arguments)[0]
    assert run_sample(*arguments, "attention=tiled")[1] == ""
    assert run_sample(*arguments, "attention=no_scale")[0] != with_naive


def test_keeps_the_options_the_run_was_trained_with(run_sample, tmp_path):
    """no_rescale is exact with one tile and wrong with many: the text tells which options were in
    force.
    """
    texts = {}
    for name, block_kv in (("tiles", 2), ("one-tile", 64)):
        write_run(tmp_path / name, attention=AttentionConfig("no_rescale", block_kv=block_kv))
        asked = (f"run={tmp_path}/{name}", "prompt=def main():", "tokens=10")
        texts[name], _ = run_sample(*asked)
    exact, _ = run_sample(*asked, "attention=naive")
    assert texts["one-tile"] == exact != texts["tiles"]


# an argument, and what the refusal names
REFUSED = {
    "token=3": "tokens?",
    "hello": "'hello'",
    "tokens=many": "tokens=many",
    "tokens=-1": "tokens=-1",
    "cache=maybe": "cache=maybe",
    "temperature=-1": "temperature=-1.0",
    "top_k=-1": "top_k=-1",
    "attention=magic": "attention=magic",
    "device=cuda": "device=cuda",
    "device=tpu": "auto, cpu, cuda",
}


@pytest.mark.parametrize(("argument", "named"), REFUSED.items(), ids=REFUSED)
def test_a_wrong_argument_is_refused(complaint, tmp_path, argument, named):
    write_run(tmp_path / "run")
    assert named in complaint(f"run={tmp_path}/run", argument)


def test_a_run_must_be_named(complaint):
    assert "run=" in complaint()


def test_a_folder_that_is_no_run_directory_is_refused(complaint, tmp_path):
    nowhere = complaint(f"run={tmp_path}/nowhere")
    assert f"{tmp_path}/nowhere" in nowhere and "checkpoint" in nowhere
    write_run(tmp_path / "sweep" / "0")
    assert complaint(f"run={tmp_path}/sweep").endswith(f"{tmp_path}/sweep/0")


def test_a_run_without_a_checkpoint_is_refused(complaint, tmp_path):
    write_run(tmp_path / "run", checkpoint=False)
    assert "checkpoint" in complaint(f"run={tmp_path}/run")


@pytest.mark.parametrize("name", ["checkpoint.best", "checkpoint.previous"])
def test_a_checkpoint_is_chosen_by_its_folder(run_sample, tmp_path, name):
    """Its weights write, not the latest's."""
    write_run(tmp_path / "run")
    wanted = run_sample(f"run={tmp_path}/run", "temperature=0", "tokens=8")
    (tmp_path / "run/checkpoint").rename(tmp_path / "run" / name)
    write_run(tmp_path / "other", seed=1)
    (tmp_path / "other/checkpoint").rename(tmp_path / "run/checkpoint")
    assert run_sample(f"run={tmp_path}/run/{name}", "temperature=0", "tokens=8") == wanted
    assert run_sample(f"run={tmp_path}/run", "temperature=0", "tokens=8") != wanted


def test_a_run_whose_tokens_are_not_text_is_refused(complaint, tmp_path):
    write_run(tmp_path / "run", data=DataConfig(source="last_write"))
    assert "last_write" in complaint(f"run={tmp_path}/run")


def test_command_in_the_help_runs_as_typed(tmp_path):
    write_run(tmp_path / "outputs" / "day" / "time")
    # newer, but a run that failed and a folder of pictures
    write_run(tmp_path / "outputs" / "day" / "later", checkpoint=False)
    (tmp_path / "outputs" / "plots" / "memory").mkdir(parents=True)

    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

    def run(command: str) -> subprocess.CompletedProcess:
        # the shell puts the newest folder in; python is started without it
        expand = ["bash", "-c", 'python() { printf "%s\\0" "$@"; }\n' + command]
        words = subprocess.run(expand, cwd=tmp_path, capture_output=True, text=True).stdout
        arguments = words.removesuffix("\0").split("\0")
        return processes.run(*arguments, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})

    line = re.search(
        r"^ +(python -m scripts\.sample (?:.*\\\n)*.*)$",
        sample.__doc__,
        re.MULTILINE,
    )[1]
    done = run(line)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def main(")  # the prompt
