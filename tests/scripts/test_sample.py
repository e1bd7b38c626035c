"""`python -m scripts.sample`: what it writes, and one line for each thing that can be wrong."""

import os
import re
import subprocess
import sys
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

ROOT = Path(__file__).resolve().parents[2]


def write_run(run_dir: Path, *, checkpoint: bool = True, **fields) -> GPT:
    """A run directory as training leaves it, of a model with large random weights, so that its
    attention decides what it writes.
    """
    shape = ModelConfig(num_layers=1, num_heads=2, hidden_size=16, max_seq_len=32, init_std=1.0)
    config = RunConfig(model=shape, seq_len=32, **fields)
    plain = OmegaConf.to_container(OmegaConf.structured(config))
    run_dir.mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(plain), run_dir / "config.yaml")
    torch.manual_seed(config.seed)
    model = GPT(config.model, vocab_size=257, backend=get_backend("tiled"))
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
        monkeypatch.setattr(sys, "argv", ["sample", *arguments])
        sample.main()
        return tuple(capsys.readouterr())

    return run


@pytest.fixture
def complaint(run_sample):
    """complaint("key=value", ...): the one line it ends with."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as error:
            run_sample(*arguments)
        assert "\n" not in error.value.code
        return error.value.code

    return run


@pytest.mark.parametrize("cache", ["true", "false"])
def test_prints_prompt_and_continuation(run_sample, tmp_path, cache):
    model = write_run(tmp_path / "run")
    out, err = run_sample(
        f"run={tmp_path}/run",
        "prompt=x = a == b",
        "tokens=40",
        "seed=5",
        "temperature=1.5",
        "top_k=0",
        f"cache={cache}",
    )
    tokenizer = build_tokenizer(RunConfig().tokenizer)
    assert (
        out
        == sample_text(model, tokenizer, "x = a == b", max_new_tokens=40, temperature=1.5, seed=5)
        + "\n"
    )
    assert err == ""


@pytest.mark.parametrize(
    "argument, passed", [("cache=true", True), ("cache=FALSE", False), (None, None)]
)
def test_cache_is_as_asked_and_else_up_to_the_attention(
    run_sample, monkeypatch, tmp_path, argument, passed
):
    write_run(tmp_path / "run")
    monkeypatch.setattr(
        sample, "sample_text", lambda *arguments, use_cache, **options: repr(use_cache)
    )
    out, _ = run_sample(f"run={tmp_path}/run", *([argument] if argument else []))
    assert out == f"{passed}\n"


def test_another_attention_is_said_and_used(run_sample, tmp_path):
    write_run(tmp_path / "run")
    arguments = (f"run={tmp_path}/run", "prompt=def", "tokens=20")
    with_naive, said = run_sample(*arguments, "attention=naive")
    assert said == "attention=naive; the run was trained with attention=tiled\n"
    assert with_naive == run_sample(*arguments)[0]
    assert run_sample(*arguments, "attention=tiled")[1] == ""
    assert run_sample(*arguments, "attention=no_scale")[0] != with_naive


def test_keeps_the_options_the_run_was_trained_with(run_sample, tmp_path):
    """no_rescale is exact with one tile and wrong with many: the text tells which options were in
    force.
    """
    write_run(tmp_path / "tiles", attention=AttentionConfig("no_rescale", block_kv=2))
    write_run(tmp_path / "one-tile", attention=AttentionConfig("no_rescale", block_kv=64))
    tiles, one_tile = (
        run_sample(f"run={tmp_path}/{name}", "prompt=def main():", "tokens=10")[0]
        for name in ("tiles", "one-tile")
    )
    exact, _ = run_sample(
        f"run={tmp_path}/tiles", "prompt=def main():", "tokens=10", "attention=naive"
    )
    assert one_tile == exact
    assert tiles != exact


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "run= is missing"),
        (
            ("run=DIR", "token=3"),
            "token=3: there is no key 'token'; did you mean tokens?",
        ),
        (("run=DIR", "hello"), "'hello' is not key=value"),
        (("run=DIR", "tokens=many"), "tokens=many must be a whole number"),
        (("run=DIR", "tokens=-1"), "tokens=-1 must be at least 1"),
        (("run=DIR", "cache=maybe"), "cache=maybe must be true or false"),
        (("run=DIR", "temperature=-1"), "temperature=-1.0 must be at least 0"),
        (("run=DIR", "top_k=-1"), "top_k=-1 must be at least 0"),
        (("run=DIR", "attention=magic"), "attention=magic is not known; valid: naive"),
        (("run=DIR", "device=cuda"), "device=cuda"),
        (("run=DIR", "device=tpu"), "device=tpu is not one of: auto, cpu, cuda"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, tuple) else "",
)
def test_complains_in_one_line_about_arguments(complaint, tmp_path, arguments, said):
    write_run(tmp_path / "run")
    assert said in complaint(
        *(argument.replace("DIR", f"{tmp_path}/run") for argument in arguments)
    )


def test_complains_about_what_is_no_run_directory(complaint, tmp_path):
    assert (
        complaint(f"run={tmp_path}/nowhere")
        == f"sample: {tmp_path}/nowhere is not a run directory: it has no config.yaml"
    )
    write_run(tmp_path / "sweep" / "0")
    assert complaint(f"run={tmp_path}/sweep").endswith(
        f"it has no config.yaml; it holds runs, such as {tmp_path}/sweep/0"
    )


def test_says_why_a_run_never_began(complaint, tmp_path):
    """A run that was refused has a summary and Hydra's folder, which is no run."""
    (tmp_path / "run/.hydra").mkdir(parents=True)
    (tmp_path / "run/.hydra/config.yaml").write_text("")
    assert (
        complaint(f"run={tmp_path}/run")
        == f"sample: {tmp_path}/run is not a run directory: it has no config.yaml"
    )
    (tmp_path / "run/summary.json").write_text(
        '{"status": "failed", "error": "seq_len=7 is odd\\nand more"}'
    )
    assert complaint(f"run={tmp_path}/run").endswith(
        "it has no config.yaml; the run ended before it began: seq_len=7 is odd"
    )


@pytest.mark.parametrize("text", ["steps: [", "colour: blue", "steps: many", "just words"])
def test_complains_about_a_foreign_configuration(complaint, tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    assert f"{tmp_path}/config.yaml is not the configuration of a run" in complaint(
        f"run={tmp_path}"
    )


def test_complains_about_a_run_without_a_checkpoint(complaint, tmp_path):
    write_run(tmp_path / "run", checkpoint=False)
    assert "holds no checkpoint" in complaint(f"run={tmp_path}/run")


@pytest.mark.parametrize("name", ["checkpoint.best", "checkpoints/step-000400"])
def test_a_checkpoint_is_chosen_by_its_folder(run_sample, tmp_path, name):
    """Its weights write, not the latest's."""
    write_run(tmp_path / "run")
    wanted = run_sample(f"run={tmp_path}/run", "temperature=0", "tokens=8")
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run/checkpoint").rename(tmp_path / "run" / name)
    latest = GPT(
        ModelConfig(num_layers=1, num_heads=2, hidden_size=16, max_seq_len=32),
        vocab_size=257,
        backend=get_backend("tiled"),
    )
    optimizer = torch.optim.AdamW(latest.parameters())
    save_checkpoint(
        tmp_path / "other",
        model=latest,
        optimizer=optimizer,
        scaler=None,
        step=500,
        tokens=32,
        config={},
    )
    (tmp_path / "other/checkpoint").rename(tmp_path / "run/checkpoint")
    assert run_sample(f"run={tmp_path}/run/{name}", "temperature=0", "tokens=8") == wanted
    assert run_sample(f"run={tmp_path}/run", "temperature=0", "tokens=8") != wanted


def test_complains_about_a_run_on_last_write(complaint, tmp_path):
    write_run(tmp_path / "run", data=DataConfig(source="last_write"))
    assert "was trained on last_write, whose tokens are not text" in complaint(
        f"run={tmp_path}/run"
    )


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
        run("python -m scripts.sample --help").stdout,
        re.MULTILINE,
    )[1]
    done = run(line)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def main(")
    failed = run("python -m scripts.sample run=nowhere")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr == "sample: nowhere is not a run directory: it has no config.yaml\n"
