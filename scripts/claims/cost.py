"""Claims about time, traffic and arithmetic: counted while the tile loop walks, timed here, or read from what an H200 recorded.

Figures of chips come from NVIDIA's documents: the A100 and H100 white papers and data sheets, and the CUDA programming guide's table of
technical specifications by compute capability.

Dimensions: N queries and keys, D head dim; a tile is R = block_q queries by T = block_kv keys.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from attention import attention, get_backend
from attention.mask import QueryTile
from attention.online_softmax import OnlineSoftmax
from scripts.claims.claim import FAILS, HOLDS, NOT_TESTABLE, Figures, claim, only_if, recorded, spread, verdict
from scripts.claims.memory import growth, memory_rows
from scripts.claims.rounding import STEP_4, exact, inputs, largest, run, textbook

KIB = 1024
# shared memory one thread block may use, in KiB (CUDA programming guide, compute capabilities 8.0, 8.6 and 8.9, 9.0)
BLOCK_KIB = {"A100": 163, "RTX 3090 and 4090": 99, "H100 and H200": 227}
STATIC_KIB = 48  # what a kernel gets without asking for more, on each of them
REGISTERS_KIB = 256  # of one SM, on each of them
# shared memory and L1 together of one SM, and number of SMs
SM_KIB = {"A100": 192, "H100 and H200": 256}
SMS = {"A100": 108, "H100 and H200": 132}
# dense 16-bit TFLOP/s and TB/s of memory
PEAKS = {"A100": (312, 2.039), "H100": (989.4, 3.35)}
GUIDE_PEAK = {"sram_tb": 19, "hbm_tb": 1.555, "hbm_gb": 40}  # A100 40 GB; SRAM bandwidth as in the first FlashAttention paper


def traffic(length: int, head_dim: int, block_q: int, block_kv: int, *, keys_outer: bool = False) -> Figures:
    """Elements moved between memory and chip for one head, if tiles stay on the chip and nothing is cached: counted tile by tile.

    Queries outer: q and out move once, k and v once for every tile of queries. Keys outer: k and v move once, and q, out (read and
    written), row_max and row_sum (read and written) once for every tile of keys.
    """
    moved = {"q and out": 0, "k and v": 0, "statistics": 0}
    seen: set[tuple[str, int]] = set()

    def once(kind: str, start: int) -> bool:
        new = (kind, start) not in seen
        seen.add((kind, start))
        return new

    def observe(tile: QueryTile, keys: slice, scores: Tensor, state: OnlineSoftmax) -> None:
        rows, columns = scores.shape[-2:]
        if keys_outer or once("queries", tile.start):
            moved["q and out"] += (3 if keys_outer else 2) * rows * head_dim
        if keys_outer:
            moved["statistics"] += 4 * rows
        if not keys_outer or once("keys", keys.start):
            moved["k and v"] += 2 * columns * head_dim

    backend = get_backend("kv_outer" if keys_outer else "tiled", block_q=block_q, block_kv=block_kv)
    q, k, v = inputs(0, 1, 1, length, head_dim)
    backend.fn(q, k, v, causal=False, scale=1.0, **backend.options, observer=observe)
    return moved | {"all": sum(moved.values())}


def standard_traffic(length: int, head_dim: int) -> int:
    """Elements of three kernels: scores (read q, k, write S), softmax (read S, write P), output (read P, v, write out)."""
    return 4 * length * length + 4 * length * head_dim


@claim(
    "guide, deep dive",
    says="Flash attention reads Q, K and V once and writes the output once: 4 N d elements.",
    criterion="the counted traffic is within 1.5 times 4 N d, and linear in N",
    measured="at 4,096 tokens of 64, tiles of 128 queries: {times:.0f} times 4 N d; it grows like N^{exponent:.2f}",
    because="k and v are read again for every tile of queries. The traffic is quadratic, divided by the size of a tile.",
    verdict=lambda f: verdict(f["times"] <= 1.5 and f["exponent"] < 1.15),
    tiny={"lengths": (512, 1024)},
)
def traffic_is_linear(lengths: tuple[int, ...] = (1024, 2048, 4096)) -> Figures:
    found = {length: traffic(length, 64, 128, 64)["all"] for length in lengths}
    longest = max(lengths)
    return {"times": found[longest] / (4 * longest * 64), "exponent": growth(found)}


@claim(
    "guide",
    says="Tiling and fusion cut the traffic to memory by 9.",
    criterion="the counted traffic of the forward pass is 8 to 10 times less than that of three kernels",
    measured="at 4,096 tokens: {times} times less, by head dim and queries of a tile",
    because="The paper's 9 is for GPT-2 medium, forward and backward together. The factor is the tile's: about twice its queries over d.",
    verdict=lambda f: (
        HOLDS
        if all(8 <= x <= 10 for x in f["times"].values())
        else only_if("the tile happens to have the right size for the head dim")
        if min(f["times"].values()) < 9 < max(f["times"].values())
        else FAILS
    ),
    tiny={"length": 1024},
)
def nine_times_less(length: int = 4096) -> Figures:
    times = {}
    for head_dim, block_q in ((64, 64), (64, 128), (64, 256), (64, 512), (128, 128)):
        times[f"d {head_dim}, {block_q} queries"] = standard_traffic(length, head_dim) / traffic(length, head_dim, block_q, 128)["all"]
    return {"times": times}


@claim(
    "deep dive",
    says="The accesses to memory of FlashAttention grow like N^2 d / M, M being the size of the fast memory.",
    criterion="with tiles that fill a fixed M, doubling d doubles the traffic (exponent of d between 0.8 and 1.2)",
    measured="the traffic grows like d^{exponent:.2f}",
    because="It is N^2 d^2 / M: a larger d also makes the tiles smaller.",
    verdict=lambda f: verdict(0.8 <= f["exponent"] <= 1.2),
    tiny={"length": 512},
)
def traffic_in_d(length: int = 2048) -> Figures:
    fast = 4 * 32 * 128  # elements: q, k, v and out tiles of 32 at d = 128
    rereads = {head_dim: traffic(length, head_dim, fast // (4 * head_dim), fast // (4 * head_dim))["k and v"] for head_dim in (32, 64, 128)}
    return {"exponent": growth(rereads)}


@claim(
    "deep dive",
    says="Keys in the outer loop is the right order, because it reads K and V only once; queries outer is a pitfall.",
    criterion="with keys outer fewer elements move",
    measured="at 2,048 tokens of 64 and tiles of 64: {queries:,} elements with queries outer, {keys:,} with keys outer; outputs differ by "
    "{difference:.0e}",
    because="With keys outer, q, the output and the statistics go in and out once for every tile of keys. FlashAttention-2 turned the "
    "loops.",
    verdict=lambda f: verdict(f["keys"] < f["queries"]),
    tiny={"length": 512},
)
def order_of_the_loops(length: int = 2048) -> Figures:
    q, k, v = inputs(0, *STEP_4)
    difference = run("kv_outer", q, k, v, block=32) - run("tiled", q, k, v, block=32)
    return {
        "queries": traffic(length, 64, 64, 64)["all"],
        "keys": traffic(length, 64, 64, 64, keys_outer=True)["all"],
        "difference": largest(difference),
    }


@claim(
    "deep dive",
    says="On a GPU the loop over K/V blocks becomes the grid: one thread block for each, looping over the queries and updating the output.",
    criterion="two such blocks that update a row at the same time leave the right output",
    measured="when each of two blocks reads the state before the other has written it, the relative error is {error:.2f}",
    because="Both update the same rows, so the last to write wins. FlashAttention-1 keeps that loop inside one thread block; splits over "
    "the keys "
    "need a merge at the end (here {merged:.0e}).",
    verdict=lambda f: verdict(f["error"] < 1e-3),
    tiny={},
)
def grid_over_keys() -> Figures:
    q, k, v = inputs(0, *STEP_4)
    truth = exact(q, k, v)
    empty = OnlineSoftmax.empty(q, dtype=torch.float32)
    scores, values = (q @ k.mT * q.shape[-1] ** -0.5).split(128, -1), v.split(128, -2)
    first, last = (empty.update(*tile) for tile in zip(scores, values, strict=True))  # each from the state it read: the empty one
    error = (last.finalize()[0].double() - truth).norm() / truth.norm()
    return {"error": error.item(), "merged": largest(first.merge(last).finalize()[0] - truth)}


@claim(
    "guide",
    says="The arithmetic intensity of standard attention is about d, 64 FLOP a byte, so it is bound by memory.",
    criterion="the FLOP of QK^T over its bytes in float16, as the guide counts its accesses, lie within 10% of d",
    measured="{intensity:.1f} FLOP a byte at 4,096 tokens: d / 2, as the guide counts elements and calls them bytes. The conclusion "
    "stands: an A100 "
    "needs {ridge:.0f}",
    verdict=lambda f: verdict(abs(f["intensity"] / 64 - 1) < 0.1),
    tiny={},
)
def intensity() -> Figures:
    length, head_dim, bytes_each = 4096, 64, 2
    flops, elements = 2 * length**2 * head_dim, 2 * length * head_dim + 2 * length**2
    tflops, bandwidth = PEAKS["A100"]
    return {"intensity": flops / (elements * bytes_each), "ridge": tflops / bandwidth}


@claim(
    "deep dive",
    says="An A100 does 156 operations for each byte it reads, an H100 296.",
    criterion="both ratios, from the data sheets' dense 16-bit rates, are right to 3%",
    measured="{A100:.0f} and {H100:.0f}",
    verdict=lambda f: verdict(abs(f["A100"] / 156 - 1) < 0.03 and abs(f["H100"] / 296 - 1) < 0.03),
    tiny={},
)
def ratio_of_the_chips() -> Figures:
    return {name: tflops / bandwidth for name, (tflops, bandwidth) in PEAKS.items()}


@claim(
    "guide, deep dive",
    says="Flash attention does more arithmetic than standard attention; the guide says twice as much, for the bookkeeping of the softmax.",
    criterion="matrix products and rescaling together, forward and backward, are 1.8 to 2.2 times naive's",
    measured="forward {forward:.2f} times, of which rescaling {rescaling:.1%} (tiles of 64); forward and backward {training:.2f} times",
    because="The forward products are the same. The backward computes the scores once more: seven products instead of six.",
    verdict=lambda f: verdict(1.8 <= f["training"] <= 2.2),
    tiny={"length": 128},
)
def twice_the_arithmetic(length: int = 512) -> Figures:
    q, k, v = (x.requires_grad_() for x in inputs(0, 1, 2, length, 64))
    rescaled = rescalings(length, 64, 64)
    found: dict[str, dict[str, float]] = {}
    for name, backend in (("naive", get_backend("naive")), ("tiled", get_backend("tiled", block_q=64, block_kv=64))):
        with FlopCounterMode(display=False) as counter:
            out = attention(q, k, v, backend=backend, causal=False).out
            forward = counter.get_total_flops()
            out.sum().backward()
        found[name] = {"forward": forward, "training": counter.get_total_flops()}
    extra = 2 * rescaled  # of two heads
    return {
        "forward": (found["tiled"]["forward"] + extra) / found["naive"]["forward"],
        "training": (found["tiled"]["training"] + extra) / found["naive"]["training"],
        "rescaling": extra / (found["tiled"]["forward"] + extra),
    }


def rescalings(length: int, head_dim: int, block_kv: int) -> int:
    """Multiplications by alpha for one head, counted tile by tile: every element of acc and of row_sum."""
    count = 0

    def observe(tile: QueryTile, keys: slice, scores: Tensor, state: OnlineSoftmax) -> None:
        nonlocal count
        count += state.acc.numel() + state.row_sum.numel()

    backend = get_backend("tiled", block_q=64, block_kv=block_kv)
    q, k, v = inputs(0, 1, 1, length, head_dim)
    backend.fn(q, k, v, causal=False, scale=1.0, **backend.options, observer=observe)
    return count


@claim(
    "deep dive",
    says="Rescaling costs O(N^2 / Bc).",
    criterion="the counted multiplications do not depend on d (exponent below 0.1)",
    measured="they grow like N^{in_length:.2f}, Bc^{in_block:.2f} and d^{in_d:.2f}",
    because="The whole output row is rescaled, d numbers of it: O(N^2 d / Bc).",
    verdict=lambda f: verdict(f["in_d"] < 0.1),
    tiny={},
)
def cost_of_rescaling() -> Figures:
    return {
        "in_length": growth({n: rescalings(n, 64, 32) for n in (256, 512)}),
        "in_block": growth({block: rescalings(512, 64, block) for block in (32, 64)}),
        "in_d": growth({d: rescalings(256, d, 32) for d in (32, 128)}),
    }


@claim(
    "deep dive",
    says="Flash attention does not reduce the arithmetic: the matrix products of the forward pass are the same.",
    criterion="a counter of matrix-product FLOP gives the same number for both",
    measured="naive {naive:,}, tiled {tiled:,}",
    verdict=lambda f: verdict(f["naive"] == f["tiled"]),
    tiny={},
)
def same_products() -> Figures:
    q, k, v = inputs(0, *STEP_4)
    found = {}
    for name in ("naive", "tiled"):
        with FlopCounterMode(display=False) as counter:
            run(name, q, k, v)
        found[name] = counter.get_total_flops()
    return found


@claim(
    "guide",
    says="SRAM (20 MB) is 12 times faster and 2,000 times smaller than the GPU's memory (A100 of 40 GB).",
    criterion="both ratios are right to 10%",
    measured="{faster:.1f} times faster, {smaller:,.0f} times smaller",
    verdict=lambda f: verdict(abs(f["faster"] / 12 - 1) < 0.1 and abs(f["smaller"] / 2000 - 1) < 0.1),
    tiny={},
)
def ratio_of_sram() -> Figures:
    sram_mb = SM_KIB["A100"] * SMS["A100"] * KIB / 1e6
    return {"faster": GUIDE_PEAK["sram_tb"] / GUIDE_PEAK["hbm_tb"], "smaller": GUIDE_PEAK["hbm_gb"] * 1000 / sram_mb}


@claim(
    "guide",
    says="The hierarchy has 256 KB of registers, 20 MB of SRAM and 40 MB of L2.",
    criterion="all three sizes are those of the same thing (the whole A100)",
    measured="registers: {registers_sm} KB in one SM, {registers:.0f} MB in all; SRAM: {sram_sm} KB in one SM, {sram:.0f} MB in all",
    because="256 KB is one SM's, 20 MB the whole chip's. In fact the registers are the larger of the two. Its latencies were not tested.",
    verdict=lambda f: verdict(abs(f["registers"] / 0.256 - 1) < 0.1 and abs(f["sram"] / 20 - 1) < 0.1),
    tiny={},
)
def hierarchy_of_the_guide() -> Figures:
    return {
        "registers_sm": REGISTERS_KIB,
        "registers": REGISTERS_KIB * SMS["A100"] * KIB / 1e6,
        "sram_sm": SM_KIB["A100"],
        "sram": SM_KIB["A100"] * SMS["A100"] * KIB / 1e6,
    }


@claim(
    "guide",
    says="The latencies are about 1, 10, 30 and 200 cycles for registers, SRAM, L2 and the GPU's memory.",
    criterion="a pointer chase on an A100 gives them within a factor of 1.5",
    measured="not measured: the project has no probe of latencies",
    verdict=lambda f: NOT_TESTABLE,
    tiny={},
)
def latencies() -> Figures:
    return {}


@claim(
    "deep dive",
    says="A GPU has 48 KB of shared memory an SM, which tiles of 64 x 64 in float16 with their statistics just fit.",
    criterion="48 KB is what a thread block can have on some chip since the A100",
    measured="a block may have, in KB: {block}; {static} KB is what it gets without asking. Q, K and V tiles of 64 x 64 take {tiles:.0f} "
    "KB",
    because="48 KB is the default of a static allocation. Tiles that small leave most of the memory unused.",
    verdict=lambda f: verdict(f["static"] in f["block"].values()),
    tiny={},
)
def forty_eight_kilobytes() -> Figures:
    return {"block": BLOCK_KIB, "static": STATIC_KIB, "tiles": 3 * torch.empty(64, 64, dtype=torch.float16, device="meta").nbytes / KIB}


@claim(
    "guide",
    says="Blocks of 256 fit: 96 KB for d = 64 go into 20 MB, and 64 KB a tensor at d = 128 are safe on most GPUs.",
    criterion="Q, K and V tiles fit the shared memory of a thread block on every chip listed, and the float32 scores fit half the "
    "registers",
    measured="{d64:.0f} KB at d = 64 and {d128:.0f} KB at d = 128, where a block may have, in KB: {block}; the scores of 256 x 256 take "
    "{scores:.0f} KB, "
    "an SM's registers are {registers} KB",
    because="The 20 MB belong to 108 SMs; one thread block has one SM's share.",
    verdict=lambda f: verdict(max(f["d64"], f["d128"]) <= min(f["block"].values()) and f["scores"] <= f["registers"] / 2),
    tiny={},
)
def blocks_of_256() -> Figures:
    found = {f"d{d}": 3 * torch.empty(256, d, dtype=torch.float16, device="meta").nbytes / KIB for d in (64, 128)}
    scores = torch.empty(256, 256, device="meta").nbytes / KIB
    return found | {"block": BLOCK_KIB, "scores": scores, "registers": REGISTERS_KIB}


class Calls(TorchDispatchMode):
    """Counts the operators called: on a GPU each is at least one kernel launch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # a view launches nothing
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@claim(
    "chapter",
    says="Below some length naive attention is faster, because it is a few large products while the tiled loop pays for many small calls.",
    criterion="at 256 tokens naive is faster than the loop with tiles of 64, which makes more than ten times as many operator calls",
    measured="at 256 tokens naive makes {naive_calls} operator calls in {naive:.1f} ms, the loop {tiled_calls} in {tiled:.1f} ms; at 4,096 "
    "tokens "
    "{naive_calls_4096} and {tiled_calls_4096:,} calls (4 heads of 64, one CPU thread)",
    because="Each call has its price, on a GPU at least a kernel launch, and its operands make the trip to memory and back.",
    verdict=lambda f: verdict(f["naive"]["median"] < f["tiled"]["median"] and f["tiled_calls"] > 10 * f["naive_calls"]),
)
def small_calls(repeats: int = 20) -> Figures:
    found: Figures = {}
    for length, suffix in ((256, ""), (4096, "_4096")):
        q, k, v = inputs(0, 1, 4, length, 64)
        functions = {"naive": partial(textbook, q, k, v), "tiled": partial(run, "tiled", q, k, v, block=64)}
        for name, function in functions.items():
            with Calls() as calls:
                function()
            found[f"{name}_calls{suffix}"] = calls.count
        if not suffix:
            found |= milliseconds(functions, repeats)
    return found


def milliseconds(functions: dict[str, Callable[[], object]], repeats: int) -> Figures:
    """Wall times on one thread, after one call to warm up; in rounds of all, so that other work on the machine meets them alike."""
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
    "chapter, notebook",
    says="Tiled attention in plain PyTorch is about as fast as naive attention at 2,048 tokens and faster beyond (tiles of 64).",
    criterion="with tiles of 64 it takes at most 1.2 times naive's time at 2,048 tokens and less than naive's at 4,096 (fastest call of "
    "each, as the machine is shared)",
    measured="ms by length on one CPU thread (4 heads of 64): naive {naive:.0f}; tiles of 64 {tiles_64:.0f}; tiles of 256 {tiles_256:.0f}; "
    "tiles of 1,024 {tiles_1024:.0f}",
    because="What decides is the size of the tile: how much work one call does.",
    verdict=lambda f: (
        HOLDS
        if f["tiles_64"]["2048"]["min"] <= 1.2 * f["naive"]["2048"]["min"] and f["tiles_64"]["4096"]["min"] < f["naive"]["4096"]["min"]
        else only_if("the tiles are larger, 256 and more")
        if min(f[name]["4096"]["min"] for name in ("tiles_256", "tiles_1024")) < f["naive"]["4096"]["min"]
        else FAILS
    ),
)
def tiled_speed_on_a_cpu(repeats: int = 4) -> Figures:
    found: Figures = {"naive": {}, "tiles_64": {}, "tiles_256": {}, "tiles_1024": {}}
    for length in (1024, 2048, 4096):
        q, k, v = inputs(0, 1, 4, length, 64)
        functions = {f"tiles_{block}": partial(run, "tiled", q, k, v, block=block) for block in (64, 256, 1024)}
        for name, times in milliseconds({"naive": partial(textbook, q, k, v)} | functions, repeats).items():
            found[name][str(length)] = times
    return found


@claim(
    "chapter, notebook",
    says="On a GPU as well, tiled attention in plain PyTorch (tiles of 64) is as fast as naive attention at 2,048 tokens and faster "
    "beyond.",
    criterion="with tiles of 64 its forward pass is no slower than 1.2 times naive at 2,048 tokens and faster at 8,192",
    measured="ms on an H200 (2 sequences, 8 heads of 64, float16, not causal): naive {naive:.1f}; tiles of 64 {tiles_64:.1f}; tiles of 256 "
    "{tiles_256:.1f}; "
    "tiles of 1,024 {tiles_1024:.1f}; tiles of 2,048 {tiles_2048:.1f}. The Triton kernels: {triton:.2f}",
    because="Each tile is a dozen kernel launches. Speed comes from fusing them into one.",
    verdict=lambda f: (
        HOLDS
        if f["tiles_64"]["2048"] <= 1.2 * f["naive"]["2048"] and f["tiles_64"]["8192"] < f["naive"]["8192"]
        else only_if("the tiles are much larger")
        if min(f[name]["8192"] for name in ("tiles_256", "tiles_1024", "tiles_2048")) < f["naive"]["8192"]
        else FAILS
    ),
    reads="tile_speed_h200",
)
def tiled_speed_on_a_gpu() -> Figures:
    names = {"naive": "naive", "triton": "triton"} | {f"tiled:block_q={n},block_kv={n}": f"tiles_{n}" for n in (64, 256, 1024, 2048)}
    found: Figures = {name: {} for name in names.values()}
    for row in recorded("tile_speed_h200")["rows"]:
        if row["attention"] in names and "oom" not in row:
            found[names[row["attention"]]][str(row["seq_len"])] = 1e3 * row["forward_seconds"]
    return found


@claim(
    "chapter, guide, deep dive",
    says="Standard attention is bound by memory, not by arithmetic.",
    criterion="at 16,384 tokens on an H200 it stays below a tenth of the chip's matrix rate, and a fused kernel on the same inputs exceeds "
    "a third",
    measured="naive reaches {naive:.1f} TFLOP/s of 989, the Triton kernels {triton:.0f}, PyTorch's flash kernel {flash:.0f}",
    because="The arithmetic is the same, so the difference is what moves. (Causal: naive computes the masked half as well.)",
    verdict=lambda f: verdict(f["naive"] < 98.9 and f["triton"] > 989 / 3),
    reads="memory_h200",
)
def bound_by_memory() -> Figures:
    rows = memory_rows()
    return {name: rows[row][16384]["forward_tflops"] for name, row in (("naive", "naive"), ("triton", "triton"), ("flash", "sdpa"))}


@claim(
    "notebook, chapter, guide",
    says="The speed comes from fusing the steps into one kernel.",
    criterion="on an H200 at 16,384 tokens the Triton kernel is at least 10 times faster than the same tiling in PyTorch calls",
    measured="forward {triton:.2f} ms against {tiled:.1f} ms for tiles of 2,048 and {naive:.0f} ms naive: {times:.0f} times faster than "
    "tiled",
    verdict=lambda f: verdict(f["times"] >= 10),
    reads="memory_h200",
)
def fusion() -> Figures:
    rows = memory_rows()
    found = {name: 1e3 * rows[name][16384]["forward_seconds"] for name in ("triton", "tiled", "naive")}
    return found | {"times": found["tiled"] / found["triton"]}
