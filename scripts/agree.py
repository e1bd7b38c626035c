"""Do your kernels agree? The same weights under several attentions, token by token.

    python -m scripts.agree outputs/2026-01-31/12-00-00 under=naive,tiled,sdpa

Reinforcement learning rolls out under one kernel and trains under another, and a server decodes
under a third. Each kernel rounds differently, so the same weights give different probabilities. The
arguments are runs, sweeps or folders of either, and

    under      attentions, each with options as in tiled:block_kv=16 (naive,tiled,sdpa; on a GPU
               triton too). The first also runs in float32 without autocast. Compare the others'
               differences with the distance between that and the run's dtype
    sequences  held-out sequences, which also serve as prompts (8)
    dtype      of the matrix products: fp32, bf16, fp16 or auto, the run's own (auto)
    tokens     tokens to generate greedily from the first half of each (half of seq_len)
    device     auto, cpu or cuda (auto)
    out        the JSON file (agree.json in the first folder)

For each pair it prints the difference of log p of the held-out tokens, mean and largest, and how
many greedy tokens are equal before the first that differs. For each attention it prints the same
difference between reading a sequence at once and token by token from a cache. Differences are in
nats. For several runs, the table has mean and standard deviation. Runs that failed, ran out of
memory or never ended are left out, with a line each.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from attention import Backend, dtype_name
from model import GPT, KVCache, generate
from scripts.arguments import Count, Device, Dtype, command, default, parse_backend
from scripts.cross_eval import TrainedRun, evaluate_runs, trained_runs
from scripts.tables import Row, by, most, spread, table
from training.loop.trained import data_of, load_trained
from training.record.text_table import printable

# columns of a table: the difference of log p, in nats
DIFFERENCE = {"mean |d log p|": spread("mean", "{:.1e}"), "largest": most("largest")}


@dataclass
class Options:
    paths: list[Path]
    under: list[str] = default()
    sequences: Count = 8
    tokens: Count | None = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    out: Path | None = None


class Reading(NamedTuple):
    """The results of one attention on the held-out sequences."""

    name: str
    log_p: Tensor  # (B, N) float32, of the targets
    continued: Tensor  # (B, tokens) int64, greedy
    decoding: Row | None  # log_p token by token against log_p at once; None without cross_length


@command
def main(options: Options) -> None:
    runs = trained_runs(options.paths, options.device)
    usual = ["naive", "tiled", "sdpa"] + ["triton"] * (runs[0].config.device == "cuda")
    backends = {text: parse_backend(text) for text in options.under or usual}
    out = options.out or options.paths[0] / "agree.json"
    rows = evaluate_runs(runs, out, partial(ask, backends=backends, options=options))
    print(printable(f"{pairs_in_text(rows)}\n{decoding_in_text(rows)}\n{out}"))


@torch.no_grad()
def ask(run: TrainedRun, backends: Mapping[str, Backend], options: Options) -> list[Row]:
    """One row: a run's weights under these attentions, compared pair by pair."""
    if run.config.data.documents:
        raise ValueError("it keeps documents apart, which a cache does not")
    second_half = run.config.seq_len - run.config.seq_len // 2
    tokens = options.tokens or second_half
    if tokens > second_half:
        raise ValueError(f"tokens={tokens}: the second half of seq_len has {second_half}")
    data = data_of(run.config)
    dtype = run.config.dtype if options.dtype == "auto" else options.dtype
    trained = load_trained(run.folder, replace(run.config, dtype=dtype), data.vocab_size)
    model = trained.model.eval()
    inputs, targets, *_ = (x.to(run.config.device) for x in data.val_batch(options.sequences))
    first = next(iter(backends))
    asked = {f"{first} in float32": (backends[first], nullcontext())}
    asked |= {name: (backend, trained.autocast) for name, backend in backends.items()}
    readings = []
    for name, (backend, autocast) in asked.items():
        with model.using(backend=backend), autocast:
            readings.append(read(model, name, inputs, targets, tokens))
    return [
        {
            "dtype": dtype_name(trained.dtype),
            "step": trained.step,
            "data": data.fingerprint,
            "sequences": len(inputs),
            "tokens": tokens,
            "pairs": [compare(a, b) for a, b in combinations(readings, 2)],
            "decoding": [{"attention": x.name} | x.decoding for x in readings if x.decoding],
        }
    ]


def read(model: GPT, name: str, inputs: Tensor, targets: Tensor, tokens: int) -> Reading:
    """Ask the model at once, greedily for `tokens` after the first half, and by steps."""
    pairs = zip(inputs.split(1), targets.split(1), strict=True)
    log_p = torch.cat([log_p_of(model(x).logits, y) for x, y in pairs])
    half = inputs.shape[1] // 2
    cached = "cross_length" in model.backend.features
    continued = generate(
        model, inputs[:, :half], max_new_tokens=tokens, temperature=0, use_cache=cached
    )
    decoding = None
    if cached:
        decoding = difference(decoded(model, inputs, targets, half), log_p[:, half:])
    return Reading(name, log_p, continued[:, half:], decoding)


def log_p_of(logits: Tensor, targets: Tensor) -> Tensor:
    """log p of the targets (B, N)."""
    log_p = logits.float().log_softmax(-1)
    return log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]


def decoded(model: GPT, inputs: Tensor, targets: Tensor, start: int) -> Tensor:
    """log p of the targets from position `start` on, read token by token behind a cache."""
    cache = KVCache(model.config.num_layers, max_len=inputs.shape[1])
    before, *tokens = inputs.split([start, *[1] * (inputs.shape[1] - start)], dim=1)
    model(before, cache=cache)
    logits = [model(token, cache=cache).logits for token in tokens]
    return log_p_of(torch.cat(logits, 1), targets[:, start:])


def difference(a: Tensor, b: Tensor) -> Row:
    distance = (a - b).abs()
    return {"mean": float(distance.mean()), "largest": float(distance.max())}


def compare(a: Reading, b: Reading) -> Row:
    return {
        "a": a.name,
        "b": b.name,
        "log_p": difference(a.log_p, b.log_p),
        # for each prompt: the number of tokens before the first that differs
        "equal_tokens": (a.continued == b.continued).int().cumprod(1).sum(1).tolist(),
    }


def pairs_in_text(rows: Sequence[Row]) -> str:
    def equal(pairs: list[Row]) -> str:
        tokens = [count for pair in pairs for count in pair["equal_tokens"]]
        return f"{median(tokens):g} (least {min(tokens)})"

    counts = " or ".join(map(str, sorted({row["tokens"] for row in rows})))
    pairs = by((pair | pair["log_p"] for row in rows for pair in row["pairs"]), "a", "b")
    lines = {f"{a} and {b}": found for (a, b), found in pairs.items()}
    return table("", lines, DIFFERENCE | {f"equal greedy tokens of {counts}": equal})


def decoding_in_text(rows: Sequence[Row]) -> str:
    found = by((each for row in rows for each in row["decoding"]), "attention")
    return table("token by token against at once", found, DIFFERENCE)


if __name__ == "__main__":
    main()
