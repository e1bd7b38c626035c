"""init_from=: where weights are found, what a run records of them, and one line where there are
none.
"""

import hashlib
import json
import re
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention import get_backend
from config import AttentionConfig, ModelConfig
from data.tokenizer import BUILDERS
from data.tokenizer_json import tokenizer_files
from model import GPT, to_hugging_face
from tests.command import run, summary, tiny
from training.pretrained import find_pretrained
from training.run import build_run, compose

SHAPE = dict(num_layers=1, num_heads=2, hidden_size=32, max_seq_len=32)


@pytest.fixture
def model():
    torch.manual_seed(7)
    return GPT(ModelConfig(**SHAPE), vocab_size=257, backend=get_backend("naive"))


@pytest.fixture
def folder(model, tmp_path):
    """What transformers would have saved of the model."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    settings, weights = to_hugging_face(model)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(weights, folder / "model.safetensors")
    return folder


def shards(folder, suffix, save):
    """The same weights in two files with an index."""
    whole = folder / "model.safetensors"
    weights = load_file(whole)
    whole.unlink()
    stem, _, kind = suffix.partition(".")
    where = {}
    for i in range(2):
        part = {key: weights[key] for key in list(weights)[i::2]}
        save(part, folder / f"{stem}-0000{i}.{kind}")
        where |= dict.fromkeys(part, f"{stem}-0000{i}.{kind}")
    (folder / f"{suffix}.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def pickled(folder, content=None, file="pytorch_model.bin"):
    """The weights, or other content, as a file of PyTorch alone."""
    torch.save(content or load_file(folder / "model.safetensors"), folder / file)
    (folder / "model.safetensors").unlink()
    return folder / file


def lightning(folder):
    weights = load_file(folder / "model.safetensors")
    state = {f"model.{name}": tensor for name, tensor in weights.items()}
    return pickled(folder, {"state_dict": state, "epoch": 1}, "last.ckpt")


FORMS = {
    "folder": lambda folder: folder,
    "file": lambda folder: folder / "model.safetensors",
    "shards": lambda folder: shards(folder, "model.safetensors", save_file),
    "index": lambda folder: (
        shards(folder, "model.safetensors", save_file) / "model.safetensors.index.json"
    ),
    "bin": lambda folder: pickled(folder).parent,
    "bin-shards": lambda folder: shards(folder, "pytorch_model.bin", torch.save),
    "lightning": lightning,
}


@pytest.mark.parametrize("form", FORMS)
def test_loads_every_form(form, folder, model):
    other = GPT(ModelConfig(**SHAPE), vocab_size=257, backend=get_backend("naive"))
    source = find_pretrained(str(FORMS[form](folder)))
    record = source.load_into(other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    assert record["sha256"] == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in source.files
    }


@pytest.mark.parametrize("bias", [True, False])
def test_loads_a_checkpoint_of_nanogpt(bias, folder, model, caplog):
    """Its names are GPT-2's, below those of torch.compile; its matrices are those of nn.Linear."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    state = {
        f"_orig_mod.{name}": x.T if re.search(r"\.c_\w+\.weight$", name) else x
        for name, x in weights.items()
        if bias or not name.endswith(".bias")
    }
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 257}
    content = {"model": state, "model_args": sizes | {"bias": bias}, "iter_num": 3}
    name = str(pickled(folder, content, "ckpt.pt"))
    shape = ModelConfig(**SHAPE, bias=bias)
    other = GPT(shape, vocab_size=257, backend=get_backend("naive"))
    find_pretrained(name).load_into(other)
    for own, tensor in other.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[own])
    assert "GELU" in caplog.text
    four = GPT(replace(shape, num_heads=4), vocab_size=257, backend=get_backend("naive"))
    with pytest.raises(ValueError, match=r"ckpt\.pt: .*model\.num_heads=2"):
        find_pretrained(name).load_into(four)


LLAMA = {"positions": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
LLAMA_SIZES = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 128,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
}
GPT2_SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 32}
UNTIED = {"tie_embeddings": False}
# {what transformers saves: (model type, class, its config, how it is saved, fields of ours)}
SAVED = {
    "gpt2": ("gpt2", "LMHeadModel", {}, {}, {}),
    "gpt2-base": ("gpt2", "Model", {}, {}, {}),
    "gpt2-shards": ("gpt2", "LMHeadModel", {}, {"max_shard_size": "20KB"}, {}),
    "gpt2-classifier": ("gpt2", "ForSequenceClassification", {"pad_token_id": 0}, {}, {}),
    "gpt2-untied": ("gpt2", "LMHeadModel", {"tie_word_embeddings": False}, {}, UNTIED),
    "gpt2-tanh": ("gpt2", "LMHeadModel", {"activation_function": "gelu_pytorch_tanh"}, {}, {}),
    "llama": ("llama", "ForCausalLM", {}, {}, LLAMA | UNTIED),
    "llama-tied": ("llama", "ForCausalLM", {"tie_word_embeddings": True}, {}, LLAMA),
    "qwen3": ("qwen3", "ForCausalLM", {"hidden_act": "swish"}, {}, LLAMA | UNTIED | {"qk_norm": 1}),
    "mistral": ("mistral", "ForCausalLM", {"sliding_window": 8}, {}, LLAMA | UNTIED),
}


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize("saved", SAVED)
def test_computes_what_transformers_computes_from_the_folder(saved, ending, tmp_path):
    transformers = pytest.importorskip("transformers")
    kind, class_name, changes, how, fields = SAVED[saved]
    torch.manual_seed(3)
    sizes = (GPT2_SIZES if kind == "gpt2" else LLAMA_SIZES) | {"vocab_size": 257}
    config = transformers.AutoConfig.for_model(kind, **sizes | changes)
    prefix = type(config).__name__.removesuffix("Config")
    theirs = getattr(transformers, prefix + class_name)(config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if not re.search("[qk]_norm", name):
                parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path, **how)
    if ending == "bin" and not how:  # as older releases saved it: with every name
        torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    attention = AttentionConfig(window=changes.get("sliding_window"))
    ours = GPT(
        ModelConfig(**SHAPE | fields),
        vocab_size=257,
        backend=get_backend("naive"),
        attention=attention,
    )
    find_pretrained(str(tmp_path)).load_into(ours)
    tokens = torch.arange(32)[None] * 7
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(tokens).logits, loaded(tokens).logits)


@pytest.mark.parametrize("own", ["byte", "bpe"])
def test_warns_once_of_a_tokenizer_with_other_tokens(own, folder, model, caplog):
    files = tokenizer_files(BUILDERS["byte"](), max_length=32)
    (folder / "tokenizer.json").write_text(files["tokenizer.json"])
    find_pretrained(str(folder)).load_into(model, BUILDERS[own]())
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == (own == "bpe")
    for warning in warnings:
        assert str(folder / "tokenizer.json") in warning and "tokenizer=bpe" in warning


def test_a_run_begins_with_them_and_says_so(folder, tmp_path):
    run_dir, hash_of = tmp_path / "run", hashlib.sha256
    sha256 = hash_of((folder / "model.safetensors").read_bytes()).hexdigest()
    (folder / "tokenizer.json").write_text("{}")
    done = run(*tiny(run_dir, f"init_from={folder}"))
    assert done.code == 0 and "tokenizer.json" in done.output
    origin = {"name": str(folder), "sha256": {"model.safetensors": sha256}}
    assert summary(run_dir)["starts"][0]["init_from"] == origin
    # a resumed run has no need of the folder, and remembers it
    folder.rename(folder.with_name("elsewhere"))
    assert run(f"resume={run_dir}", "steps=6").code == 0
    first, second = summary(run_dir)["starts"]
    assert first["init_from"] == origin and "init_from" not in second
    complaint = run(f"resume={run_dir}", "steps=8", "init_from=gpt2").complaint()
    assert "init_from=gpt2" in complaint and "resume=" in complaint


def test_the_first_step_sees_these_weights(folder, model):
    overrides = [each for each in tiny(folder)[:-1]]
    parts = build_run(compose(*overrides, f"init_from={folder}"))
    assert torch.equal(parts.model.token_embedding.weight, model.token_embedding.weight)


def without_shard(folder):
    shards(folder, "model.safetensors", save_file)
    (folder / "model-00001.safetensors").unlink()


def write(file, content):
    """How to replace the weights, or the settings, of a folder by a file."""

    def spoil(folder):
        if file != "config.json":
            (folder / "model.safetensors").unlink()
        if isinstance(content, bytes):
            (folder / file).write_bytes(content)
        else:
            torch.save(content, folder / file)

    return spoil


BIN, INDEX = "pytorch_model.bin", "model.safetensors.index.json"
NESTED = b"[" * 100_000
EMBEDDING = "transformer.wte.weight"
# what is done to the folder, and what the error must name
DAMAGED = {
    "none": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "safetensors": (write("model.safetensors", b"x" * 99), "model.safetensors"),
    "missing-shard": (without_shard, "model-00001.safetensors"),
    "settings": (write("config.json", b"{"), "config.json"),
    "settings-list": (write("config.json", b"[]"), "config.json .*list"),
    "settings-nested": (write("config.json", NESTED), "config.json"),
    "settings-rope": (
        write("config.json", b'{"model_type": "llama", "rope_scaling": [3]}'),
        r"rope_type=\[3\]",
    ),
    "settings-window": (
        write("config.json", b'{"model_type": "mistral", "sliding_window": "x"}'),
        "mistral",
    ),
    "settings-activation": (
        write("config.json", b'{"model_type": "gpt2", "activation_function": []}'),
        r"activation_function=\[\]",
    ),
    "index-empty": (write(INDEX, b"{}"), INDEX),
    "index-nested": (write(INDEX, NESTED), INDEX),
    "index-list": (write(INDEX, b'{"weight_map": ["x"]}'), INDEX),
    "index-number": (write(INDEX, b'{"weight_map": {"x": 1}}'), INDEX),
    "index-outside": (write(INDEX, b'{"weight_map": {"x": "../x"}}'), r"\.\./x"),
    "bin-empty": (write(BIN, b""), BIN),
    "bin-text": (write(BIN, b"some text\n"), BIN),
    "bin-code": (write(BIN, {EMBEDDING: print}), BIN),
    "bin-list": (write(BIN, [torch.ones(2)]), f"{BIN} .*list"),
    "bin-tensor": (write(BIN, torch.ones(2)), f"{BIN} .*Tensor"),
    "bin-number": (write(BIN, {EMBEDDING: 1}), f"{BIN} .*{EMBEDDING}"),
    "bin-key": (write(BIN, {1: torch.ones(2)}), f"{BIN} .*1"),
    "bin-sparse": (write(BIN, {EMBEDDING: torch.eye(2).to_sparse()}), f"{BIN} .*{EMBEDDING}"),
    "bin-meta": (write(BIN, {EMBEDDING: torch.ones(2, device="meta")}), f"{BIN} .*{EMBEDDING}"),
    "bin-scalar": (write(BIN, {EMBEDDING: torch.tensor(1.0)}), "wte.weight"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_says_what_is_wrong_with_a_folder(damage, folder, model):
    """A regression test: 16 of 76 bad folders and files ended in a traceback."""
    spoil, named = DAMAGED[damage]
    spoil(folder)
    with pytest.raises(ValueError, match=named) as error:
        find_pretrained(str(folder)).load_into(model)
    assert "\n" not in str(error.value) and "\x1b" not in str(error.value)


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "nowhere.ckpt", "x" * 5000, "a\0b"])
def test_says_what_is_wrong_with_a_name(name, folder, model):
    (folder / "notes.txt").write_text("epoch 3\n")
    path = folder / name
    with pytest.raises(ValueError, match=re.escape(str(path))):
        find_pretrained(str(path)).load_into(model)


def test_without_network_says_at_once_what_to_do(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "https://no-such-host.invalid")
    began = time.monotonic()
    with pytest.raises(ValueError, match="init_from=gpt2: .*no-such-host.invalid"):
        find_pretrained("gpt2")
    assert time.monotonic() - began < 5


def test_finds_what_the_cache_has(monkeypatch, folder, model):
    """Without network, too: the cache's layout is huggingface_hub's."""
    import huggingface_hub

    asked = []

    def download(name, file, local_files_only):
        asked.append((name, local_files_only))
        if not (folder / file).is_file():
            raise huggingface_hub.errors.LocalEntryNotFoundError(file)
        return str(folder / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    find_pretrained("openai-community/gpt2").load_into(model)
    assert set(asked) == {("openai-community/gpt2", True)}
