"""scripts.tune without a GPU: what it would time, and what it says."""

import pytest
import torch

from attention.kernels.tiles import TILES, VARIANTS, tables
from scripts.tune import candidates, main, write_tables


def test_the_tiles_in_force_are_among_the_candidates():
    for kernel in VARIANTS:
        for head_dim in (64, 128):
            in_force = tuple(tables()["sm_90"]["16-bit"][kernel][str(head_dim)])
            assert in_force in set(candidates(kernel, head_dim))


def test_the_file_is_kept_as_it_is_written(tmp_path):
    write_tables(tmp_path / "tiles.json")
    assert (tmp_path / "tiles.json").read_text() == TILES.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a machine without a GPU")
@pytest.mark.parametrize(("interpret", "named"), [("0", "GPU"), ("1", "TRITON_INTERPRET=1")])
def test_tiles_are_only_timed_on_a_gpu(monkeypatch, interpret, named):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with pytest.raises(SystemExit, match=f"^tune: .*{named}"):
        main(["head_dim=64", "seconds=300"])
