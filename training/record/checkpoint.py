"""Checkpoints that are either whole or refused.

RUN/checkpoint/ holds

    model.safetensors   the weights; a tensor with two names is stored once
    training.pt         optimizer, gradient scaler and random number generators,
                        readable with weights_only=True
    metrics.jsonl       a copy of the run's metrics.jsonl
    meta.json           format, step, tokens, val_loss, config, the overrides that a resume
                        repeats, starts (starts.py), the size and SHA-256 of the files
                        above, and its own SHA-256

Whenever the process dies, one whole checkpoint is left; see whole_folder(). If the latest is
damaged, a run resumes from the newest whole one. The best consists of hard links, which take no
space while another folder has the same checkpoint.
"""

import copy
import json
import logging
import math
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

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
    whole_folder,
    write_file,
)
from training.record.memory import GIB
from training.record.starts import Start, resumed_starts, stop_clock
from training.record.text_table import first_line

log = logging.getLogger("tilegpt")

WEIGHTS, TRAINING, METRICS = "model.safetensors", "training.pt", "metrics.jsonl"


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
        scaler: GradScaler,
        config: Row,
        overrides: Sequence[str] = (),
        background: bool | None = None,
        writes: bool = True,
    ):
        self.run_dir, self.config, self.overrides = run_dir, config, overrides
        self.writes = writes  # only one rank writes; all ranks load
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.starts: list[Row] = []  # see training/record/starts.py; filled by begin()
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
            return Start(0, 0)
        folder, meta = self.load(Path(self.config["resume"]))
        self.starts = resumed_starts(meta, self.config, entry)
        if self.writes:
            write_file(self.run_dir / METRICS, (folder / METRICS).read_bytes())
        return Start(meta["step"], meta["tokens"])

    @phase("saving")
    def save(
        self,
        step: int,
        tokens: int,
        val_loss: float | None = None,
        *,
        due: bool = True,
        last: bool = False,
    ) -> None:
        """Save the current state as the latest checkpoint if one is due, or if it is the best yet.

        val_loss: of this step, or None. last: no step follows, so nothing changes the state.
        """
        if not self.writes:
            return
        if val_loss is not None and not math.isfinite(val_loss):
            val_loss = None  # NaN is not JSON
        best = val_loss is not None and self._is_best(step, val_loss)
        if not (due or last or best):
            return
        self._wait()
        stop_clock(self.starts)
        meta = {
            "format": "tilegpt-checkpoint",
            "version": VERSION,
            "step": step,
            "tokens": tokens,
            "val_loss": val_loss,
            "vocab_size": getattr(self.model, "vocab_size", None),
            "config": self.config,
            "overrides": self.overrides,
            "starts": copy.deepcopy(self.starts),
        }
        parts = self._state(), meta, (self.run_dir / METRICS).read_bytes(), best
        if last or not self.background:
            self._write(*parts)
            return
        # copies from a GPU are pinned, and go on while the host queues them
        copied = tree_map_only(Tensor, lambda x: x.to("cpu", non_blocking=True, copy=True), parts)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the next step changes what they copy
        self._pending = self._writer.submit(self._write, *copied)

    def _is_best(self, step: int, val_loss: float) -> bool:
        """Whether val_loss is below that of all earlier checkpoints on the same data."""
        self._wait()
        try:
            best = meta_of(self.run_dir / BEST)
        except CheckpointError:  # there is none, or it is damaged
            return True
        # a resumed run may have changed its data: losses on other data do not compare
        same_data = best["starts"][-1]["data"] == self.starts[-1]["data"]
        return not same_data or best["step"] >= step or val_loss < best["val_loss"]

    def _state(self) -> Row:
        """The weights by name, and what else a resumed run needs."""
        return {
            "weights": {name: x.detach().contiguous() for name, x in _named(self.model).items()},
            "training": {
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "random": _random_state(),
            },
        }

    def _write(self, state: Row, meta: Row, rows: bytes, best: bool) -> None:
        """Write a checkpoint and make it the latest, and also the best if `best` says so."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            with whole_folder(self.run_dir / LATEST, former=self._former) as folder:
                save_file(state["weights"], folder / WEIGHTS)
                # SHA-256 finds what CRC-32 would
                with serialization.patch("save.compute_crc32", False):
                    torch.save(state["training"], folder / TRAINING)
                # safetensors creates files that only their owner can read
                shutil.copymode(folder / TRAINING, folder / WEIGHTS)
                (folder / METRICS).write_bytes(rows)
                meta["files"] = {
                    path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
                    for path in sorted(folder.iterdir())
                }
                meta["sha256"] = meta_checksum(meta)
                (folder / META).write_text(json.dumps(meta, indent=2))
                if best:  # before it is the latest: a run that dies here writes both again
                    with whole_folder(self.run_dir / BEST) as target:
                        shutil.copytree(folder, target, copy_function=_link, dirs_exist_ok=True)
            self._former = self.run_dir / PREVIOUS
        # safetensors and PyTorch report a full disk with errors of their own
        except (OSError, SafetensorError, RuntimeError) as error:
            free = shutil.disk_usage(self.run_dir).free if self.run_dir.is_dir() else 0
            raise OSError(
                f"cannot write a checkpoint to {self.run_dir} ({free / GIB:.2f} GiB free on that "
                f"disk): {first_line(error)}"
            ) from error

    def load(self, run_dir: Path) -> tuple[Path, Row]:
        """Restore model, optimizer, scaler and random numbers from a run's newest whole checkpoint.

        Returns its folder and its meta.json. A damaged checkpoint is skipped with one warning; none
        is deleted. The optimizer keeps the settings it was built with (learning rate, betas, weight
        decay), because the caller chooses those.
        """
        # all files are verified before anything is changed
        folder, meta = _newest_whole(run_dir)
        state = torch.load(folder / TRAINING, map_location="cpu", weights_only=True)
        _load_weights(folder, self.model)
        settings = [dict(group) for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(setting)
        if state["scaler"]:  # one that was enabled
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


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


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
            _verify(folder, meta, *meta["files"])
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


def _verify(folder: Path, meta: Row, *names: str) -> None:
    """Raise CheckpointError unless these files have the bytes that were written."""
    for path in map(folder.joinpath, names):
        try:
            found = sha256_of(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if found != meta["files"][path.name]["sha256"]:
            raise CheckpointError(f"{path} is damaged: it has not the SHA-256 in {META}")


def _load_weights(folder: Path, model: nn.Module) -> None:
    from safetensors.torch import load_file

    stored, current = load_file(folder / WEIGHTS), _named(model)
    for name in sorted(stored | current):
        then, now = (
            tuple(tensors[name].shape) if name in tensors else None for tensors in (stored, current)
        )
        if then != now:
            raise CheckpointError(
                f"{folder}: the shape of {name} is {then} in the checkpoint and {now} now; keep "
                "the model, the attention with its options, the tokenizer and seq_len of the run, "
                "or start a new run"
            )
    with torch.no_grad():
        for name, tensor in current.items():
            tensor.copy_(stored[name])


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tensor with several names gets its first."""
    named: dict[int, tuple[str, Tensor]] = {}
    # keep_vars returns the tensors themselves, so tied weights are found and filled in place
    for name, tensor in model.state_dict(keep_vars=True).items():
        named.setdefault(id(tensor), (name, tensor))
    return dict(named.values())


def _random_state() -> Row:
    """Of PyTorch's generators. Nothing here draws from those of Python and NumPy."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def _set_random_state(state: Row) -> None:
    torch.set_rng_state(state["torch"])
    # a run may resume with another number of GPUs, or none
    for index, cuda_state in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(cuda_state, index)
