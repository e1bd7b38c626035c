"""Traffic and arithmetic: what a tile loop moves and computes.

Traffic is counted in elements for one head: printed accountings and visited tiles come from
training.traffic. A tile is R = block_q queries by T = block_kv keys.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

from attention import attention, get_backend
from attention.online_softmax import OnlineSoftmax
from lab.claims.claim import Figures, claim, growth
from lab.claims.inputs import CHAPTER_SHAPE, exact, inputs, largest, relative, run
from training.traffic import Call, printed_fused, printed_naive, visited_keys


def reread_keys(length: int, head_dim: int, block_q: int, block_kv: int) -> int:
    """Elements of k and v that the tiles of queries read."""
    return 2 * visited_keys(length, block_q, block_kv, causal=False) * head_dim


def tiled_traffic(length: int, head_dim: int, block_q: int, block_kv: int) -> int:
    """Queries in the outer loop: q is read and out written once, k and v for every tile of
    queries.
    """
    return 2 * length * head_dim + reread_keys(length, head_dim, block_q, block_kv)


def kv_outer_traffic(length: int, head_dim: int, block_kv: int) -> int:
    """Keys in the outer loop: k and v are read once. For every tile of keys, q is read, and out,
    row_max and row_sum are read and written.
    """
    return 2 * length * head_dim + length // block_kv * length * (3 * head_dim + 4)


@claim(
    "guide, deep dive",
    holds=lambda f: f["times"] <= 1.5 and f["exponent"] < 1.15,
)
def traffic_is_linear() -> Figures:
    """Flash attention reads Q, K and V once and writes the output once: 4 N d elements.

    Holds if the counted traffic is within 1.5 times 4 N d, and linear in N.

    Measured: at 4,096 tokens of 64, tiles of 128 queries: {times:.0f} times 4 N d; it grows
    like N^{exponent:.2f}.

    Every tile of queries reads k and v again. The traffic is quadratic, divided by the size of
    a tile.
    """
    elements = {length: tiled_traffic(length, 64, 128, 64) for length in (1024, 2048, 4096)}
    times = elements[4096] / printed_fused(Call(1, 1, 4096, 64, element=1)).bytes
    return {"times": times, "exponent": growth(elements)}


@claim(
    "guide",
    holds=lambda f: all(8 <= times <= 10 for times in f["times"].values()),
    only_if=(
        "the tile happens to have the right size for the head dim",
        lambda f: min(f["times"].values()) < 9 < max(f["times"].values()),
    ),
)
def nine_times_less() -> Figures:
    """Tiling and fusion cut the traffic to memory by 9.

    Holds if the counted traffic of the forward pass is 8 to 10 times less than that of three
    kernels.

    Measured: at 4,096 tokens: {times} times less, by head dim and queries of a tile.

    The paper's 9 is for GPT-2 medium, forward and backward together. The factor is the tile's:
    about twice its queries over d.
    """
    times = {}
    for head_dim, block_q in ((64, 64), (64, 128), (64, 256), (64, 512), (128, 128)):
        standard = printed_naive(Call(1, 1, 4096, head_dim, element=1)).bytes
        tiled = tiled_traffic(4096, head_dim, block_q, 128)
        times[f"d {head_dim}, {block_q} queries"] = standard / tiled
    return {"times": times}


@claim(
    "deep dive",
    holds=lambda f: 0.8 <= f["exponent"] <= 1.2,
)
def traffic_in_d() -> Figures:
    """The accesses to memory of FlashAttention grow like N^2 d / M, M being the size of the
    fast memory.

    Holds if with tiles that fill a fixed M, doubling d doubles the traffic (exponent of d
    between 0.8 and 1.2).

    Measured: the traffic grows like d^{exponent:.2f}.

    It is N^2 d^2 / M: a larger d also makes the tiles smaller.
    """
    # tiles of q, k, v and out fill as many elements as tiles of 32 at d = 128
    block = {head_dim: 32 * 128 // head_dim for head_dim in (32, 64, 128)}
    reread = {d: reread_keys(2048, d, block[d], block[d]) for d in block}
    return {"exponent": growth(reread)}


@claim(
    "deep dive",
    holds=lambda f: f["keys"] < f["queries"],
)
def order_of_the_loops() -> Figures:
    """Keys in the outer loop is the right order, because it reads K and V only once; queries
    outer is a pitfall.

    Holds if with keys outer fewer elements move.

    Measured: at 2,048 tokens of 64 and tiles of 64: {queries:,} elements with queries outer,
    {keys:,} with keys outer; outputs differ by {difference:.0e}.

    With keys outer, q, the output and the statistics go in and out once for every tile of keys.
    FlashAttention-2 turned the loops.
    """
    qkv = inputs(0, *CHAPTER_SHAPE)
    return {
        "queries": tiled_traffic(2048, 64, 64, 64),
        "keys": kv_outer_traffic(2048, 64, 64),
        "difference": largest(run("kv_outer", *qkv, block=32) - run("tiled", *qkv, block=32)),
    }


@claim(
    "deep dive",
    holds=lambda f: f["error"] < 1e-3,
)
def grid_over_keys() -> Figures:
    """On a GPU the loop over K/V blocks becomes the grid: one thread block for each, looping
    over the queries and updating the output.

    Holds if two such blocks that update a row at the same time leave the right output.

    Measured: when each of two blocks reads the state before the other has written it, the
    relative error is {error:.2f}.

    Both update the same rows, so the last to write wins. FlashAttention-1 keeps that loop
    inside one thread block; splits over the keys need a merge at the end (here {merged:.0e}).
    """
    q, k, v = inputs(0, *CHAPTER_SHAPE)
    truth = exact(q, k, v)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    empty = OnlineSoftmax.empty(q, dtype=torch.float32)
    # each starts from the state that it has read: the empty one
    first = empty.update(scores[..., :128], v[..., :128, :])
    last = empty.update(scores[..., 128:], v[..., 128:, :])
    return {
        "error": relative(last.finalize()[0], truth),
        "merged": largest(first.merge(last).finalize()[0] - truth),
    }


@claim(
    "guide, deep dive",
    holds=lambda f: 1.8 <= f["training"] <= 2.2,
)
def twice_the_arithmetic() -> Figures:
    """Flash attention does more arithmetic than standard attention; the guide says twice as
    much, for the bookkeeping of the softmax.

    Holds if matrix products and rescaling together, forward and backward, are 1.8 to 2.2 times
    naive's.

    Measured: forward {forward:.2f} times, of which rescaling {rescaling:.1%} (tiles of 64);
    forward and backward {training:.2f} times.

    The forward products are the same. The backward computes the scores once more: seven
    products instead of six.
    """
    q, k, v = (x.requires_grad_() for x in inputs(0, 1, 2, 512, 64))

    def products(name: str, **tiles: int) -> tuple[int, int]:
        """FLOP of the matrix products: forward, and forward and backward."""
        with FlopCounterMode(display=False) as counter:
            out = attention(q, k, v, backend=get_backend(name, **tiles), causal=False).out
            forward = counter.get_total_flops()
            out.sum().backward()
        return forward, counter.get_total_flops()

    naive_forward, naive_training = products("naive")
    forward, training = products("tiled", block_q=64, block_kv=64)
    # each tile of keys multiplies the accumulator and the sum of every row, in two heads
    rescaling = 2 * 512 // 64 * 512 * (64 + 1)
    return {
        "forward": (forward + rescaling) / naive_forward,
        "training": (training + rescaling) / naive_training,
        "rescaling": rescaling / (forward + rescaling),
    }
