"""init_from=: where weights are found, what a run records of them, and one line where there are
none.
"""

import hashlib
import json
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention import get_backend
from config import ModelConfig
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


def one_bin(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


FORMS = {
    "folder": lambda folder: folder,
    "file": lambda folder: folder / "model.safetensors",
    "shards": lambda folder: shards(folder, "model.safetensors", save_file) or folder,
    "bin": lambda folder: one_bin(folder) or folder,
    "bin-shards": lambda folder: shards(folder, "pytorch_model.bin", torch.save) or folder,
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


def test_a_run_begins_with_them_and_says_so(folder, tmp_path):
    run_dir, hash_of = tmp_path / "run", hashlib.sha256
    sha256 = hash_of((folder / "model.safetensors").read_bytes()).hexdigest()
    assert run(*tiny(run_dir, f"init_from={folder}")).code == 0
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


def damage_index(folder):
    shards(folder, "model.safetensors", save_file)
    (folder / "model-00001.safetensors").unlink()


def empty_index(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")


def pickle_of_code(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"wte.weight": print}, folder / "pytorch_model.bin")


# what is done to the folder, and what the error must name
DAMAGED = {
    "none": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "no-weights": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99),
        "model.safetensors",
    ),
    "missing-shard": (damage_index, "model-00001.safetensors"),
    "settings": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "settings-without-names": (
        lambda folder: (folder / "config.json").write_text("[]"),
        "config.json .*list",
    ),
    "empty-index": (empty_index, "model.safetensors.index.json"),
    "pickle": (pickle_of_code, "pytorch_model.bin"),
    # a regression test: every tensor of the model was named as missing
    "name-of-the-settings": (lambda folder: folder / "config.json", "config.json .*safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_says_what_is_wrong_with_a_folder(damage, folder, model):
    spoil, named = DAMAGED[damage]
    other = spoil(folder)
    name = str(other if damage == "name-of-the-settings" else folder)
    with pytest.raises(ValueError, match=named):
        find_pretrained(name).load_into(model)


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
