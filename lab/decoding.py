"""Measure decoding: GPT-2's tokens per second, beside the same model in plain PyTorch.

    python -m lab.decoding out=decoding.json

Arguments are key=value, lists with commas; all have a default:

    batches    numbers of sequences that GPT-2 124M writes (1,64)
    attention  of that model (triton)
    rounds     how often every variant is timed, in turns (7)
    dtype, device, out    as in scripts.benchmark

Tokens per second are measured between the 64th and the last token, greedy, with weights in `dtype`.
The prompt and the capture of a CUDA graph do not count. Our model is measured as it is, and with
compiled blocks. The peer is the same model in plain PyTorch, compiled, with a static cache and a
CUDA graph. On a CPU nothing is compiled or a graph. `same` is the share of our tokens that the peer
finds likeliest too, after the same tokens: with random weights, a rounding may decide between two.
Variants take turns; a row has the median, least and most of its turns.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from config import ModelConfig
from model import GPT, generate
from model.decoding import captured
from scripts.arguments import Count, Device, Dtype, Json, command, default, parse_backend
from scripts.tables import Row
from training.loop.device import pick_device, pick_dtype
from training.record.environment import measured_on
from training.record.files import write_json

PROMPT, FIRST, LAST = 16, 64, 512  # tokens; those between the first and the last are timed
GPT2 = ModelConfig(num_layers=12, num_heads=12, hidden_size=768, max_seq_len=1024)
LARGER = 5.0  # factor of the first weights, so that the tokens vary


@dataclass
class Options:
    batches: list[Count] = default(1, 64)
    attention: str = "triton"
    rounds: Count = 7
    dtype: Dtype = "auto"
    device: Device = "auto"
    out: Json | None = None


class PlainGPT2:
    """GPT-2's greedy decoding in plain PyTorch, with the weights of our model.

    It uses a static cache, a mask from the position, and on a GPU a CUDA graph of the step.
    """

    def __init__(self, model: GPT, batch: int, *, compiled: bool):
        self.model, config = model, model.config
        weight = model.token_embedding.weight
        shape = (batch, config.num_heads, config.max_seq_len, config.head_dim)
        # in one tensor, torch.compile would copy all layers to change one
        self.caches = [
            (weight.new_zeros(shape), weight.new_zeros(shape)) for _ in range(config.num_layers)
        ]
        self.position = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=weight.device)
        self.step = torch.compile(self.forward, fullgraph=True) if compiled else self.forward
        self.graph: torch.cuda.CUDAGraph | None = None

    def forward(self) -> Tensor:
        """The likeliest token after self.token, (B, 1)."""
        model, config = self.model, self.model.config
        seen = torch.arange(config.max_seq_len, device=self.position.device)
        mask = (seen <= self.position)[None, None, None]  # (1, 1, 1, M)
        x = model.token_embedding(self.token) + model.position_embedding(self.position)
        for block, (k_cache, v_cache) in zip(model.blocks, self.caches, strict=True):
            qkv = block.attention.qkv(normed(block.attention_norm, x))
            q, k, v = qkv.unflatten(-1, (3, config.num_heads, -1)).permute(2, 0, 3, 1, 4)
            k_cache.index_copy_(2, self.position, k)
            v_cache.index_copy_(2, self.position, v)
            out = F.scaled_dot_product_attention(q, k_cache, v_cache, attn_mask=mask)
            x = x + block.attention.proj(out.transpose(1, 2).flatten(2))
            hidden = F.gelu(block.mlp.up(normed(block.mlp_norm, x)), approximate="tanh")
            x = x + block.mlp.down(hidden)
        logits = F.linear(normed(model.final_norm, x), model.token_embedding.weight)
        return logits[:, -1].float().argmax(-1, keepdim=True)

    @torch.no_grad()
    def after(self, at: int, token: Tensor) -> Tensor:
        """The likeliest token after `token` (B, 1), which is number `at` of its sequence."""
        if token.device.type == "cuda" and self.graph is None:
            self.graph, self.next = captured(self.step)
        self.token.copy_(token)
        self.position.fill_(at)
        if self.graph is None:
            return self.step()
        self.graph.replay()
        return self.next.clone()

    def generate(self, prompt: Tensor, new_tokens: int) -> Tensor:
        """The prompt (B, N), read token by token, with its continuation."""
        tokens = list(prompt.split(1, dim=1))
        for at in range(prompt.shape[1] + new_tokens - 1):
            following = self.after(at, tokens[at])
            if at + 1 >= prompt.shape[1]:
                tokens.append(following)
        return torch.cat(tokens, 1)

    def agreement(self, tokens: Tensor) -> float:
        """The share of the tokens (B, N) after the prompt that are the likeliest here too."""
        found = [self.after(at, token) for at, token in enumerate(tokens[:, :-1].split(1, dim=1))]
        return (torch.cat(found, 1) == tokens[:, 1:])[:, PROMPT - 1 :].float().mean().item()


def normed(norm: torch.nn.Module, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias)


def greedy(model: GPT, prompt: Tensor, new_tokens: int) -> Tensor:
    return generate(model, prompt, max_new_tokens=new_tokens, temperature=0.0)


def in_turns(
    calls: dict[str, Callable[[int], Tensor]], batch: int, rounds: int
) -> dict[str, list[Row]]:
    """What each call took, in turns."""
    found: dict[str, list[Row]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times = []
            for count in (FIRST, LAST):
                start = time.perf_counter()
                call(count).sum().item()  # waits for the GPU
                times.append(time.perf_counter() - start)
            rate = batch * (LAST - FIRST) / (times[1] - times[0])
            found[name].append({"tokens_per_second": rate, "whole_call_seconds": times[1]})
    return found


def summary(turns: list[Row]) -> Row:
    """The median of each figure, and the least and most tokens per second."""
    rates = [turn["tokens_per_second"] for turn in turns]
    middle = {name: median(turn[name] for turn in turns) for name in turns[0]}
    return middle | {"least": min(rates), "most": max(rates), "rounds": len(turns)}


def rows_of(batch: int, options: Options, device: torch.device) -> list[Row]:
    """Tokens per second of ours and of the plain model, with each other's tokens compared."""
    torch.manual_seed(0)
    model = GPT(GPT2, vocab_size=50257, backend=parse_backend(options.attention))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(LARGER if weight.dim() > 1 else 1.0)
    model = model.to(device, pick_dtype(options.dtype, device)).eval()
    prompt = torch.randint(50257, (batch, PROMPT), device=device)
    compiled = device.type == "cuda"
    peer = PlainGPT2(model, batch, compiled=compiled)
    ours = partial(greedy, model, prompt)
    calls: dict[str, Callable[[int], Tensor]] = {f"tilegpt, {options.attention}": ours}
    if compiled:
        faster = copy.deepcopy(model)
        for block in faster.blocks:
            block.compile()
        calls[f"tilegpt, {options.attention}, compiled"] = partial(greedy, faster, prompt)
    calls[f"plain PyTorch{', compiled' * compiled}"] = partial(peer.generate, prompt)
    in_turns(calls, batch, 2)  # compiles; the first turn after that may take longer
    same, rows = peer.agreement(ours(LAST)), []
    for name, turns in in_turns(calls, batch, options.rounds).items():
        row = {"batch": batch, "prompt": PROMPT, "new_tokens": LAST, "variant": name}
        rows.append(row | summary(turns) | {"same": same})
    return rows


@command
def main(options: Options) -> None:
    device = pick_device(options.device)
    result: Row = {"environment": measured_on(device), "generation": []}
    for batch in options.batches:
        rows = rows_of(batch, options, device)
        result["generation"] += rows
        for row in rows:
            speed = f"{row['tokens_per_second']:>10,.0f} tokens/s, same {row['same']:.3f}"
            print(f"GPT-2, B={batch:<6} {row['variant']:<28} {speed}", flush=True)
        if options.out:
            write_json(options.out, result)


if __name__ == "__main__":
    main()
