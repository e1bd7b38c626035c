"""Claims about traffic and arithmetic, counted while the tile loop walks.

Dimensions: N queries and keys, D head dim; a tile is R = block_q queries by T = block_kv keys.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attention import attention, get_backend
from attention.mask import QueryTile
from attention.online_softmax import OnlineSoftmax
from lab.claims.claim import FAILS, HOLDS, Figures, claim, growth, only_if, verdict
from lab.claims.inputs import STEP_4, exact, inputs, largest, run


def traffic(
    length: int, head_dim: int, block_q: int, block_kv: int, *, keys_outer: bool = False
) -> Figures:
    """Elements moved between memory and chip for one head, if tiles stay on the chip and nothing is
    cached: counted tile by tile.

    Queries outer: q and out move once, k and v once for every tile of queries. Keys outer: k and v
    move once, and q, out (read and written), row_max and row_sum (read and written) once for every
    tile of keys.
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
    """Elements of three kernels: scores (read q, k, write S), softmax (read S, write P), output
    (read P, v, write out).
    """
    return 4 * length * length + 4 * length * head_dim


@claim(
    "guide, deep dive",
    says="Flash attention reads Q, K and V once and writes the output once: 4 N d elements.",
    criterion="the counted traffic is within 1.5 times 4 N d, and linear in N",
    measured="at 4,096 tokens of 64, tiles of 128 queries: {times:.0f} times 4 N d; it grows like "
    "N^{exponent:.2f}",
    because="k and v are read again for every tile of queries. The traffic is "
    "quadratic, divided by "
    "the size of a tile.",
    verdict=lambda f: verdict(f["times"] <= 1.5 and f["exponent"] < 1.15),
    tiny={"lengths": (512, 1024)},
    also="python -m scripts.plan model=gpt2 seq_len=8192 attention=naive,triton gpu=a100-40",
)
def traffic_is_linear(lengths: tuple[int, ...] = (1024, 2048, 4096)) -> Figures:
    found = {length: traffic(length, 64, 128, 64)["all"] for length in lengths}
    longest = max(lengths)
    return {"times": found[longest] / (4 * longest * 64), "exponent": growth(found)}


@claim(
    "guide",
    says="Tiling and fusion cut the traffic to memory by 9.",
    criterion="the counted traffic of the forward pass is 8 to 10 times less than that of "
    "three kernels",
    measured="at 4,096 tokens: {times} times less, by head dim and queries of a tile",
    because="The paper's 9 is for GPT-2 medium, forward and backward together. The factor is the "
    "tile's: about twice its queries over d.",
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
        times[f"d {head_dim}, {block_q} queries"] = (
            standard_traffic(length, head_dim) / traffic(length, head_dim, block_q, 128)["all"]
        )
    return {"times": times}


@claim(
    "deep dive",
    says="The accesses to memory of FlashAttention grow like N^2 d / M, M being the size of "
    "the fast memory.",
    criterion="with tiles that fill a fixed M, doubling d doubles the traffic (exponent of d "
    "between 0.8 and 1.2)",
    measured="the traffic grows like d^{exponent:.2f}",
    because="It is N^2 d^2 / M: a larger d also makes the tiles smaller.",
    verdict=lambda f: verdict(0.8 <= f["exponent"] <= 1.2),
    tiny={"length": 512},
)
def traffic_in_d(length: int = 2048) -> Figures:
    fast = 4 * 32 * 128  # elements: q, k, v and out tiles of 32 at d = 128
    rereads = {
        head_dim: traffic(length, head_dim, fast // (4 * head_dim), fast // (4 * head_dim))[
            "k and v"
        ]
        for head_dim in (32, 64, 128)
    }
    return {"exponent": growth(rereads)}


@claim(
    "deep dive",
    says="Keys in the outer loop is the right order, because it reads K and V only once; queries "
    "outer is a pitfall.",
    criterion="with keys outer fewer elements move",
    measured="at 2,048 tokens of 64 and tiles of 64: {queries:,} elements with queries "
    "outer, {keys:,} "
    "with keys outer; outputs differ by "
    "{difference:.0e}",
    because="With keys outer, q, the output and the statistics go in and out once for "
    "every tile of "
    "keys. FlashAttention-2 turned the "
    "loops.",
    verdict=lambda f: verdict(f["keys"] < f["queries"]),
    tiny={"length": 512},
    also="python -m scripts.verify attention=kv_outer",
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
    says="On a GPU the loop over K/V blocks becomes the grid: one thread block for each, looping "
    "over the queries and updating the output.",
    criterion="two such blocks that update a row at the same time leave the right output",
    measured="when each of two blocks reads the state before the other has written it, "
    "the relative "
    "error is {error:.2f}",
    because="Both update the same rows, so the last to write wins. FlashAttention-1 "
    "keeps that loop "
    "inside one thread block; splits over "
    "the keys need a merge at the end (here {merged:.0e}).",
    verdict=lambda f: verdict(f["error"] < 1e-3),
    tiny={},
)
def grid_over_keys() -> Figures:
    q, k, v = inputs(0, *STEP_4)
    truth = exact(q, k, v)
    empty = OnlineSoftmax.empty(q, dtype=torch.float32)
    scores, values = (q @ k.mT * q.shape[-1] ** -0.5).split(128, -1), v.split(128, -2)
    first, last = (
        empty.update(*tile) for tile in zip(scores, values, strict=True)
    )  # each from the state it read: the empty one
    error = (last.finalize()[0].double() - truth).norm() / truth.norm()
    return {"error": error.item(), "merged": largest(first.merge(last).finalize()[0] - truth)}


def rescalings(length: int, head_dim: int, block_kv: int) -> int:
    """Multiplications by alpha for one head, counted tile by tile: every element of acc and of
    row_sum.
    """
    count = 0

    def observe(tile: QueryTile, keys: slice, scores: Tensor, state: OnlineSoftmax) -> None:
        nonlocal count
        count += state.acc.numel() + state.row_sum.numel()

    backend = get_backend("tiled", block_q=64, block_kv=block_kv)
    q, k, v = inputs(0, 1, 1, length, head_dim)
    backend.fn(q, k, v, causal=False, scale=1.0, **backend.options, observer=observe)
    return count


@claim(
    "guide, deep dive",
    says="Flash attention does more arithmetic than standard attention; the guide says twice as "
    "much, for the bookkeeping of the softmax.",
    criterion="matrix products and rescaling together, forward and backward, are 1.8 to 2.2 "
    "times naive's",
    measured="forward {forward:.2f} times, of which rescaling {rescaling:.1%} (tiles of "
    "64); forward "
    "and backward {training:.2f} times",
    because="The forward products are the same. The backward computes the scores once more: seven "
    "products instead of six.",
    verdict=lambda f: verdict(1.8 <= f["training"] <= 2.2),
    tiny={"length": 128},
)
def twice_the_arithmetic(length: int = 512) -> Figures:
    q, k, v = (x.requires_grad_() for x in inputs(0, 1, 2, length, 64))
    rescaled = rescalings(length, 64, 64)
    found: dict[str, dict[str, float]] = {}
    for name, backend in (
        ("naive", get_backend("naive")),
        ("tiled", get_backend("tiled", block_q=64, block_kv=64)),
    ):
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
    says="Flash attention does not reduce the arithmetic: the matrix products of the forward pass "
    "are the same.",
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
