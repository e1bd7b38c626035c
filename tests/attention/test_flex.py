"""What FlexAttention gets of tensors that its kernels cannot read."""

import torch

from attention.flex import within_reach
from conformance.views import far_apart


def test_rows_that_lie_too_far_apart_are_copied():
    x = torch.randn(1, 2, 8, 16)
    (far,) = far_apart([x], dim=2)
    assert within_reach(far).is_contiguous() and within_reach(far).equal(x)
    assert within_reach(x) is x
