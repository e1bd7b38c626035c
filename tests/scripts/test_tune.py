"""scripts.tune without a GPU: what it would time, and what it says."""

import json
from types import SimpleNamespace

import pytest
import torch

from attention.kernels.tiles import TILES, VARIANTS, Tile, tables
from scripts.tune import candidates, main, use_tile, write_tables


def test_the_tiles_in_force_are_among_the_candidates():
    for kernel in VARIANTS:
        for head_dim in (64, 128):
            in_force = tuple(tables()["sm_90"]["16-bit"][kernel][str(head_dim)])
            assert in_force in set(candidates(kernel, head_dim))


def test_a_launch_takes_the_tile_that_is_timed(monkeypatch):
    """A regression test: launches kept the first tile, and every candidate was as fast as it."""
    from attention.kernels import launch

    h200 = SimpleNamespace(major=9, minor=0, shared_memory_per_block_optin=232448)
    monkeypatch.setattr("attention.kernels.tiles.properties", lambda device: h200)
    table = json.loads(json.dumps(tables()["sm_90"]))
    monkeypatch.setitem(tables(), "sm_90", table)
    call = launch.Settings(True, 0.125), torch.device("cuda"), torch.bfloat16, 64, 1
    for tile in (Tile(128, 64, 4, 3), Tile(64, 32, 4, 2)):
        use_tile(tile, "forward", 64, table)
        found = launch.constants("forward", *call)
        sizes = [found[name] for name in ("BLOCK_Q", "BLOCK_KV", "num_warps", "num_stages")]
        assert sizes == list(tile)
    launch.constants.cache_clear()


def test_the_file_is_kept_as_it_is_written(tmp_path):
    write_tables(tmp_path / "tiles.json")
    assert (tmp_path / "tiles.json").read_text() == TILES.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a machine without a GPU")
@pytest.mark.parametrize(("interpret", "named"), [("0", "GPU"), ("1", "TRITON_INTERPRET=1")])
def test_tiles_are_only_timed_on_a_gpu(monkeypatch, interpret, named):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with pytest.raises(SystemExit, match=f"^tune: .*{named}"):
        main(["head_dim=64", "seconds=300"])
