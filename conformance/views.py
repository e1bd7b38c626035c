"""Memory layouts of q, k, v and gradients: views of other tensors with NaN around them, and offsets
past 2^31.

Dimensions: B batch, H heads, N tokens, D head dim.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor


def packed(tensors: list[Tensor]) -> list[Tensor]:
    """Views of one projection (B, N, 3, H, D), as in a model."""
    return list(
        torch.stack(tensors).permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4).unbind()
    )


def misaligned(x: Tensor) -> Tensor:
    """Neither the start nor the rows are aligned to 16 bytes; NaN lies between the rows."""
    return F.pad(x, (1, 2), value=torch.nan)[..., 1:-2]


def spread_out(x: Tensor) -> Tensor:
    """Every other row and column of a larger tensor."""
    around = x.new_full((*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3]), torch.nan)
    return around[:, :, ::2, ::2].copy_(x)


def cached(x: Tensor) -> Tensor:
    """The first rows of a cache whose other half is unwritten (NaN)."""
    return F.pad(x, (0, 0, 0, x.shape[2]), value=torch.nan)[:, :, : x.shape[2]]


def far_apart(tensors: list[Tensor], *, dim: int) -> list[Tensor]:
    """Views whose stride along dim makes offsets pass 2^31 elements. All share one allocation; on a
    CPU only the pages that are written use memory.
    """
    step = 2**31 // (min(x.shape[dim] for x in tensors) - 1) // 16 * 16 + 16
    starts = [0, *accumulate(x.numel() for x in tensors)]
    assert starts[-1] < step  # all views fit between two steps
    longest = max(x.shape[dim] for x in tensors)
    around = tensors[0].new_empty(step * (longest - 1) + starts[-1])
    views = []
    for x, start in zip(tensors, starts[:-1], strict=True):
        strides = list(torch.empty(x.shape, device="meta").stride())
        strides[dim] = step
        views.append(around.as_strided(x.shape, strides, start).copy_(x))
    return views


EACH = (spread_out, cached, misaligned)
LAYOUTS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "packed": packed,
    "misaligned": lambda tensors: [misaligned(x) for x in tensors],
    "transposed": lambda tensors: [x.mT.contiguous().mT for x in tensors],
    "spread out": lambda tensors: [spread_out(x) for x in tensors],
    "cached": lambda tensors: [cached(x) for x in tensors],
    "each another": lambda tensors: [f(x) for f, x in zip(EACH, tensors, strict=True)],
}
FAR: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "sequences past 2^31": partial(far_apart, dim=0),
    "rows past 2^31": partial(far_apart, dim=2),
}
