"""Reading through a cache gives what reading at once gives."""

import pytest
import torch

from model import KVCache


@pytest.mark.parametrize(
    ("variant", "backend", "chunks"),
    [
        ("modern", "sdpa", (1,) * 20),
        ("modern", "tiled", (7, 1, 1, 5, 6)),
        ("gpt2", "tiled", (7, 1, 1, 5, 6)),
    ],
    ids=["one-by-one", "ragged", "ragged-gpt2"],
)
def test_chunks_through_a_cache_equal_one_pass(build_gpt, random_tokens, variant, backend, chunks):
    # float64, so that only a mistake can make a difference
    model = build_gpt(backend, variant=variant).double()
    tokens, cache = random_tokens(2, 20), KVCache(model.config.num_layers, max_len=24)
    with torch.no_grad():
        parts = [model(chunk, cache=cache).logits for chunk in tokens.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens).logits)
    assert cache.length == 20


def test_room_is_taken_once_and_unwritten_room_is_never_read(build_gpt, random_tokens):
    model, tokens = build_gpt(variant="modern"), random_tokens(2, 12)
    cache = KVCache(model.config.num_layers, max_len=16)
    with torch.no_grad():
        model(tokens[:, :8], cache=cache)
        rooms = [room for layer in cache.layers for room in (layer.k, layer.v)]
        for room in rooms:
            assert room.shape == (2, 2, 16, 8)
            room[:, :, 8:] = torch.nan
        assert model(tokens[:, 8:], cache=cache).logits.isfinite().all()
    again = [room for layer in cache.layers for room in (layer.k, layer.v)]
    assert all(a is b for a, b in zip(again, rooms, strict=True))


def test_refuses_more_than_it_holds(build_gpt, random_tokens):
    """Or more than there are learned positions."""
    for model, max_len, named in (
        (build_gpt(variant="modern"), 31, "30.* 3 .*max_len=31"),
        (build_gpt(), 64, "33 .* 32 "),
    ):
        cache = KVCache(2, max_len=max_len)
        with torch.no_grad():
            model(random_tokens(1, 30), cache=cache)
            with pytest.raises(ValueError, match=named):
                model(random_tokens(1, 3), cache=cache)
        assert cache.length == 30


def test_an_argument_that_decoding_does_not_have_is_refused(build_gpt, random_tokens):
    """Not left out in silence."""
    model, cache = build_gpt("tiled", positions="alibi"), KVCache(2, max_len=8)
    with torch.no_grad():
        model(random_tokens(1, 3), cache=cache)
        with cache.fixed(torch.tensor([4])), pytest.raises(TypeError, match="alibi_slopes"):
            model(random_tokens(1, 1), cache=cache)
