"""The table of tiles, and which of them a device and a call get. test_machine_code.py compiles
them.
"""

import pytest
import torch

from attention.kernels.tiles import VARIANTS, padded_head_dim, pick_tile, table_for, tables

DTYPES = ("16-bit", "float32")
HEAD_DIMS = (64, 128, 256)


@pytest.mark.parametrize("name", tables())
def test_every_head_dim_has_a_tile(name):
    table = tables()[name]
    assert table["how"] and table["shared_memory"] % 1024 == 0
    for dtype in DTYPES:
        assert set(table[dtype]) == set(VARIANTS)
        for tiles in table[dtype].values():
            assert set(tiles) == {str(head_dim) for head_dim in HEAD_DIMS}
            for block_q, block_kv, num_warps, num_stages in tiles.values():
                assert {block_q, block_kv} <= {16, 32, 64, 128, 256}
                assert num_warps in (1, 2, 4, 8, 16)
                assert num_stages >= 1
    padded = [padded_head_dim(head_dim) for head_dim in (1, 16, 17, 64, 65, 256)]
    assert padded == [16, 16, 32, 64, 128, 256]


@pytest.mark.parametrize(
    ("capability", "shared_memory", "expected"),
    [
        ((9, 0), 232448, "sm_90"),
        ((8, 0), 166912, "sm_80"),
        ((8, 9), 101376, "sm_86"),
        ((10, 0), 232448, "sm_90"),
        ((12, 0), 101376, "sm_86"),
    ],
    ids=["H200", "A100", "L40S", "B200", "RTX-5090"],
)
def test_a_device_gets_the_largest_table_that_fits(capability, shared_memory, expected):
    assert table_for(capability, shared_memory) is tables()[expected]


def test_a_device_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="101376 .* 65536.*attention=sdpa"):
        table_for((7, 5), 65536)


@pytest.mark.parametrize("kernel", VARIANTS)
def test_tiles_of_ones_own_keep_their_keys_and_in_float32_have_fewer_queries(kernel):
    """128 by 64 take ptxas over a minute in float32, and spill 137 kB a thread."""
    asked = {"device": torch.device("cuda"), "block_q": 128, "block_kv": 64}
    for head_dim, most in ((64, 32), (128, 16)):
        assert pick_tile(kernel, head_dim, torch.float32, **asked)[:2] == (most, 64)
    halves = pick_tile(kernel, 128, torch.bfloat16, **asked)
    assert halves[:2] == (32 if kernel.startswith("dkdv") else 128, 64)
