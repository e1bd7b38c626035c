"""Measure decoding: one query per sequence against a long cache, and GPT-2's tokens per second.

    python -m lab.decoding out=decoding.json

Arguments are key=value, lists with commas; all have a default:

    shapes     names in SHAPES, or none (all)
    batches    numbers of sequences that GPT-2 124M writes (1,64); 0 leaves it out
    attention  of that model (triton)
    rounds     how often every variant is timed, in turns (7)
    dtype, device, out    as in scripts.benchmark

Attention is timed as in scripts.benchmark: the device's time with a cold cache, and separately the
host's time of an eager call. The pages of a paged cache are in random order. Bytes count the keys
and values, each read once. A variant whose error exceeds the budget of conformance is not timed.
Peers are PyTorch's flash, cuDNN and memory-efficient kernels and compiled FlexAttention.

Tokens per second are measured between the 64th and the last token, greedy, with weights in `dtype`.
The prompt and the capture of a CUDA graph do not count. The peer is the same model in plain
PyTorch, with a static cache and a CUDA graph, once eager and once compiled. `same` is the share of
our tokens that the peer finds likeliest too, after the same tokens: with random weights, a rounding
may decide between two. Variants take turns; a row has the median, least and most of its turns.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import attention, attention_with_cache, get_backend
from config import ModelConfig
from conformance.cases import distance
from conformance.errors import in_one_line
from model import GPT, generate
from model.decoding import captured
from scripts.arguments import Count, Device, Dtype, Json, Natural, command, default, parse_backend
from scripts.attention_call import seconds
from scripts.tables import Row
from training.device import pick_device, pick_dtype
from training.environment import measured_on
from training.files import write_json

PAGE_SIZES = (16, 64, 256)
REPEATS = 10  # timed calls of a variant in a turn
PROMPT, FIRST, LAST = 16, 64, 512  # tokens; those between the first and the last are timed
GPT2 = ModelConfig(
    num_layers=12, num_heads=12, hidden_size=768, max_seq_len=1024, init_std=0.1
)  # random weights, large enough that the tokens vary


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    keys: int
    head_dim: int = 128

    @property
    def bytes(self) -> int:
        """Bytes of keys and values in 16 bits."""
        return 2 * 2 * self.batch * self.kv_heads * self.keys * self.head_dim


SHAPES = {
    "MHA": Shape(16, 32, 32, 8192),
    "MHA-D64": Shape(32, 32, 32, 8192, 64),
    "GQA-8": Shape(64, 64, 8, 8192),
    "GQA-8-long": Shape(4, 64, 8, 131072),
    "MQA": Shape(64, 32, 1, 65536),
    "MHA-small": Shape(1, 12, 12, 1024, 64),
    "MHA-one": Shape(1, 32, 32, 8192),
    "GQA-8-small": Shape(1, 32, 4, 4096),
    "GQA-8-batch": Shape(16, 32, 4, 2048),
    "MQA-small": Shape(1, 32, 1, 8192),
}


@dataclass
class Options:
    shapes: list[Literal[("none", *SHAPES)]] = default(*SHAPES)
    batches: list[Natural] = default(1, 64)
    attention: str = "triton"
    rounds: Count = 7
    dtype: Dtype = "auto"
    device: Device = "auto"
    out: Json | None = None


def variants(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """(name, call) for q (B, H, 1, D); k, v (B, H_kv, M, D). A call returns out."""
    triton = get_backend("triton", splits="auto")
    lengths = torch.full((len(q),), k.shape[2], dtype=torch.int32, device=q.device)
    cached = partial(attention_with_cache, q, backend=triton)
    yield "triton", lambda: attention(q, k, v, backend=triton).out
    yield "triton, fixed splits", lambda: cached(k, v, lengths, splits="fixed").out
    for page_size in PAGE_SIZES:
        if k.shape[2] % page_size == 0:
            *pages, table = paged(k, v, page_size)
            yield (
                f"triton, pages of {page_size}",
                partial(lambda p, t: cached(*p, lengths, block_table=t).out, pages, table),
            )
    for kernel in ("flash", "cudnn", "efficient"):
        peer = get_backend("sdpa", backend=kernel)
        yield f"sdpa {kernel}", partial(lambda peer: attention(q, k, v, backend=peer).out, peer)
    if q.device.type == "cuda":
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.reset()  # after eight shapes it would run uncompiled
        flex = torch.compile(flex_attention, dynamic=False)
        yield "flex", lambda: flex(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def paged(k: Tensor, v: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same keys and values in pages (P, page_size, H_kv, D), and their block_table."""
    batch, _, room, _ = k.shape
    order = torch.randperm(batch * room // page_size, device=k.device)
    pages = []
    for x in (k, v):
        rows = x.unflatten(2, (-1, page_size)).permute(0, 2, 3, 1, 4).flatten(0, 1)
        pages.append(torch.empty_like(rows, memory_format=torch.contiguous_format))
        pages[-1][order] = rows
    return *pages, order.view(batch, -1).int()


def why_wrong(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the result is wrong, or None; compares the last sequence with float64."""
    last = [x[-1:] for x in (q, k, v)]
    exact = attention(*(x.double() for x in last), backend="naive")
    own = distance(attention(*last, backend="naive").out.double(), exact.out)
    # rounding of the result, of a score and of lse
    rounding = torch.finfo(q.dtype).eps
    rounding += 2 * torch.finfo(torch.float32).eps * exact.lse.abs().max().item()
    budget = 2 * own + rounding * exact.out.abs().max().item()
    error = distance(out[-1:].double(), exact.out)
    return None if error <= budget else f"error {error:.2g} is more than {budget:.2g}"


def failure(call: Callable[[], str | None]) -> str | None:
    """What `call` returns, or the error that it raises, in one line: a compiler may fail."""
    try:
        return call()
    except Exception as error:
        return in_one_line(error)


def in_turns(
    calls: dict[str, Callable[[], Any]], measure: Callable[[Callable[[], Any]], Row], rounds: int
) -> dict[str, Row]:
    """Measure each call in turns. A row has the median of each number, and the least and most of
    the first number."""
    found: dict[str, list[Row]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(measure(call))
    rows = {}
    for name, turns in found.items():
        key = next(iter(turns[0]))
        values = [turn[key] for turn in turns]
        rows[name] = {each: median(turn[each] for turn in turns) for each in turns[0]}
        rows[name] |= {"least": min(values), "most": max(values), "rounds": rounds}
    return rows


def attention_rows(name: str, shape: Shape, options: Options, device: torch.device) -> list[Row]:
    """The rows of one shape; `refused` says why a variant was not timed."""
    dtype, rows, calls = pick_dtype(options.dtype, device), {}, {}
    sizes = ((shape.heads, 1), (shape.kv_heads, shape.keys), (shape.kv_heads, shape.keys))
    q, k, v = (
        torch.randn(shape.batch, heads, tokens, shape.head_dim, device=device, dtype=dtype)
        for heads, tokens in sizes
    )
    for variant, call in variants(q, k, v):
        wrong = failure(lambda call=call: why_wrong(call(), q, k, v))
        if wrong:
            rows[variant] = {"refused": wrong}
        else:
            calls[variant] = call

    def measure(call: Callable[[], Any]) -> Row:
        seconds(call, repeats=REPEATS // 4, device=device)
        times, host = seconds(call, repeats=REPEATS, device=device)
        return {"seconds": median(times), "host_seconds": median(host)}

    rows |= in_turns(calls, measure, options.rounds)
    moved = (k.numel() + v.numel()) * k.element_size()
    for row in rows.values():
        if "seconds" in row:
            row["terabytes_per_second"] = moved / row["seconds"] / 1e12
    head = {"shape": name, **vars(shape), "kv_bytes": moved}
    return [head | {"variant": variant} | row for variant, row in rows.items()]


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


def generation_rows(batch: int, options: Options, device: torch.device) -> list[Row]:
    """Tokens per second of ours and of the plain model, with each other's tokens compared."""
    torch.manual_seed(0)
    model = GPT(GPT2, vocab_size=50257, backend=parse_backend(options.attention))
    model = model.to(device, pick_dtype(options.dtype, device)).eval()
    prompt = torch.randint(50257, (batch, PROMPT), device=device)
    calls: dict[str, Callable[[int], Tensor]] = {
        f"tilegpt, {options.attention}": lambda n: generate(
            model, prompt, max_new_tokens=n, temperature=0.0
        )
    }
    peers = {
        f"plain PyTorch{', compiled' * compiled}": PlainGPT2(model, batch, compiled=compiled)
        for compiled in ((False, True) if device.type == "cuda" else (False,))
    }
    calls |= {name: partial(peer.generate, prompt) for name, peer in peers.items()}

    def measure(call: Callable[[int], Tensor]) -> Row:
        times = []
        for count in (FIRST, LAST):
            start = time.perf_counter()
            call(count).sum().item()  # waits for the GPU
            times.append(time.perf_counter() - start)
        rate = batch * (LAST - FIRST) / (times[1] - times[0])
        return {"tokens_per_second": rate, "whole_call_seconds": times[1]}

    head = {"batch": batch, "prompt": PROMPT, "new_tokens": LAST}
    written: dict[str, Tensor] = {}
    rows: dict[str, Row] = {}
    for name, call in list(calls.items()):  # also the warm-up of both lengths
        wrong = failure(
            lambda name=name, call=call: written.update({name: [call(FIRST), call(LAST)][1]})
        )
        if wrong:
            rows[name] = {"refused": wrong}
            del calls[name]
    in_turns(calls, measure, 1)  # the first turn after compilation may take longer
    rows |= in_turns(calls, measure, options.rounds)
    ours = next(iter(written.values()))
    for name in calls:
        rows[name]["same"] = peers[name].agreement(ours) if name in peers else 1.0
    return [head | {"variant": name} | row for name, row in rows.items()]


def describe(row: Row) -> str:
    head = f"{row.get('shape', 'GPT-2, B=' + str(row['batch'])):<14} {row['variant']:<28}"
    if "refused" in row:
        return f"{head} not timed: {row['refused']}"
    if "tokens_per_second" in row:
        return f"{head} {row['tokens_per_second']:>10,.0f} tokens/s, same {row['same']:.3f}"
    return (
        f"{head} {row['seconds'] * 1e6:>9.1f} us {row['terabytes_per_second']:>6.3f} TB/s, host "
        f"{row['host_seconds'] * 1e6:>7.1f} us"
    )


@command
def main(options: Options) -> None:
    device = pick_device(options.device)
    result: Row = {"environment": measured_on(device), "attention": [], "generation": []}

    def keep(kind: str, rows: list[Row]) -> None:
        """Write after every shape, so that a later failure loses nothing."""
        result[kind] += rows
        for row in rows:
            print(describe(row), flush=True)
        if options.out:
            write_json(options.out, result)

    for name in options.shapes:
        if name != "none":
            keep("attention", attention_rows(name, SHAPES[name], options, device))
    for batch in filter(None, options.batches):
        keep("generation", generation_rows(batch, options, device))


if __name__ == "__main__":
    main()
