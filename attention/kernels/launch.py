"""Which tiles a kernel runs with: a table, looked up by head dim, dtype and device, so that no first call stalls on autotuning."""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Tile shape and launch parameters of one kernel."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


# kernel -> padded head dim -> tile, for 16-bit inputs; dkdv_general is dkdv with intervals, a score modifier or
# grouped heads, which take registers.
# 227 KB of shared memory per program (sm_90): the fastest of those measured on an H200
HOPPER = {
    "forward": {64: Tile(128, 64, 4, 3), 128: Tile(128, 128, 8, 3), 256: Tile(128, 64, 8, 2)},
    "dkdv": {64: Tile(128, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(32, 64, 8, 1)},
    "dkdv_general": {64: Tile(32, 64, 4, 3), 128: Tile(32, 64, 4, 2), 256: Tile(32, 64, 8, 1)},
    "dq": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 32, 8, 2)},
}
# 163 KB (sm_80): by what fits, not measured
AMPERE = {
    "forward": {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 64, 8, 1)},
    "dkdv": {64: Tile(64, 64, 4, 2), 128: Tile(32, 64, 4, 2), 256: Tile(32, 32, 8, 1)},
    "dkdv_general": {64: Tile(32, 64, 4, 2), 128: Tile(32, 64, 4, 2), 256: Tile(32, 32, 8, 1)},
    "dq": {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 1)},
}
# 99 KB (sm_86, sm_89): half of that, not measured
SMALL = {
    "forward": {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(32, 32, 4, 1)},
    "dkdv": {64: Tile(32, 64, 4, 2), 128: Tile(32, 32, 4, 2), 256: Tile(16, 32, 4, 1)},
    "dkdv_general": {64: Tile(32, 64, 4, 2), 128: Tile(32, 32, 4, 2), 256: Tile(16, 32, 4, 1)},
    "dq": {64: Tile(64, 32, 4, 2), 128: Tile(32, 32, 4, 2), 256: Tile(32, 16, 4, 1)},
}
# exact float32 products run on the ordinary cores, with operands twice as wide
FLOAT32 = {
    "forward": {64: Tile(64, 32, 4, 2), 128: Tile(32, 32, 4, 2), 256: Tile(32, 16, 4, 1)},
    "dkdv": {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)},
    "dkdv_general": {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)},
    "dq": {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)},
}
# the interpreter runs tiles one by one: small enough that a short test crosses several
INTERPRETER = Tile(32, 16, 1, 1)


def padded_head_dim(head_dim: int) -> int:
    """The power of two, at least 16, that a product of tiles needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


def pick_tile(kernel: str, head_dim: int, dtype: torch.dtype, device: torch.device, *, block_q: int = 0, block_kv: int = 0) -> Tile:
    """The table's tile, or one of block_q by block_kv: a defect depends on where its tiles of keys end, so there they are the user's."""
    if block_q and block_kv:
        if kernel.startswith("dkdv"):
            block_q = min(block_q, 64 if head_dim <= 64 else 32)  # what the registers hold
        return Tile(block_q, block_kv, num_warps=8 if block_q * block_kv > 64 * 64 else 4, num_stages=2 if dtype.itemsize == 2 else 1)
    if device.type == "cpu":
        return INTERPRETER
    if dtype == torch.float32:
        table = FLOAT32
    else:
        shared_memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        table = next(tiles for least, tiles in ((225, HOPPER), (163, AMPERE), (0, SMALL)) if shared_memory >= least * 1024)
    return table[kernel][max(64, padded_head_dim(head_dim))]
