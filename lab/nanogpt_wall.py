"""How long whole runs take: nanoGPT's own train.py beside our `python train.py`, by the wall clock.

    python -m lab.nanogpt_wall folder=../nanoGPT seq_len=1024 steps=600 rounds=3 out=wall.json

nanoGPT (github.com/karpathy/nanoGPT) is not part of this project: folder= is your clone, whose
train.py runs unchanged in a scratch folder. Both programs train the same shape of model on the same
tokens under the same learning rates. Their initial weights and batches differ.

    seq_len      several lengths; tokens=32768 is the size of every step, in one pass
    steps        optimizer steps of each run (600): one number, or one for each length
    rounds       runs of each program at each length (3), in turns; nanoGPT is first
    attention    several, separated by commas: triton,sdpa:backend=cudnn
    eval_iters   passes of each evaluation of nanoGPT (20), on each of its two splits
    out          the JSON file to write; a file of that name is replaced
    model, vocab_size, device    as in train.py; the vocabulary is nanoGPT's padded one

Other arguments are settings of our train.py. The defaults are data=torch_source tokenizer=bpe.

A run's seconds are those of its process: start, compilation, steps, an evaluation before and one
after them, and a checkpoint. Building token files is not counted. In each evaluation both models
read the same number of tokens. nanoGPT evaluates training and held-out text. We evaluate held-out
text twice, under our own and under exact attention.

Rows arrive every ten steps, and their times give the speed of the steps alone. The third row is the
first that counts, the last is the one before the last evaluation. Each program has its own caches
at each length: of its compilers, and of Python's bytecode. They are empty in the first round, which
is "cold", and filled in later ones.
"""

import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from attention import dtype_name
from config import RunConfig
from data.batches import TextData
from scripts.arguments import Count, Device, Json, command, default, parse_backend
from scripts.tables import Row, by
from training.launch.command_line import compose
from training.loop.device import pick_device, pick_dtype
from training.loop.trained import data_of
from training.record.environment import ROOT, measured_on
from training.record.files import read_mapping, read_metrics, write_json

LOG_EVERY = 10  # steps
THEIR_VOCABULARY = 50304  # without a meta.pkl beside the tokens
THEIR_FILES = ("train.py", "model.py", "configurator.py")
# names in nanoGPT's GPTConfig: our settings
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
    out: Json | None = None
    seq_len: list[Count] = default(1024, 8192, 32768)
    attention: list[str] = default("triton")
    tokens: Count = 32768
    # the speed needs two rows after the first two
    steps: list[Annotated[int, Field(ge=4 * LOG_EVERY)]] = default(600)
    rounds: Count = 3
    eval_iters: Count = 20
    model: str = "gpt2"
    vocab_size: int = THEIR_VOCABULARY
    device: Device = "auto"
    overrides: list[str] = default()  # train.py's own settings

    def __post_init__(self) -> None:
        missing = [name for name in THEIR_FILES if not (self.folder / name).is_file()]
        if missing:
            raise ValueError(
                f"folder={self.folder} has no {', '.join(missing)}; it is what git clone "
                "https://github.com/karpathy/nanoGPT makes"
            )
        for name in ("seq_len", "attention"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name}={','.join(map(str, values))} names one of them twice")
        for length in self.seq_len:
            if self.tokens % length:
                raise ValueError(f"tokens={self.tokens} is not a multiple of seq_len={length}")
        for name in self.attention:
            parse_backend(name)
        if len(self.steps) == 1:
            self.steps *= len(self.seq_len)
        if len(self.steps) != len(self.seq_len):
            raise ValueError(
                f"steps= has {len(self.steps)} numbers for {len(self.seq_len)} lengths; give one "
                "number, or one for each length"
            )

    def settings(self, attention: str, seq_len: int, steps: int) -> list[str]:
        """The settings of one of our runs."""
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
            "log_every": LOG_EVERY,
            "eval_every": steps,
            # we pass every held-out sequence through the model twice
            "eval_sequences": self.eval_iters * self.tokens // seq_len,
            "diagnose_every": 0,
        }
        overrides = [f"{key}={value}" for key, value in settings.items()]
        overrides += [f"attention.{option}" for option in rest.split(",") if option]
        return overrides + self.overrides


def prepare(options: Options, home: Path) -> None:
    """Make `home` the folder in which nanoGPT's train.py runs: its files, and our tokens."""
    longest = max(options.seq_len)
    config = compose(*options.settings(options.attention[0], longest, options.steps[0]))
    data, folder = data_of(config), home / "data/tokens"
    if not isinstance(data, TextData):
        raise ValueError(f"data={config.data.source} is not text, which nanoGPT needs")
    for name in THEIR_FILES:
        shutil.copy(options.folder / name, home)
    folder.mkdir(parents=True)
    for name, tokens in {"train": data.train, "val": data.val}.items():
        whole = tokens.rows(np.zeros(1, np.int64), len(tokens))
        whole.astype(np.uint16).tofile(folder / f"{name}.bin")
    if options.vocab_size != THEIR_VOCABULARY:
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": options.vocab_size}))


def their_arguments(config: RunConfig, eval_iters: int) -> list[str]:
    """The arguments of nanoGPT's train.py for the settings of one of our runs."""
    device, optim = pick_device(config.device), config.optimizer()
    last = config.steps - 1  # it counts from 0, and max_iters is its last iteration
    same = ("min_lr", "weight_decay", "beta1", "beta2", "grad_clip")
    settings = {theirs: getattr(config.model, mine) for theirs, mine in NAMES.items()}
    settings |= {name: getattr(optim, name) for name in same}
    settings |= {
        "learning_rate": optim.lr,
        # the warm-up of learning_rate(); nanoGPT reaches its end one iteration later than it says
        "warmup_iters": max(min(optim.warmup_steps, max(1, config.steps // 10)) - 1, 0),
        "lr_decay_iters": last,
        "max_iters": last,
        "eval_interval": last,
        "eval_iters": eval_iters,
        "log_interval": LOG_EVERY,
        "batch_size": config.batch_size,
        "block_size": config.seq_len,
        "gradient_accumulation_steps": 1,
        "dataset": "tokens",
        "out_dir": "out",
        "wandb_log": False,
        "device": device.type,
        "dtype": dtype_name(pick_dtype(config.dtype, device)),
        "compile": device.type == "cuda",
    }
    return [f"--{key}={value}" for key, value in settings.items()]


def watch(
    arguments: Sequence[str], log: Path, steps: Callable[[], Iterable[int]], **where: Any
) -> tuple[int, float, dict[int, float]]:
    """Run `python ARGUMENTS` with its output in `log`. Returns its exit code, its seconds, and the
    seconds from its start to the arrival of each step that `steps` finds.
    """
    begin, seconds, arrivals = time.perf_counter(), 0.0, {}
    with log.open("w") as output:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, **where, stdout=output, stderr=output)
        running = True
        while running:
            time.sleep(0.02)
            running = process.poll() is None
            seconds = time.perf_counter() - begin
            for step in steps():
                arrivals.setdefault(step, seconds)
    return process.returncode, seconds, arrivals


def run_ours(run_dir: Path, overrides: list[str], **variables: str) -> Row:
    """One run of our train.py: its seconds, the arrival of each row, and what it reports. Raises
    ValueError with the end of its output if it does not complete.
    """
    log = run_dir.with_suffix(".log")

    def steps() -> list[int]:
        return [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")]

    arguments = ["train.py", *overrides, f"hydra.run.dir={run_dir}"]
    _, seconds, arrivals = watch(arguments, log, steps, cwd=ROOT, env=os.environ | variables)
    summary = read_mapping(run_dir / "summary.json")
    if summary.get("status") != "completed":
        raise ValueError(
            f"train.py {' '.join(overrides)} ended {summary.get('status')}: "
            f"{log.read_text()[-500:]}"
        )
    reported = {key: summary[key] for key in ("memory/peak_gib", "val/loss") if key in summary}
    return {"seconds": seconds, "arrivals": arrivals} | reported


def run_theirs(home: Path, arguments: list[str], **variables: str) -> Row:
    """One run of nanoGPT's train.py. Raises ValueError with the end of its output if it fails."""
    log = home / "log"

    def steps() -> list[int]:
        return [int(step) for step in re.findall(r"^iter (\d+): ", log.read_text(), re.MULTILINE)]

    where = {"cwd": home, "env": os.environ | {"PYTHONUNBUFFERED": "1"} | variables}
    code, seconds, arrivals = watch(["train.py", *arguments], log, steps, **where)
    output = log.read_text()
    losses = re.findall(r"val loss (\S+)", output)
    if code or len(arrivals) < 4 or not losses:
        raise ValueError(
            f"nanoGPT's train.py {' '.join(arguments)} ended with code {code} after "
            f"{len(arrivals)} rows: {output.strip()[-500:]}"
        )
    return {"seconds": seconds, "arrivals": arrivals, "val/loss": float(losses[-1])}


def by_arrival(arrivals: dict[int, float], tokens: int) -> float:
    """Tokens per second from the third row, when everything is compiled, to the last, with `tokens`
    a step. Raises ValueError if these arrived at once.
    """
    _, _, (first, begin), *_, (last, end) = arrivals.items()
    if end == begin:
        raise ValueError(f"the rows of steps {first} to {last} arrived at once; take more steps")
    return (last - first) * tokens / (end - begin)


def run_once(options: Options, home: Path, who: str, seq_len: int, steps: int) -> Row:
    """The row of one run, without its round."""
    caches = home / "caches" / f"{seq_len}-{[*options.attention, 'nanogpt'].index(who)}"
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTHONPYCACHEPREFIX")
    variables = {name: str(caches / name) for name in names}
    variables["PYTHONDONTWRITEBYTECODE"] = ""  # without bytecode every start takes seconds longer
    if who == "nanogpt":
        config = compose(*options.settings(options.attention[0], seq_len, steps))
        run = run_theirs(home, their_arguments(config, options.eval_iters), **variables)
    else:
        run = run_ours(home / "ours", options.settings(who, seq_len, steps), **variables)
    for name in ("out", "ours"):  # the checkpoints are large
        shutil.rmtree(home / name, ignore_errors=True)
    # our last row arrives after the last evaluation
    arrivals = {step: seconds for step, seconds in run["arrivals"].items() if step < steps}
    row = {"who": who, "seq_len": seq_len, "steps": steps}
    row["tokens_per_sec"] = by_arrival(arrivals, options.tokens)
    return row | run


def measure(options: Options, home: Path) -> Iterator[Row]:
    """The row of every run; the programs take turns."""
    for seq_len, steps in zip(options.seq_len, options.steps, strict=True):
        for number in range(options.rounds):
            for who in ("nanogpt", *options.attention):
                row = run_once(options, home, who, seq_len, steps)
                print(
                    f"{who:28} {seq_len:>6} tokens, round {number}: {row['seconds']:.1f} s, "
                    f"{row['tokens_per_sec']:,.0f} tokens/s, steps alone, "
                    f"val loss {row['val/loss']:.3f}",
                    flush=True,
                )
                yield {"round": number, "cold": number == 0} | row


def compared(runs: list[Row]) -> list[Row]:
    """How many times as fast as nanoGPT each attention is, at each length, in each round."""
    found, groups = [], by(runs, "seq_len", "who")
    for (seq_len, who), ours in groups.items():
        if who != "nanogpt":
            pairs = list(zip(groups[seq_len, "nanogpt"], ours, strict=False))
            wall = [theirs["seconds"] / own["seconds"] for theirs, own in pairs]
            steps = [own["tokens_per_sec"] / theirs["tokens_per_sec"] for theirs, own in pairs]
            row = {"seq_len": seq_len, "who": who}
            found.append(row | {"seconds": {"rounds": wall}, "tokens_per_sec": {"rounds": steps}})
    return found


@command
def main(options: Options) -> None:
    where = measured_on(pick_device(options.device))
    settings = {key: x for key, x in vars(options).items() if key not in ("folder", "out")}
    runs = []
    with tempfile.TemporaryDirectory() as home:
        prepare(options, Path(home))
        for row in measure(options, Path(home)):
            runs.append(row)
            if options.out:
                result = {"environment": where, "settings": settings, "ratios": compared(runs)}
                write_json(options.out, result | {"runs": runs})
    for row in compared(runs):
        for name, title in {"seconds": "whole runs", "tokens_per_sec": "steps alone"}.items():
            times = ", ".join(f"{x:.2f}" for x in row[name]["rounds"])
            print(f"{row['who']}, {row['seq_len']} tokens, {title}: {times} times as fast")


if __name__ == "__main__":
    main()
