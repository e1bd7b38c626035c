"""Measure which tiles the Triton kernels are fastest with on this GPU, and print the table to paste
into attention/kernels/tiles.json.

    python -m scripts.tune head_dim=64,128 seconds=300

Arguments are key=value, lists with commas; all have a default:

    kernel    of forward, dkdv, dkdv_general, dq (all)
    head_dim  of 64, 128, 256 (64,128)
    seconds   time for all of it (300)

Tiles are timed in bfloat16 over 16,384 tokens with heads * head_dim = 2048, at 1,024 and 16,384
tokens per sequence: causal, not causal, with a window and with a softcap. dkdv_general has grouped
heads too. The best geometric mean of the times wins. A tile that one of the calls cannot take, as
for want of shared memory, is not timed. The clock of a shared GPU varies, so the current tile is
timed again with every candidate. The decoding kernel keeps its tiles.
"""

import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean, median
from typing import Any, Literal

import torch

from attention import attention, get_backend
from attention.kernels.tiles import TILES, Tile, table_for
from scripts.arguments import command, default
from scripts.attention_call import seconds

LENGTHS = (1024, 16384)
TOKENS, WIDTH = 16384, 2048
GROUPS, WINDOW, SOFTCAP = 4, 512, 50.0
HEAD_DIMS = (64, 128, 256)
KERNELS = ("forward", "dkdv", "dkdv_general", "dq")
GPU = torch.device("cuda")
PORTABLE = get_backend("triton", kernel="portable")


@dataclass
class Options:
    kernel: list[Literal[KERNELS]] = default(*KERNELS)
    head_dim: list[int] = default(64, 128)
    seconds: float = 300

    def __post_init__(self) -> None:
        for head_dim in set(self.head_dim) - set(HEAD_DIMS):
            raise ValueError(f"head_dim={head_dim} is not one of: {HEAD_DIMS}")


def candidates(kernel: str, head_dim: int) -> Iterator[Tile]:
    """Tiles to try, the largest first: sizes for tensor cores, with at least 16 rows for each
    warp.
    """
    walks_keys = kernel in ("forward", "dq")
    walked = (128, 64, 32) if walks_keys else (128, 64, 32, 16)
    for own, walk, warps, stages in itertools.product((128, 64), walked, (4, 8), (2, 3)):
        if own >= 16 * warps and own * walk * head_dim <= 128 * 128 * 128:
            block_q, block_kv = (own, walk) if walks_keys else (walk, own)
            yield Tile(block_q, block_kv, warps, stages)


def workloads(kernel: str, head_dim: int) -> list[Callable[[], Any]]:
    """Calls whose time depends on the kernel's tile, one at least for each of its variants."""
    calls, heads = [], WIDTH // head_dim
    kv_heads = max(heads // GROUPS, 1) if kernel == "dkdv_general" else heads
    plain = [{"causal": True}, {"causal": False}]
    general = [{"window": WINDOW}, {"softcap": SOFTCAP}]
    masks = {"dkdv": plain, "dkdv_general": general}.get(kernel, plain + general)
    for length, mask in itertools.product(LENGTHS, masks):
        q, k, v, d_out = (
            torch.randn(TOKENS // length, length, n, head_dim, device=GPU, dtype=torch.bfloat16)
            for n in (heads, kv_heads, kv_heads, heads)
        )
        tensors = [x.transpose(1, 2).requires_grad_(kernel != "forward") for x in (q, k, v)]
        call = partial(attention, *tensors, backend=PORTABLE, **mask)
        if kernel != "forward":
            whole = call().out, tensors, d_out.transpose(1, 2)
            call = partial(torch.autograd.grad, *whole, retain_graph=True)
        calls.append(call)
    return calls


def use_tile(tile: Tile, kernel: str, head_dim: int, table: dict[str, Any]) -> None:
    """Put a tile into the table, and let the next launches read it there."""
    from attention.kernels import launch

    table["16-bit"][kernel][str(head_dim)] = list(tile)
    launch.constants.cache_clear()


def tune(kernel: str, head_dim: int, table: dict[str, Any], until: float) -> None:
    """Put the fastest tile into the table, in place."""
    where = f"{kernel} D={head_dim}"
    before = Tile(*table["16-bit"][kernel][str(head_dim)])
    calls, best = workloads(kernel, head_dim), (1.0, before)
    for tile in candidates(kernel, head_dim):
        if time.monotonic() > until:
            print(f"{where}: out of time", flush=True)
            break
        if tile == before:
            continue
        use_tile(tile, kernel, head_dim, table)
        try:
            for call in calls:  # compiles it
                call()
        except Exception as error:  # whatever the compiler raises
            print(f"{where} {tuple(tile)}: {type(error).__name__}", flush=True)
            continue
        ratios = []
        for call in calls:
            times = []
            for each in (before, tile):
                use_tile(each, kernel, head_dim, table)
                times.append(median(seconds(call, repeats=12, device=GPU)))
            ratios.append(times[1] / times[0])
        best = min(best, (geometric_mean(ratios), tile))
        each_call = " ".join(f"{ratio:.3f}" for ratio in ratios)
        mean = f"{geometric_mean(ratios):.3f} of the time of {tuple(before)}"
        print(f"{where} {tuple(tile)}: {mean}: {each_call}", flush=True)
    ratio, fastest = best
    use_tile(fastest, kernel, head_dim, table)
    print(f"{where}: {tuple(fastest)}, {ratio:.3f} of the time of {tuple(before)}", flush=True)


def as_in_the_file(found: dict[str, Any]) -> str:
    """Tables as tiles.json has them, with one line per kernel."""
    text = json.dumps(found, indent=1)
    return re.sub(r"\{[^{}]*\}", lambda part: json.dumps(json.loads(part[0])), text)


@command
def main(options: Options) -> None:
    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("tiles are timed on a GPU, and with TRITON_INTERPRET=1 on none")
    import triton

    properties = torch.cuda.get_device_properties(0)
    capability = properties.major, properties.minor
    table = table_for(capability, properties.shared_memory_per_block_optin)
    shapes = list(itertools.product(options.kernel, options.head_dim))
    start = time.monotonic()
    for i, (kernel, head_dim) in enumerate(shapes, 1):
        tune(kernel, head_dim, table, start + options.seconds * i / len(shapes))
    table["how"] = (
        f"measured on an {properties.name}, torch {torch.__version__}, triton "
        f"{triton.__version__}, head_dim {options.head_dim}"
    )
    print(f"\npaste into {TILES}, and run the tests of attention/kernels on this GPU:\n")
    print(as_in_the_file({f"sm_{capability[0]}{capability[1]}": table}))


if __name__ == "__main__":
    main()
