"""Do your kernels agree? The same weights under several attentions, token by token.

    python -m scripts.agree outputs/2026-01-31/12-00-00 under=naive,tiled,sdpa

Reinforcement learning rolls out under one kernel and trains under another, and a server decodes
under a third. Each kernel rounds differently, so the same weights give different probabilities. The
arguments are one run or several (for example with other seeds), and

    under      attentions, each with options as in tiled:block_kv=16 (naive,tiled,sdpa; on a GPU
               triton too). The first also runs in float32 without autocast. Compare the others'
               differences with the distance between that and the run's dtype
    sequences  held-out sequences, which also serve as prompts (8)
    dtype      of the matrix products: fp32, bf16, fp16 or auto, the run's own (auto)
    tokens     tokens to generate greedily from the first half of each (half of seq_len)
    device     auto, cpu or cuda (auto)
    out        the JSON file (agree.json in the first run's folder)

For each pair it prints the difference of log p of the held-out tokens, mean and largest; how often
the likeliest token differs; and how many greedy tokens are equal before the first that differs. For
each attention it prints the same difference between reading a sequence at once and token by token
from a cache. Differences are in nats. For several runs, the table has mean and standard deviation.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from attention import Backend, dtype_name
from attention.look.blame import is_foreign, with_place
from model import GPT, KVCache, generate
from scripts.arguments import Count, Device, Dtype, command, default, parse_backend
from scripts.tables import Row, by, most, spread, table
from training.loop.device import pick_device
from training.loop.trained import data_of, load_trained, read_run_config
from training.record.environment import environment
from training.record.files import check_writable, write_json


@dataclass
class Options:
    paths: list[Path]
    under: list[str] = default()
    sequences: Count = 8
    tokens: Count | None = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    out: Path | None = None

    def __post_init__(self) -> None:
        if len(self.under) == 1:
            raise ValueError(f"under={self.under[0]} is one attention: name two or more")


class Reading(NamedTuple):
    """The results of one attention on the held-out sequences."""

    name: str
    log_p: Tensor  # (B, N) float32, of the targets
    likeliest: Tensor  # (B, N) int64
    continued: Tensor  # (B, tokens) int64, greedy
    decoding: Row | None  # log_p token by token against log_p at once; None without cross_length


@command
def main(options: Options) -> None:
    device = pick_device(options.device)
    for folder in options.paths:  # before check_writable() creates the folder of a mistyped run
        if read_run_config(folder).data.documents:
            why = "keeps documents apart, which a cache does not; choose another"
            raise ValueError(f"{folder} {why}")
    out = options.out or options.paths[0] / "agree.json"
    check_writable(out)
    usual = ["naive", "tiled", "sdpa"] + ["triton"] * (device.type == "cuda")
    backends = {text: parse_backend(text) for text in options.under or usual}
    runs = [ask(folder, backends, device, options) for folder in options.paths]
    print(pairs_in_text(runs))
    print(decoding_in_text(runs))
    write_json(out, {"runs": runs})
    print(out)


@torch.no_grad()
def ask(folder: Path, backends: dict[str, Backend], device: torch.device, options: Options) -> Row:
    """Compare a run's weights under these attentions, pair by pair."""
    config = read_run_config(folder)
    data = data_of(config)
    dtype = config.dtype if options.dtype == "auto" else options.dtype
    config = replace(config, device=device.type, dtype=dtype)
    trained = load_trained(folder, config, data.vocab_size)
    trained.model.eval()
    inputs, targets, *_ = (x.to(device) for x in data.val_batch(options.sequences))
    half = config.seq_len // 2
    count = min(options.tokens or half, config.seq_len - half)
    first = next(iter(backends))
    in_float32 = f"{first} in float32", backends[first], nullcontext()
    others = [(name, backend, trained.autocast) for name, backend in backends.items()]
    readings = []
    try:
        for _, backend, autocast in others:  # one that fails is told before the others take time
            with trained.model.using(backend=backend), autocast:
                trained.model(inputs[:1])
        for name, backend, autocast in (in_float32, *others):
            with trained.model.using(backend=backend), autocast:
                readings.append(read(trained.model, name, inputs, targets, half, count))
    except Exception as error:
        if not is_foreign(error):
            raise
        raise ValueError(f"attention={backend.name} fails: {with_place(error)}") from error
    return {
        "environment": environment(data.fingerprint, device),
        "run": str(folder),
        "dtype": dtype_name(trained.dtype),
        "step": trained.step,
        "sequences": len(inputs),
        "seq_len": config.seq_len,
        "tokens": count,
        "pairs": [compare(a, b) for a, b in combinations(readings, 2)],
        "decoding": [{"attention": x.name} | x.decoding for x in readings if x.decoding],
    }


def read(model: GPT, name: str, inputs: Tensor, targets: Tensor, half: int, count: int) -> Reading:
    """Ask the model at once, greedily for `count` tokens after `half` of them, and by steps."""
    rows = [log_p_of(model(x[None]).logits, y[None]) for x, y in zip(inputs, targets, strict=True)]
    log_p, likeliest = (torch.cat(each) for each in zip(*rows, strict=True))
    cached = "cross_length" in model.backend.features
    continued = generate(
        model, inputs[:, :half], max_new_tokens=count, temperature=0, use_cache=cached
    )
    decoding = None
    if cached:
        decoding = difference(decoded(model, inputs, targets, half), log_p[:, half:])
    return Reading(name, log_p, likeliest, continued[:, half:], decoding)


def log_p_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """log p of the targets (B, N), and the likeliest tokens."""
    log_p = logits.float().log_softmax(-1)
    return log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0], logits.argmax(-1)


def decoded(model: GPT, inputs: Tensor, targets: Tensor, start: int) -> Tensor:
    """log p of the targets from position `start` on, read token by token behind a cache."""
    cache = KVCache(model.config.num_layers, max_len=inputs.shape[1])
    if start:
        model(inputs[:, :start], cache=cache)
    steps = range(start, inputs.shape[1])
    logits = [model(inputs[:, i : i + 1], cache=cache).logits for i in steps]
    return log_p_of(torch.cat(logits, 1), targets[:, start:])[0]


def difference(a: Tensor, b: Tensor) -> Row:
    distance = (a - b).abs()
    return {"mean": float(distance.mean()), "largest": float(distance.max())}


def compare(a: Reading, b: Reading) -> Row:
    same = (a.continued == b.continued).int().cumprod(1).sum(1).tolist()
    return {
        "a": a.name,
        "b": b.name,
        "log_p": difference(a.log_p, b.log_p),
        "other_token": float((a.likeliest != b.likeliest).float().mean()),
        # for each prompt: the number of tokens before the first that differs
        "equal_tokens": same,
    }


def pairs_in_text(runs: list[Row]) -> str:
    def equal(rows: list[Row]) -> str:
        tokens = [count for row in rows for count in row["equal_tokens"]]
        return f"{median(tokens):g} (least {min(tokens)})"

    counts = " or ".join(map(str, sorted({run["tokens"] for run in runs})))
    pairs = by((pair | pair["log_p"] for run in runs for pair in run["pairs"]), "a", "b")
    columns = {
        "mean |d log p|": spread("mean", "{:.1e}"),
        "largest": most("largest"),
        "other token": spread("other_token", "{:.2%}"),
        f"equal greedy tokens of {counts}": equal,
    }
    return table("", {f"{a} and {b}": rows for (a, b), rows in pairs.items()}, columns)


def decoding_in_text(runs: list[Row]) -> str:
    rows = by((row for run in runs for row in run["decoding"]), "attention")
    columns = {"mean |d log p|": spread("mean", "{:.1e}"), "largest": most("largest")}
    return table("token by token against at once", rows, columns)


if __name__ == "__main__":
    main()
