"""Checkpoints: exact resume, refusal by name, which ones stay, and every kind of interruption."""

import json
import logging
import os
import resource
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.amp import GradScaler

from config import OptimConfig
from data.token_file import meta_checksum
from tests.command import begun_checkpoints, load_checkpoint, same, save_checkpoint
from tests.processes import limited
from training.loop.optimizer import AdamW, build_optimizer
from training.record.checkpoint import load_model_state
from training.record.files import CheckpointError, newest_first, read_meta

CONFIG = {"seed": 0, "resume": None}


class TiedModel(nn.Module):
    """A small model with dropout, a buffer, and an output layer that shares the embedding."""

    def __init__(self, vocab_size: int = 11):
        super().__init__()
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(8, vocab_size, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.dropout(self.norm(self.embedding(tokens))))


def new_parts() -> dict:
    """What Checkpoints takes, newly built."""
    model = TiedModel()
    return {
        "model": model,
        "optimizer": build_optimizer(model, OptimConfig(lr=0.05)),
        "scaler": GradScaler("cpu", init_scale=8.0, growth_interval=2),
        "config": CONFIG,
    }


def train(parts: dict, steps: int) -> list[float]:
    """Steps that draw on PyTorch's random number generator."""
    model, optimizer, scaler = (parts[name] for name in ("model", "optimizer", "scaler"))
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 11, (12,))
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def save(run_dir: Path, step: int = 3, **replaced) -> Path:
    return save_checkpoint(run_dir, **new_parts() | replaced, step=step, tokens=step * 100)


def test_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path):
    torch.manual_seed(0)
    whole = new_parts()
    losses = train(whole, 8)

    torch.manual_seed(0)
    first = new_parts()
    train(first, 5)
    save_checkpoint(tmp_path, **first, step=5, tokens=500)

    torch.manual_seed(99)
    resumed = new_parts()
    train(resumed, 2)  # other weights, moments and random states, all to be replaced
    meta = load_checkpoint(tmp_path, **resumed)
    assert (meta["step"], meta["tokens"], meta["config"]) == (5, 500, CONFIG)
    assert train(resumed, 3) == losses[5:]
    for name in ("model", "optimizer", "scaler"):
        assert same(whole[name].state_dict(), resumed[name].state_dict())


def test_optimizer_settings_are_the_callers(tmp_path):
    save(tmp_path)
    parts = new_parts()
    own = OptimConfig(lr=0.5, weight_decay=0.3)
    parts["optimizer"] = optimizer = build_optimizer(parts["model"], own)
    load_checkpoint(tmp_path, **parts)
    settings = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert settings == [(0.5, 0.3), (0.5, 0.0)]


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    model, other = TiedModel(), TiedModel()
    save(tmp_path, model=model)
    stored = load_file(tmp_path / "checkpoint/model.safetensors")
    assert stored.keys() == model.state_dict().keys() - {"output.weight"}
    assert load_model_state(tmp_path, other)["vocab_size"] == 11
    assert other.output.weight is other.embedding.weight
    assert torch.equal(other.output.weight, model.embedding.weight)


def refusal(run_dir: Path, **replaced: nn.Module) -> str:
    """The one line with which loading refuses, having changed no weight."""
    parts = new_parts() | replaced
    before = {name: tensor.clone() for name, tensor in parts["model"].state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(run_dir, **parts)
    assert same(before, {**parts["model"].state_dict()}) and "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_loaded_is_named(tmp_path):
    for missing in (tmp_path, tmp_path / "nowhere"):
        assert f"{missing} holds no checkpoint" in refusal(missing)
    path = save(tmp_path) / "meta.json"
    said = refusal(tmp_path, model=TiedModel(vocab_size=12))
    assert "embedding.weight is (11, 8)" in said and "(12, 8) now" in said
    untied = TiedModel()
    untied.output.weight = nn.Parameter(torch.ones(11, 8))
    assert "output.weight is None" in refusal(tmp_path, model=untied)
    newer = json.loads(path.read_text()) | {"version": 99}
    path.write_text(json.dumps(newer | {"sha256": meta_checksum(newer)}))
    assert "version 99" in refusal(tmp_path)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 10)


def alter(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("limit, background", [(200, True), (5000, False)])
def test_a_full_disk_is_said_and_keeps_the_last_good_checkpoint(tmp_path, limit, background):
    """In the background, the next save or the end of the run says so."""
    save(tmp_path, step=1)
    assert limit < (tmp_path / "checkpoint/training.pt").stat().st_size
    full = limited(resource.RLIMIT_FSIZE, limit)
    with full, pytest.raises(OSError, match=f"{tmp_path}.* GiB free"):
        save_in(tmp_path, {2: None}, background=background)
    assert {*os.listdir(tmp_path)} == {"checkpoint", "metrics.jsonl"}
    assert load_checkpoint(tmp_path, **new_parts())["step"] == 1


def test_a_full_disk_hides_no_other_error(tmp_path, caplog):
    with (
        limited(resource.RLIMIT_FSIZE, 2000),
        pytest.raises(RuntimeError, match="of the training"),
        begun_checkpoints(tmp_path, **new_parts(), background=True) as checkpoints,
    ):
        checkpoints.save(1, 100)
        raise RuntimeError("of the training")
    assert f"checkpoint to {tmp_path}" in caplog.text


def test_a_run_folder_that_was_deleted_is_not_created_again(tmp_path):
    """A regression test: a checkpoint was left alone in a folder without settings."""
    checkpoints = begun_checkpoints(tmp_path, **new_parts())
    shutil.rmtree(tmp_path)
    with pytest.raises(OSError, match=str(tmp_path)):
        checkpoints.save(1, 100)
    assert not tmp_path.exists()


def save_in(run_dir: Path, losses: dict[int, float | None], **background: bool) -> None:
    """A checkpoint for every step of `losses`, whose weights tell the step."""
    parts = new_parts()
    with begun_checkpoints(run_dir, **parts, **background) as checkpoints:
        for step, loss in losses.items():
            parts["model"].embedding.weight.data.fill_(step)
            checkpoints.save(step, step * 100, loss)


def steps(run_dir: Path) -> dict[str, int]:
    """The step whose weights each folder of the run holds."""
    found = {}
    for folder in newest_first(run_dir):
        model = TiedModel()
        step = load_model_state(folder, model)["step"]
        assert (model.embedding.weight == step).all()
        found[folder.name] = step
    assert found.keys() == {*os.listdir(run_dir)} - {"metrics.jsonl"}
    return found


@pytest.mark.parametrize("links", [True, False])
def test_the_latest_the_one_before_and_the_best_stay(tmp_path, monkeypatch, links):
    """The best takes no room of its own where there are hard links."""
    if not links:
        monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError("not permitted")))
    save_in(tmp_path, {100: 3.0, 200: 2.0})
    for name in ("model.safetensors", "training.pt", "meta.json"):
        pair = (tmp_path / "checkpoint.best" / name, tmp_path / "checkpoint" / name)
        assert pair[0].samefile(pair[1]) == links
    save_in(tmp_path, {300: 2.5, 400: float("nan"), 500: None}, background=True)
    assert steps(tmp_path) == {
        "checkpoint": 500,
        "checkpoint.previous": 400,
        "checkpoint.best": 200,
    }


def foreign(file: Path) -> None:
    file.write_text('{"iteration": 7, "model_args": {}}')


HARMS = [
    ("model.safetensors", truncate),
    ("training.pt", alter),
    ("metrics.jsonl", alter),
    ("meta.json", alter),
    ("meta.json", foreign),
    ("meta.json", Path.unlink),
]


@pytest.mark.parametrize("name, harm", HARMS)
def test_a_damaged_one_is_passed_over_for_the_one_before_in_one_line(tmp_path, caplog, name, harm):
    """Nothing is deleted, and the next save does not replace the one that was whole."""
    for step in (100, 200):
        save(tmp_path, step)
    harm(tmp_path / "checkpoint" / name)
    before = sorted(tmp_path.rglob("*"))
    with caplog.at_level(logging.WARNING):
        checkpoints = begun_checkpoints(tmp_path, **new_parts())
        folder, meta = checkpoints.load(tmp_path)
    assert (folder, meta["step"]) == (tmp_path / "checkpoint.previous", 100)
    (said,) = caplog.messages
    assert str(tmp_path / "checkpoint") in said and name in said and "\n" not in said
    assert str(folder) in said and sorted(tmp_path.rglob("*")) == before
    checkpoints.save(300, 0)
    assert [read_meta(folder)["step"] for folder in newest_first(tmp_path)] == [300, 100]


def test_where_all_are_damaged_the_refusal_names_the_latest(tmp_path):
    save_in(tmp_path, {100: 1.0, 200: 2.0})
    for folder in newest_first(tmp_path):
        truncate(folder / "training.pt")
    before = sorted(tmp_path.rglob("*"))
    assert str(tmp_path / "checkpoint/training.pt") in refusal(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_newest_whole_one_may_be_the_best(tmp_path):
    """Its files are links: what is removed from the latest is still there."""
    save_in(tmp_path, {100: 2.0, 200: 1.0})
    (tmp_path / "checkpoint/training.pt").unlink()
    assert load_checkpoint(tmp_path, **new_parts())["step"] == 200


def test_where_only_the_best_is_left_a_run_goes_on_from_it_and_says_so(tmp_path, caplog):
    """But nobody else takes it for the latest, unless its folder is named."""
    save_in(tmp_path, {100: 1.0, 200: 2.0})
    for name in ("checkpoint", "checkpoint.previous"):
        shutil.rmtree(tmp_path / name)
    with caplog.at_level(logging.WARNING):
        assert load_checkpoint(tmp_path, **new_parts())["step"] == 100
    assert f"{tmp_path}/checkpoint.best" in caplog.text
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        read_meta(tmp_path)
    assert read_meta(tmp_path / "checkpoint.best")["step"] == 100


def test_a_best_one_that_the_run_went_back_behind_is_not_kept(tmp_path):
    save_in(tmp_path, {100: 3.0, 200: 1.0})
    alter(tmp_path / "checkpoint/model.safetensors")  # the best is a link to it
    checkpoints = begun_checkpoints(tmp_path, **new_parts())
    assert checkpoints.load(tmp_path)[1]["step"] == 100
    checkpoints.save(150, 15000, 2.0)
    assert {folder.name: read_meta(folder)["step"] for folder in newest_first(tmp_path)} == {
        "checkpoint": 150,
        "checkpoint.best": 150,
        "checkpoint.previous": 100,
    }


def cut_off(moments: int, run_dir: Path) -> int:
    """Save step 300 in a process that dies before its call number `moments` of the file system,
    counted from 0; its exit code.
    """

    def cut(call):
        def counted(*arguments, **options):
            nonlocal moments
            if moments == 0:
                os._exit(9)
            moments -= 1
            return call(*arguments, **options)

        return counted

    pid = os.fork()
    if pid == 0:
        try:
            calls = ((Path, "rename"), (Path, "mkdir"), (os, "link"), (shutil, "rmtree"))
            for owner, name in calls:
                setattr(owner, name, cut(getattr(owner, name)))
            save_in(run_dir, {300: 0.5})
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_kill_between_any_two_steps_of_a_save(tmp_path):
    """What can be gone on from is the old checkpoint or the new one, and so is the best."""
    (tmp_path / "old").mkdir()
    save_in(tmp_path / "old", {100: 1.0, 200: 2.0})
    moments, code, best = 0, 9, set()
    while code == 9:
        run_dir = tmp_path / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(tmp_path / "old", run_dir)
        code = cut_off(moments, run_dir)
        last = load_checkpoint(run_dir, **new_parts())["step"]
        assert last in (200, 300)
        if (run_dir / "checkpoint.best").is_dir():
            best.add(load_model_state(run_dir / "checkpoint.best", TiedModel())["step"])
        checkpoints = begun_checkpoints(run_dir, **new_parts())
        checkpoints.load(run_dir)
        checkpoints.save(400, 40000)
        assert read_meta(run_dir)["step"] == 400
        moments += 1
    assert code == 0 and moments > 8 and last == 300 and best == {100, 300}


def test_a_save_that_a_second_ctrl_c_ends_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "rename", mock.Mock(side_effect=KeyboardInterrupt))
    with (
        pytest.raises(KeyboardInterrupt),
        begun_checkpoints(tmp_path, **new_parts()) as checkpoints,
    ):
        checkpoints.save(5, 60, last=True)
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_background_save_is_of_its_moment(tmp_path, device):
    """Weights change in place before the writer has got through them; a GPU has queued the steps
    that change them.
    """
    model = nn.Linear(1024, 1024, device=device)
    optimizer = AdamW(model.parameters(), fused=True)
    scaler = GradScaler(device, enabled=False)
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "config": CONFIG}

    def step() -> None:
        model(torch.randn(64, 1024, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state() -> list:
        return [*model.parameters(), *(value["exp_avg"] for value in optimizer.state.values())]

    step()
    # on a GPU that is the default
    background = None if device == "cuda" else True
    with begun_checkpoints(tmp_path, **parts, background=background) as checkpoints:
        then = [tensor.detach().clone() for tensor in state()]
        checkpoints.save(1, 1)
        for _ in range(5):
            step()
        assert checkpoints.background and not same(then, state())
    load_checkpoint(tmp_path, **parts)
    assert same(then, state())
    step()
