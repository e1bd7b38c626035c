"""Checkpoints that are either whole or refused.

RUN/checkpoint/ holds

    model.safetensors   the weights; a tensor with two names is stored once
    training.pt         optimizer, gradient scaler and random number generators,
                        readable with weights_only=True
    metrics.jsonl       a copy of the run's metrics.jsonl
    meta.json           format, step, tokens, val_loss, config, starts (starts.py), the
                        size and SHA-256 of the files above, and its own SHA-256

Whenever the process dies, one whole checkpoint is left; see whole_folder(). If the latest is
damaged, a run resumes from the newest whole one. The best consists of hard links, which take no
space while another folder has the same checkpoint.
"""

import copy
import json
import logging
import math
import os
import random
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.serialization import config as serialization

from data.token_file import meta_checksum, sha256_of
from training.record.clock import phase
from training.record.files import (
    BEST,
    LATEST,
    META,
    PREVIOUS,
    VERSION,
    CheckpointError,
    Row,
    latest,
    meta_of,
    newest_first,
    read_mapping,
    whole_folder,
    write_file,
)
from training.record.memory import GIB
from training.record.names import as_typed
from training.record.starts import Start, differences, resumed_starts, stop_clock

log = logging.getLogger("tilegpt")

WEIGHTS, TRAINING, METRICS = "model.safetensors", "training.pt", "metrics.jsonl"

# settings of the model that change neither a tensor nor what the weights mean
FREE_SETTINGS = ("model.name", "model.dropout", "model.checkpoint")


class Checkpoints:
    """The checkpoints of one run. A context manager that on exit waits for the last save.

    In the background (the default on CUDA) save() copies the state to host memory, and a thread
    writes it while the training continues. The next save() and the exit wait for that write, and
    raise its OSError. On a CPU the thread would slow the training down, and the copy would take
    memory from it.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: GradScaler | None,
        config: dict,
        background: bool | None = None,
        writes: bool = True,
    ):
        self.run_dir, self.config = run_dir, config
        self.writes = writes  # only one rank writes; all ranks load
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.starts: list[Row] = []  # see training/record/starts.py; saved with every checkpoint
        self.background = next(model.parameters()).is_cuda if background is None else background
        self._former: Path | None = run_dir / PREVIOUS  # what the next save makes of the latest
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def begin(self, entry: Row) -> Start:
        """Resume from the checkpoint of resume=, or begin at step 0.

        `entry` describes this start, see new_start(). metrics.jsonl becomes the checkpoint's copy,
        which has no rows of later steps.
        """
        self.starts = [entry]
        if not self.config["resume"]:
            return Start(0, 0, self.starts)
        if not self.writes:
            self.run_dir = Path(self.config["resume"])
        folder, meta = self.load()
        self.starts = resumed_starts(meta, self.config, entry)
        if self.writes:
            for unfinished in self.run_dir.glob(f"{LATEST}*.tmp"):
                shutil.rmtree(unfinished)
            write_file(self.run_dir / METRICS, (folder / METRICS).read_bytes())
        return Start(meta["step"], meta["tokens"], self.starts)

    @phase("saving")
    def is_best(self, step: int, val_loss: float | None) -> bool:
        """Whether val_loss is below that of all earlier checkpoints on the same data."""
        if not self.writes or val_loss is None or not math.isfinite(val_loss):
            return False
        self._wait()
        data = self.starts[-1]["data"] if self.starts else None
        best = read_mapping(self.run_dir / BEST / META)
        # a resumed run may have changed its data: losses on other data do not compare
        compares = best and best["step"] < step and _data(best) == data
        return val_loss < best["val_loss"] if compares else True

    @phase("saving")
    def save(
        self, step: int, tokens: int, val_loss: float | None = None, *, last: bool = False
    ) -> None:
        """Save the current state as the latest checkpoint.

        val_loss: of this step, or None. last: no step follows, so nothing changes the state.
        """
        if not self.writes:
            return
        self._wait()
        meta = {
            "format": "tilegpt-checkpoint",
            "version": VERSION,
            "step": step,
            "tokens": tokens,
            # NaN is not JSON
            "val_loss": val_loss if val_loss is None or math.isfinite(val_loss) else None,
            "vocab_size": getattr(self.model, "vocab_size", None),
            "config": self.config,
        }
        rows = None
        if self.starts:
            stop_clock(self.starts)
            meta["starts"] = copy.deepcopy(self.starts)
            rows = (self.run_dir / METRICS).read_bytes()
        best = self.is_best(step, val_loss)
        write = partial(_write, self.run_dir, meta, rows, former=self._former, best=best)
        self._former = self.run_dir / PREVIOUS
        state = self._state()
        if last or not self.background:
            write(*state)
            return
        # copies from a GPU are pinned, and go on while the host queues them
        copied = tree_map_only(Tensor, lambda x: x.to("cpu", non_blocking=True, copy=True), state)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the next step changes what they copy
        self._pending = self._writer.submit(write, *copied)

    def _state(self) -> tuple[dict[str, Tensor], Row]:
        """The weights, and what else a resumed run needs."""
        named = _named_tensors(self.model)
        return {name: tensor.detach().contiguous() for name, tensor in named.items()}, {
            "optimizer": self.optimizer.state_dict(),
            "scaler": {} if self.scaler is None else self.scaler.state_dict(),
            "random": _random_state(),
        }

    def load(self) -> tuple[Path, Row]:
        """Restore model, optimizer, scaler and random numbers from the newest whole checkpoint.

        Returns its folder and its meta.json. A damaged checkpoint is skipped with one warning; none
        is deleted. The optimizer keeps the settings it was built with (learning rate, betas, weight
        decay), because the caller chooses those.
        """
        # all files are verified before anything is changed
        folder, meta = _newest_whole(self.run_dir)
        _check_settings(meta["config"], self.config, folder)
        state = torch.load(folder / TRAINING, map_location="cpu", weights_only=True)
        _load_weights(folder, self.model)
        settings = [dict(group) for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(setting)
        # a disabled scaler has no state, and accepts none
        if self.scaler is not None and self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        _set_random_state(state["random"])
        if folder.name != LATEST:
            self._former = None  # a damaged checkpoint does not replace the whole one before it
        return folder, meta

    def _wait(self) -> None:
        """Wait for the last write. Raises its OSError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> "Checkpoints":
        return self

    @phase("saving")
    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        try:
            self._wait()
        except OSError as failure:
            if error is None:
                raise
            log.error(failure)  # the run itself raises another error
        finally:
            self._writer.shutdown()


def _write(
    run_dir: Path,
    meta: Row,
    rows: bytes | None,
    tensors: dict[str, Tensor],
    state: Row,
    *,
    former: Path | None,
    best: bool,
) -> None:
    """Write a checkpoint and make it the latest, and the best where `best` says so."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with whole_folder(run_dir / LATEST, former=former) as folder:
            save_file(tensors, folder / WEIGHTS)
            # SHA-256 finds what CRC-32 would
            with serialization.patch("save.compute_crc32", False):
                torch.save(state, folder / TRAINING)
            # safetensors creates files that only their owner can read
            shutil.copymode(folder / TRAINING, folder / WEIGHTS)
            if rows is not None:
                (folder / METRICS).write_bytes(rows)
            meta["files"] = {
                path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
                for path in sorted(folder.iterdir())
            }
            meta["sha256"] = meta_checksum(meta)
            (folder / META).write_text(json.dumps(meta, indent=2))
            if best:  # before it is the latest: a run that dies here writes both again
                _link(folder, run_dir / BEST)
    # safetensors and PyTorch report a full disk with errors of their own
    except (OSError, SafetensorError, RuntimeError) as error:
        free = shutil.disk_usage(run_dir).free if run_dir.is_dir() else 0
        raise OSError(
            f"cannot write a checkpoint to {run_dir} ({free / GIB:.2f} GiB free on that disk): "
            f"{str(error).splitlines()[0]}"
        ) from error


def _link(folder: Path, target: Path) -> None:
    """Make `target` a checkpoint of the same files."""
    with whole_folder(target) as fresh:
        for file in folder.iterdir():
            try:
                os.link(file, fresh / file.name)
            except OSError:  # a file system without hard links
                shutil.copy2(file, fresh / file.name)


def _data(meta: Row) -> str | None:
    """The fingerprint of the data that a checkpoint was trained and evaluated on."""
    return meta["starts"][-1]["data"] if "starts" in meta else None


def load_model_state(run_dir: Path, model: nn.Module) -> Row:
    """Load only the weights into `model`; returns the checkpoint's meta.json.

    `run_dir` is a run directory, whose latest checkpoint is loaded, or the folder of a checkpoint.
    """
    folder = latest(run_dir)
    meta = meta_of(folder)
    _verify(folder, meta, WEIGHTS)
    _load_weights(folder, model)
    return meta


def _newest_whole(run_dir: Path) -> tuple[Path, Row]:
    """The newest checkpoint whose files are as they were written, and its meta.json."""
    problems = []
    for folder in newest_first(run_dir):
        try:
            meta = meta_of(folder)
            for name in meta["files"]:
                _verify(folder, meta, name)
        except CheckpointError as error:
            problems.append(error)
            continue
        if folder.name != LATEST:
            problem = problems[0] if problems else f"{run_dir} has no folder {LATEST}"
            log.warning(
                f"{problem}; going on from step {meta['step']} with {folder}, the newest whole "
                "checkpoint"
            )
        return folder, meta
    latest(run_dir)  # raises an error if there is none
    raise problems[0]


def _verify(folder: Path, meta: Row, name: str) -> None:
    """Raise CheckpointError unless the file has the bytes that were written."""
    path = folder / name
    try:
        if sha256_of(path) != meta["files"][name]["sha256"]:
            raise CheckpointError(f"{path} is damaged: it has not the SHA-256 in {META}")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _load_weights(folder: Path, model: nn.Module) -> None:
    from safetensors.torch import load_file

    stored, current = load_file(folder / WEIGHTS), _named_tensors(model)
    then, now = (
        {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for tensors in (stored, current)
    )
    for name in sorted(then | now):
        if then.get(name) != now.get(name):
            keep = "the model, the attention with its options, the tokenizer and seq_len of the run"
            raise _unfit(folder, f"the shape of {name}", then.get(name), now.get(name), keep)
    with torch.no_grad():
        for name, tensor in current.items():
            tensor.copy_(stored[name])


def _check_settings(then: Row, now: Row, folder: Path) -> None:
    """Raise CheckpointError for the first setting under which the weights would mean another
    model, or the state be of another optimizer.
    """
    for key, (before, present) in differences(then, now).items():
        length = key == "model.max_seq_len"
        # only learned positions have a table of max_seq_len rows; other models run at any length
        free = key in FREE_SETTINGS or (length and now["model"]["positions"] in ("rope", "alibi"))
        if key == "optim.name" or (key.startswith("model.") and not free):
            # a longer sequence asks for a longer table
            keep = "seq_len" if length else key.removesuffix(".name")
            raise _unfit(folder, key, before, present, f"{keep}={as_typed(before)}")


def _unfit(folder: Path, what: str, then: Any, now: Any, keep: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: {what} is {then} in the checkpoint and {now} now; keep {keep}, or start a new "
        "run"
    )


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tensor with several names gets its first."""
    named: dict[int, tuple[str, Tensor]] = {}
    # keep_vars returns the tensors themselves, so tied weights are found and filled in place
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert "_orig_mod." not in name, "pass the module itself, not the result of torch.compile"
        named.setdefault(id(tensor), (name, tensor))
    return dict(named.values())


def _random_state() -> Row:
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),  # weights_only=True reads no array
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def _set_random_state(state: Row) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    # a run may resume with another number of GPUs, or none
    for index, cuda_state in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(cuda_state, index)
