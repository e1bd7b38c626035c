"""init_from=: where weights are found, what a run records of them, and one line where there are
none.
"""

import hashlib
import json
import re

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from attention import get_backend
from config import AttentionConfig, ModelConfig
from data.tokenizer import BUILDERS, END_OF_TEXT
from data.tokenizer_json import tokenizer_files
from model import GPT, to_hugging_face
from tests.command import run, summary, tiny
from tests.weights import with_weights
from training import build_run, compose
from training.loop.pretrained import find_pretrained

SHAPE = dict(num_layers=1, num_heads=2, hidden_size=32, max_seq_len=32)


def build(attention: AttentionConfig | None = None, **fields) -> GPT:
    torch.manual_seed(7)
    config, backend = ModelConfig(**SHAPE | fields), get_backend("naive")
    return GPT(config, vocab_size=257, backend=backend, attention=attention).eval()


@pytest.fixture
def model():
    return with_weights(build(), 0.1)


@pytest.fixture
def folder(model, tmp_path):
    """What transformers would have saved of the model."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    settings, weights = to_hugging_face(model)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(weights, folder / "model.safetensors")
    return folder


def weights_of(folder):
    return load_file(folder / "model.safetensors")


BIN = "pytorch_model.bin"


def saved(content, folder, file=BIN):
    """The only file of weights, as PyTorch alone saves it."""
    torch.save(content, folder / file)
    (folder / "model.safetensors").unlink()
    return folder / file


def bin_shards(folder):
    """The same weights in two files."""
    weights = weights_of(folder)
    for i in range(2):
        part = {name: weights[name] for name in list(weights)[i::2]}
        torch.save(part, folder / f"pytorch_model-0000{i + 1}-of-00002.bin")
    (folder / "model.safetensors").unlink()
    return folder


def lightning(folder):
    state = {f"model.{name}": tensor for name, tensor in weights_of(folder).items()}
    return saved({"state_dict": state, "epoch": 1}, folder, "last.ckpt")


def in_the_cache(folder):
    """The name of weights that huggingface_hub has downloaded, in a layout of its own."""
    home, commit = folder.with_name("models--openai-community--gpt2"), "a" * 40
    for part in ("refs", "snapshots"):
        (home / part).mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    folder.rename(home / "snapshots" / commit)
    return "openai-community/gpt2"


FORMS = {
    "file": lambda folder: folder / "model.safetensors",
    "bin-shards": bin_shards,
    "lightning": lightning,
    "cached": in_the_cache,
}


def same_weights(one: GPT, other: GPT) -> bool:
    weights = other.state_dict()
    return all(torch.equal(x, weights[name]) for name, x in one.state_dict().items())


@pytest.mark.parametrize("form", FORMS)
def test_loads_every_form(form, folder, model, monkeypatch):
    """Without network, too."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder.parent))
    other, source = build(), find_pretrained(str(FORMS[form](folder)))
    record = source.load_into(other)
    assert same_weights(other, model)
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in source.files}
    assert record["sha256"] == hashes


def test_shards_of_two_models_are_not_mixed(folder, model):
    part = bin_shards(folder) / "pytorch_model-00001-of-00002.bin"
    part.with_name("pytorch_model-00001-of-00003.bin").write_bytes(part.read_bytes())
    with pytest.raises(ValueError, match=r"init_from=.*-00001-of-00003\.bin and in another"):
        find_pretrained(str(folder)).load_into(model)


@pytest.mark.parametrize("bias", [True, False])
def test_loads_a_checkpoint_of_nanogpt(bias, folder, model, caplog):
    """Its names are GPT-2's, below those of torch.compile; its matrices are those of nn.Linear."""
    weights = weights_of(folder)
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    state = {
        f"_orig_mod.{name}": x.T if re.search(r"\.c_\w+\.weight$", name) else x
        for name, x in weights.items()
        if bias or not name.endswith(".bias")
    }
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 257}
    sizes |= {} if bias else {"bias": False}  # older ones had no such choice
    content = {"model": state, "model_args": sizes, "iter_num": 3}
    name = str(saved(content, folder, "ckpt.pt"))
    other = build(bias=bias)
    find_pretrained(name).load_into(other)
    assert same_weights(other, model)
    assert "GELU" in caplog.text
    with pytest.raises(ValueError, match=r"ckpt\.pt: .*model\.bias=.* model\.num_heads=2"):
        find_pretrained(name).load_into(build(bias=not bias, num_heads=4))
    torch.save(content | {"model_args": sizes | {"use_relu": True}}, name)
    with pytest.raises(ValueError, match="use_relu"):
        find_pretrained(name).load_into(other)


GPT2 = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 32}
LLAMA = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
LLAMA |= {"hidden_size": 32, "intermediate_size": 128, "head_dim": 16, "rms_norm_eps": 1e-5}
UNTIED = {"tie_embeddings": False}
MODERN = {"positions": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False} | UNTIED
# {folder: (class of transformers, its config, fields of ours)}
SAVED = {
    "gpt2": ("GPT2LMHeadModel", GPT2, {}),
    "says-tied": ("GPT2LMHeadModel", GPT2 | {"tie_word_embeddings": False}, UNTIED),
    "mistral": ("MistralForCausalLM", LLAMA | {"sliding_window": 8}, MODERN),
}


@pytest.mark.parametrize("kind", SAVED)
def test_computes_what_transformers_computes_from_the_folder(kind, tmp_path):
    """In several files. tests/model/test_hugging_face.py has more architectures. 5 s: the import of
    transformers.
    """
    transformers = pytest.importorskip("transformers")
    name, sizes, fields = SAVED[kind]
    torch.manual_seed(3)
    theirs = getattr(transformers, name)
    theirs = theirs(theirs.config_class(**sizes, vocab_size=257))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 1
    if kind == "says-tied":
        config = tmp_path / "config.json"
        tied = json.loads(config.read_text()) | {"tie_word_embeddings": True}
        config.write_text(json.dumps(tied))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours = build(AttentionConfig(window=sizes.get("sliding_window")), **fields)
    find_pretrained(str(tmp_path)).load_into(ours)
    tokens = torch.arange(32)[None] * 7
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, loaded(tokens).logits)


@pytest.mark.parametrize("own, normalizer", [("byte", None), ("bpe", None), ("byte", "Lowercase")])
def test_warns_once_of_a_tokenizer_with_other_tokens(own, normalizer, folder, model, caplog):
    files = tokenizer_files(BUILDERS["byte"](), max_length=32)
    theirs = json.loads(files["tokenizer.json"])
    theirs["model"]["vocab"][END_OF_TEXT] = 256  # as GPT-2 was published
    theirs["added_tokens"].append({"content": "[PAD]", "id": 257})
    theirs["normalizer"] = normalizer and {"type": normalizer}
    (folder / "tokenizer.json").write_text(json.dumps(theirs))
    find_pretrained(str(folder)).load_into(model, BUILDERS[own]())
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == (own == "bpe" or normalizer is not None)
    for warning in warnings:
        assert str(folder / "tokenizer.json") in warning and f"tokenizer={own}" in warning


def test_a_run_begins_with_them_and_says_so(folder, model, tmp_path):
    run_dir, weights = tmp_path / "run", (folder / "model.safetensors").read_bytes()
    sha256 = {"model.safetensors": hashlib.sha256(weights).hexdigest()}
    (folder / "tokenizer.json").write_text("{}")
    done = run(*tiny(run_dir, f"init_from={folder}"))
    assert done.code == 0 and "tokenizer.json" in done.output
    built = build_run(compose(*tiny(folder)[:-1], f"init_from={folder}")).model
    assert torch.equal(built.token_embedding.weight, model.token_embedding.weight)
    # a resumed run has no need of the folder, and remembers it
    folder.rename(folder.with_name("elsewhere"))
    assert run(f"resume={run_dir}", "steps=6").code == 0
    first, second = summary(run_dir)["starts"]
    assert first["init_from"] == {"name": str(folder), "sha256": sha256}
    assert "init_from" not in second
    complaint = run(f"resume={run_dir}", "steps=8", "init_from=gpt2").complaint()
    assert "init_from=gpt2" in complaint and "resume=" in complaint


# PyTorch would run the last one
BAD = {
    "bytes": ("model.safetensors", b"x" * 99),
    "torn-settings": ("config.json", b"{"),
    "mistyped-settings": ("config.json", b'{"model_type": "mistral", "sliding_window": "8"}'),
    "one-tensor": (BIN, torch.ones(2)),
    "no-tensor": (BIN, {"wte.weight": 1}),
    "code": (BIN, {"wte.weight": print}),
}


@pytest.mark.parametrize("file, content", BAD.values(), ids=BAD)
def test_names_a_file_that_is_no_checkpoint(file, content, folder, model):
    """A regression test: 16 of 76 bad folders and files ended in a traceback."""
    if file == BIN:
        (folder / "model.safetensors").unlink()
    if isinstance(content, bytes):
        (folder / file).write_bytes(content)
    else:
        torch.save(content, folder / file)
    for name in (folder, folder / file):
        with pytest.raises(ValueError, match=re.escape(file)) as error:
            find_pretrained(str(name)).load_into(model)
        assert "\n" not in str(error.value) and "\x1b" not in str(error.value)


@pytest.mark.parametrize("name", [".", "notes.txt", "x" * 5000], ids=["folder", "text", "long"])
def test_names_a_path_without_weights(name, folder, model):
    (folder / "model.safetensors").unlink()
    (folder / "notes.txt").write_text("epoch 3\n")
    path = str(folder / name)
    with pytest.raises(ValueError, match=re.escape(path)):
        find_pretrained(path).load_into(model)


def test_without_network_says_at_once_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "https://no-such-host.invalid")
    with pytest.raises(ValueError, match="init_from=gpt2: .*hf download gpt2 "):
        find_pretrained("gpt2")
