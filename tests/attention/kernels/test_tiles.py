"""The table of tiles: complete, and compiled for sm_90 without a GPU, where no tile may spill
registers or serialise its products.
"""

import json

import pytest
import torch

from attention.kernels.tiles import VARIANTS, padded_head_dim, pick_tile, table_for, tables
from tests.attention.kernels.compiler import NEEDED, printed

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


@pytest.mark.parametrize(
    ("head_dim", "padded"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128), (256, 256)]
)
def test_padding_of_the_head_dim(head_dim, padded):
    assert padded_head_dim(head_dim) == padded


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


def test_tiles_of_ones_own_keep_their_keys():
    asked = {"device": torch.device("cuda"), "block_q": 128, "block_kv": 32}
    for kernel in VARIANTS:
        assert pick_tile(kernel, 64, torch.bfloat16, **asked).block_kv == 32


def test_float32_gets_fewer_queries_than_asked_for():
    """128 by 64 take ptxas over a minute in float32, and spill 137 kB a thread."""
    asked = {"device": torch.device("cuda"), "block_q": 128, "block_kv": 64}
    for kernel in VARIANTS:
        for head_dim, most in ((64, 32), (128, 16)):
            tile = pick_tile(kernel, head_dim, torch.float32, **asked)
            assert (tile.block_q, tile.block_kv) == (most, 64)
    assert pick_tile("forward", 128, torch.bfloat16, **asked).block_q == 128


# bytes of a thread that the compiler spills, and why
SPILLS = {
    ("dkdv", 128, "full"): 16,  # by Triton 3.9's allocation; none with 3.6
    # dk and dv of 64 x 256 leave few registers for the rest
    ("dkdv_general", 256, "intervals"): 256,
    ("dkdv_general", 256, "score_mod"): 256,
    ("dkdv_general", 256, "grouped"): 256,
}


# one process for several: it takes seconds to load
COMPILE = """
import json, sys
from attention.kernels.tiles import Tile
from tests.attention.kernels.portable_offline import compile_tile
for *problem, tile in json.loads(sys.argv[1]):
    print(json.dumps(compile_tile(*problem, Tile(*tile))))
"""


EVERY = [
    (kernel, head_dim, variant)
    for kernel, variants in VARIANTS.items()
    for head_dim in HEAD_DIMS
    for variant in variants
]
# every kernel once (dkdv and dkdv_general are one), and each of the things that a variant adds
SOME = [
    ("forward", 64, "score_mod"),
    ("dkdv_general", 64, "intervals"),
    ("dq", 128, "full"),
    ("decoding", 128, "pages"),
]


@NEEDED
@pytest.mark.parametrize(
    "wanted", [SOME, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["some", "every"]
)
def test_sm_90_compiles_without_spills(wanted):
    """The compiler takes a second for each, and the process two to begin."""
    table = tables()["sm_90"]
    problems = [
        (kernel, head_dim, variant, table["16-bit"][kernel][str(head_dim)])
        for kernel, head_dim, variant in wanted
    ]
    found = printed("-c", COMPILE, json.dumps(problems))
    for (kernel, head_dim, variant), row in zip(wanted, found, strict=True):
        assert row["variant"] == variant
        assert row["shared"] <= table["shared_memory"], row
        assert row["warnings"] == [], row
        assert row["spilled"] <= SPILLS.get((kernel, head_dim, variant), 0), row
