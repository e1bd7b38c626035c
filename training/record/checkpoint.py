"""Checkpoints that are either whole or refused.

RUN/checkpoint/ holds

    model.safetensors   the weights; a tensor with two names is stored once
    training.pt         optimizer, gradient scaler and random number generators,
                        readable with weights_only=True
    metrics.jsonl       a copy of the run's metrics.jsonl
    meta.json           format, step, tokens, val_loss, config, starts (starts.py), the
                        size and SHA-256 of the files above, and its own SHA-256

A save writes checkpoint.tmp/, syncs it to disk and swaps it in by two renames. Whenever the process
dies, one whole checkpoint is left. retention.py decides which earlier ones stay. If the latest is
damaged, a run resumes from the newest whole one.
"""

import copy
import errno
import json
import logging
import math
import random
import re
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.serialization import config as serialization

from attention import dtype_name
from data.token_file import meta_checksum, sha256_of, sync
from training.record.clock import phase
from training.record.files import HashedFile, MetricsFile, Row
from training.record.memory import GIB, is_out_of_memory
from training.record.names import as_typed
from training.record.retention import (
    BEST,
    FRESH,
    LATEST,
    META,
    best_val_loss,
    misfit,
    newest_first,
    parse,
    rotate,
)
from training.record.starts import Start, resumed_starts, stop_clock

log = logging.getLogger("tilegpt")

FORMAT = "tilegpt-checkpoint"
VERSION = 1
WEIGHTS, TRAINING, METRICS = "model.safetensors", "training.pt", "metrics.jsonl"

# settings of the model that change neither a tensor nor what the weights mean; the last two are of
# older checkpoints
FREE_SETTINGS = ("name", "dropout", "init_std", "checkpoint", "chunk_tokens", "offload")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, with the reason in one line."""


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
        keep: int = 1,
        background: bool | None = None,
        writes: bool = True,
    ):
        self.run_dir, self.config, self.keep = run_dir, config, keep
        self.writes = writes  # only one rank writes; all ranks load
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.starts: list[Row] = []  # see training/record/starts.py; saved with every checkpoint
        self.background = next(model.parameters()).is_cuda if background is None else background
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def begin(self, entry: Row) -> Start:
        """Resume from the checkpoint of resume=, or begin at step 0.

        `entry` describes this start, see new_start(). Rows of metrics.jsonl after the checkpoint
        are dropped.
        """
        self.starts = [entry]
        if not self.config["resume"]:
            return Start(0, 0, self.starts)
        if not self.writes:
            self.run_dir = Path(self.config["resume"])
        meta = self.load()
        self.starts = resumed_starts(meta, self.config, entry)
        if self.writes:
            MetricsFile(self.run_dir / METRICS).go_back_to(meta["step"], meta["folder"] / METRICS)
        return Start(meta["step"], meta["tokens"], self.starts)

    @phase("saving")
    def is_best(self, step: int, val_loss: float | None) -> bool:
        """Whether val_loss is below that of all earlier checkpoints on the same data."""
        if val_loss is None or not self.writes:
            return False
        self._wait()
        data = self.starts[-1]["data"] if self.starts else None
        return val_loss < best_val_loss(self.run_dir, before=step, data=data)

    @phase("saving")
    def save(
        self, step: int, tokens: int, val_loss: float | None = None, *, last: bool = False
    ) -> None:
        """Save the current state as the latest checkpoint.

        val_loss: of this step, or None. last: no step follows.
        """
        if not self.writes:
            return
        self._wait()
        if val_loss is not None and not math.isfinite(val_loss):
            val_loss = None  # such a checkpoint cannot be the best
        meta = {
            "step": step,
            "tokens": tokens,
            "val_loss": val_loss,
            "vocab_size": getattr(self.model, "vocab_size", None),
            "config": self.config,
        }
        if self.starts:
            stop_clock(self.starts)
            meta["starts"] = copy.deepcopy(self.starts)
        path = self.run_dir / METRICS
        rows = path.read_bytes() if path.is_file() else None
        if last or not self.background:
            files = _write_state(self.run_dir, *self._state())
            _publish(self.run_dir, files, rows, meta, self.keep)
            return
        tensors, state = _on_host(self._state())
        if torch.cuda.is_initialized():
            # the copies are still running, and the next step changes what they copy
            torch.cuda.synchronize()

        def write() -> None:
            files = _write_state(self.run_dir, tensors, state)
            _publish(self.run_dir, files, rows, meta, self.keep)

        self._pending = self._writer.submit(write)

    def _state(self) -> tuple[dict[str, Tensor], Row]:
        """The weights, and what else a resumed run needs."""
        named = _named_tensors(self.model)
        return {name: tensor.detach().contiguous() for name, tensor in named.items()}, {
            "optimizer": self.optimizer.state_dict(),
            "scaler": {} if self.scaler is None else self.scaler.state_dict(),
            "random": _random_state(),
        }

    def load(self) -> Row:
        """Restore model, optimizer, scaler and random numbers from the newest whole checkpoint.

        Returns its meta.json, and its folder as "folder". A damaged checkpoint is skipped with one
        warning; none is deleted. The optimizer keeps the settings it was built with (learning rate,
        betas, weight decay), because the caller chooses those.
        """
        # all files are verified before anything is changed
        folder, meta = _newest_whole(self.run_dir)
        _check_settings(meta["config"], self.config, folder)
        state = _training_state(folder)
        _load_weights(folder, meta, self.model)
        settings = [dict(group) for group in self.optimizer.param_groups]
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{folder / TRAINING}: the optimizer differs: {error}") from error
        except (TypeError, AttributeError, RuntimeError) as error:
            raise _foreign(folder) from error
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(setting)
        try:
            # a disabled scaler has no state, and accepts none
            if self.scaler is not None and self.scaler.is_enabled() and state["scaler"]:
                self.scaler.load_state_dict(state["scaler"])
            _set_random_state(state["random"])
        except (TypeError, AttributeError, RuntimeError, ValueError, LookupError) as error:
            raise _foreign(folder) from error
        return meta | {"folder": folder}

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
            if self.writes:  # a second Ctrl-C may have ended a save
                shutil.rmtree(self.run_dir / FRESH, ignore_errors=True)


def _on_host(tensors: Any) -> Any:
    """Copies of nested tensors in host memory.

    A copy from a GPU is pinned, and may still be running when this function returns.
    """
    return tree_map_only(Tensor, lambda x: x.to("cpu", non_blocking=True, copy=True), tensors)


def _write_state(run_dir: Path, tensors: dict[str, Tensor], state: Row) -> Row:
    """Write the largest files of a new checkpoint; returns their entries in meta.json."""
    from safetensors.torch import save_file

    fresh = run_dir / FRESH
    size = sum(x.nbytes for x in tree_leaves([tensors, state]) if isinstance(x, Tensor))
    with _whole(run_dir, size), ThreadPoolExecutor() as others:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        # a file is hashed and synced while the next one is made
        save_file(tensors, fresh / WEIGHTS)
        hashed, synced = (others.submit(each, fresh / WEIGHTS) for each in (sha256_of, sync))
        # the largest file is hashed as it is written, so it needs no CRC-32
        without_crc32 = serialization.patch("save.compute_crc32", False)
        with HashedFile(fresh / TRAINING, others) as file, without_crc32:
            torch.save(state, file)
        sync(fresh / TRAINING)
        synced.result()
        # safetensors creates files that only their owner can read
        shutil.copymode(fresh / TRAINING, fresh / WEIGHTS)
        digests = {WEIGHTS: hashed.result(), TRAINING: file.digest.hexdigest()}
        return {name: _entry(fresh / name, digest) for name, digest in digests.items()}


def _publish(run_dir: Path, files: Row, rows: bytes | None, meta: Row, keep: int) -> None:
    """Add rows of metrics and meta.json to a new checkpoint, and make it the latest."""
    fresh = run_dir / FRESH
    with _whole(run_dir, sum(each["bytes"] for each in files.values())):
        if rows is not None:
            path = fresh / METRICS
            path.write_bytes(rows)
            sync(path)
            files = files | {METRICS: _entry(path, sha256_of(path))}
        meta = {"format": FORMAT, "version": VERSION, **meta, "files": dict(sorted(files.items()))}
        (fresh / META).write_text(json.dumps(meta | {"sha256": meta_checksum(meta)}, indent=2))
        for path in (fresh / META, fresh):
            sync(path)
        rotate(fresh, run_dir, keep=keep)


def _entry(path: Path, digest: str) -> Row:
    return {"bytes": path.stat().st_size, "sha256": digest}


@contextmanager
def _whole(run_dir: Path, size: int) -> Iterator[None]:
    """Remove the new checkpoint of about `size` bytes if writing it fails, and say why."""
    from safetensors import SafetensorError

    try:
        yield
    # safetensors and PyTorch report a full disk with errors of their own
    except (OSError, SafetensorError, RuntimeError) as error:
        shutil.rmtree(run_dir / FRESH, ignore_errors=True)
        raise _write_error(run_dir, error, size) from error


def _write_error(run_dir: Path, error: Exception, size: int) -> OSError:
    """The error to raise for one that came while a checkpoint of about `size` bytes was written."""
    free = shutil.disk_usage(run_dir).free if run_dir.exists() else 0
    # safetensors gives the number of the error in its message, PyTorch gives none
    told = re.search(r"os error (\d+)", str(error))
    number = int(told[1]) if told else getattr(error, "errno", None)
    reason = str(error).splitlines()[0]
    # PyTorch's message only gives positions in its file
    if "enforce fail" in str(error):
        reason = f"{TRAINING} could not be written whole"
    if number == errno.EFBIG:
        reason += "; raise the limit on the size of a file (ulimit -f)"
    elif number == errno.EDQUOT:
        reason += "; free some space of your quota there"
    elif number is None and free > 2 * size:
        reason += "; it would fit, so look for a limit on the size of a file (ulimit -f) or a quota"
    elif number in (None, errno.ENOSPC):
        reason += "; free some space there"
    return OSError(
        f"cannot write a checkpoint to {run_dir} ({free / GIB:.2f} GiB free on that disk): {reason}"
    )


def _training_state(folder: Path) -> Row:
    """The content of training.pt: tensors, numbers and strings.

    PyTorch refuses a file that would run code, and so does this function.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about pickle versions
            state = torch.load(folder / TRAINING, map_location="cpu", weights_only=True)
    # unpickling a malicious file can raise anything
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
        f"delete {folder} to go on with the checkpoint before it, if there is one"
    )


def load_model_state(run_dir: Path, model: nn.Module) -> Row:
    """Load only the weights into `model`; returns the checkpoint's meta.json.

    `run_dir` is a run directory, whose latest checkpoint is loaded, or the folder of a checkpoint.
    """
    folder = _latest(run_dir)
    meta = _read_meta(folder)
    _verify(folder, meta, WEIGHTS)
    _load_weights(folder, meta, model)
    return meta


def read_meta(run_dir: Path) -> Row:
    """The checkpoint's meta.json, for building the model that load_model_state() fills."""
    return _read_meta(_latest(run_dir))


def _latest(run_dir: Path) -> Path:
    """RUN/checkpoint/, or the checkpoint before it if a save died between its two renames."""
    for folder in newest_first(run_dir):
        if folder.name != BEST or folder == run_dir:
            return folder
    raise CheckpointError(
        f"{run_dir} holds no checkpoint: there is no folder {run_dir / LATEST}; a run that "
        "was stopped before its first checkpoint is started anew"
    )


def _newest_whole(run_dir: Path) -> tuple[Path, Row]:
    """The newest checkpoint whose files are as they were written, and its meta.json."""
    refusals = []
    try:
        _latest(run_dir)
    except CheckpointError as error:
        refusals.append(error)
    for folder in newest_first(run_dir):
        try:
            meta = _read_meta(folder)
            for name in meta["files"]:
                _verify(folder, meta, name)
        except CheckpointError as error:
            refusals.append(error)
            continue
        if refusals:
            log.warning(
                f"{refusals[0]}; going on from step {meta['step']} with {folder}, the newest whole "
                "checkpoint"
            )
        return folder, meta
    tried = len(refusals) - 1
    others = f"; no other checkpoint is whole either ({tried} tried)" if tried else ""
    raise CheckpointError(f"{refusals[0]}{others}") from refusals[0]


def _read_meta(folder: Path) -> Row:
    path = folder / META
    try:
        meta = parse(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a checkpoint of this program: {META} is missing"
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
    if problem := misfit(meta) or _missing(meta):
        raise CheckpointError(f"{path} is incomplete or damaged: {problem}")
    if meta.get("sha256") != meta_checksum(meta):
        raise CheckpointError(f"{path} was altered: its content does not have the SHA-256 it names")
    return meta


def _missing(meta: Row) -> str | None:
    files = meta.get("files", (WEIGHTS, TRAINING))
    lacking = [key for key in ("step", "tokens", "config", "files") if key not in meta]
    lacking += [name for name in (WEIGHTS, TRAINING) if name not in files]
    return f"it lacks {', '.join(lacking)}" if lacking else None


def _verify(folder: Path, meta: Row, name: str) -> None:
    """Raise CheckpointError unless the file has the bytes that were written."""
    path, expected = folder / name, meta["files"][name]
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        size, sha256 = path.stat().st_size, sha256_of(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if size != expected["bytes"]:
        problem = "truncated" if size < expected["bytes"] else "too long"
        raise CheckpointError(f"{path} is {problem}: {size} bytes instead of {expected['bytes']}")
    if sha256 != expected["sha256"]:
        raise CheckpointError(
            f"{path} was altered: SHA-256 {sha256[:16]}... instead of {expected['sha256'][:16]}..."
        )


def _load_weights(folder: Path, meta: Row, model: nn.Module) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise CheckpointError(f"{folder / WEIGHTS} holds no weights: {error}") from error
    current = _named_tensors(model)
    vocab_size = getattr(model, "vocab_size", None)
    if meta.get("vocab_size") != vocab_size:
        keep = "the tokenizer and data of the run"
        raise _unfit(folder, "vocab_size", meta.get("vocab_size"), vocab_size, keep)
    for name in sorted(stored.keys() | current.keys()):
        then, now = (_describe(tensors.get(name)) for tensors in (stored, current))
        if then != now:
            # an attention's own parameters, by its options and the model's sizes
            own = ".own." in name
            keep = "the run's attention, its options and seq_len" if own else "the run's model"
            raise _unfit(folder, f"the model differs: {name}", then, now, keep)
    with torch.no_grad():
        for name, tensor in current.items():
            tensor.copy_(stored[name])


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "absent"
    return f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)}"


def _check_settings(then: Row, now: Row, folder: Path) -> None:
    optimizers = [config.get("optim", {}).get("name") for config in (then, now)]
    if optimizers[0] != optimizers[1]:
        raise _unfit(folder, "optim.name", *optimizers, keep=f"optim={optimizers[0]}")
    lengths = [config.get("seq_len", 0) for config in (then, now)]
    then, now = then.get("model", {}), now.get("model", {})
    # only learned positions have a table of max_seq_len rows; other models run at any length
    of_any_length = now.get("positions") in ("rope", "alibi")
    free = (*FREE_SETTINGS, "max_seq_len") if of_any_length else FREE_SETTINGS
    for key in then | now:
        if key not in free and then.get(key) != now.get(key):
            if key == "max_seq_len" and lengths[1] > then.get(key, 0):  # it follows seq_len
                raise _unfit(folder, "seq_len", *lengths, keep=f"seq_len={lengths[0]}")
            keep = f"model.{key}={as_typed(then.get(key))}"
            raise _unfit(folder, f"model.{key}", then.get(key), now.get(key), keep)


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
    assert kind == "MT19937"
    return {
        "python": random.getstate(),
        "numpy": [torch.from_numpy(keys.astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def _set_random_state(state: Row) -> None:
    random.setstate(state["python"])
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    # a run may resume with another number of GPUs, or none
    for index, cuda_state in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(cuda_state, index)
