"""What one attention call moves through a GPU's memory, how much it computes for it, and which
tiles fit on the chip.

Counted per call of B sequences, H heads, N queries and keys, D head dim; `element` is the bytes of
an element of q, k, v and out; `mask` is causal (True) and window (None: all keys).

Two accountings stand side by side. The one often printed counts q, k, v and out once for a fused
kernel, 4 N D. But a query tile must see every key it attends to, so K and V are read again for each
query tile: 2 N D + 2 N D * N / block_q (half of the second term when causal). With a tile as large
as the chip's memory of M elements lets it be, that is Theta(N^2 D^2 / M) (Dao et al.,
"FlashAttention", 2022, theorem 2), not Theta(N D). A second-level cache may serve the repeats: this
counts what is asked for.
"""

from dataclasses import dataclass
from typing import Any

from training.hardware import REGISTER_BYTES, SHARED_KIB


@dataclass(frozen=True)
class Traffic:
    """Bytes through device memory and FLOPs of one forward call."""

    read: float
    written: float
    flops: float

    @property
    def bytes(self) -> float:
        return self.read + self.written

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes


def useful_flops(
    batch: int,
    heads: int,
    seq_len: int,
    head_dim: int,
    *,
    causal: bool = True,
    window: int | None = None,
) -> float:
    """Of the forward's two products; a causal mask leaves half of them to do, a window fewer."""
    hidden = seq_len - min(window or seq_len, seq_len)
    return 4 * batch * heads * (seq_len**2 - hidden**2) * head_dim / (2 if causal else 1)


def printed_naive(
    batch: int, heads: int, seq_len: int, head_dim: int, element: int, **mask: Any
) -> Traffic:
    """The usual accounting of attention in three kernels: scores written and read, probabilities
    written and read, 4 N^2 + 4 N D.
    """
    square, line = (
        batch * heads * seq_len**2 * element,
        batch * heads * seq_len * head_dim * element,
    )
    return Traffic(
        2 * square + 3 * line,
        2 * square + line,
        useful_flops(batch, heads, seq_len, head_dim, **mask),
    )


def printed_fused(
    batch: int, heads: int, seq_len: int, head_dim: int, element: int, **mask: Any
) -> Traffic:
    """The usual accounting of a fused kernel: q, k, v read once and out written once, 4 N D."""
    line = batch * heads * seq_len * head_dim * element
    return Traffic(3 * line, line, useful_flops(batch, heads, seq_len, head_dim, **mask))


def naive(
    batch: int, heads: int, seq_len: int, head_dim: int, element: int, **mask: Any
) -> Traffic:
    """attention=naive as it runs, operator by operator, every one over the whole of N x N in
    float32 (causal or not).

    q k^T, scale, mask, logsumexp (maximum, difference, exponential, sum), softmax, rows without a
    key, the cast to v's dtype, p v.
    """
    square, line = batch * heads * seq_len**2, batch * heads * seq_len * head_dim
    cast = element if element < 4 else 0
    read = square * (
        4 + 4 + 1 + 4 + 4 + 4 + 4 + 4 + 4 + (4 if cast else 0) + (cast or 4)
    ) + line * (3 * element + 8)
    written = square * (4 + 4 + 4 + 4 + 4 + 4 + 4 + cast) + line * (element + 8)
    return Traffic(read, written, useful_flops(batch, heads, seq_len, head_dim, **mask))


def visited_keys(
    seq_len: int, block_q: int, block_kv: int, *, causal: bool = True, window: int | None = None
) -> int:
    """Rows of K that the query tiles of one head load, tile by tile: block_kv at a time, none past
    the diagonal or before the window.
    """
    tiles, window = -(-seq_len // block_q), window or seq_len
    # query tiles that end before the last, ragged tile of keys: these see whole tiles, others all
    early = seq_len // block_kv * block_kv // block_q if causal else 0
    seen = block_kv * floor_sum(early, block_q, block_q + block_kv - 1, block_kv)
    seen += (tiles - early) * seq_len
    full = min(-(-window // block_q), tiles)  # query tiles whose window reaches the first key
    before = full * block_q + 1 - window  # keys before the window of the next
    return seen - block_kv * floor_sum(tiles - full, block_q, before, block_kv)


def floor_sum(n: int, a: int, b: int, m: int) -> int:
    """The sum of (a * i + b) // m for i in range(n), in steps of Euclid's algorithm. b >= 0."""
    total = 0
    while n:
        total += a // m * (n * (n - 1) // 2) + b // m * n
        a, b = a % m, b % m
        # the lattice points under the line, counted along the other axis
        (n, b), m, a = divmod(a * n + b, m), a, m
    return total


def fused(
    batch: int,
    heads: int,
    seq_len: int,
    head_dim: int,
    element: int,
    *,
    block_q: int = 128,
    block_kv: int = 64,
    **mask: Any,
) -> Traffic:
    """A flash kernel: q once, K and V once for every query tile, out and lse once. The score tile
    never leaves the chip.
    """
    rows = batch * heads * seq_len
    keys = batch * heads * visited_keys(seq_len, block_q, block_kv, **mask)
    read = (rows + 2 * keys) * head_dim * element
    return Traffic(
        read,
        rows * (head_dim * element + 4),
        useful_flops(batch, heads, seq_len, head_dim, **mask),
    )


def tile_loop(
    batch: int,
    heads: int,
    seq_len: int,
    head_dim: int,
    element: int,
    *,
    block_q: int = 128,
    block_kv: int = 64,
    **mask: Any,
) -> Traffic:
    """The same tiles as PyTorch operators: K and V as above, but every step on a score tile goes
    through memory (or the cache).

    A score: the product, the scale, the maximum, the difference, the exponential, the sum, the
    casts, p v. A step also reads and writes the accumulator three times. Tiling alone saves memory,
    not traffic: that takes fusion.
    """
    kernel = fused(
        batch,
        heads,
        seq_len,
        head_dim,
        element,
        block_q=block_q,
        block_kv=block_kv,
        **mask,
    )
    keys = batch * heads * visited_keys(seq_len, block_q, block_kv, **mask)
    scores, accumulators = (
        keys * min(block_q, seq_len),
        keys / block_kv * min(block_q, seq_len) * head_dim * 4,
    )
    casts = element if element < 4 else 0
    read = (
        scores * (4 + 4 + 4 + 4 + 4 + 4 + (4 + casts if casts else 0))
        + 4 * accumulators
        + 2 * keys * head_dim * 4
    )
    written = (
        scores * (4 + 4 + 4 + 4 + (4 + casts if casts else 0))
        + 3 * accumulators
        + 2 * keys * head_dim * 4
    )
    return Traffic(kernel.read + read, kernel.written + written, kernel.flops)


def lower_bound_bytes(
    batch: int, heads: int, seq_len: int, head_dim: int, element: int, *, sram_bytes: int
) -> float:
    """N^2 D^2 / M in bytes, the order that no exact attention beats for every M (the paper,
    proposition 3); M elements on the chip.
    """
    return batch * heads * seq_len**2 * head_dim**2 / (sram_bytes / element) * element


def tile_bytes(
    block_q: int, block_kv: int, head_dim: int, element: int, *, stages: int = 2
) -> tuple[int, int]:
    """On-chip bytes of one block of a flash forward: shared (the q tile, `stages` pairs of k and v
    tiles) and in registers (float32 scores and accumulator)."""
    shared = (block_q + 2 * stages * block_kv) * head_dim * element
    return shared, 4 * block_q * (block_kv + head_dim)


def fits_on_chip(
    block_q: int, block_kv: int, head_dim: int, element: int, capability: str, *, stages: int = 2
) -> bool:
    """Whether one block has room for that tile. Raises KeyError for an unknown compute
    capability.
    """
    shared, registers = tile_bytes(block_q, block_kv, head_dim, element, stages=stages)
    return shared <= SHARED_KIB[capability][1] * 1024 and registers <= REGISTER_BYTES
