"""Which checkpoints stay, which one a run goes on from, and saves behind the training's back."""

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.command import same
from tests.training.test_checkpoint import (
    CONFIG,
    TiedModel,
    build,
    file_size,
    rewrite,
)
from training.record.checkpoint import CheckpointError, Checkpoints, load_model_state, read_meta
from training.record.retention import newest_first, rotate


def checkpoints(
    run_dir: Path, *, keep: int = 1, background: bool = False, **replaced
) -> Checkpoints:
    # building draws random numbers
    parts = replaced or dict(zip(("model", "optimizer", "scaler"), build(), strict=True))
    return Checkpoints(run_dir, **parts, config=CONFIG, keep=keep, background=background)


def save_all(run_dir: Path, losses: dict[int, float | None], *, keep: int) -> None:
    """A checkpoint for every step of `losses`, whose weights tell the step."""
    model, optimizer, scaler = build()
    with checkpoints(run_dir, keep=keep, model=model, optimizer=optimizer, scaler=scaler) as saves:
        for step, loss in losses.items():
            model.embedding.weight.data.fill_(step)
            saves.save(step, step * 100, loss)


def steps(run_dir: Path) -> dict[str, int]:
    """The step whose weights each folder of the run holds."""
    found = {}
    for folder in newest_first(run_dir):
        model = TiedModel()
        step = load_model_state(folder, model)["step"]
        assert (model.embedding.weight == step).all()
        found[str(folder.relative_to(run_dir))] = step
    return found


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_and_the_best_stay(tmp_path, keep):
    save_all(tmp_path, {100: 3.0, 200: 2.0, 300: 2.5, 400: None, 500: 2.25}, keep=keep)
    earlier = {f"checkpoints/step-{step:06d}": step for step in (400, 300)[: keep - 1]}
    assert steps(tmp_path) == {"checkpoint": 500, **earlier, "checkpoint.best": 200}
    assert set(os.listdir(tmp_path)) == {"checkpoint", "checkpoint.best"} | (
        {"checkpoints"} if keep > 1 else set()
    )


def test_without_an_evaluation_there_is_no_best(tmp_path):
    save_all(tmp_path, {1: None, 2: float("nan"), 3: float("inf")}, keep=1)
    assert os.listdir(tmp_path) == ["checkpoint"] and read_meta(tmp_path)["val_loss"] is None


def test_the_best_takes_no_room_of_its_own(tmp_path):
    save_all(tmp_path, {1: 2.0}, keep=1)
    for name in ("model.safetensors", "training.pt", "meta.json"):
        assert (tmp_path / "checkpoint.best" / name).samefile(tmp_path / "checkpoint" / name)


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError("Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    save_all(tmp_path, {1: 2.0, 2: 3.0}, keep=2)
    assert steps(tmp_path) == {"checkpoint": 2, "checkpoints/step-000001": 1, "checkpoint.best": 1}


def damage(folder: Path, how: str) -> None:
    name, _, what = how.partition(":")
    path = folder / name
    if what == "missing":
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    if what == "altered":
        content[len(content) // 2] ^= 1
    # a file of its own: the links of it stay as they were
    path.unlink()
    path.write_bytes(content[: len(content) // 2] if what == "truncated" else content)


HARM = ("model.safetensors:truncated", "training.pt:altered", "meta.json:altered")


@pytest.mark.parametrize("how", [*HARM, "meta.json:missing"])
def test_a_damaged_one_is_passed_over_in_one_line(tmp_path, caplog, how):
    """For the newest whole one. Nothing is deleted, and what follows takes its place."""
    save_all(tmp_path, {100: None, 200: None, 300: None}, keep=3)
    damage(tmp_path / "checkpoint", how)
    before = sorted(tmp_path.rglob("*"))
    with caplog.at_level(logging.WARNING), checkpoints(tmp_path, keep=3) as saves:
        assert saves.load()["step"] == 200
        (said,) = caplog.messages
        assert str(tmp_path / "checkpoint") in said and "\n" not in said
        assert f"{tmp_path}/checkpoints/step-000200" in said
        assert sorted(tmp_path.rglob("*")) == before
        saves.save(250, 25000)
    assert [read_meta(folder)["step"] for folder in newest_first(tmp_path)] == [250, 200, 100]


@pytest.mark.parametrize("changed", [{"val_loss": ["low"]}, {"starts": [5]}, {"step": "four"}])
def test_an_earlier_one_of_any_form_stops_no_save(tmp_path, changed):
    save_all(tmp_path, {100: 1.0, 200: 2.0}, keep=2)
    for folder in ("checkpoints/step-000100", "checkpoint.best"):
        rewrite(tmp_path / folder, **changed)
    with checkpoints(tmp_path, keep=2) as saves:
        assert saves.load()["step"] == 200
        saves.save(300, 30000, 3.0)
    assert read_meta(tmp_path)["step"] == 300


@pytest.mark.parametrize("byte", range(0, 900, 100))
def test_no_altered_byte_of_the_meta_file_goes_unseen(tmp_path, byte):
    """A flipped bit in the number of the step, say, would be a wrong resume."""
    save_all(tmp_path, {123456: 2.0}, keep=1)
    path = tmp_path / "checkpoint/meta.json"
    content = bytearray(path.read_bytes())
    said = read_meta(tmp_path)
    content[byte % len(content)] ^= 1
    path.write_bytes(content)
    try:
        found = read_meta(tmp_path)
    except CheckpointError:
        return
    # only what has no meaning may differ
    assert {key: found[key] for key in said if key != "sha256"} == {
        key: said[key] for key in said if key != "sha256"
    }


def test_where_all_are_damaged_the_refusal_names_the_latest(tmp_path):
    save_all(tmp_path, {100: 1.0, 200: 2.0}, keep=2)
    for folder in newest_first(tmp_path):
        damage(folder, "training.pt:truncated")
    before = sorted(tmp_path.rglob("*"))
    with checkpoints(tmp_path) as saves, pytest.raises(CheckpointError) as caught:
        saves.load()
    assert str(tmp_path / "checkpoint/training.pt") in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_where_only_the_best_is_left_a_run_goes_on_from_it_and_says_so(tmp_path, caplog):
    """But nobody else takes it for the latest, unless its folder is named."""
    save_all(tmp_path, {100: 1.0, 200: 2.0}, keep=1)
    shutil.rmtree(tmp_path / "checkpoint")
    with caplog.at_level(logging.WARNING), checkpoints(tmp_path) as saves:
        assert saves.load()["step"] == 100
    (said,) = caplog.messages
    assert "holds no checkpoint" in said and f"{tmp_path}/checkpoint.best" in said
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        read_meta(tmp_path)
    assert read_meta(tmp_path / "checkpoint.best")["step"] == 100


def test_a_best_one_that_the_run_went_back_behind_is_not_kept(tmp_path):
    save_all(tmp_path, {100: 3.0, 200: 1.0}, keep=2)
    for folder in ("checkpoint", "checkpoint.best"):
        damage(tmp_path / folder, "model.safetensors:altered")
    with checkpoints(tmp_path, keep=2) as saves:
        assert saves.load()["step"] == 100
        saves.save(150, 15000, 2.0)
    assert {
        str(folder.relative_to(tmp_path)): read_meta(folder)["step"]
        for folder in newest_first(tmp_path)
    } == {
        "checkpoint": 150,
        "checkpoint.best": 150,
        "checkpoints/step-000100": 100,
    }


def cut_off(moments: int, fresh: Path, run_dir: Path) -> int:
    """rotate() in a process that dies before its call number `moments` of the file system, counted
    from 0; its exit code.
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
            for owner, name in (
                (Path, "rename"),
                (Path, "mkdir"),
                (Path, "rmdir"),
                (os, "link"),
                (shutil, "rmtree"),
            ):
                setattr(owner, name, cut(getattr(owner, name)))
            rotate(fresh, run_dir, keep=1)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_kill_between_any_two_steps_of_a_rotation(tmp_path):
    """What can be gone on from is the old checkpoint or the new one, and the next save finds the
    best one again.
    """
    save_all(tmp_path / "old", {100: 1.0, 200: 2.0}, keep=1)
    save_all(tmp_path / "new", {300: 0.5}, keep=1)
    moments, code = 0, 9
    while code == 9:
        run_dir, fresh = tmp_path / "run", tmp_path / "run/checkpoint.tmp"
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(tmp_path / "old", run_dir)
        shutil.copytree(tmp_path / "new/checkpoint", fresh)
        code = cut_off(moments, fresh, run_dir)
        with checkpoints(run_dir) as saves:
            last = saves.load()["step"]
            saves.save(400, 40000, 3.0)
        assert last in (200, 300)
        assert read_meta(run_dir / "checkpoint.best")["step"] == {200: 100, 300: 300}[last]
        assert sorted(os.listdir(run_dir)) == ["checkpoint", "checkpoint.best"]
        moments += 1
    assert code == 0 and moments > 8 and last == 300


def test_a_background_save_is_of_its_moment(tmp_path):
    """Weights change in place before the writer has got through them."""
    model = nn.Linear(1024, 1024)
    parts = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "scaler": None}
    then = model.weight.detach().clone()
    with checkpoints(tmp_path, model=model, **parts, background=True) as saves:
        saves.save(1, 100)
        model.weight.data.zero_()
    stored = load_file(tmp_path / "checkpoint/model.safetensors")
    assert torch.equal(stored["weight"], then)


def test_saves_in_the_background_come_in_turn_and_the_last_is_there_when_it_returns(tmp_path):
    with checkpoints(tmp_path, keep=9, background=True) as saves:
        for step in range(1, 5):
            saves.save(step, step * 100)
        saves.save(5, 500, last=True)
        assert [read_meta(folder)["step"] for folder in newest_first(tmp_path)] == [5, 4, 3, 2, 1]


def test_an_error_of_the_writer_is_the_runs(tmp_path):
    """The next save and the end raise it; what was whole before stays."""
    save_all(tmp_path, {1: 1.0}, keep=1)
    said = f"{tmp_path}.* GiB free"
    with file_size(2000):
        with (
            pytest.raises(OSError, match=said),
            checkpoints(tmp_path, background=True) as saves,
        ):
            saves.save(2, 200)
        with checkpoints(tmp_path, background=True) as saves:
            saves.save(2, 200)
            with pytest.raises(OSError, match=said):
                saves.save(3, 300)
    assert steps(tmp_path) == {"checkpoint": 1, "checkpoint.best": 1}
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "checkpoint.best"]


def test_an_error_of_the_writer_hides_no_other(tmp_path, caplog):
    with (
        file_size(2000),
        pytest.raises(RuntimeError, match="of the training"),
        checkpoints(tmp_path, background=True) as saves,
    ):
        saves.save(1, 100)
        raise RuntimeError("of the training")
    assert f"checkpoint to {tmp_path}" in caplog.text


@pytest.mark.gpu
def test_a_gpu_saves_behind_the_training(tmp_path):
    """The state of the moment, though the next steps are already queued; loaded bit for bit."""
    model = nn.Linear(4096, 4096).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    parts = {"model": model, "optimizer": optimizer, "scaler": None, "config": {}}

    def step() -> None:
        model(torch.randn(64, 4096, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Checkpoints(tmp_path, **parts) as saves:
        assert saves.background
        then = [tensor.clone() for tensor in model.parameters()]
        moments = [value["exp_avg"].clone() for value in optimizer.state.values()]
        saves.save(1, 1)
        for _ in range(20):
            step()
    for parameter in model.parameters():
        parameter.data.zero_()
    with Checkpoints(tmp_path, **parts) as saves:
        saves.load()
    assert same(then, [tensor.detach() for tensor in model.parameters()])
    assert same(moments, [value["exp_avg"] for value in optimizer.state.values()])
    step()
