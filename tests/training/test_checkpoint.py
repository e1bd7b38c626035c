"""Checkpoints: exact resume, refusal by name, and survival of every kind of interruption."""

import errno
import json
import os
import random
import resource
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp import GradScaler

import training.checkpoint
from config import OptimConfig
from tests.command import load_checkpoint, same, save_checkpoint
from training.checkpoint import CheckpointError, Checkpoints, load_model_state, read_meta
from training.optimizer import build_optimizer

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.parametrize("changed", ["nothing", "random numbers", "a buffer in place", "a buffer"])
def test_the_last_state_is_written_beside_the_evaluation(tmp_path, monkeypatch, changed):
    """It is that after the evaluation, in which a user's attention may draw random numbers or
    change its buffers.
    """
    parts = new_parts()
    written = mock.Mock(side_effect=training.checkpoint._write_state)
    monkeypatch.setattr(training.checkpoint, "_write_state", written)
    with Checkpoints(tmp_path, **parts, background=True) as checkpoints:
        checkpoints.write_ahead(last=True)
        norm = parts["model"].norm
        if changed == "random numbers":
            torch.rand(1)
        elif changed == "a buffer in place":
            norm.running_mean += 1
        elif changed == "a buffer":
            norm.running_mean = norm.running_mean + 1
        after = torch.get_rng_state()
        checkpoints.save(5, 60, last=True)
    assert written.call_count == 1 + (changed != "nothing")
    seed(99)
    others = new_parts()
    load_checkpoint(tmp_path, **others)
    assert torch.equal(torch.get_rng_state(), after)
    assert same(*(dict(each["model"].state_dict()) for each in (others, parts)))


def test_a_last_state_that_is_not_saved_leaves_nothing(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        Checkpoints(tmp_path, **new_parts(), background=True) as checkpoints,
    ):
        checkpoints.write_ahead(last=True)
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_a_second_ctrl_c_ends_leaves_nothing(tmp_path, monkeypatch, background):
    monkeypatch.setattr(training.checkpoint, "rotate", mock.Mock(side_effect=KeyboardInterrupt))
    with (
        pytest.raises(KeyboardInterrupt),
        Checkpoints(tmp_path, **new_parts(), background=background) as checkpoints,
    ):
        checkpoints.write_ahead(last=True)
        checkpoints.save(5, 60, last=True)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_during_the_evaluation_is_said(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(training.checkpoint.HashedFile, "write", mock.Mock(side_effect=full))
    with Checkpoints(tmp_path, **new_parts(), background=True) as checkpoints:
        checkpoints.write_ahead(last=True)
        with pytest.raises(OSError, match="cannot write a checkpoint.*No space left.*free some"):
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
    assert set(load_file(tmp_path / "checkpoint/model.safetensors")) == {
        "embedding.weight",
        *(
            f"norm.{name}"
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        ),
    }
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


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt"])
def test_truncated_file(tmp_path, name):
    path = save(tmp_path) / name
    size = path.stat().st_size
    os.truncate(path, size - 10)
    assert refusal(tmp_path) == f"{path} is truncated: {size - 10} bytes instead of {size}"


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt"])
def test_altered_file(tmp_path, name):
    path = save(tmp_path) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert f"{path} was altered: SHA-256" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt"])
def test_missing_file(tmp_path, name):
    path = save(tmp_path) / name
    path.unlink()
    assert refusal(tmp_path) == f"{path} is missing"


@pytest.mark.parametrize(
    "content, said",
    [
        ("{torn", "cannot be read"),
        ("[1, 2]", "is of another program"),
        ('{"iteration": 7, "model_args": {}}', "is of another program"),
        ('{"format": "tilegpt-checkpoint", "version": 99}', "version 99"),
        (
            '{"format": "tilegpt-checkpoint", "version": 1, "step": 3}',
            "lacks tokens, config, files",
        ),
    ],
    ids=["torn", "list", "foreign", "newer", "incomplete"],
)
def test_unusable_meta(tmp_path, content, said):
    path = save(tmp_path) / "meta.json"
    path.write_text(content)
    message = refusal(tmp_path)
    assert str(path) in message and said in message


def test_folder_of_another_program(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/pytorch_model.bin").write_bytes(b"x")
    assert "is not a checkpoint of this program: meta.json is missing" in refusal(tmp_path)


def with_model(**changed) -> dict:
    return CONFIG | {"model": CONFIG["model"] | changed}


def test_the_first_differing_setting_is_named(tmp_path):
    save(tmp_path)
    assert "model.num_layers is 2 in the checkpoint and 6 now" in refusal(
        tmp_path, config=with_model(num_layers=6, hidden_size=16)
    )
    assert "model.max_seq_len is 16 in the checkpoint and 32 now" in refusal(
        tmp_path, config=with_model(max_seq_len=32)
    )


def test_a_setting_of_a_later_version_is_named(tmp_path):
    save(tmp_path)
    assert "model.bias is None in the checkpoint and False now" in refusal(
        tmp_path, config=with_model(bias=False)
    )


def test_settings_that_change_no_weight_may_differ(tmp_path):
    save(tmp_path, config=with_model(positions="rope"))
    model, optimizer, scaler = build()
    now = with_model(positions="rope", name="other", dropout=0.0, max_seq_len=64)
    assert (
        load_checkpoint(tmp_path, model=model, optimizer=optimizer, scaler=scaler, config=now)[
            "step"
        ]
        == 3
    )


def test_differing_weights_are_named(tmp_path):
    save(tmp_path)
    assert "vocab_size is 11 in the checkpoint and 12 now" in refusal(
        tmp_path, TiedModel(vocab_size=12)
    )
    wide = "embedding.weight is (11, 8) float32 in the checkpoint and (11, 16) float32 now"
    assert wide in refusal(tmp_path, TiedModel(hidden_size=16))
    assert "output.weight is absent in the checkpoint and (11, 8) float32 now" in refusal(
        tmp_path, TiedModel(tied=False)
    )
    model = TiedModel()
    model.norm.own = nn.Linear(2, 2)
    assert "now; keep the run's attention, its options and seq_len, or" in refusal(tmp_path, model)


@pytest.mark.parametrize(
    "limit", [200, 2000, 5000], ids=["weights", "training-start", "training-end"]
)
def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path, limit):
    """A file-size limit makes a write fail half way, as a full disk does."""
    save(tmp_path, step=1)
    assert limit < (tmp_path / "checkpoint/training.pt").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match="cannot write a checkpoint to .* GiB free"):
            save(tmp_path, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["checkpoint"]
    model, optimizer, scaler = build()
    assert (
        load_checkpoint(tmp_path, model=model, optimizer=optimizer, scaler=scaler, config=CONFIG)[
            "step"
        ]
        == 1
    )
    save(tmp_path, step=3)
    assert read_meta(tmp_path)["step"] == 3


@pytest.mark.parametrize(
    ("error", "free", "way_out"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 10**9, "free some space there"),
        (RuntimeError("enforce fail: unexpected pos"), 1000, "free some space there"),
        (RuntimeError("enforce fail: unexpected pos"), 10**9, "(ulimit -f) or a quota"),
        (RuntimeError("I/O error: File too large (os error 27)"), 10**9, "a file (ulimit -f)"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 10**9, "some space of your quota there"),
        (PermissionError(errno.EACCES, "Permission denied"), 10**9, "denied"),
        (OSError(errno.EIO, "Input/output error"), 10**9, "Input/output error"),
    ],
)
def test_what_to_do_when_a_checkpoint_cannot_be_written(
    tmp_path, monkeypatch, error, free, way_out
):
    """A regression test: it asked for free space even if only a limit was too low."""

    def fail(*arguments):
        raise error

    monkeypatch.setattr(torch, "save", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: mock.Mock(free=free))
    with pytest.raises(OSError, match="cannot write a checkpoint") as raised:
        save_checkpoint(tmp_path, step=1, tokens=1, **new_parts())
    assert str(raised.value).endswith(way_out)


def test_an_output_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write a checkpoint"):
        save(tmp_path / "file")


def test_meta_is_plain_json(tmp_path):
    meta = json.loads((save(tmp_path) / "meta.json").read_text())
    assert set(meta["files"]) == {"model.safetensors", "training.pt"}
    assert (
        torch.load(tmp_path / "checkpoint/training.pt", weights_only=True)["random"]["torch"].dtype
        == torch.uint8
    )
