"""Checkpoints that are either whole or refused.

RUN/checkpoint/ holds

    model.safetensors   the weights; a tensor shared by two names is stored once
    training.pt         optimizer, gradient scaler and random number generators (readable with
                        weights_only=True)
    metrics.jsonl       the run's, as far as it was written
    meta.json           format, step, tokens, val_loss, config, starts (training/resume.py), the
                        size and SHA-256 of the files above, and its own

A save writes checkpoint.tmp/, syncs it to disk and swaps it in by two renames: whenever the process
dies, one whole checkpoint is left. training/retention.py says which earlier ones stay; where the
latest is damaged, a run goes on from the newest whole one.
"""

import copy
import hashlib
import json
import logging
import math
import random
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from data.token_file import sync
from training.memory import is_out_of_memory
from training.metrics import MetricsFile
from training.resume import resumed_starts, stop_clock
from training.retention import (
    BEST,
    LATEST,
    META,
    best_val_loss,
    misfit,
    newest_first,
    parse,
    rotate,
)

log = logging.getLogger("tilegpt")

FORMAT = "tilegpt-checkpoint"
VERSION = 1
WEIGHTS, TRAINING, METRICS = "model.safetensors", "training.pt", "metrics.jsonl"

# settings of the model that neither change a tensor nor what the weights mean
FREE_SETTINGS = ("name", "dropout", "init_std", "checkpoint", "chunk_tokens", "offload")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, and why, in one line."""


class Checkpoints:
    """The checkpoints of one run. Use as a context manager: its end waits until the last save is on
    disk.

    In the background (the default on CUDA) save() copies the state to host memory, and a thread
    writes it while the training goes on. One write at a time: the next save() and the end wait for
    it, and raise its OSError. On a CPU the writer would take its time from the training, and the
    copy its memory.

    starts: the run's, as training/resume.py describes them; every checkpoint takes them along.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: GradScaler | None,
        config: dict,
        keep: int = 1,
        starts: list[dict[str, Any]] | None = None,
        background: bool | None = None,
    ):
        self.run_dir = Path(run_dir)
        self.config, self.keep, self.starts = config, keep, starts or []
        self._parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
        self.background = next(model.parameters()).is_cuda if background is None else background
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None

    def begin(self, start: dict[str, Any]) -> tuple[int, int]:
        """Begin where the checkpoint of resume= stopped, or at step 0: steps and tokens done.

        `start` is the entry of this start, as new_start() makes it. The rows of metrics.jsonl that
        follow the checkpoint are dropped.
        """
        self.starts = [start]
        if not self.config["resume"]:
            return 0, 0
        meta = self.load()
        self.starts = resumed_starts(meta, self.config, start)
        MetricsFile(self.run_dir / METRICS).go_back_to(meta["step"], meta["folder"] / METRICS)
        return meta["step"], meta["tokens"]

    def is_best(self, step: int, val_loss: float | None) -> bool:
        """Whether this is lower than the val/loss of every checkpoint of an earlier step, on the
        same data.
        """
        if val_loss is None:
            return False
        self.wait()
        return val_loss < best_val_loss(
            self.run_dir, before=step, data=self.starts[-1]["data"] if self.starts else None
        )

    def save(self, step: int, tokens: int, val_loss: float | None = None) -> None:
        """Make the state of this moment the latest checkpoint; `val_loss` where it was measured at
        this very step.
        """
        self.wait()
        tensors, state = _state(**self._parts)
        vocab_size = getattr(self._parts["model"], "vocab_size", None)
        if val_loss is not None and not math.isfinite(val_loss):
            val_loss = None  # no candidate for the best one
        meta = {
            "step": step,
            "tokens": tokens,
            "val_loss": val_loss,
            "vocab_size": vocab_size,
            "config": self.config,
        }
        if self.starts:
            stop_clock(self.starts)
            meta["starts"] = copy.deepcopy(self.starts)
        rows = (self.run_dir / METRICS).read_bytes() if (self.run_dir / METRICS).is_file() else None
        if not self.background:
            _write(self.run_dir, tensors, state, rows, meta, self.keep)
            return
        tensors, state = _on_host(tensors), _on_host(state)
        if torch.cuda.is_initialized():
            # the copies are under way, and the next step changes what they copy
            torch.cuda.synchronize()
        self._pending = self._writer.submit(
            _write, self.run_dir, tensors, state, rows, meta, self.keep
        )

    def load(self) -> dict[str, Any]:
        """Put model, optimizer, scaler and random state back where the last whole checkpoint left
        them; see load_checkpoint().
        """
        return load_checkpoint(self.run_dir, **self._parts, config=self.config)

    def wait(self) -> None:
        """Until nothing is being written. Raises the OSError of a write that failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        try:
            self.wait()
        except OSError as failure:
            if error is None:
                raise
            log.error(failure)  # the run has a failure of its own to report
        finally:
            self._writer.shutdown()


def save_checkpoint(
    run_dir: Path,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None,
    step: int,
    tokens: int,
    config: dict,
) -> Path:
    """Write RUN/checkpoint/, replacing the last one.

    A failed write (a full disk, say) raises OSError and leaves the last good checkpoint where it
    was.
    """
    with Checkpoints(
        run_dir, model=model, optimizer=optimizer, scaler=scaler, config=config, background=False
    ) as checkpoints:
        checkpoints.save(step, tokens)
    return Path(run_dir) / LATEST


def _state(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What model.safetensors and training.pt hold."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in _named_tensors(model).items()}
    scale = scaler.state_dict() if scaler is not None else {}
    return tensors, {
        "optimizer": optimizer.state_dict(),
        "scaler": scale,
        "random": _random_state(),
    }


def _on_host(value: Any) -> Any:
    """A copy of every tensor in dictionaries, lists and tuples, in host memory. From a GPU it is
    pinned, and may be under way.
    """
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(item) for item in value)
    return value.to("cpu", non_blocking=True, copy=True) if isinstance(value, Tensor) else value


def _write(
    run_dir: Path,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    rows: bytes | None,
    meta: dict[str, Any],
    keep: int,
) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    fresh = run_dir / f"{LATEST}.tmp"
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        save_file(tensors, fresh / WEIGHTS)
        torch.save(state, fresh / TRAINING)
        shutil.copymode(
            fresh / TRAINING, fresh / WEIGHTS
        )  # safetensors makes files that their owner alone can read
        if rows is not None:
            (fresh / METRICS).write_bytes(rows)
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in sorted(fresh.iterdir())
        }
        meta = {"format": FORMAT, "version": VERSION, **meta, "files": files}
        (fresh / META).write_text(json.dumps(meta | {"sha256": _meta_sha256(meta)}, indent=2))
        for path in (*fresh.iterdir(), fresh):
            sync(path)
        rotate(fresh, run_dir, keep=keep)
    # both writers report a full disk as an error of their own
    except (OSError, SafetensorError, RuntimeError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        free_gib = shutil.disk_usage(run_dir).free / 1024**3 if run_dir.exists() else 0.0
        # PyTorch's own words are of positions in its file
        reason = (
            f"{TRAINING} could not be written whole"
            if "enforce fail" in str(error)
            else str(error).splitlines()[0]
        )
        way_out = (
            ""
            if isinstance(error, (PermissionError, NotADirectoryError))
            else "; free some space there"
        )
        raise OSError(
            f"cannot write a checkpoint to {run_dir} ({free_gib:.2f} GiB free on that disk): "
            f"{reason}{way_out}"
        ) from error


def load_checkpoint(
    run_dir: Path,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None,
    config: dict,
) -> dict[str, Any]:
    """Put model, optimizer, scaler and random number generators back where the checkpoint left
    them.

    Returns its meta.json, and its folder as "folder". A damaged checkpoint is passed over, with one
    warning, for the newest whole one; none of them is deleted. The optimizer keeps the settings it
    was built with (learning rate, betas, weight decay): those are the caller's to choose.
    """
    # all files are verified before anything is changed
    folder, meta = _last_whole(run_dir)
    _check_settings(meta["config"], config, folder)
    state = _training_state(folder)
    _load_weights(folder, meta, model)
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    try:
        optimizer.load_state_dict(state["optimizer"])
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / TRAINING}: the optimizer differs: {error}") from error
    except (TypeError, AttributeError, RuntimeError) as error:
        raise _foreign(folder) from error
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)
    # a scaler that is off has no state, and takes none
    try:
        if scaler is not None and scaler.is_enabled() and state["scaler"]:
            scaler.load_state_dict(state["scaler"])
        _set_random_state(state["random"])
    except (TypeError, AttributeError, RuntimeError, ValueError, LookupError) as error:
        raise _foreign(folder) from error
    return meta | {"folder": folder}


def _training_state(folder: Path) -> dict[str, Any]:
    """What training.pt holds: tensors, numbers and words. PyTorch refuses whatever would run code,
    and so is it refused here.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the versions of pickle
            state = torch.load(folder / TRAINING, map_location="cpu", weights_only=True)
    # a file that was made to mislead fails in any way that unpickling can
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise _foreign(folder) from error
    if not isinstance(state, dict) or not {"optimizer", "scaler", "random"} <= state.keys():
        raise _foreign(folder)
    return state


def _foreign(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder / TRAINING} does not hold what this program writes, and nothing in it was run; "
        f"delete {folder} to go on with the "
        "checkpoint before it, if there is one"
    )


def load_model_state(run_dir: Path, model: nn.Module) -> dict[str, Any]:
    """Put the weights alone into `model`, from the latest checkpoint of a run or the folder of
    another; returns its meta.json.
    """
    folder = _latest(run_dir)
    meta = _read_meta(folder)
    _verified(folder, meta, WEIGHTS)
    _load_weights(folder, meta, model)
    return meta


def read_meta(run_dir: Path) -> dict[str, Any]:
    """The checkpoint's meta.json: step, tokens, config. For building the model that
    load_model_state() fills.
    """
    return _read_meta(_latest(run_dir))


def _latest(run_dir: Path) -> Path:
    """The folder that RUN/checkpoint/ is, or was when a process died between the two renames of a
    save.
    """
    folder = next(
        (
            folder
            for folder in newest_first(run_dir)
            if folder.name != BEST or folder == Path(run_dir)
        ),
        None,
    )
    if folder is None:
        anew = "a run that was stopped before its first one is started anew"
        raise CheckpointError(
            f"{run_dir} holds no checkpoint: there is no folder {Path(run_dir) / LATEST}; {anew}"
        )
    return folder


def _last_whole(run_dir: Path) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint whose files are those that were written, and its meta.json."""
    refusals = []
    try:
        _latest(run_dir)
    except CheckpointError as error:
        refusals.append(error)
    for folder in newest_first(run_dir):
        try:
            meta = _read_meta(folder)
            for name in meta["files"]:
                _verified(folder, meta, name)
        except CheckpointError as error:
            refusals.append(error)
            continue
        if refusals:
            log.warning(
                f"{refusals[0]}; going on from step {meta['step']} with {folder}, the last one "
                "that is whole"
            )
        return folder, meta
    others = (
        f"; no other one is whole either ({len(refusals) - 1} tried)" if len(refusals) > 1 else ""
    )
    raise CheckpointError(f"{refusals[0]}{others}") from refusals[0]


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    try:
        meta = parse(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is no checkpoint of this program: {META} is missing"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise CheckpointError(f"{path} is of another program: it does not say format={FORMAT}")
    if meta.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {meta.get('version')} of the format; this program reads "
            f"version {VERSION}"
        )
    missing = [key for key in ("step", "tokens", "config", "files") if key not in meta]
    missing += [
        name
        for name in (WEIGHTS, TRAINING)
        if isinstance(meta.get("files"), dict) and name not in meta["files"]
    ]
    wrong = misfit(meta) or (missing and f"it lacks {', '.join(missing)}")
    if wrong:
        raise CheckpointError(f"{path} is incomplete or damaged: {wrong}")
    # checkpoints of earlier versions do not vouch for their own meta.json
    found = _meta_sha256(meta)
    if meta.get("sha256", found) != found:
        raise CheckpointError(f"{path} was altered: its content does not have the SHA-256 it names")
    return meta


def _meta_sha256(meta: dict[str, Any]) -> str:
    """Of what meta.json says, however it is laid out."""
    content = {key: value for key, value in meta.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _verified(folder: Path, meta: dict[str, Any], name: str) -> Path:
    """The path of one file of the checkpoint, whose bytes are those that were written."""
    path, expected = folder / name, meta["files"][name]
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        size, found = path.stat().st_size, _sha256(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if size != expected["bytes"]:
        problem = "truncated" if size < expected["bytes"] else "too long"
        raise CheckpointError(f"{path} is {problem}: {size} bytes instead of {expected['bytes']}")
    if found != expected["sha256"]:
        raise CheckpointError(
            f"{path} was altered: SHA-256 {found[:16]}... instead of {expected['sha256'][:16]}..."
        )
    return path


def _load_weights(folder: Path, meta: dict[str, Any], model: nn.Module) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise CheckpointError(f"{folder / WEIGHTS} holds no weights: {error}") from error
    current = _named_tensors(model)
    vocab_size = getattr(model, "vocab_size", None)
    if meta.get("vocab_size") != vocab_size:
        raise CheckpointError(
            f"{folder}: vocab_size is {meta.get('vocab_size')} in the checkpoint and "
            f"{vocab_size} now"
        )
    for name in sorted(stored.keys() | current.keys()):
        then, now = (_describe(tensors.get(name)) for tensors in (stored, current))
        if then != now:
            raise CheckpointError(
                f"{folder}: the model differs: {name} is {then} in the checkpoint and {now} now"
            )
    with torch.no_grad():
        for name, tensor in current.items():
            tensor.copy_(stored[name])


def _describe(tensor: Tensor | None) -> str:
    return (
        "absent"
        if tensor is None
        else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    )


def _check_settings(then: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    optimizers = [config.get("optim", {}).get("name") for config in (then, now)]
    if optimizers[0] != optimizers[1]:
        raise CheckpointError(
            f"{folder}: optim.name is {optimizers[0]} in the checkpoint and {optimizers[1]} now"
        )
    then, now = then.get("model", {}), now.get("model", {})
    # rotary positions have no table: such a model runs at any length
    free = (*FREE_SETTINGS, "max_seq_len") if now.get("positions") == "rope" else FREE_SETTINGS
    for key in (*then, *(key for key in now if key not in then)):
        if key not in free and then.get(key) != now.get(key):
            raise CheckpointError(
                f"{folder}: model.{key} is {then.get(key)} in the checkpoint and {now.get(key)} now"
            )


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; of a tensor that has several names (tied weights),
    the first.
    """
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
