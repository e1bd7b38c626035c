"""Checkpoints that are either whole or refused.

RUN/checkpoint/ holds

    model.safetensors   the weights; a tensor shared by two names is stored once
    training.pt         optimizer, gradient scaler and random number generators (readable with weights_only=True)
    meta.json           format, step, tokens, config, and the size and SHA-256 of the two files above

A save writes checkpoint.tmp/, syncs it to disk and swaps it in by two renames, the last good checkpoint waiting as
checkpoint.old/ in between: whenever the process dies, one whole checkpoint is left.
"""

import hashlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

FORMAT = "tilegpt-checkpoint"
VERSION = 1
WEIGHTS, TRAINING, META = "model.safetensors", "training.pt", "meta.json"

# settings of the model that neither change a tensor nor what the weights mean
FREE_SETTINGS = ("name", "dropout", "init_std")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, and why, in one line."""


def save_checkpoint(
    run_dir: Path, *, model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None, step: int, tokens: int, config: dict
) -> Path:
    """Write RUN/checkpoint/, replacing the last one.

    A failed write (a full disk, say) raises OSError and leaves the last good checkpoint where it was.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    final, fresh, last = (Path(run_dir) / name for name in ("checkpoint", "checkpoint.tmp", "checkpoint.old"))
    state = {
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict() if scaler is not None else {},
        "random": _random_state(),
    }
    tensors = {name: tensor.detach().contiguous() for name, tensor in _named_tensors(model).items()}
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        save_file(tensors, fresh / WEIGHTS)
        torch.save(state, fresh / TRAINING)
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "tokens": tokens,
            "vocab_size": getattr(model, "vocab_size", None),
            "config": config,
            "files": {name: {"bytes": (fresh / name).stat().st_size, "sha256": _sha256(fresh / name)} for name in (WEIGHTS, TRAINING)},
        }
        (fresh / META).write_text(json.dumps(meta, indent=2))
        for path in (*fresh.iterdir(), fresh):
            _sync(path)
        if final.exists():
            shutil.rmtree(last, ignore_errors=True)
            final.rename(last)
        fresh.rename(final)
        _sync(final.parent)
    # both writers report a full disk as an error of their own
    except (OSError, SafetensorError, RuntimeError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        free_gib = shutil.disk_usage(run_dir).free / 1024**3 if Path(run_dir).exists() else 0.0
        # PyTorch's own words are of positions in its file
        reason = f"{TRAINING} could not be written whole" if "enforce fail" in str(error) else str(error).splitlines()[0]
        way_out = "" if isinstance(error, (PermissionError, NotADirectoryError)) else "; free some space there"
        raise OSError(f"cannot write a checkpoint to {run_dir} ({free_gib:.2f} GiB free on that disk): {reason}{way_out}") from error
    shutil.rmtree(last, ignore_errors=True)
    return final


def load_checkpoint(run_dir: Path, *, model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None, config: dict) -> dict[str, Any]:
    """Put model, optimizer, scaler and random number generators back where the checkpoint left them; returns its meta.json.

    The optimizer keeps the settings it was built with (learning rate, betas, weight decay): those are the caller's to choose.
    """
    folder, meta = _open(run_dir)
    _check_settings(meta["config"].get("model", {}), config.get("model", {}), folder)
    # both files are verified before anything is changed
    state = torch.load(_verified(folder, meta, TRAINING), map_location="cpu", weights_only=True)
    _load_weights(folder, meta, model)
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(state["optimizer"])
    except ValueError as error:
        raise CheckpointError(f"{folder / TRAINING}: the optimizer differs: {error}") from error
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)
    # a scaler that is off has no state, and takes none
    if scaler is not None and scaler.is_enabled() and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    _set_random_state(state["random"])
    return meta


def load_model_state(run_dir: Path, model: nn.Module) -> dict[str, Any]:
    """Put the weights alone into `model`; returns the checkpoint's meta.json."""
    folder, meta = _open(run_dir)
    _load_weights(folder, meta, model)
    return meta


def read_meta(run_dir: Path) -> dict[str, Any]:
    """The checkpoint's meta.json: step, tokens, config. For building the model that load_model_state() fills."""
    return _open(run_dir)[1]


def _open(run_dir: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of the whole checkpoint in `run_dir`, and its meta.json."""
    # the second name is left by a process that died between the two renames of a save
    folders = [Path(run_dir) / name for name in ("checkpoint", "checkpoint.old")]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        raise CheckpointError(f"{run_dir} holds no checkpoint: there is no folder {folders[0]}")
    path = folder / META
    try:
        meta = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint of this program: {META} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise CheckpointError(f"{path} is of another program: it does not say format={FORMAT}")
    if meta.get("version") != VERSION:
        raise CheckpointError(f"{path} has version {meta.get('version')} of the format; this program reads version {VERSION}")
    missing = [key for key in ("step", "tokens", "config", "files") if key not in meta]
    if missing:
        raise CheckpointError(f"{path} is incomplete: it lacks {', '.join(missing)}")
    return folder, meta


def _verified(folder: Path, meta: dict[str, Any], name: str) -> Path:
    """The path of one file of the checkpoint, whose bytes are those that were written."""
    path, expected = folder / name, meta["files"][name]
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    if size != expected["bytes"]:
        problem = "truncated" if size < expected["bytes"] else "too long"
        raise CheckpointError(f"{path} is {problem}: {size} bytes instead of {expected['bytes']}")
    found = _sha256(path)
    if found != expected["sha256"]:
        raise CheckpointError(f"{path} was altered: SHA-256 {found[:16]}... instead of {expected['sha256'][:16]}...")
    return path


def _load_weights(folder: Path, meta: dict[str, Any], model: nn.Module) -> None:
    from safetensors.torch import load_file

    stored = load_file(_verified(folder, meta, WEIGHTS))
    current = _named_tensors(model)
    vocab_size = getattr(model, "vocab_size", None)
    if meta.get("vocab_size") != vocab_size:
        raise CheckpointError(f"{folder}: vocab_size is {meta.get('vocab_size')} in the checkpoint and {vocab_size} now")
    for name in sorted(stored.keys() | current.keys()):
        then, now = (_describe(tensors.get(name)) for tensors in (stored, current))
        if then != now:
            raise CheckpointError(f"{folder}: the model differs: {name} is {then} in the checkpoint and {now} now")
    with torch.no_grad():
        for name, tensor in current.items():
            tensor.copy_(stored[name])


def _describe(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _check_settings(then: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    # rotary positions have no table: such a model runs at any length
    free = (*FREE_SETTINGS, "max_seq_len") if now.get("positions") == "rope" else FREE_SETTINGS
    for key in (*then, *(key for key in now if key not in then)):
        if key not in free and then.get(key) != now.get(key):
            raise CheckpointError(f"{folder}: model.{key} is {then.get(key)} in the checkpoint and {now.get(key)} now")


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; of a tensor that has several names (tied weights), the first."""
    named, seen = {}, set()
    # keep_vars: the very objects, so that tied weights are recognised and can be filled in place
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert "_orig_mod." not in name, "pass the module itself, not what torch.compile made of it"
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor
    return named


def _random_state() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    assert kind == "MT19937"
    return {
        "python": random.getstate(),
        "numpy": [torch.from_numpy(keys.astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    # a run may go on with another number of GPUs, or none
    for index, cuda_state in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(cuda_state, index)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Push a file, or the names in a folder, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
