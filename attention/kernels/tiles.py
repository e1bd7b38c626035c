"""Choose the tiles of a kernel, and the order of its work.

Tiles come from a table by device, dtype and head dim, so that no first call stalls on autotuning.

tiles.json has one table per compute capability: kernel -> padded head dim -> [block_q, block_kv,
num_warps, num_stages]. The kernel dkdv_general is dkdv with intervals, a score modifier or grouped
heads, which take registers. decoding is the split kernel; its block_q is the most rows that a
program takes. `python -m scripts.tune` prints a table for the device of this machine.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

TILES = Path(__file__).with_name("tiles.json")
# the variants that run with a kernel's tile
VARIANTS = {
    "forward": ("causal", "full", "intervals", "score_mod", "no_rescale"),
    "dkdv": ("causal", "full"),
    "dkdv_general": ("intervals", "score_mod", "grouped"),
    "dq": ("causal", "full", "intervals", "score_mod"),
    "decoding": ("cache", "pages", "intervals", "score_mod"),
}


class Tile(NamedTuple):
    """Tile shape and launch parameters of one kernel."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


# the interpreter's tile is so small that a short test crosses several
INTERPRETER = Tile(32, 16, 1, 1)


def padded_head_dim(head_dim: int) -> int:
    """The next power of two, at least 16, as a product of tiles needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


@cache
def tables() -> dict[str, dict[str, Any]]:
    return json.loads(TILES.read_text())


@cache
def table_for(capability: tuple[int, int], shared_memory: int) -> dict[str, Any]:
    """The table of this compute capability. If there is none, the largest table whose tiles fit
    into a program's shared memory (bytes).
    """
    own = tables().get(f"sm_{capability[0]}{capability[1]}")
    if own is not None:
        return own
    fitting = [table for table in tables().values() if table["shared_memory"] <= shared_memory]
    if not fitting:
        least = min(table["shared_memory"] for table in tables().values())
        raise ValueError(
            f"attention=triton needs {least} bytes of shared memory a program, this GPU has "
            f"{shared_memory}: use attention=sdpa"
        )
    return max(fitting, key=lambda table: table["shared_memory"])


@cache
def properties(device: torch.device) -> Any:
    """torch.cuda.get_device_properties, cached: a launch needs them several times."""
    return torch.cuda.get_device_properties(device)


def multiprocessors(device: torch.device) -> int:
    return properties(device).multi_processor_count


def tiles_of(length: int, block: int) -> int:
    """length / block, rounded up. triton.cdiv takes two microseconds for it."""
    return -(-length // block)


@cache
def section_of(
    device: torch.device, streamed: int, *, heads: int = 1, equal: bool, at_least: int = 1
) -> int:
    """How many heads to work on at a time, so that what they read stays in the L2 cache: `streamed`
    bytes, which `heads` heads share.

    equal: whether all programs take the same amount of work. If not, a section has several heads,
    at least heads * at_least, and their longest programs run first.
    """
    if equal:
        return heads
    if device.type == "cpu":
        return 2 * heads  # interpreter: no cache and few heads; this makes several sections
    # about half of the cache; the rest is for data that is read once or written
    return heads * max(1, at_least, round(properties(device).L2_cache_size / 2 / streamed))


def bytes_of_a_head(x: Tensor) -> int:
    """Bytes of one head of x (B, H, N, D)."""
    return x.shape[2] * x.shape[3] * x.element_size()


def batch_stride(x: Tensor | None) -> int:
    """The stride along B of a tensor (B or 1, ...); 0 if all sequences share it, or for None."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def pick_tile(
    kernel: str,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    block_q: int = 0,
    block_kv: int = 0,
) -> Tile:
    """The table's tile, or one of block_q by block_kv if the user chose these. They matter for a
    defect: its result depends on where a tile of keys ends, but not on block_q.
    """
    if block_q and block_kv:
        # the registers limit it; in float32 larger tiles take minutes to compile
        if dtype == torch.float32:
            block_q = min(block_q, 32 if head_dim <= 64 else 16)
        elif kernel.startswith("dkdv"):
            block_q = min(block_q, 64 if head_dim <= 64 else 32)
        return Tile(
            block_q,
            block_kv,
            num_warps=8 if block_q * block_kv > 64 * 64 else 4,
            num_stages=2 if dtype.itemsize == 2 else 1,
        )
    if device.type == "cpu":
        return INTERPRETER
    gpu = properties(device)
    table = table_for((gpu.major, gpu.minor), gpu.shared_memory_per_block_optin)
    tiles = table["float32" if dtype == torch.float32 else "16-bit"][kernel]
    return Tile(*tiles[str(max(64, padded_head_dim(head_dim)))])
