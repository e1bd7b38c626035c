"""Checkpoints: exact resume, refusal by name, and survival of every kind of interruption."""

import contextlib
import errno
import hashlib
import json
import os
import pickle
import random
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp import GradScaler

import training.record.checkpoint
from config import OptimConfig
from data.token_file import meta_checksum
from tests.command import load_checkpoint, save_checkpoint
from training.loop.optimizer import build_optimizer
from training.record.checkpoint import CheckpointError, Checkpoints, load_model_state, read_meta

CONFIG = {
    "seed": 0,
    "model": {
        "name": "tiny",
        "num_layers": 2,
        "hidden_size": 8,
        "positions": "learned",
        "max_seq_len": 16,
        "dropout": 0.5,
    },
}


class TiedModel(nn.Module):
    """A small model with dropout, a buffer, and an output layer that shares the embedding."""

    def __init__(self, vocab_size: int = 11, hidden_size: int = 8, tied: bool = True):
        super().__init__()
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.norm = nn.BatchNorm1d(hidden_size)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(hidden_size, vocab_size, bias=False)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.dropout(self.norm(self.embedding(tokens))))


def build(scaled: bool = False):
    model = TiedModel()
    return (
        model,
        build_optimizer(model, OptimConfig(lr=0.05)),
        GradScaler("cpu", enabled=scaled, init_scale=8.0, growth_interval=2),
    )


def train(model, optimizer, scaler, steps: int) -> list[float]:
    """Steps that draw on every random number generator."""
    losses = []
    for _ in range(steps):
        tokens = torch.tensor(
            [random.randrange(11) for _ in range(6)] + np.random.randint(0, 11, 6).tolist()
        )
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def save(run_dir: Path, step: int = 3, config: dict = CONFIG, **replaced):
    parts = new_parts() | {"config": config} | replaced
    return save_checkpoint(run_dir, **parts, step=step, tokens=step * 100)


@contextlib.contextmanager
def file_size(limit: int) -> Iterator[None]:
    """A file-size limit makes a write fail half way, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def new_parts() -> dict:
    """What Checkpoints takes, newly built."""
    parts = zip(("model", "optimizer", "scaler"), build(), strict=True)
    return dict(parts) | {"config": CONFIG}


@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
def test_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path, scaled):
    seed(0)
    whole = build(scaled)
    losses = train(*whole, 8)

    seed(0)
    first = build(scaled)
    train(*first, 5)
    model, optimizer, scaler = first
    save_checkpoint(
        tmp_path, model=model, optimizer=optimizer, scaler=scaler, step=5, tokens=60, config=CONFIG
    )

    seed(99)
    resumed = build(scaled)
    train(*resumed, 2)  # other weights, moments and random states, all to be replaced
    model, optimizer, scaler = resumed
    meta = load_checkpoint(tmp_path, model=model, optimizer=optimizer, scaler=scaler, config=CONFIG)
    assert (meta["step"], meta["tokens"], meta["config"]) == (5, 60, CONFIG)
    assert train(*resumed, 3) == losses[5:]
    for name, tensor in whole[0].state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    for mine, theirs in zip(
        whole[1].state_dict()["state"].values(),
        optimizer.state_dict()["state"].values(),
        strict=True,
    ):
        assert all(torch.equal(mine[key], theirs[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
    assert scaler.get_scale() == whole[2].get_scale()


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_a_second_ctrl_c_ends_leaves_nothing(tmp_path, monkeypatch, background):
    monkeypatch.setattr(
        training.record.checkpoint, "rotate", mock.Mock(side_effect=KeyboardInterrupt)
    )
    with (
        pytest.raises(KeyboardInterrupt),
        Checkpoints(tmp_path, **new_parts(), background=background) as checkpoints,
    ):
        checkpoints.save(5, 60, last=True)
    assert not list(tmp_path.iterdir())


def test_optimizer_settings_are_the_callers(tmp_path):
    save(tmp_path)
    model = TiedModel()
    optimizer = build_optimizer(model, OptimConfig(lr=0.5, weight_decay=0.3))
    load_checkpoint(tmp_path, model=model, optimizer=optimizer, scaler=None, config=CONFIG)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.5, 0.3),
        (0.5, 0.0),
    ]


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    from safetensors.torch import load_file

    model, optimizer, scaler = build()
    save(tmp_path, model=model)
    stored = load_file(tmp_path / "checkpoint/model.safetensors")
    assert stored.keys() == model.state_dict().keys() - {"output.weight"}
    other = TiedModel()
    assert load_model_state(tmp_path, other)["vocab_size"] == 11
    assert other.output.weight is other.embedding.weight
    assert torch.equal(other.output.weight, model.embedding.weight)


def test_a_compiled_module_is_refused(tmp_path):
    """torch.compile() wraps a module as `_orig_mod`: names with that prefix would fit no model."""
    compiled = nn.Module()
    compiled._orig_mod = TiedModel()
    with pytest.raises(AssertionError, match="torch.compile"):
        save(tmp_path, model=compiled)


def test_a_second_save_replaces_the_first_and_leaves_nothing_else(tmp_path):
    save(tmp_path, step=1)
    folder = save(tmp_path, step=2)
    assert folder == tmp_path / "checkpoint"
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert sorted(os.listdir(folder)) == ["meta.json", "model.safetensors", "training.pt"]
    assert read_meta(tmp_path)["step"] == 2


def refusal(run_dir: Path, model: nn.Module | None = None, config: dict = CONFIG) -> str:
    """The one line with which loading refuses, having changed no weight."""
    model = model or TiedModel()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(
            run_dir,
            model=model,
            optimizer=build_optimizer(model, OptimConfig(lr=1e-3)),
            scaler=None,
            config=config,
        )
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_checkpoint(tmp_path):
    assert "holds no checkpoint" in refusal(tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_model_state(tmp_path / "nowhere", TiedModel())


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 10)


def alter(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt"])
@pytest.mark.parametrize(
    "harm, said", [(truncate, "truncated"), (alter, "altered"), (Path.unlink, "missing")]
)
def test_a_damaged_file_is_named(tmp_path, name, harm, said):
    path = save(tmp_path) / name
    harm(path)
    message = refusal(tmp_path)
    assert message.startswith(str(path)) and said in message


@pytest.mark.parametrize(
    "content, said",
    [
        ("{torn", "cannot be read"),
        ("[1, 2]", "another program"),
        ("null", "another program"),
        ('{"iteration": 7, "model_args": {}}', "another program"),
        ('{"format": "tilegpt-checkpoint", "version": 99}', "version 99"),
        ('{"format": "tilegpt-checkpoint", "version": 1, "step": 3}', "tokens, config, files"),
        ("[" * 100_000 + "]" * 100_000, "nested"),
        (None, "checkpoint of this program"),
    ],
    ids=["torn", "list", "null", "foreign", "newer", "incomplete", "deep", "missing"],
)
def test_a_meta_file_of_another_form_is_refused(tmp_path, content, said):
    """A regression test: some of them ended in a traceback."""
    folder = save(tmp_path)
    if content is None:
        (folder / "meta.json").unlink()
    else:
        (folder / "meta.json").write_text(content)
    message = refusal(tmp_path)
    assert str(folder) in message and re.search(said, message)


def rewrite(folder: Path, **changed: object) -> None:
    """Change meta.json, and its own checksum with it."""
    path = folder / "meta.json"
    meta = json.loads(path.read_text()) | changed
    path.write_text(json.dumps(meta | {"sha256": meta_checksum(meta)}))


TILED = [[0, "tiled"]]
CRAFTED = {
    "step": {"step": "four"},
    "step-negative": {"step": -4},
    "step-huge": {"step": 10**30},
    "tokens": {"tokens": None},
    "val_loss": {"val_loss": ["low"]},
    "files-list": {"files": []},
    "files-number": {"files": {"model.safetensors": 5}},
    "files-elsewhere": {"files": {"../metrics.jsonl": {"bytes": 1, "sha256": ""}}},
    "files-none": {"files": {}},
    "config-number": {"config": 5},
    "starts-number": {"starts": 5},
    "starts-of-numbers": {"starts": [5]},
    "starts-attention": {"starts": [{"step": 0, "attention": [[0]], "changed": {}}]},
    "starts-changed": {"starts": [{"step": 0, "attention": TILED, "changed": {"seed": 1}}]},
}


@pytest.mark.parametrize("changed", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_meta_file_is_refused_by_its_key(tmp_path, changed):
    """A regression test: each was a traceback."""
    rewrite(save(tmp_path), **changed)
    (key,) = changed
    said = "model.safetensors, training.pt" if changed == {"files": {}} else key
    assert said in refusal(tmp_path)


class Harm:
    """An object whose unpickling would run code."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


STATES = {
    "list": lambda state: [1, 2],
    "empty": lambda state: {},
    "optimizer": lambda state: state | {"optimizer": 5},
    "random": lambda state: state | {"random": {"python": 3}},
}


@pytest.mark.parametrize("kind", [*STATES, "pickle", "words", "weights"])
def test_a_crafted_state_is_refused_and_not_run(tmp_path, kind):
    """A regression test: PyTorch ended with a traceback. It never ran the code inside."""
    folder = save(tmp_path)
    path = folder / ("model.safetensors" if kind == "weights" else "training.pt")
    if kind in STATES:
        torch.save(STATES[kind](torch.load(path, weights_only=True)), path)
    else:
        words = b"words that are no weights"
        path.write_bytes(pickle.dumps(Harm(tmp_path / "harm")) if kind == "pickle" else words)
    files = read_meta(tmp_path)["files"]
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    rewrite(folder, files=files | {path.name: {"bytes": path.stat().st_size, "sha256": sha256}})
    # the weights are loaded before a state that is of another form is seen
    with pytest.raises(CheckpointError, match=path.name):
        load_checkpoint(tmp_path, **new_parts())
    assert not (tmp_path / "harm").exists()


def with_model(**changed) -> dict:
    return CONFIG | {"model": CONFIG["model"] | changed}


@pytest.mark.parametrize(
    "changed, then",
    [
        ({"num_layers": 6, "hidden_size": 16}, {"num_layers": 2}),
        ({"max_seq_len": 32}, {"max_seq_len": 16}),
        ({"bias": False}, {"bias": None}),  # of a later version
    ],
)
def test_the_first_differing_setting_is_named(tmp_path, changed, then):
    save(tmp_path)
    ((key, value),) = then.items()
    message = refusal(tmp_path, config=with_model(**changed))
    assert re.search(rf"model\.{key} is {value} .* {changed[key]} now", message)


def test_settings_that_change_no_weight_may_differ(tmp_path):
    save(tmp_path, config=with_model(positions="rope", offload=False))  # of an older version
    now = with_model(positions="rope", name="other", dropout=0.0, max_seq_len=64)
    assert load_checkpoint(tmp_path, **new_parts() | {"config": now})["step"] == 3


def test_differing_weights_are_named(tmp_path):
    save(tmp_path)
    for name, model in {
        "vocab_size is 11 .* 12 now": TiedModel(vocab_size=12),
        r"embedding.weight is \(11, 8\) float32 .* \(11, 16\)": TiedModel(hidden_size=16),
        r"output.weight is absent .* \(11, 8\)": TiedModel(tied=False),
    }.items():
        assert re.search(name, refusal(tmp_path, model))


@pytest.mark.parametrize("limit", [200, 5000], ids=["weights", "training-end"])
def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path, limit):
    save(tmp_path, step=1)
    assert limit < (tmp_path / "checkpoint/training.pt").stat().st_size
    with file_size(limit), pytest.raises(OSError, match=f"{tmp_path}.* GiB free"):
        save(tmp_path, step=2)
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert load_checkpoint(tmp_path, **new_parts())["step"] == 1
    save(tmp_path, step=3)
    assert read_meta(tmp_path)["step"] == 3


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free some space"),
        (RuntimeError("I/O error: File too large (os error 27)"), "ulimit -f"),
        (RuntimeError("enforce fail: unexpected pos"), "ulimit -f.*quota"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "quota"),
        (PermissionError(errno.EACCES, "Permission denied"), "denied$"),
    ],
)
def test_what_to_do_when_a_checkpoint_cannot_be_written(tmp_path, monkeypatch, error, way_out):
    """A regression test: it asked for free space even if only a limit was too low."""
    monkeypatch.setattr(torch, "save", mock.Mock(side_effect=error))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: mock.Mock(free=10**9))
    with pytest.raises(OSError, match=f"cannot write.*{way_out}"):
        save_checkpoint(tmp_path, step=1, tokens=1, **new_parts())


def test_an_output_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write"):
        save(tmp_path / "file")


def test_meta_is_plain_json(tmp_path):
    meta = json.loads((save(tmp_path) / "meta.json").read_text())
    assert set(meta["files"]) == {"model.safetensors", "training.pt"}
    assert (
        torch.load(tmp_path / "checkpoint/training.pt", weights_only=True)["random"]["torch"].dtype
        == torch.uint8
    )
