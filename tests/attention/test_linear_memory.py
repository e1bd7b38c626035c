"""Nothing but naive materialises N x N: every tensor an operator returns is weighed, in the forward
and the backward pass.

Fitted to c * N^exponent over growing N, the largest tensor, the bytes alive at the worst moment and
the bytes kept for the backward pass must grow like N. Dimensions: N tokens, D head dim.
"""

import pytest
import torch

from attention import BACKENDS, get_backend
from conformance.memory_growth import exponents

TILES = {"block_q": 64, "block_kv": 64}
LENGTHS = (128, 256, 512)
# the other defects are the loop of no_rescale with another softmax. flex has no backward pass on
# the CPU, and materialises the scores there
LINEAR = [name for name, backend in BACKENDS.items() if backend.exact]
LINEAR = {*LINEAR, "no_rescale", "relative_mask"} - {"naive", "flex"}


@pytest.mark.parametrize("name", sorted(LINEAR))
def test_grows_linearly(name):
    lengths = LENGTHS
    if name == "triton":
        if torch.cuda.is_available():
            pytest.skip("with a GPU the Triton kernels are compiled, not interpreted")
        lengths = (64, 128, 256)  # the interpreter is slow, and has small tiles
    tiles = {option: size for option, size in TILES.items() if option in get_backend(name).options}
    found = exponents(get_backend(name, **tiles), lengths)
    assert max(found.values()) <= 1.15, found
    # it was measured at all: something of the inputs' own size is made and kept
    assert min(found.values()) >= 0.5, found


def test_naive_grows_with_the_square():
    """The measure sees an N x N tensor where there is one."""
    found = exponents(get_backend("naive"), (*LENGTHS, 1024))
    assert min(found.values()) >= 1.8, found
