"""`python train.py ...` for tests: in this process where that is as good, in one of its own where
signals and memory count.

`run` executes train.py as the interpreter would, with its command line and its exit code, and saves
the seconds of importing torch.
"""

import atexit
import contextlib
import functools
import io
import json
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from hydra._internal.hydra import Hydra

from data.batches import TextData
from tests.processes import ROOT, SECONDS, Process, python_path
from training.record.checkpoint import Checkpoints
from training.record.runs import not_started, read_sweep

# the smallest run that does everything
TINY = (
    "device=cpu",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.hidden_size=32",
    "seq_len=32",
    "batch_size=4",
    "steps=4",
    "eval_sequences=4",
    "log_every=1",
    "sample_tokens=0",
    "logger=none",
)

# what differs between two runs that are the same run
MEASURED = (
    "seconds",
    "tokens_per_sec",
    "step_tokens_per_sec",
    "mfu",
    "mfu_causal",
    "memory/peak_gib",  # a CPU's is known from the second step of a start on
    "memory/reserved_gib",
    "memory/process_gib",
)


class Done(NamedTuple):
    code: int
    output: str  # stdout and stderr together

    def complaint(self) -> str:
        """The single line that refuses a run. Fails for a traceback, or for any other output."""
        assert self.code not in (0, None) and "Traceback" not in self.output, self.output
        lines = [line for line in self.output.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.output
        return lines[0]


@functools.cache
def cache_folder() -> str:
    """One token store for all tests of this process."""
    folder = tempfile.mkdtemp(prefix="tilegpt-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def tiny(run_dir: Path, *overrides: str) -> list[str]:
    """The overrides of a tiny run; the last one for a key wins. Without evaluations it sets no
    eval_sequences, which would be refused.
    """
    values = {override.partition("=")[0]: override for override in (*TINY, *overrides)}
    if values.get("eval_every") == "eval_every=0":
        del values["eval_sequences"]
    return [*values.values(), f"hydra.run.dir={run_dir}"]


def tiny_sweep(folder: Path, *overrides: str) -> list[str]:
    return ["-m", *tiny(folder, *overrides)[:-1], f"hydra.sweep.dir={folder}"]


def environment(**variables: str) -> dict[str, str]:
    if "PYTHONPATH" in variables:
        variables["PYTHONPATH"] = python_path(variables["PYTHONPATH"])
    return os.environ | {"TILEGPT_CACHE": cache_folder(), "OMP_NUM_THREADS": "1"} | variables


def run(*arguments: str, curve: bool = False, **variables: str) -> Done:
    """train.py with these arguments and environment variables, in this process.

    Two things would take half of the time of a tiny run, and are left out. One is its picture,
    unless `curve` asks for it. The other is the first of Hydra's two compositions, which finds out
    whether a recipe asks for a sweep.
    """
    torch.set_num_threads(1)
    output, code = io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["train.py", *arguments]),
        mock.patch.dict(os.environ, environment(**variables)),
        # where others leave less than half a GiB free, a run could not even import a library
        mock.patch("training.record.memory.MARGIN", -(2**34)),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        shortcuts(curve),
    ):
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        except SystemExit as error:
            # as the interpreter does: a message is printed, and counts as a failure
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                print(error.code)
        except KeyboardInterrupt:
            traceback.print_exc()
            code = -signal.SIGINT
    return Done(code, output.getvalue())


@contextlib.contextmanager
def shortcuts(curve: bool) -> Iterator[None]:
    with contextlib.ExitStack() as left_out:
        if not curve:
            drawing = mock.patch("training.record.recorder.draw_loss_curve", return_value=None)
            left_out.enter_context(drawing)
        if not any("experiment=" in each or "hydra.mode" in each for each in sys.argv):
            left_out.enter_context(mock.patch.object(Hydra, "get_mode", return_value=None))
        yield


def start(*arguments: str, new_group: bool = False, **variables: str) -> Process:
    """train.py with these arguments, in a process of its own."""
    given = {"env": environment(**variables), "start_new_session": new_group}
    return Process("train.py", *arguments, **given)


def finish(process: Process) -> Done:
    output = process.end()
    return Done(process.returncode, output)


def wait_until(condition: Callable[[], bool], process: Process) -> None:
    """Or until the process ends, or would be ended."""
    end = time.monotonic() + SECONDS
    while process.poll() is None and not condition() and time.monotonic() < end:
        time.sleep(0.01)


def at_step(monkeypatch, step: int, action: Callable[[], object], run_dir: Path = ROOT) -> None:
    """Call this while this process first prepares that step, counted from 0, of the first run or of
    the job of a sweep in run_dir.
    """
    train_batch, pending = TextData.train_batch, [action]

    def patched(self, at: int, num_sequences: int):
        if at == step and pending and run_dir.exists():
            pending.pop()()
        return train_batch(self, at, num_sequences)

    monkeypatch.setattr(TextData, "train_batch", patched)


def send_at_step(monkeypatch, step: int, *signals: signal.Signals, run_dir: Path = ROOT) -> None:
    """Send the signals to this process at that step; see at_step()."""

    def send() -> None:
        for each in signals:
            signal.raise_signal(each)

    at_step(monkeypatch, step, send, run_dir)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, read as strictly as JSON is meant to be."""
    return [strict_json(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def computed(run_dir: Path) -> list[dict[str, Any]]:
    """The rows without measurements: equal for two runs that computed the same."""
    return [
        {key: value for key, value in row.items() if key not in MEASURED}
        for row in metrics(run_dir)
    ]


def summary(run_dir: Path) -> dict[str, Any]:
    return strict_json((run_dir / "summary.json").read_text())


def index(sweep_dir: Path) -> list[dict[str, Any]]:
    """What a sweep planned for each job, and how it went."""
    waiting = [row | {"status": "not started"} for row in not_started(sweep_dir)]
    return [*read_sweep(sweep_dir), *waiting]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run except its log."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "train.log")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def checkpoint(run_dir: Path) -> dict[str, Any]:
    """Weights, optimizer state and PyTorch's random state."""
    from safetensors.torch import load_file

    state = torch.load(run_dir / "checkpoint/training.pt", weights_only=True)
    return {
        "weights": load_file(run_dir / "checkpoint/model.safetensors"),
        "optimizer": state["optimizer"],
        "scaler": state["scaler"],
        "random": state["random"]["torch"],
        "step": strict_json((run_dir / "checkpoint/meta.json").read_text())["step"],
    }


def begun_checkpoints(run_dir: Path, **parts: Any) -> Checkpoints:
    """Those of a run at its beginning. parts: what Checkpoints takes."""
    (run_dir / "metrics.jsonl").write_text('{"step": 0}\n')
    checkpoints = Checkpoints(run_dir, **{"background": False} | parts)
    checkpoints.begin({"step": 0, "started": 0.0, "data": "text", "commit": None})
    return checkpoints


def save_checkpoint(run_dir: Path, *, step: int, tokens: int, **parts: Any) -> Path:
    """RUN/checkpoint/, as a run writes it after this step. parts: what Checkpoints takes."""
    with begun_checkpoints(run_dir, **parts) as checkpoints:
        checkpoints.save(step, tokens)
    return run_dir / "checkpoint"


def load_checkpoint(run_dir: Path, **parts: Any) -> dict[str, Any]:
    return Checkpoints(run_dir, **parts, background=False).load(run_dir)[1]


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, through dictionaries, lists and tensors."""
    if isinstance(a, dict):
        return (
            isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
