"""Memory: bytes alive while code runs here, and what an H200 recorded.

The recorded figures were measured by

    python -m scripts.benchmark --attention naive triton triton:kernel=portable
        sdpa:backend=flash sdpa:backend=cudnn sdpa:backend=efficient
        tiled:block_q=2048,block_kv=2048 --seq-len 1024 2048 4096 8192 16384 32768 65536 131072
        --dtype bf16 --out results/memory_h200.json
    python -m scripts.benchmark --max-length --attention naive triton --batch 2 --heads 8 --full
        --dtype fp16 --memory-gib 8 --out results/longest_h200.json
    python -m scripts.benchmark --max-length --attention naive triton --heads 32 --full
        --dtype fp16 --memory-gib 24 40 --append --out results/longest_h200.json

Dimensions: B batch, H heads, N queries and keys, D head dim.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attention import attention, get_backend
from attention.mask import visible_keys
from attention.tiled import TileLoop
from conformance.memory_growth import LiveTensors, saved_storages
from lab.claims.claim import Figures, claim, growth
from lab.claims.inputs import inputs, textbook
from lab.results.tables import load
from training.memory import GIB


def forward_bytes(function: Callable[..., object], *inputs: Tensor) -> int:
    """Peak bytes of the live tensors that function(*inputs) makes, without gradients."""
    with torch.no_grad(), LiveTensors() as live:
        function(*inputs)
    return live.peak


def kept_for_backward(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    """Bytes that autograd keeps between forward and backward, without the inputs."""
    with saved_storages() as saved:
        function(*inputs)
    addresses = {x.data_ptr() for x in inputs}
    return sum(size for address, size in saved.items() if address not in addresses)


def through_the_loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The tile loop under plain autograd, without the project's own backward pass."""
    visible = visible_keys(q, k, causal=False)
    loop = TileLoop(visible, scale=q.shape[-1] ** -0.5, dtype=q.dtype, block_q=64, block_kv=64)
    return loop.forward(*(x.unsqueeze(2) for x in (q, k, v)))[0].squeeze(2)


@claim(
    "chapter, guide, deep dive",
    holds=lambda f: max(f["forward"], f["autograd"]) <= 1.15,
    only_if=(
        "gradients are off, or the backward pass recomputes the tiles",
        lambda f: max(f["forward"], f["recomputing"]) <= 1.15,
    ),
)
def linear_memory() -> Figures:
    """A tiled forward pass in plain PyTorch makes memory linear in the length.

    Holds if bytes alive in the forward pass, and bytes kept for the backward pass, grow like
    N^1.15 or less.

    Measured: the forward pass grows like N^{forward:.2f}. What is kept for the backward pass:
    under plain autograd N^{autograd:.2f}, with the project's recomputing backward
    N^{recomputing:.2f}, naive N^{naive:.2f}. At {longest:,} tokens plain autograd through the
    loop (tiles of 64) keeps {kept:.1f} times what naive keeps.

    Autograd keeps every tile. It takes a backward pass that computes them again from the
    log-sum-exp.
    """
    tiled = partial(attention, backend=get_backend("tiled", block_q=64, block_kv=64), causal=False)
    functions = {
        "autograd": through_the_loop,
        "recomputing": lambda *qkv: tiled(*qkv).out,
        "naive": textbook,
    }
    lengths = 256, 512, 1024
    qkv = {n: [x.requires_grad_() for x in inputs(0, 1, 2, n, 32)] for n in lengths}
    kept = {
        name: {n: kept_for_backward(function, *qkv[n]) for n in lengths}
        for name, function in functions.items()
    }
    longest = max(lengths)
    return {
        "forward": growth({n: forward_bytes(through_the_loop, *qkv[n]) for n in lengths}),
        "kept": kept["autograd"][longest] / kept["naive"][longest],
        "longest": longest,
    } | {name: growth(sizes) for name, sizes in kept.items()}


@claim(
    "chapter",
    holds=lambda f: max(f["ratio"].values()) < 1,
    only_if=(
        "the sequence is longer than a tile",
        lambda f: all(ratio < 1 for length, ratio in f["ratio"].items() if int(length) > 64),
    ),
)
def less_memory_at_every_length() -> Figures:
    """Tiled attention in plain PyTorch takes less memory than naive attention at every length.

    Holds if the bytes alive above the inputs are fewer at every length tried, tiles of 64.

    Measured: tiled over naive, by length: {ratio:.2f}.

    Up to the length of a tile there is nothing to save, and the state comes on top.
    """
    ratio = {}
    for length in (32, 64, 128, 256, 512, 1024):
        qkv = inputs(0, 1, 2, length, 64)
        ratio[str(length)] = forward_bytes(through_the_loop, *qkv) / forward_bytes(textbook, *qkv)
    return {"ratio": ratio}


def memory_rows(name: str) -> dict[int, Figures]:
    """Rows of results/memory_h200.json by length, for the first variant of this backend. Rows that
    ran out of memory have the key oom.
    """
    rows: dict[int, Figures] = {}
    for row in load("memory_h200")["rows"]:
        if row["attention"].split(":")[0] == name:
            rows.setdefault(row["seq_len"], row)
    return rows


@claim(
    "chapter, guide",
    holds=lambda f: f["factor"] >= 10,
    reads="memory_h200",
)
def wall_moves_out() -> Figures:
    """Tiled attention moves the wall out by a factor of ten or more.

    Holds if the length at which it takes what naive takes at its last length is at least ten
    times that length.

    Measured: on an H200 naive runs at {fits:,} tokens ({gib:.1f} GiB with backward) and fails
    at {fails:,}; the Triton kernels take {triton_gib:.2f} GiB at {longest:,} and, growing like
    N^{exponent:.2f}, would take naive's {gib:.1f} GiB at a length {factor:.0f} times naive's
    last.
    """
    naive, triton = (
        {n: row.get("training_bytes") for n, row in memory_rows(name).items()}
        for name in ("naive", "triton")
    )
    fits = max(n for n, size in naive.items() if size)
    longest, exponent = max(triton), growth(triton)
    reach = longest * (naive[fits] / triton[longest]) ** (1 / exponent)
    return {
        "fits": fits,
        "fails": min(n for n, size in naive.items() if not size),
        "gib": naive[fits] / GIB,
        "longest": longest,
        "triton_gib": triton[longest] / GIB,
        "exponent": exponent,
        "factor": reach / fits,
    }


def longest_rows(memory_gib: float) -> dict[str, Figures]:
    """Rows of results/longest_h200.json with this memory limit, by backend and pass, such as
    naive_forward.
    """
    return {
        f"{row['attention'].split(':')[0]}_{row['pass']}": row
        for row in load("longest_h200")["rows"]
        if row["memory_gib"] == memory_gib
    }


@claim(
    "chapter",
    holds=lambda f: f["naive_forward"]["max_seq_len"] < 8192,
    reads="longest_h200",
)
def wall_of_8_gigabytes_on_a_gpu() -> Figures:
    """With 8 GB, naive attention (2 sequences, 8 heads of 64, float16) is at its end by 8,192
    tokens.

    Holds if on an H200 held to 8 GiB the longest naive forward pass is shorter than 8,192
    tokens.

    Measured: longest forward pass: naive {naive_forward[max_seq_len]:,} tokens, the Triton
    kernels {triton_forward[max_seq_len]:,}; forward and backward
    {naive_training[max_seq_len]:,} and {triton_training[max_seq_len]:,}.

    The project's naive keeps scores in float32, twice the bytes of the chapter's float16.
    """
    return longest_rows(8)


@claim(
    "guide",
    holds=lambda f: (
        1 / 1.5 <= f["naive_forward"]["max_seq_len"] / 4096 <= 1.5
        and 1 / 1.5 <= f["triton_forward"]["max_seq_len"] / 65536 <= 1.5
    ),
    reads="longest_h200",
)
def longest_on_40_gigabytes() -> Figures:
    """On a card of 40 GB with 32 heads of 64 in float16, standard attention reaches 4,096
    tokens and flash attention 65,536.

    Holds if the longest forward passes on an H200 held to 40 GiB are those within a factor of
    1.5.

    Measured: naive {naive_forward[max_seq_len]:,} tokens, the Triton kernels
    {triton_forward[max_seq_len]:,} (ended by {triton_forward[limited_by]}).
    """
    return longest_rows(40)
