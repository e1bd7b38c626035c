"""What FlexAttention needs beside the calls of test_conformance.py: tensors that its kernels can
read, and numbers that its compiler may not lift out.
"""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from attention.flex import compiled, within_reach
from conformance.views import far_apart


def test_rows_that_lie_too_far_apart_are_copied():
    x = torch.randn(1, 2, 8, 16)
    (far,) = far_apart(x, dim=2)
    assert within_reach(far).is_contiguous() and within_reach(far).equal(x)
    assert within_reach(x) is x


@pytest.mark.slow
def test_flex_compiles_for_a_second_number():
    """Once it has seen two values of a number, torch.compile would hand it to the kernel as an
    argument, which flex cannot lower.
    """
    attend = compiled(flex_attention)
    q, k, v = (torch.randn(1, 1, 128, 16) for _ in range(3))

    def capped(softcap):
        # from the variable around it, as in flex(): torch 2.11 would keep the first default of a
        # parameter, pytorch#178365
        return lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)

    for softcap in (2.0, 5.0):
        expected = torch.softmax(softcap * torch.tanh(q @ k.mT / 4 / softcap), -1) @ v
        found = attend(q, k, v, score_mod=capped(softcap))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
