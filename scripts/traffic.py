"""Counts the bytes that one attention call moves through a GPU's memory, its FLOPs, and the bytes
of its tiles on the chip.

Dimensions: B sequences, H heads, N queries and keys, D head dim.

There are two accountings. The usual one counts q, k, v and out once for a fused kernel, 4 N D. But
a query tile must see every key it attends to, so K and V are read again for each query tile:
2 N D + 2 N D * N / block_q (half of the second term when causal). With the largest tile that an
on-chip memory of M elements allows, that is Theta(N^2 D^2 / M) (Dao et al., "FlashAttention", 2022,
theorem 2), not Theta(N D). A second-level cache may serve the repeats; this counts all requests.
"""

from dataclasses import dataclass


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


@dataclass(frozen=True)
class Call:
    """One forward call of attention."""

    batch: int
    heads: int
    seq_len: int
    head_dim: int
    element: int  # bytes of an element of q, k, v and out
    causal: bool = True
    window: int | None = None  # None: all keys

    @property
    def line(self) -> int:
        """Elements of q; k, v and out have as many."""
        return self.batch * self.heads * self.seq_len * self.head_dim

    @property
    def square(self) -> int:
        """Number of scores, including hidden ones."""
        return self.batch * self.heads * self.seq_len**2

    @property
    def cast(self) -> int:
        """Bytes of a score cast to the narrow dtype of v; 0 if v is float32."""
        return self.element if self.element < 4 else 0

    @property
    def flops(self) -> float:
        """FLOPs of the two products. A causal mask leaves half of them, a window fewer still."""
        hidden = self.seq_len - min(self.window or self.seq_len, self.seq_len)
        pairs = self.square - self.batch * self.heads * hidden**2
        return 4 * pairs * self.head_dim / (2 if self.causal else 1)

    def visited_keys(self, block_q: int, block_kv: int) -> int:
        """Rows of K that all query tiles load."""
        keys = visited_keys(self.seq_len, block_q, block_kv, causal=self.causal, window=self.window)
        return self.batch * self.heads * keys


def printed_naive(call: Call) -> Traffic:
    """The usual accounting of attention in three kernels, which write and read the scores and then
    the probabilities: 4 N^2 + 4 N D.
    """
    square, line = call.square * call.element, call.line * call.element
    return Traffic(2 * square + 3 * line, 2 * square + line, call.flops)


def printed_fused(call: Call) -> Traffic:
    """The usual accounting of a fused kernel: q, k, v read once and out written once, 4 N D."""
    line = call.line * call.element
    return Traffic(3 * line, line, call.flops)


def naive(call: Call) -> Traffic:
    """attention=naive as it runs, operator by operator. Each goes over all of N x N in float32,
    causal or not.

    q k^T, scale, mask, logsumexp (maximum, difference, exponential, sum), softmax, rows without a
    key, the cast to v's dtype, p v.
    """
    cast = call.cast
    # N x N eight times in float32, the mask, and p for its cast and for p v
    read = call.square * (8 * 4 + 1 + 4 + cast) + call.line * (3 * call.element + 8)
    written = call.square * (7 * 4 + cast) + call.line * (call.element + 8)
    return Traffic(read, written, call.flops)


def visited_keys(
    seq_len: int, block_q: int, block_kv: int, *, causal: bool = True, window: int | None = None
) -> int:
    """Rows of K that the query tiles of one head load, block_kv at a time, without tiles past the
    diagonal or before the window.
    """
    tiles, window = -(-seq_len // block_q), window or seq_len
    # query tiles that end before the last, ragged tile of keys load whole tiles; others load all
    early = seq_len // block_kv * block_kv // block_q if causal else 0
    seen = block_kv * floor_sum(early, block_q, block_q + block_kv - 1, block_kv)
    seen += (tiles - early) * seq_len
    full = min(-(-window // block_q), tiles)  # query tiles whose window reaches the first key
    before = full * block_q + 1 - window  # keys before the window of the next
    return seen - block_kv * floor_sum(tiles - full, block_q, before, block_kv)


def floor_sum(n: int, a: int, b: int, m: int) -> int:
    """The sum of (a * i + b) // m for i in range(n), by Euclid's algorithm. b >= 0."""
    total = 0
    while n:
        total += a // m * (n * (n - 1) // 2) + b // m * n
        a, b = a % m, b % m
        # the lattice points under the line, counted along the other axis
        (n, b), m, a = divmod(a * n + b, m), a, m
    return total


def fused(call: Call, *, block_q: int = 128, block_kv: int = 64) -> Traffic:
    """A flash kernel reads q once, and K and V once for every query tile; it writes out and lse
    once. The score tile never leaves the chip.
    """
    keys = 2 * call.visited_keys(block_q, block_kv) * call.head_dim  # of K and V
    lse = 4 * call.batch * call.heads * call.seq_len
    return Traffic((call.line + keys) * call.element, call.line * call.element + lse, call.flops)


def tile_loop(call: Call, *, block_q: int = 128, block_kv: int = 64) -> Traffic:
    """The same tiles as PyTorch operators: K and V as above, but every step on a score tile goes
    through memory (or the cache).

    Steps on a score: the product, the scale, the maximum, the difference, the exponential, the sum,
    the casts, p v. Each tile also reads the accumulator four times and writes it three times.
    Tiling alone saves memory, not traffic; that takes fusion.
    """
    kernel = fused(call, block_q=block_q, block_kv=block_kv)
    keys, rows = call.visited_keys(block_q, block_kv), min(block_q, call.seq_len)
    accumulators = keys / block_kv * rows * call.head_dim * 4
    casts = 4 + call.cast if call.cast else 0
    copies = 2 * keys * call.head_dim * 4
    return Traffic(
        kernel.read + keys * rows * (6 * 4 + casts) + 4 * accumulators + copies,
        kernel.written + keys * rows * (4 * 4 + casts) + 3 * accumulators + copies,
        kernel.flops,
    )


def lower_bound_bytes(call: Call, *, sram_bytes: int) -> float:
    """N^2 D^2 / M in bytes: no exact attention is of a lower order for every M (Dao et al.,
    proposition 3). M is the elements that fit on the chip.
    """
    return call.square * call.head_dim**2 / (sram_bytes / call.element) * call.element


def tile_bytes(block_q: int, block_kv: int, head_dim: int, element: int) -> tuple[int, int]:
    """On-chip bytes of one block of a flash forward: shared (the q tile, two stages of k and v
    tiles) and in registers (float32 scores and accumulator)."""
    return (block_q + 4 * block_kv) * head_dim * element, 4 * block_q * (block_kv + head_dim)
