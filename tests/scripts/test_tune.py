"""scripts.tune without a GPU: what it would time, and what it says."""

from types import SimpleNamespace

import pytest
import torch

from attention.kernels.tiles import Tile, tables
from scripts import tune


def test_the_tiles_in_force_are_among_the_candidates():
    for kernel in tune.KERNELS:
        for head_dim in (64, 128):
            in_force = tuple(tables()["sm_90"]["16-bit"][kernel][str(head_dim)])
            assert in_force in set(tune.candidates(kernel, head_dim))


@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_what_is_timed_can_be_called(monkeypatch, kernel):
    sizes = {"LENGTHS": (32,), "TOKENS": 32, "WIDTH": 64, "WINDOW": 8}
    for name, value in (sizes | {"GPU": torch.device("cpu")}).items():
        monkeypatch.setattr(tune, name, value)
    for call in tune.workloads(kernel, 16):
        assert all(x is None or x.isfinite().all() for x in call())


def test_a_launch_takes_the_tile_that_is_timed(monkeypatch):
    """A regression test: launches kept the first tile, and every candidate was as fast as it."""
    from attention.kernels import launch

    h200 = SimpleNamespace(major=9, minor=0, shared_memory_per_block_optin=232448)
    monkeypatch.setattr("attention.kernels.tiles.properties", lambda device: h200)
    table = tables()["sm_90"]
    tiles = table["16-bit"]["forward"]
    monkeypatch.setitem(tiles, "64", tiles["64"])  # which it restores
    call = launch.Settings(True, 0.125), torch.device("cuda"), torch.bfloat16, 64, 1
    for tile in (Tile(128, 64, 4, 3), Tile(64, 32, 4, 2)):
        tune.use_tile(tile, "forward", 64, table)
        found = launch.constants("forward", *call)
        sizes = [found[name] for name in ("BLOCK_Q", "BLOCK_KV", "num_warps", "num_stages")]
        assert sizes == list(tile)
    launch.constants.cache_clear()
