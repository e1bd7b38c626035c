"""Do your kernels agree? The same weights under several attentions, token by token.

    python -m scripts.agree outputs/2026-01-31/12-00-00 under=naive,tiled,sdpa

Reinforcement learning rolls out under one kernel and trains under another. Each kernel rounds
differently, so the same weights give different probabilities. The arguments are runs, sweeps or
folders of either, and

    under      attentions, each with options as in tiled:block_kv=16 (naive,tiled,sdpa; on a GPU
               triton too). The first also runs in float32 without autocast. Compare the others'
               differences with the distance between that and the run's dtype
    sequences  held-out sequences, which also serve as prompts (8)
    dtype      of the matrix products: fp32, bf16, fp16 or auto, the run's own (auto)
    tokens     tokens to generate greedily from the first half of each (half of seq_len)
    device     auto, cpu or cuda (auto)
    out        the JSON file (agree.json in the first folder)

For each pair it prints the difference of log p of the held-out tokens in nats, mean and largest. It
also counts the greedy tokens before the first that differs. For several runs, the table has mean
and standard deviation. Runs that failed, ran out of memory or never ended are left out, with a line
each.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import Backend
from config import RunConfig
from data.interface import IGNORED, TrainingData
from model import GPT, generate
from scripts.arguments import Count, command, default, parse_backend
from scripts.cross_eval import Evaluation, evaluate_runs, trained_runs
from scripts.tables import Row, by, spread, table
from training.loop.trained import Trained


@dataclass
class Options(Evaluation):
    sequences: Count = 8
    under: list[str] = default()
    tokens: Count | None = None


class Reading(NamedTuple):
    """The results of one attention on the held-out sequences."""

    log_p: Tensor  # float32, of each target for which a loss is taken
    written: Tensor  # (B, tokens) int64, greedy


@command
def main(options: Options) -> None:
    runs = trained_runs(options)
    usual = ["naive", "tiled", "sdpa"] + ["triton"] * (runs[0].config.device == "cuda")
    backends = {text: parse_backend(text) for text in options.under or usual}
    evaluate = partial(ask, backends=backends, options=options)
    evaluate_runs(options, runs, evaluate, "agree.json", in_text)


@torch.no_grad()
def ask(
    config: RunConfig,
    data: TrainingData,
    trained: Trained,
    *,
    backends: Mapping[str, Backend],
    options: Options,
) -> list[Row]:
    """A run's weights under these attentions: one row for each pair."""
    if config.data.documents:
        raise ValueError("it keeps documents apart, which a cache does not")
    tokens, model = options.tokens or config.seq_len - config.seq_len // 2, trained.model.eval()
    inputs, targets, *_ = (x.to(config.device) for x in data.val_batch(options.sequences))
    first = next(iter(backends))
    asked = {f"{first} in float32": (backends[first], nullcontext())}
    asked |= {name: (backend, trained.autocast) for name, backend in backends.items()}
    readings = {}
    for name, (backend, autocast) in asked.items():
        with model.using(backend=backend), autocast:
            readings[name] = read(model, inputs, targets, tokens)
    common = {"sequences": len(inputs), "tokens": tokens}
    pairs = combinations(readings, 2)
    return [common | {"a": a, "b": b} | compare(readings[a], readings[b]) for a, b in pairs]


def read(model: GPT, inputs: Tensor, targets: Tensor, tokens: int) -> Reading:
    """Ask the model at once, and greedily for `tokens` after the first half."""
    # one sequence after another: the logits of all may not fit
    losses = [
        F.cross_entropy(model(x[None]).logits[0].float(), y, reduction="none")
        for x, y in zip(inputs, targets, strict=True)
    ]
    log_p = -torch.cat(losses)[targets.flatten() != IGNORED]
    prompts = inputs[:, : inputs.shape[1] // 2]
    cached = "cross_length" in model.backend.features
    written = generate(model, prompts, max_new_tokens=tokens, temperature=0, use_cache=cached)
    return Reading(log_p, written[:, -tokens:])


def compare(a: Reading, b: Reading) -> Row:
    distance = (a.log_p - b.log_p).abs()
    return {
        "mean": float(distance.mean()),
        "largest": float(distance.max()),
        # for each prompt: the number of tokens before the first that differs
        "equal_tokens": (a.written == b.written).int().cumprod(1).sum(1).tolist(),
    }


def in_text(rows: Sequence[Row]) -> str:
    def equal(pairs: list[Row]) -> str:
        counts = [count for pair in pairs for count in pair["equal_tokens"]]
        return f"{median(counts):g} (least {min(counts)})"

    tokens = " or ".join(map(str, sorted({row["tokens"] for row in rows})))
    columns = {
        "mean |d log p|": spread("mean", "{:.1e}"),  # in nats
        "largest": lambda pairs: f"{max(pair['largest'] for pair in pairs):.1e}",
        f"equal greedy tokens of {tokens}": equal,
    }
    lines = {f"{a} and {b}": own for (a, b), own in by(rows, "a", "b").items()}
    return table("", lines, columns)


if __name__ == "__main__":
    main()
