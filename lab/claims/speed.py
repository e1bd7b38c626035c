"""Claims about time, measured on this CPU or read from what an H200 recorded."""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lab.claims.alive import memory_rows
from lab.claims.claim import FAILS, HOLDS, Figures, claim, only_if, recorded, spread, verdict
from lab.claims.inputs import inputs, run, textbook


class Calls(TorchDispatchMode):
    """Counts the operators called: on a GPU each is at least one kernel launch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # a view launches nothing
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def milliseconds(functions: dict[str, Callable[[], object]], repeats: int) -> Figures:
    """Wall times on one thread, after one call to warm up; in rounds of all, so that other work on
    the machine meets them alike.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in functions}
    try:
        for round_number in range(repeats + 1):
            for name, function in functions.items():
                start = time.perf_counter()
                function()
                if round_number:
                    times[name].append(1e3 * (time.perf_counter() - start))
    finally:
        torch.set_num_threads(threads)
    return {name: spread(values) for name, values in times.items()}


@claim(
    "chapter",
    says="Below some length naive attention is faster, because it is a few large products while "
    "the tiled loop pays for many small calls.",
    criterion="at 256 tokens naive is faster than the loop with tiles of 64, which makes "
    "more than ten "
    "times as many operator calls",
    measured="at 256 tokens naive makes {naive_calls} operator calls in {naive:.1f} ms, the loop "
    "{tiled_calls} in {tiled:.1f} ms; at 4,096 "
    "tokens {naive_calls_4096} and {tiled_calls_4096:,} calls (4 heads of 64, one CPU thread)",
    because="Each call has its price, on a GPU at least a kernel launch, and its operands make the "
    "trip to memory and back.",
    verdict=lambda f: verdict(
        f["naive"]["median"] < f["tiled"]["median"] and f["tiled_calls"] > 10 * f["naive_calls"]
    ),
)
def small_calls(repeats: int = 20) -> Figures:
    found: Figures = {}
    for length, suffix in ((256, ""), (4096, "_4096")):
        q, k, v = inputs(0, 1, 4, length, 64)
        functions = {
            "naive": partial(textbook, q, k, v),
            "tiled": partial(run, "tiled", q, k, v, block=64),
        }
        for name, function in functions.items():
            with Calls() as calls:
                function()
            found[f"{name}_calls{suffix}"] = calls.count
        if not suffix:
            found |= milliseconds(functions, repeats)
    return found | {"a_tile": found["tiled_calls_4096"] / (4096 // 64) ** 2}


@claim(
    "chapter, notebook",
    says="Tiled attention in plain PyTorch is about as fast as naive attention at 2,048 tokens and "
    "faster beyond (tiles of 64).",
    criterion="with tiles of 64 it takes at most 1.2 times naive's time at 2,048 tokens "
    "and less than "
    "naive's at 4,096 (fastest call of "
    "each, as the machine is shared)",
    measured="ms by length on one CPU thread (4 heads of 64): naive {naive:.0f}; tiles of 64 "
    "{tiles_64:.0f}; tiles of 256 {tiles_256:.0f}; "
    "tiles of 1,024 {tiles_1024:.0f}",
    because="What decides is the size of the tile: how much work one call does.",
    verdict=lambda f: (
        HOLDS
        if f["tiles_64"]["2048"]["min"] <= 1.2 * f["naive"]["2048"]["min"]
        and f["tiles_64"]["4096"]["min"] < f["naive"]["4096"]["min"]
        else only_if("the tiles are larger, 256 and more")
        if min(f[name]["4096"]["min"] for name in ("tiles_256", "tiles_1024"))
        < f["naive"]["4096"]["min"]
        else FAILS
    ),
)
def tiled_speed_on_a_cpu(repeats: int = 4) -> Figures:
    found: Figures = {"naive": {}, "tiles_64": {}, "tiles_256": {}, "tiles_1024": {}}
    for length in (1024, 2048, 4096):
        q, k, v = inputs(0, 1, 4, length, 64)
        functions = {
            f"tiles_{block}": partial(run, "tiled", q, k, v, block=block)
            for block in (64, 256, 1024)
        }
        for name, times in milliseconds(
            {"naive": partial(textbook, q, k, v)} | functions, repeats
        ).items():
            found[name][str(length)] = times
    return found


@claim(
    "chapter, notebook",
    says="On a GPU as well, tiled attention in plain PyTorch (tiles of 64) is as fast as naive "
    "attention at 2,048 tokens and faster "
    "beyond.",
    criterion="with tiles of 64 its forward pass is no slower than 1.2 times naive at "
    "2,048 tokens and "
    "faster at 8,192",
    measured="ms on an H200 (2 sequences, 8 heads of 64, float16, not causal): naive {naive:.1f}; "
    "tiles of 64 {tiles_64:.1f}; tiles of 256 "
    "{tiles_256:.1f}; tiles of 1,024 {tiles_1024:.1f}; tiles of 2,048 {tiles_2048:.1f}. The "
    "Triton kernels: {triton:.2f}",
    because="Each call of each tile is a kernel launch. Speed comes from fusing them into one.",
    verdict=lambda f: (
        HOLDS
        if f["tiles_64"]["2048"] <= 1.2 * f["naive"]["2048"]
        and f["tiles_64"]["8192"] < f["naive"]["8192"]
        else only_if("the tiles are much larger")
        if min(f[name]["8192"] for name in ("tiles_256", "tiles_1024", "tiles_2048"))
        < f["naive"]["8192"]
        else FAILS
    ),
    reads="tile_speed_h200",
)
def tiled_speed_on_a_gpu() -> Figures:
    names = {"naive": "naive", "triton": "triton"} | {
        f"tiled:block_q={n},block_kv={n}": f"tiles_{n}" for n in (64, 256, 1024, 2048)
    }
    found: Figures = {name: {} for name in names.values()}
    for row in recorded("tile_speed_h200")["rows"]:
        if row["attention"] in names and "oom" not in row:
            found[names[row["attention"]]][str(row["seq_len"])] = 1e3 * row["forward_seconds"]
    return found


@claim(
    "chapter, guide, deep dive",
    says="Standard attention is bound by memory, not by arithmetic.",
    criterion="at 16,384 tokens on an H200 it stays below a tenth of the chip's matrix rate, and a "
    "fused kernel on the same inputs exceeds "
    "a third",
    measured="naive reaches {naive:.1f} TFLOP/s of 989, the Triton kernels {triton:.0f}, PyTorch's "
    "flash kernel {flash:.0f}",
    because="The arithmetic is the same, so the difference is what moves. (Causal: naive "
    "computes the "
    "masked half as well.)",
    verdict=lambda f: verdict(f["naive"] < 98.9 and f["triton"] > 989 / 3),
    reads="memory_h200",
)
def bound_by_memory() -> Figures:
    rows = memory_rows()
    return {
        name: rows[row][16384]["forward_tflops"]
        for name, row in (("naive", "naive"), ("triton", "triton"), ("flash", "sdpa"))
    }


@claim(
    "notebook, chapter, guide",
    says="The speed comes from fusing the steps into one kernel.",
    criterion="on an H200 at 16,384 tokens the Triton kernel is at least 10 times faster "
    "than the same "
    "tiling in PyTorch calls",
    measured="forward {triton:.2f} ms against {tiled:.1f} ms for tiles of 2,048 and {naive:.0f} ms "
    "naive: {times:.0f} times faster than "
    "tiled",
    verdict=lambda f: verdict(f["times"] >= 10),
    reads="memory_h200",
)
def fusion() -> Figures:
    rows = memory_rows()
    found = {
        name: 1e3 * rows[name][16384]["forward_seconds"] for name in ("triton", "tiled", "naive")
    }
    return found | {"times": found["tiled"] / found["triton"]}
