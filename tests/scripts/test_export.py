"""`python -m scripts.export`: transformers loads the folder and computes what the run computes."""

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from config import AttentionConfig, DataConfig
from scripts import export
from tests.command import run, tiny
from tests.processes import limited
from tests.run_folder import write_run
from training.loop.pretrained import find_pretrained
from training.loop.trained import load_trained, read_run_config

transformers = pytest.importorskip("transformers")

MODERN = ("model=modern", "model.num_kv_heads=1")
PLAIN = (*MODERN, "model.qk_norm=false")
WINDOW = "attention.window=8"  # the prompt below has 22 tokens
TWO = ("model.num_layers=2", WINDOW)
RUNS = {
    "GPT2LMHeadModel": ("tokenizer=bpe",),
    "LlamaForCausalLM": PLAIN,
    "Qwen3ForCausalLM": (*MODERN, "attention=no_rescale"),
    "MistralForCausalLM": (*PLAIN, WINDOW),
    "MinistralForCausalLM": (*PLAIN, *TWO, "attention.pattern=LS"),
    "Qwen3ForCausalLM with windows": (*MODERN, *TWO, "attention.pattern=SL"),
}


def export_run(run_dir: Path, out: Path) -> None:
    export.main([f"run={run_dir}", f"out={out}"])


QUICK = ("GPT2LMHeadModel", "MinistralForCausalLM", "Qwen3ForCausalLM")  # for each branch
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in RUNS if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_transformers_loads_a_run(name, tmp_path, capsys):
    run_dir, out = tmp_path / "run", tmp_path / "out"
    assert run(*tiny(run_dir, *RUNS[name], "steps=2", "device=cpu")).code == 0
    export_run(run_dir, out)
    said = capsys.readouterr()
    assert str(out / "model.safetensors") in said.out
    assert ("exact attention" in said.err) == ("no_rescale" in str(RUNS[name]))

    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(theirs).__name__ == name.split()[0]
    config = read_run_config(run_dir)
    ours = load_trained(run_dir, config).model
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    tokens = tokenizer("def f(x):\n    return x", return_tensors="pt").input_ids
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens).logits, atol=1e-5, rtol=0)
    # without a prompt it begins a document, as ours does
    written = theirs.generate(max_new_tokens=4, do_sample=False)
    assert written[0, 0] == tokenizer.eos_token_id == ours.vocab_size - 1

    if "window" in str(RUNS[name]):  # which a model without windows does not compute
        without = replace(config, attention=AttentionConfig())
        plain = load_trained(run_dir, without).model
        with pytest.raises(ValueError, match=r"attention\.window"):
            find_pretrained(str(out)).load_into(plain)
        assert (theirs(tokens).logits - plain(tokens).logits).abs().max() > 1e-4
    for parameter in ours.parameters():
        torch.nn.init.zeros_(parameter)
    find_pretrained(str(out)).load_into(ours)
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens).logits, atol=1e-5, rtol=0)


def test_a_model_whose_data_are_no_text_has_no_tokenizer(tmp_path):
    run_dir, out = tmp_path / "run", tmp_path / "out"
    write_run(run_dir, data=DataConfig(source="last_write"))
    export_run(run_dir, out)
    assert not (out / "tokenizer.json").exists()
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] is None
    transformers.AutoModelForCausalLM.from_pretrained(out)


def test_a_full_disk_leaves_no_file(tmp_path):
    """A regression test: a traceback, and half a folder that refused to be written again."""
    run_dir, out = tmp_path / "run", tmp_path / "out"
    write_run(run_dir)
    full = limited(resource.RLIMIT_FSIZE, 8 * 1024)
    with full, pytest.raises(SystemExit, match=f"^export: out={out}"):
        export_run(run_dir, out)
    assert list(tmp_path.iterdir()) == [run_dir]
    export_run(run_dir, out)
