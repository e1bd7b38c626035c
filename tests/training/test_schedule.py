"""What a GPU chooses of an attention that leaves the choice open."""

import pytest

from attention import get_backend
from attention.tiled import tile_loop_backend
from training import compose
from training.loop.schedule import GPU_BLOCK_Q, chosen_attention, suit_gpu


def on_gpu(*overrides: str) -> dict:
    config = compose(*overrides)
    backend = chosen_attention(config)[0]
    return dict(suit_gpu(config, backend, config.attention.backend_options()).options)


def test_a_gpu_runs_a_defect_by_its_kernels():
    tiles = {"block_q": 128, "block_kv": 32}
    expected = get_backend("no_rescale").on_gpu.configured(**tiles).options
    assert on_gpu("attention=no_rescale", "attention.block_kv=32") == expected


@pytest.mark.parametrize("asked", ["attention.softmax_dtype=input", "attention.sinks=true"])
def test_it_stays_with_the_loop_that_alone_has_what_is_asked_for(asked):
    assert "kernel" not in on_gpu("attention=no_max", asked)


@pytest.mark.parametrize("name", ["tiled", "kv_outer"])
def test_a_gpu_takes_larger_tiles_in_an_exact_loop(name):
    assert on_gpu(f"attention={name}")["block_q"] == GPU_BLOCK_Q
    assert on_gpu(f"attention={name}", "attention.block_q=32")["block_q"] == 32
    # which keeps a whole row of tiles
    assert on_gpu(f"attention={name}", "attention.softmax_dtype=input")["block_q"] == 128
    # a mask inside the tile is another function in a tile of another size
    assert on_gpu("attention=relative_mask")["block_q"] == 128


def test_your_own_attention_keeps_its_options():
    own = tile_loop_backend("pkg.module:OWN")
    assert suit_gpu(compose(), own, {}) is own
