"""Compare our training with nanoGPT's: tokens per second, peak memory and loss, from the same
weights on the same batches.

    python -m lab.nanogpt folder=../nanoGPT seq_len=1024,8192 attention=triton out=nanogpt.json

nanoGPT (github.com/karpathy/nanoGPT) is not part of this project: folder= is your clone, from which
we read model.py. Its step is the one of its train.py: TF32, autocast, torch.compile, its fused
AdamW, clipping; batches wait in pinned memory. Ours is the full `python train.py`, with data and
logging. Each runs in a separate process on the same batches, nanoGPT before and after the other
attentions at each length. The speeds exclude the work between two steps: nanoGPT's loop does not
compute our metrics.

    attention     several, separated by commas: triton,sdpa:backend=cudnn
    seq_len       several lengths; tokens=32768 is the size of every pass, which is one step
    steps         steps of each run; the first ten are not timed, and the rest are timed ten by ten
    curve_steps   steps of another run of each at the first length, whose losses are compared step
                  by step; 0 for none. nanoGPT then also runs with different roundings only: from
                  weights moved by one rounding, and on a GPU with other kernels, which round
                  differently in every step. This noise is the scale for any difference
    model, vocab_size, device    as in train.py; the vocabulary is nanoGPT's padded one

Other arguments are settings of our train.py, such as model.checkpoint=elementwise. The defaults
are data=torch_source tokenizer=bpe.
"""

import importlib.util
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from config import RunConfig
from data.interface import TrainingData
from model import GPT
from model.hugging_face import GPT2
from scripts.arguments import Count, Device, Json, command, default, parse_backend
from scripts.tables import Row
from training.device import autocast_to, pick_device, pick_dtype
from training.environment import ROOT, measured_on
from training.files import read_metrics, write_json
from training.memory import GIB
from training.optimizer import set_learning_rate
from training.sweep import load_json
from training.trained import data_of, read_run_config

WARMUP, WINDOW = 10, 10  # steps that are not timed, and steps timed together
# variations that change nanoGPT's losses only by roundings
NOISE = {"nanogpt, noise 1": {"noise_seed": 1}, "nanogpt, noise 2": {"noise_seed": 2}}
OTHER_KERNELS = {
    "nanogpt, not compiled": {"compiled": False},
    "nanogpt, flash attention": {"cudnn": False},
}
# names in nanoGPT's GPTConfig: our settings
NAMES = {
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_embd": "hidden_size",
    "dropout": "dropout",
    "bias": "bias",
}


def check_clone(option: str, folder: Path, files: tuple[str, ...], repository: str) -> None:
    """Raises ValueError unless the option names a clone of the repository with these files."""
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{option}={folder} has no {', '.join(missing)}; it is what git clone "
            f"https://github.com/{repository} makes"
        )


@dataclass
class Comparison:
    """Options of a comparison of our runs with a clone of nanoGPT, or of another repository."""

    folder: Path
    out: Json | None = None
    seq_len: list[Count] = default(1024, 8192, 32768)
    attention: list[str] = default("triton")
    tokens: Count = 32768
    model: str = "gpt2"
    vocab_size: int = 50304
    device: Device = "auto"
    overrides: list[str] = default()  # train.py's own settings

    repository: ClassVar[str] = "karpathy/nanoGPT"
    files: ClassVar[tuple[str, ...]] = ("model.py",)  # that `folder` must have

    def __post_init__(self) -> None:
        check_clone("folder", self.folder, self.files, self.repository)
        for name in ("seq_len", "attention"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name}={','.join(map(str, values))} names one of them twice")
        for length in self.seq_len:
            if self.tokens % length:
                raise ValueError(f"tokens={self.tokens} is not a multiple of seq_len={length}")
        for name in self.attention:
            parse_backend(name)

    def ours(self, attention: str, seq_len: int, steps: int, **more: Any) -> list[str]:
        """The settings of one `python train.py`; `more` are further ones."""
        name, _, rest = attention.partition(":")
        settings = {
            "model": self.model,
            "data": "torch_source",
            "tokenizer": "bpe",
            "tokenizer.vocab_size": self.vocab_size,
            "optim.lr": 6e-4,
            "device": self.device,
            "attention": name,
            "seq_len": seq_len,
            "batch_size": self.tokens // seq_len,
            "steps": steps,
            "checkpoint_every": steps,
            "sample_tokens": 0,
            "logger": "none",
        }
        overrides = [f"{key}={value}" for key, value in (settings | more).items()]
        overrides += [f"attention.{option}" for option in rest.split(",") if option]
        return overrides + self.overrides

    def head(self) -> Row:
        """The first entries of the JSON file: where it was measured, and these options."""
        settings = {key: value for key, value in vars(self).items() if key not in ("folder", "out")}
        return {"environment": measured_on(pick_device(self.device)), "settings": settings}

    def save(self, result: Row) -> None:
        """Write the JSON file: after every run, so that a later failure loses nothing."""
        if self.out:
            write_json(self.out, result)


@dataclass
class Options(Comparison):
    steps: Annotated[int, WARMUP + WINDOW] = 60
    curve_steps: int = 300


def train_ours(
    options: Comparison,
    run_dir: Path,
    *,
    attention: str,
    seq_len: int,
    steps: int,
    log_every: int,
    **more: Any,
) -> Row:
    """One `python train.py`. If it fails, raises ValueError with the end of its output."""
    # train_theirs() neither evaluates nor inspects its attention
    more |= {"log_every": log_every, "eval_every": 0}
    overrides = options.ours(attention, seq_len, steps, **more)
    done = subprocess.run(
        [sys.executable, "train.py", *overrides, f"hydra.run.dir={run_dir}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    summary = load_json(run_dir / "summary.json")
    if done.returncode or summary.get("status") != "completed":
        raise ValueError(
            f"train.py {' '.join(overrides)} ended {summary.get('status')}: "
            f"{(done.stdout + done.stderr).strip()[-500:]}"
        )
    rows = read_metrics(run_dir / "metrics.jsonl")
    speeds = {row["step"]: row.get("step_tokens_per_sec") for row in rows}
    timed = [speed for step, speed in speeds.items() if step > WARMUP and speed]
    peaks = [row.get("memory/peak_gib") or 0 for row in rows if row["step"] > 0]
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    return percentiles(timed) | {"peak_gib": max(peaks, default=0) or None, "losses": losses}


def train_theirs(
    folder: Path,
    run_dir: Path,
    steps: int,
    *,
    noise_seed: int | None = None,
    compiled: bool = True,
    cudnn: bool = True,
) -> Row:
    """nanoGPT's step under the settings of one of our runs.

    noise_seed moves the initial weights by about one rounding. cudnn=False makes PyTorch use flash
    attention.
    """

    config = read_run_config(run_dir)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    # as in nanoGPT's train.py
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    data = data_of(config)
    optim = config.optimizer()
    with redirect_stdout(StringIO()):  # it prints its number of parameters
        model = their_model(folder, config, data.vocab_size)
        if noise_seed is not None:
            add_noise(model, noise_seed)
        model.to(device)
        optimizer = model.configure_optimizers(
            optim.weight_decay, optim.lr, (optim.beta1, optim.beta2), device.type
        )
    run = torch.compile(model) if compiled and device.type == "cuda" else model
    losses = []

    def take(step: int, batch: list[Tensor]) -> None:
        set_learning_rate(optimizer, step, config.steps, optim)
        inputs, targets = (x.to(device, non_blocking=True) for x in batch)
        with autocast_to(dtype, device):
            _, loss = run(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    found = timed(take, config, data, steps)
    return found | {"losses": {step: loss.item() for step, loss in enumerate(losses, 1)}}


def timed(
    take: Callable[[int, list[Tensor]], None], config: RunConfig, data: TrainingData, steps: int
) -> Row:
    """Call take(step, [inputs, targets]) for every step, on the batches of one of our runs.

    The batches wait in pinned memory on a GPU. Returns tokens per second and the peak memory.
    """
    device = pick_device(config.device)
    batches = [list(data.train_batch(step, config.sequences_per_step)[:2]) for step in range(steps)]
    if device.type == "cuda":
        batches = [[tensor.pin_memory() for tensor in batch] for batch in batches]
    times = []
    for step, batch in enumerate(batches):
        if step >= WARMUP and (step - WARMUP) % WINDOW == 0:
            times.append(now(device))
        if step == WARMUP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        take(step, batch)
    if (steps - WARMUP) % WINDOW == 0:
        times.append(now(device))
    tokens = WINDOW * config.sequences_per_step * config.seq_len
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
    speeds = [tokens / (after - before) for before, after in pairwise(times)]
    return percentiles(speeds) | {"peak_gib": peak}


def their_model(folder: Path, config: RunConfig, vocab_size: int) -> torch.nn.Module:
    """nanoGPT's GPT in our shape, with the initial weights of our run. Raises ValueError if the
    parameter names differ.
    """
    torch.manual_seed(config.seed)
    ours = GPT(config.model, vocab_size=vocab_size, backend=parse_backend("sdpa"))
    settings = {theirs: getattr(config.model, mine) for theirs, mine in NAMES.items()}
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    nanogpt = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = nanogpt  # its dataclass looks its module up there
    spec.loader.exec_module(nanogpt)
    shape = nanogpt.GPTConfig(block_size=config.seq_len, vocab_size=vocab_size, **settings)
    model = nanogpt.GPT(shape)
    # nanoGPT uses GPT-2's names, but stores matrices as nn.Linear does
    weights = {
        f"transformer.{GPT2.their_names(name)[0]}": tensor
        for name, tensor in ours.state_dict().items()
    }
    weights["lm_head.weight"] = ours.token_embedding.weight
    missing, unexpected = model.load_state_dict(weights, strict=False)
    foreign = [name for name in missing if not name.endswith(".attn.bias")] + unexpected
    if foreign:
        raise ValueError(
            f"this model.py is not nanoGPT's as of 2022 to 2025: {', '.join(foreign)} differ"
        )
    return model


def add_noise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            eps = torch.finfo(parameter.dtype).eps
            parameter.mul_(1 + eps * torch.randn(parameter.shape, generator=generator))


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def percentiles(values: list[float]) -> Row:
    """Median, 20th and 80th percentile of tokens per second; each value covers ten steps."""
    low, median, high = np.percentile(values, (20, 50, 80)) if values else (None,) * 3
    return {"step_tokens_per_sec": median, "p20": low, "p80": high, "windows": len(values)}


def in_own_process(train: Callable[..., Row], *arguments: Any, **variation: Any) -> Row:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(train, *arguments, **variation).result()


def compare_speed(options: Options, scratch: Path, seq_len: int) -> Iterator[Row]:
    """Rows of every run at one length; nanoGPT's come first and last."""

    how = {"seq_len": seq_len, "steps": options.steps, "log_every": WINDOW}

    def theirs() -> Row:
        run_dir = scratch / f"{seq_len}-0"
        found = in_own_process(train_theirs, options.folder, run_dir, options.steps)
        return describe("nanogpt", seq_len, options, found)

    for i, name in enumerate(options.attention):
        ours = train_ours(options, scratch / f"{seq_len}-{i}", attention=name, **how)
        if i == 0:  # nanoGPT's run reads its settings from ours
            yield theirs()
        yield describe(name, seq_len, options, ours)
    yield theirs()


def describe(who: str, seq_len: int, options: Comparison, found: Row) -> Row:
    """Print and return the row of a run."""
    row = {"who": who, "seq_len": seq_len, "batch_size": options.tokens // seq_len} | found
    row.pop("losses", None)
    peak = f", {row['peak_gib']:.2f} GiB" if row["peak_gib"] else ""
    print(
        f"{who:28} {seq_len:>6} tokens: {row['step_tokens_per_sec']:>9,.0f} tokens/s, "
        f"steps alone{peak}",
        flush=True,
    )
    return row


def compare_curves(options: Options, scratch: Path) -> Row:
    """Losses step by step, and the root mean square of their differences from nanoGPT's."""
    seq_len, steps = options.seq_len[0], options.curve_steps
    losses = {}
    for i, name in enumerate(options.attention):
        run_dir = scratch / f"curve-{i}"
        ours = train_ours(
            options, run_dir, attention=name, seq_len=seq_len, steps=steps, log_every=1
        )
        losses[name] = ours["losses"]
    variations = {"nanogpt": {}} | NOISE
    if pick_device(options.device).type == "cuda":
        variations |= OTHER_KERNELS
    for name, variation in variations.items():
        arguments = (train_theirs, options.folder, run_dir, steps)
        losses[name] = in_own_process(*arguments, **variation)["losses"]
    found = {"seq_len": seq_len, "steps": steps, "losses": losses, "rms": {}, "mean": {}}
    reference = np.array(list(losses["nanogpt"].values()))
    for name in [name for name in losses if name != "nanogpt"]:
        apart = np.array(list(losses[name].values())) - reference
        rms, mean = float(np.sqrt(np.mean(apart**2))), float(apart.mean())
        found["rms"][name], found["mean"][name] = rms, mean
        print(
            f"{name:28} differs from nanoGPT's loss by {rms:.2e} (rms of {steps} steps), "
            f"{mean:+.2e} in the mean",
            flush=True,
        )
    return found


@command
def main(options: Options) -> None:
    result = options.head() | {"speed": []}
    with tempfile.TemporaryDirectory() as scratch:
        for seq_len in options.seq_len:
            for row in compare_speed(options, Path(scratch), seq_len):
                result["speed"].append(row)
                options.save(result)
        if options.curve_steps:
            result["curves"] = compare_curves(options, Path(scratch))
            options.save(result)


if __name__ == "__main__":
    main()
