"""Speed: on this CPU, and what an H200 recorded.

results/tile_speed_h200.json was measured by

    python -m scripts.benchmark --attention naive triton tiled:block_q=64,block_kv=64
        tiled:block_q=256,block_kv=256 tiled:block_q=1024,block_kv=1024
        tiled:block_q=2048,block_kv=2048 --seq-len 1024 2048 4096 8192 --batch 2 --heads 8 --full
        --dtype fp16 --out results/tile_speed_h200.json
"""

import timeit
from collections.abc import Callable
from functools import partial

from torch.utils._python_dispatch import TorchDispatchMode

from lab.claims.claim import Figures, claim, distribution
from lab.claims.inputs import inputs, run, textbook
from lab.claims.memory import memory_rows
from lab.results.tables import load


class Calls(TorchDispatchMode):
    """Counts operator calls: on a GPU each is at least one kernel launch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # a view launches nothing
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def milliseconds(function: Callable[[], object], repeats: int) -> Figures:
    """Wall times in ms, after one warm-up call."""
    function()
    return distribution(1e3 * time for time in timeit.repeat(function, number=1, repeat=repeats))


@claim(
    "chapter",
    holds=lambda f: (
        f["naive"]["median"] < f["tiled"]["median"] and f["tiled_calls"] > 10 * f["naive_calls"]
    ),
)
def small_calls() -> Figures:
    """Below some length naive attention is faster, because it is a few large products while the
    tiled loop pays for many small calls.

    Holds if at 256 tokens naive is faster than the loop with tiles of 64, which makes more than
    ten times as many operator calls.

    Measured: at 256 tokens naive makes {naive_calls} operator calls in {naive:.1f} ms, the loop
    {tiled_calls} in {tiled:.1f} ms; at 4,096 tokens {naive_calls_4096} and {tiled_calls_4096:,}
    calls, {a_tile:.0f} a tile (4 heads of 64, one CPU thread).

    Each call has its price, on a GPU at least a kernel launch, and its operands make the trip
    to memory and back.
    """
    figures: Figures = {}
    for length, suffix in ((256, ""), (4096, "_4096")):
        qkv = inputs(0, 1, 4, length, 64)
        functions = {
            "naive": partial(textbook, *qkv),
            "tiled": partial(run, "tiled", *qkv, block=64),
        }
        for name, function in functions.items():
            with Calls() as calls:
                function()
            figures[f"{name}_calls{suffix}"] = calls.count
            if length == 256:
                figures[name] = milliseconds(function, repeats=20)
    return figures | {"a_tile": figures["tiled_calls_4096"] / (4096 // 64) ** 2}


@claim(
    "chapter, notebook",
    table="tokens",
    holds=lambda f: (
        f["tiles_64"]["2048"]["min"] <= 1.2 * f["naive"]["2048"]["min"]
        and f["tiles_64"]["4096"]["min"] < f["naive"]["4096"]["min"]
    ),
    only_if=(
        "the tiles are larger, 256 and more",
        lambda f: (
            max(f[name]["4096"]["min"] for name in ("tiles_256", "tiles_1024"))
            < f["naive"]["4096"]["min"]
        ),
    ),
)
def tiled_speed_on_a_cpu() -> Figures:
    """Tiled attention in plain PyTorch is about as fast as naive attention at 2,048 tokens and
    faster beyond (tiles of 64).

    Holds if with tiles of 64 it takes at most 1.2 times naive's time at 2,048 tokens and less
    than naive's at 4,096 (fastest call of each, as the machine is shared).

    Measured: ms on one CPU thread (4 heads of 64).

    The size of the tile decides: how much work one call does.
    """
    figures: Figures = {"naive": {}, "tiles_64": {}, "tiles_256": {}, "tiles_1024": {}}
    for length in (1024, 2048, 4096):
        qkv = inputs(0, 1, 4, length, 64)
        figures["naive"][str(length)] = milliseconds(partial(textbook, *qkv), repeats=4)
        for block in (64, 256, 1024):
            tiled = partial(run, "tiled", *qkv, block=block)
            figures[f"tiles_{block}"][str(length)] = milliseconds(tiled, repeats=4)
    return figures


@claim(
    "chapter, notebook",
    table="tokens",
    holds=lambda f: (
        f["tiles_64"]["2048"] <= 1.2 * f["naive"]["2048"]
        and f["tiles_64"]["8192"] < f["naive"]["8192"]
    ),
    only_if=(
        "the tiles are much larger",
        lambda f: f["tiles_2048"]["8192"] < f["naive"]["8192"],
    ),
    reads="tile_speed_h200",
)
def tiled_speed_on_a_gpu() -> Figures:
    """On a GPU as well, tiled attention in plain PyTorch (tiles of 64) is as fast as naive
    attention at 2,048 tokens and faster beyond.

    Holds if with tiles of 64 its forward pass is no slower than 1.2 times naive at 2,048 tokens
    and faster at 8,192.

    Measured: ms on an H200 (2 sequences, 8 heads of 64, float16, not causal).

    Each call of each tile is a kernel launch. Speed comes from fusing them into one.
    """
    figures: Figures = {}
    for row in load("tile_speed_h200")["rows"]:
        # tiled:block_q=64,block_kv=64 to tiles_64
        name = row["attention"].replace("tiled:block_q=", "tiles_").partition(",")[0]
        if "oom" not in row:
            figures.setdefault(name, {})[str(row["seq_len"])] = 1e3 * row["forward_seconds"]
    return figures


@claim(
    "chapter, guide, deep dive",
    holds=lambda f: f["naive"] < 989 / 10 and f["triton"] > 989 / 3,
    reads="memory_h200",
)
def bound_by_memory() -> Figures:
    """Standard attention is bound by memory, not by arithmetic.

    Holds if at 16,384 tokens on an H200 it stays below a tenth of the chip's matrix rate, and a
    fused kernel on the same inputs exceeds a third.

    Measured: naive reaches {naive:.1f} TFLOP/s of 989, the Triton kernels {triton:.0f},
    PyTorch's flash kernel {sdpa:.0f}.

    The arithmetic is the same, so the traffic makes the difference. (Causal: naive computes the
    masked half as well.)
    """
    return {
        name: memory_rows(name)[16384]["forward_tflops"] for name in ("naive", "triton", "sdpa")
    }


@claim(
    "notebook, chapter, guide",
    holds=lambda f: f["times"] >= 10,
    reads="memory_h200",
)
def fusion() -> Figures:
    """The speed comes from fusing the steps into one kernel.

    Holds if on an H200 at 16,384 tokens the Triton kernel is at least 10 times faster than the
    same tiling in PyTorch calls.

    Measured: forward {triton:.2f} ms against {tiled:.1f} ms for tiles of 2,048 and {naive:.0f}
    ms naive: {times:.0f} times faster than tiled.
    """
    names = ("triton", "tiled", "naive")
    figures = {name: 1e3 * memory_rows(name)[16384]["forward_seconds"] for name in names}
    return figures | {"times": figures["tiled"] / figures["triton"]}
