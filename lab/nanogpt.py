"""Our training beside nanoGPT's: tokens per second, peak memory and the loss, from the same weights
over the same batches.

    python -m lab.nanogpt folder=../nanoGPT seq_len=1024,8192 attention=triton out=nanogpt.json

nanoGPT (github.com/karpathy/nanoGPT) is no part of this project: folder= is your clone of it, of
which model.py is read. Its step is that of its train.py: TF32, autocast, torch.compile, its own
fused AdamW, clipping; batches wait in pinned memory. Ours is `python train.py` as anyone runs it,
data, logging and all. Each has a process of its own, nanoGPT's runs first and last at every length,
and both see the same batches. The speeds are those of the steps alone: what our run does between
two steps for a row of metrics, nanoGPT's loop does not do.

    attention     several, separated by commas: triton,sdpa:backend=cudnn
    seq_len       several lengths; tokens=32768 is the size of every pass, which is one step
    steps         steps of each run; the first ten are not timed, and the rest are timed ten by ten
    curve_steps   steps of a further run of each at the first length whose losses are compared one
                  by one; 0 for none. nanoGPT runs there again with nothing changed but roundings:
                  from weights moved by one, and on a GPU in other kernels, which round in every
                  step, as ours do. What such noise does is the measure of any difference
    model, vocab_size, data, tokenizer, lr, device    as in train.py; the vocabulary is nanoGPT's
                                                      padded one

Anything else is our train.py's own, as model.checkpoint=elementwise.
"""

import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields
from io import StringIO
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from model import GPT
from model.gpt2_weights import gpt2_name
from scripts.arguments import parse_backend, read_settings
from scripts.sample import read_config
from training.command_line import check_keys
from training.device import pick_device, pick_dtype
from training.interrupt import one_line
from training.metrics import check_writable, measured_on, read_metrics, write_json
from training.optimizer import set_learning_rate

ROOT = Path(__file__).resolve().parent.parent
WARMUP, WINDOW = 10, 10  # steps that are not timed, and steps timed together
# what moves nanoGPT's losses by roundings alone
NOISE = {"nanogpt, noise 1": {"noise_seed": 1}, "nanogpt, noise 2": {"noise_seed": 2}}
OTHER_KERNELS = {
    "nanogpt, not compiled": {"compiled": False},
    "nanogpt, flash attention": {"cudnn": False},
}
# what nanoGPT's GPTConfig calls our settings
NAMES = {
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_embd": "hidden_size",
    "dropout": "dropout",
    "bias": "bias",
}


@dataclass
class Options:
    folder: Path
    out: Path | None = None
    seq_len: str = "1024,8192,32768"
    attention: str = "triton"
    tokens: int = 32768
    steps: int = 60
    curve_steps: int = 300
    model: str = "gpt2"
    vocab_size: int = 50304
    data: str = "torch_source"
    tokenizer: str = "bpe"
    lr: float = 6e-4
    device: str = "auto"
    overrides: list[str] = field(default_factory=list)  # passed on to train.py


def read_options(arguments: list[str]) -> Options:
    """Options from key=value arguments. Raises ValueError for what cannot be run."""
    own = {each.name for each in fields(Options)} - {"overrides"}
    passed_on = [argument for argument in arguments if argument.partition("=")[0] not in own]
    values = read_settings(
        Options, [argument for argument in arguments if argument not in passed_on]
    )
    if "folder" not in values:
        raise ValueError("folder=DIR is missing: a clone of github.com/karpathy/nanoGPT")
    check_keys(passed_on)
    options = Options(**values, overrides=passed_on)
    if not (options.folder / "model.py").is_file():
        raise ValueError(
            f"folder={options.folder} has no model.py; git clone "
            "https://github.com/karpathy/nanoGPT names the folder wanted"
        )
    if options.steps < WARMUP + WINDOW:
        raise ValueError(
            f"steps={options.steps} must be at least {WARMUP + WINDOW}: the first {WARMUP} "
            "are not timed"
        )
    for length in lengths(options):
        if options.tokens % length:
            raise ValueError(f"tokens={options.tokens} is not a multiple of seq_len={length}")
    for name in options.attention.split(","):
        parse_backend(name)
    if options.out:
        check_writable(options.out)
    return options


def lengths(options: Options) -> list[int]:
    try:
        found = [int(length) for length in options.seq_len.split(",")]
    except ValueError:
        raise ValueError(
            f"seq_len={options.seq_len} is no list of lengths such as 1024,8192"
        ) from None
    if min(found) < 1:
        raise ValueError(f"seq_len={options.seq_len} must be at least 1")
    return found


def train_ours(
    options: Options, run_dir: Path, *, attention: str, seq_len: int, steps: int, log_every: int
) -> dict[str, Any]:
    """One `python train.py`. Raises ValueError with its last words where it fails."""
    name, _, rest = attention.partition(":")
    settings = {
        "model": options.model,
        "data": options.data,
        "tokenizer": options.tokenizer,
        "tokenizer.vocab_size": options.vocab_size,
        "optim.lr": options.lr,
        "device": options.device,
        "attention": name,
        "seq_len": seq_len,
        "batch_size": options.tokens // seq_len,
        "steps": steps,
        "log_every": log_every,
        "eval_every": 0,  # nanoGPT's loop neither evaluates nor looks into its attention meanwhile
        "checkpoint_every": steps,
        "sample_tokens": 0,
        "logger": "none",
        "hydra.run.dir": run_dir,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()] + [
        f"attention.{option}" for option in rest.split(",") if option
    ]
    overrides += options.overrides
    done = subprocess.run(
        [sys.executable, "train.py", *overrides], cwd=ROOT, capture_output=True, text=True
    )
    summary = (
        json.loads((run_dir / "summary.json").read_text())
        if (run_dir / "summary.json").exists()
        else {}
    )
    if done.returncode or summary.get("status") != "completed":
        raise ValueError(
            f"train.py {' '.join(overrides)} ended {summary.get('status')}: "
            f"{(done.stdout + done.stderr).strip()[-500:]}"
        )
    rows = read_metrics(run_dir / "metrics.jsonl")
    timed = [
        row["step_tokens_per_sec"]
        for row in rows
        if row["step"] > WARMUP and row.get("step_tokens_per_sec")
    ]
    peak = max(
        (row["memory/peak_gib"] for row in rows if row["step"] > 0 and row.get("memory/peak_gib")),
        default=None,
    )
    return spread(timed) | {
        "peak_gib": peak,
        "losses": {row["step"]: row["train/loss"] for row in rows if "train/loss" in row},
    }


def train_theirs(
    folder: Path,
    run_dir: Path,
    steps: int,
    *,
    noise_seed: int | None = None,
    compiled: bool = True,
    cudnn: bool = True,
) -> dict[str, Any]:
    """nanoGPT's step under the settings of one of our runs.

    noise_seed moves the initial weights by about a rounding error; without cudnn PyTorch takes
    flash for its attention.
    """
    from data import build_data

    config = read_config(run_dir)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
        True  # as its train.py does
    )
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    data = build_data(config.data, config.tokenizer, seq_len=config.seq_len, seed=config.seed)
    torch.manual_seed(config.seed)
    ours = GPT(config.model, vocab_size=data.vocab_size, backend=parse_backend("sdpa"))
    settings = {theirs: getattr(config.model, mine) for theirs, mine in NAMES.items()}
    nanogpt = load_model_file(folder)
    with redirect_stdout(StringIO()):  # it counts its parameters aloud
        model = nanogpt.GPT(
            nanogpt.GPTConfig(block_size=config.seq_len, vocab_size=data.vocab_size, **settings)
        )
    take_weights(model, ours)
    if noise_seed is not None:
        add_noise(model, noise_seed)
    model.to(device)
    optim = config.optimizer()
    with redirect_stdout(StringIO()):
        optimizer = model.configure_optimizers(
            optim.weight_decay, optim.lr, (optim.beta1, optim.beta2), device.type
        )
    run = torch.compile(model) if compiled and device.type == "cuda" else model
    batches = [data.train_batch(step, config.sequences_per_step) for step in range(steps)]
    batches = [
        tuple(tensor.pin_memory() if device.type == "cuda" else tensor for tensor in batch[:2])
        for batch in batches
    ]

    losses, times = [], []
    for step, (inputs, targets) in enumerate(batches):
        if step >= WARMUP and (step - WARMUP) % WINDOW == 0:
            times.append(now(device))
        if step == WARMUP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        set_learning_rate(optimizer, step, config.steps, optim)
        inputs, targets = (
            inputs.to(device, non_blocking=True),
            targets.to(device, non_blocking=True),
        )
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            _, loss = run(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    if (steps - WARMUP) % WINDOW == 0:
        times.append(now(device))
    tokens = WINDOW * config.sequences_per_step * config.seq_len
    peak = torch.cuda.max_memory_allocated() / 1024**3 if device.type == "cuda" else None
    found = {
        "peak_gib": peak,
        "losses": {step + 1: loss.item() for step, loss in enumerate(losses)},
    }
    return spread([tokens / (after - before) for before, after in pairwise(times)]) | found


def load_model_file(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


def take_weights(model: torch.nn.Module, ours: GPT) -> None:
    """nanoGPT keeps GPT-2's names, and its matrices the way nn.Linear does. Raises ValueError where
    the two differ.
    """
    weights = {
        f"transformer.{gpt2_name(name)}": tensor for name, tensor in ours.state_dict().items()
    }
    weights["lm_head.weight"] = ours.token_embedding.weight
    missing, unexpected = model.load_state_dict(weights, strict=False)
    foreign = [name for name in missing if not name.endswith(".attn.bias")] + unexpected
    if foreign:
        raise ValueError(
            f"this model.py is not nanoGPT's as of 2022 to 2025: {', '.join(foreign)} differ"
        )


def add_noise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(
                1
                + torch.finfo(parameter.dtype).eps
                * torch.randn(parameter.shape, generator=generator)
            )


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def spread(values: list[float]) -> dict[str, Any]:
    """Median with the 20th and 80th percentile of the steps' tokens per second, each over ten
    steps.
    """
    low, median, high = np.percentile(values, (20, 50, 80)) if values else (None,) * 3
    return {"step_tokens_per_sec": median, "p20": low, "p80": high, "windows": len(values)}


def in_own_process(*arguments: Any, **variation: Any) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(train_theirs, *arguments, **variation).result()


def compare_speed(options: Options, scratch: Path, seq_len: int) -> Iterator[dict[str, Any]]:
    """Every run at one length, nanoGPT's first and last."""
    names = options.attention.split(",")
    for i, name in enumerate(names):
        run_dir = scratch / f"{seq_len}-{i}"
        found = {
            name: train_ours(
                options,
                run_dir,
                attention=name,
                seq_len=seq_len,
                steps=options.steps,
                log_every=WINDOW,
            )
        }
        if name == names[0]:  # which reads its settings from a run of ours
            found = {"nanogpt": in_own_process(options.folder, run_dir, options.steps)} | found
        for who, row in found.items():
            yield describe(who, seq_len, options, row)
    yield describe(
        "nanogpt", seq_len, options, in_own_process(options.folder, run_dir, options.steps)
    )


def describe(who: str, seq_len: int, options: Options, found: dict[str, Any]) -> dict[str, Any]:
    """The row of a run, which is printed too."""
    row = {"who": who, "seq_len": seq_len, "batch_size": options.tokens // seq_len} | found
    row.pop("losses")
    peak = f", {row['peak_gib']:.2f} GiB" if row["peak_gib"] else ""
    print(
        f"{who:28} {seq_len:>6} tokens: {row['step_tokens_per_sec']:>9,.0f} tokens/s, "
        f"steps alone{peak}",
        flush=True,
    )
    return row


def compare_curves(options: Options, scratch: Path) -> dict[str, Any]:
    """Losses step by step, and the root mean square of their differences from nanoGPT's."""
    seq_len, steps = lengths(options)[0], options.curve_steps
    losses = {}
    for i, name in enumerate(options.attention.split(",")):
        run_dir = scratch / f"curve-{i}"
        losses[name] = train_ours(
            options, run_dir, attention=name, seq_len=seq_len, steps=steps, log_every=1
        )["losses"]
    on_a_gpu = pick_device(options.device).type == "cuda"
    for name, variation in ({"nanogpt": {}} | NOISE | (OTHER_KERNELS if on_a_gpu else {})).items():
        losses[name] = in_own_process(options.folder, run_dir, steps, **variation)["losses"]
    reference = np.array(list(losses["nanogpt"].values()))
    apart = {
        name: np.array(list(curve.values())) - reference
        for name, curve in losses.items()
        if name != "nanogpt"
    }
    rms = {name: float(np.sqrt(np.mean(difference**2))) for name, difference in apart.items()}
    mean = {name: float(difference.mean()) for name, difference in apart.items()}
    for name in apart:
        print(
            f"{name:28} differs from nanoGPT's loss by {rms[name]:.2e} (rms of {steps} steps), "
            f"{mean[name]:+.2e} in the mean",
            flush=True,
        )
    return {"seq_len": seq_len, "steps": steps, "losses": losses, "rms": rms, "mean": mean}


@one_line("nanogpt")
def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    try:
        options = read_options(sys.argv[1:])
        settings = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(options).items()
            if key not in ("folder", "out")
        }
        found = {
            "environment": measured_on(pick_device(options.device)),
            "settings": settings,
            "speed": [],
        }
        with tempfile.TemporaryDirectory() as scratch:
            for seq_len in lengths(options):
                for row in compare_speed(options, Path(scratch), seq_len):
                    found["speed"].append(row)
                    save(options.out, found)
            if options.curve_steps:
                found["curves"] = compare_curves(options, Path(scratch))
                save(options.out, found)
    except ValueError as error:
        sys.exit(f"nanogpt: {error}")


def save(path: Path | None, found: dict[str, Any]) -> None:
    """After every run: what was measured is kept, whatever becomes of the rest."""
    if path:
        write_json(path, found)


if __name__ == "__main__":
    main()
