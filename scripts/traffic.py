"""Counts the bytes that one causal attention call moves through a GPU's memory, its FLOPs, and the
bytes of a tile on the chip.

The count of 4 N D that is often printed for a fused kernel has q, k, v and out once. But a query
tile must see every key it attends to, so K and V are read again for each query tile: 2 N D + N D *
N / block_q (Dao et al., "FlashAttention", 2022). A second-level cache may serve the repeats; this
counts all requests.
"""

from dataclasses import dataclass
from typing import Any


def pairs(shape: dict[str, Any]) -> float:
    """The number of visible scores of one head. A causal mask leaves half of the square, as is
    customary; a window leaves fewer. shape: seq_len, causal; optionally window, and documents
    (tokens of each document packed into a sequence).
    """
    # length of what attends to itself
    length = min(shape.get("documents") or shape["seq_len"], shape["seq_len"])
    window = min(shape.get("window") or length, length)
    per_document = (window * length - window**2 / 2) if shape["causal"] else length**2
    return per_document * shape["seq_len"] / length


@dataclass(frozen=True)
class Call:
    """One forward call of attention, with N = seq_len queries and keys."""

    batch: int
    heads: int
    seq_len: int
    head_dim: int
    element: int  # bytes of an element of q, k, v and out
    window: int | None = None  # None: all keys

    @property
    def query_bytes(self) -> int:
        """Bytes of q; out has as many."""
        return self.batch * self.heads * self.seq_len * self.head_dim * self.element

    @property
    def flops(self) -> float:
        """FLOPs of the two products over the visible scores."""
        return 4 * self.batch * self.heads * self.head_dim * pairs(vars(self) | {"causal": True})


def naive(call: Call) -> int:
    """attention=naive as it runs, operator by operator, over all of N x N in float32.

    q k^T, scale, mask, logsumexp (maximum, difference, exponential, sum), softmax, rows without a
    key, the cast to v's dtype, p v.
    """
    cast = call.element if call.element < 4 else 0
    # N x N read eight times in float32, the mask, and p for its cast and for p v; written seven
    # times
    of_a_score = 15 * 4 + 1 + 4 + 2 * cast
    wide = 16 * call.query_bytes // call.element  # float32 q and k, written and read
    scores = call.batch * call.heads * call.seq_len**2  # including hidden ones
    return scores * of_a_score + 4 * call.query_bytes + wide


def visited_keys(call: Call, block_q: int, block_kv: int) -> int:
    """Rows of K that the query tiles of all heads load, block_kv at a time, without tiles past the
    diagonal or before the window.
    """
    rows = 0
    for start in range(0, call.seq_len, block_q):
        stop = min(start + block_q, call.seq_len)
        first = max(start + 1 - (call.window or call.seq_len), 0)
        last = min(-(-stop // block_kv) * block_kv, call.seq_len)
        rows += last - first // block_kv * block_kv
    return call.batch * call.heads * rows


def fused(call: Call, *, block_q: int = 128, block_kv: int = 64) -> int:
    """A flash kernel reads q once, and K and V once for every query tile; it writes out and lse
    once. The score tile never leaves the chip.
    """
    keys_and_values = 2 * visited_keys(call, block_q, block_kv) * call.head_dim * call.element
    lse = 4 * call.batch * call.heads * call.seq_len
    return 2 * call.query_bytes + keys_and_values + lse


def tile_bytes(block_q: int, block_kv: int, head_dim: int, element: int) -> tuple[int, int]:
    """On-chip bytes of one block of a flash forward: shared (the q tile, two stages of k and v
    tiles) and in registers (float32 scores and accumulator).
    """
    return (block_q + 4 * block_kv) * head_dim * element, 4 * block_q * (block_kv + head_dim)
