"""Measure which tiles the Triton kernels are fastest with on this GPU, and print the table to paste
into attention/kernels/tiles.json.

    python -m scripts.tune kernel=forward head_dim=64

Arguments are key=value, lists with commas; all have a default:

    kernel    of forward, dkdv, dkdv_general, dq (all)
    head_dim  of 64, 128, 256 (64,128)

Each kernel and head_dim takes minutes. Tiles are timed in bfloat16 over 16,384 tokens with heads *
head_dim = 2048, at 1,024 and 16,384 tokens per sequence: causal, not causal, with a window and with
a softcap. dkdv_general has grouped heads too. The best geometric mean of the times wins. A tile
that one of the calls cannot take, as for want of shared memory, is not timed. The clock of a shared
GPU varies, so the current tile is timed again with every candidate. The decoding kernel keeps its
tiles.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any, Literal

import torch

from attention import get_backend
from attention.kernels.tiles import TILES, Tile, table_for
from scripts.arguments import command, default
from scripts.attention_call import Call, seconds

LENGTHS = (1024, 16384)
TOKENS, WIDTH = 16384, 2048
GROUPS, WINDOW, SOFTCAP = 4, 512, 50.0
KERNELS = ("forward", "dkdv", "dkdv_general", "dq")
GPU = torch.device("cuda")
PORTABLE = get_backend("triton", kernel="portable")


@dataclass
class Options:
    kernel: list[Literal[KERNELS]] = default(*KERNELS)
    head_dim: list[Literal["64", "128", "256"]] = default("64", "128")


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
    plain, general = [{}, {"causal": False}], [{"window": WINDOW}, {"softcap": SOFTCAP}]
    masks = {"dkdv": plain, "dkdv_general": general}.get(kernel, plain + general)
    shape = {"heads": WIDTH // head_dim, "head_dim": head_dim, "causal": True}
    if kernel == "dkdv_general":
        shape["groups"] = GROUPS
    calls = []
    for length, mask in itertools.product(LENGTHS, masks):
        size = {"batch": TOKENS // length, "seq_len": length}
        call = Call(PORTABLE, shape | size | mask, device=GPU, dtype=torch.bfloat16)
        calls.append(call.passes()["forward" if kernel == "forward" else "backward"])
    return calls


def use_tile(tile: Tile, kernel: str, head_dim: int, table: dict[str, Any]) -> None:
    """Put a tile into the table, and let the next launches read it there."""
    from attention.kernels import launch

    table["16-bit"][kernel][str(head_dim)] = list(tile)
    launch.constants.cache_clear()


def tune(kernel: str, head_dim: int, table: dict[str, Any]) -> None:
    """Put the fastest tile into the table, in place."""
    where = f"{kernel} D={head_dim}"
    before = Tile(*table["16-bit"][kernel][str(head_dim)])
    calls, found = workloads(kernel, head_dim), [(1.0, before)]
    for tile in candidates(kernel, head_dim):
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
        found.append((geometric_mean(ratios), tile))
        each_call = " ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{where} {tuple(tile)}: {found[-1][0]:.3f} of the time: {each_call}", flush=True)
    ratio, fastest = min(found)
    use_tile(fastest, kernel, head_dim, table)
    print(f"{where}: {tuple(fastest)}, {ratio:.3f} of the time of {tuple(before)}", flush=True)


@command
def main(options: Options) -> None:
    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("tiles are timed on a GPU, and with TRITON_INTERPRET=1 on none")
    import triton

    properties = torch.cuda.get_device_properties(0)
    capability = properties.major, properties.minor
    table = table_for(capability, properties.shared_memory_per_block_optin)
    for kernel, head_dim in itertools.product(options.kernel, options.head_dim):
        tune(kernel, int(head_dim), table)
    table["how"] = (
        f"measured on an {properties.name}, torch {torch.__version__}, triton "
        f"{triton.__version__}, head_dim {', '.join(options.head_dim)}"
    )
    print(f"\npaste into {TILES}, and run the tests of attention/kernels on this GPU:\n")
    print(json.dumps({f"sm_{capability[0]}{capability[1]}": table}, indent=1))


if __name__ == "__main__":
    main()
