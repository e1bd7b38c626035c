"""Nothing but naive materialises N x N: the bytes of both passes grow like N. That tiled keeps to
this, and that naive would be caught, is the part of tests/conformance/test_properties.py.

Dimensions: N tokens.
"""

import pytest

from attention import get_backend
from conformance.memory_growth import LINEAR, exponents

TILES = {"block_q": 64, "block_kv": 64}


# another order of the tiles, a softmax that is computed again, another mask, other code
@pytest.mark.parametrize("name", ["kv_outer", "no_rescale", "relative_mask", "sdpa", "triton"])
def test_grows_linearly(name):
    lengths = (128, 256)
    if name == "triton":
        lengths = (64, 128)  # the interpreter is slow, and has small tiles
    tiles = {option: size for option, size in TILES.items() if option in get_backend(name).options}
    found = exponents(get_backend(name, **tiles), lengths)
    assert max(found.values()) <= LINEAR, found
    # it was measured at all: something of the inputs' own size is made and kept
    assert min(found.values()) >= 0.5, found
